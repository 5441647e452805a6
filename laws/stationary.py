"""Nothing should be forgotten where nothing changes.

Rows of one distribution come in ten rounds of 60, through one head. A small network learns them round by round with
each method and, as `joint`, all at once with vcl. Labels are drawn from a logistic model of five inputs, on three
scales, so that the best possible accuracy is about 0.70, 0.80 and 0.94; numbers are a smooth function of the inputs
with noise. The table has the NLL on 2,000 new rows after the last round, and the distance of each method from vcl with
its paired standard error. Defaults throughout, except for `--set`.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import evcl

ROUNDS, ROWS, TEST, INPUTS = 10, 60, 2000, 5
SCALES = {"0.70": 1.25, "0.80": 2.6, "0.94": 11.0}  # of the logits


def rows(world: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    x = source.normal(size=(ROUNDS * ROWS + TEST, INPUTS))
    w = source.normal(size=INPUTS)
    f = x @ w / np.linalg.norm(w)
    if world == "numbers":
        return x, np.sin(1.5 * f) + 0.3 * x[:, 0] + 0.5 * source.normal(size=len(x))
    return x, (source.random(len(x)) < 1 / (1 + np.exp(-SCALES[world] * f))).astype(int)


def nll(method: str, world: str, seed: int, given: dict[str, Any]) -> float:
    x, y = rows(world, seed)
    learner = evcl.Learner(
        evcl.nn.mlp(INPUTS, [20]),
        "vcl" if method == "joint" else method,
        seed=seed,
        likelihood="gaussian" if world == "numbers" else "categorical",
        **given,
    )
    for one in np.split(np.arange(ROUNDS * ROWS), 1 if method == "joint" else ROUNDS):
        learner.learn(x[one], y[one], head="0" if learner.tasks else "new")
    return float(learner.measure((x[-TEST:], y[-TEST:])).nll)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--worlds", nargs="+", default=[*SCALES, "numbers"])
    parser.add_argument("--methods", nargs="+", default=["vcl", "evcl", "joint"])
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    asked = parser.parse_args()
    given = dict(one.split("=", 1) for one in asked.set)
    for world in asked.worlds:
        each = {m: np.array([nll(m, world, s, given) for s in range(asked.seeds)]) for m in asked.methods}
        for method, found in each.items():
            behind = found - each[asked.methods[0]]
            error = behind.std(ddof=1) / len(behind) ** 0.5
            print(f"{world:8} {method:12} {found.mean():.4f}   behind {behind.mean():+.4f} ± {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
