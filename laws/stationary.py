"""Where nothing changes, nothing should be forgotten: rows of one distribution, learned in ten rounds of 60.

    python laws/stationary.py --methods evcl vcl --set distill=0

The NLL of 2,000 new rows at the end, mean ± deviation over the seeds, and beside it each method's NLL minus that of the
last method of --methods, with its standard error over pairs of seeds: a star marks those that are behind by more than
one standard error. `joint` has learned all rows at once, with point weights; `the rule` knows the probabilities. The
streams:

    70, 80, 94 %  five columns, two classes whose log-odds are linear; the number is the accuracy of the best possible
                  prediction. mlp(5, [50]), the defaults
    regression    five columns and a linear rule with noise, learned by a linear model. `std` is the mean over weights
                  of the standard deviation, divided by that of the mean-field optimum (exact.py) at the learner's beta.
                  With 60 rows an epoch is one step, so it has the epochs and the learning rate of exact.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from comparing import header, paired, parsed, parser, row, save, settings_of, spread
from exact import CONVERGED, Belief, learned_noise, weights
from scipy.special import expit, log_expit
from torch import nn

import evcl
from evcl import targets

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
ROUNDS, ROWS, NEW_ROWS, COLUMNS, NOISE = 10, 60, 2000, 5, 0.5


class Stationary(NamedTuple):
    """Rows of one distribution: x, y and the NLL of each row under the true rule."""

    x: Array
    y: Array
    best: Array
    likelihood: Any = "categorical"


def sharpness(accuracy: float) -> float:
    """The c for which E max(p, 1 - p) is the accuracy, where p = sigmoid(c z) and z ~ N(0, 1)."""
    z, weight = np.polynomial.hermite_e.hermegauss(200)
    low, high = 0.0, 100.0
    for _ in range(60):
        c = (low + high) / 2
        low, high = (c, high) if expit(c * np.abs(z)) @ weight / weight.sum() < accuracy else (low, c)
    return c


def noisy_labels(accuracy: float) -> Callable[[int], Stationary]:
    def rows(seed: int) -> Stationary:
        source = np.random.default_rng([seed, round(100 * accuracy)])
        x = source.standard_normal((ROUNDS * ROWS + NEW_ROWS, COLUMNS))
        direction = source.standard_normal(COLUMNS)
        odds = sharpness(accuracy) * x @ direction / np.linalg.norm(direction)
        y = (source.random(len(x)) < expit(odds)).astype("int64")
        return Stationary(x.astype("float32"), y, -log_expit(np.where(y, odds, -odds)))

    return rows


def regression(seed: int) -> Stationary:
    source = np.random.default_rng([seed, 1])
    x = source.standard_normal((ROUNDS * ROWS + NEW_ROWS, COLUMNS))
    error = source.standard_normal(len(x))
    y = x @ source.standard_normal(COLUMNS) + NOISE * error
    best = 0.5 * error**2 + np.log(NOISE) + 0.5 * np.log(2 * np.pi)
    return Stationary(x.astype("float32"), y.astype("float32"), best, "gaussian")


STREAMS = {f"{round(100 * a)} %": noisy_labels(a) for a in (0.70, 0.80, 0.94)} | {"regression": regression}


def learned(data: Stationary, method: str, seed: int, **settings: Any) -> evcl.Learner:
    """A learner of the rounds one after another; `joint`: at once."""
    linear = data.likelihood == "gaussian"
    network = nn.Identity() if linear else evcl.nn.mlp(COLUMNS, [50])
    rounds, rows = (1, ROUNDS * ROWS) if method == "joint" else (ROUNDS, ROWS)
    learner = evcl.Learner(
        network, "naive" if rounds == 1 else method, seed=seed, likelihood=data.likelihood, **settings
    )
    for k in range(rounds):
        part = slice(k * rows, (k + 1) * rows)
        learner.learn((data.x[part], data.y[part]), str(k), head="0" if k else "new")
    return learner


def std_ratio(learner: evcl.Learner, data: Stationary) -> float:
    """The mean over weights of their standard deviation, divided by the mean-field optimum's. The KL counts beta times,
    so the rows count 1 / beta times, and all variances are beta times as large but for the first prior.
    """
    beta = learner.settings.get("tempering", 1.0)
    beta = targets.Gaussian.usual_tempering if isinstance(beta, str) else float(beta)
    x = np.column_stack([data.x[: ROUNDS * ROWS].astype(float), np.ones(ROUNDS * ROWS)])
    y = data.y[: ROUNDS * ROWS].astype(float)
    parts = [(x[k : k + ROWS], y[k : k + ROWS]) for k in range(0, len(x), ROWS)]
    first = parts[0][1]
    prior = Belief(np.eye(COLUMNS + 1)[-1] * first.mean(), np.full(COLUMNS + 1, first.std()))
    optimum = learned_noise(parts, prior, exact=False, beta=beta)
    return float(np.mean(weights(learner).std * y.std() / optimum.std))


def compare(data: Stationary, method: str, seed: int, **settings: Any) -> tuple[float, float]:
    """The NLL of new rows, and for regression the ratio of standard deviations."""
    learner = learned(data, method, seed, **settings)
    new = slice(ROUNDS * ROWS, None)
    nll = learner.measure((data.x[new], data.y[new]), 0).nll
    return nll, std_ratio(learner, data) if data.likelihood == "gaussian" else float("nan")


def main() -> None:
    made = parser(__doc__)
    made.set_defaults(methods=["evcl", "vcl"])
    made.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS), metavar="STREAM")
    options = parsed(made)
    kept: dict[str, dict[str, list[tuple[float, float]]]] = {}
    last = options.methods[-1]
    header("", "method", "NLL", f"minus {last}'s", "std")
    for name in options.streams:
        streams = [STREAMS[name](seed) for seed in range(options.seeds)]
        kept[name] = own = {"the rule": [(float(one.best[ROUNDS * ROWS :].mean()), float("nan")) for one in streams]}
        for method in dict.fromkeys([*options.methods, "joint"]):
            longer = {key: CONVERGED[key] for key in ("epochs", "lr")} if name == "regression" else {}
            settings = settings_of(method, options.set if method != "joint" else [], **longer)
            try:
                own[method] = [compare(data, method, seed, **settings) for seed, data in enumerate(streams)]
            except evcl.EvclError as error:
                own[method] = []
                print(f"{method}: {error}", flush=True)
        for method, each in own.items():
            nll, ratios = [one[0] for one in each], [one[1] for one in each]
            beside = [one[0] for one in own[last]]
            gap = paired(nll, beside) if nll and beside and method != last else "-"
            row(name, method, spread(nll, 4), gap, spread(ratios))
    save(options, kept)


if __name__ == "__main__":
    main()
