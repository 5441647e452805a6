"""Agents on streams of environments: choose settings on validation seeds, run on others, and print the tables.

    python experiments/rl/agents.py search [--jobs 16]    # search/STREAM.json: a trial per line
    python experiments/rl/agents.py tune                  # evcl/rl/tuned.json: the best trials become the defaults
    python experiments/rl/agents.py final [--jobs 16]     # results/STREAM/METHOD.json
    python experiments/rl/agents.py plain [--jobs 16]     # results/plain.json: PPO beside Stable-Baselines3's
    python experiments/rl/agents.py tables                # Markdown, from those files, into docs/RESULTS.md

A job is a method with one choice of settings, on one core: in a search with its two seeds side by side, otherwise with
one seed. What is there already is not done again. Seeds 100 and 101 are for choosing, 20 to 24 for the tables. It needs
no extra of evcl except `rl`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from evcl import rl
from evcl._core.errors import Diverged
from evcl._core.files import write_atomically
from evcl.experiments.compare import between

FOLDER = Path(__file__).parent
CHOOSING, TESTED = (100, 101), (20, 21, 22, 23, 24)
Settings = Mapping[str, float]
Found = dict[str, Any]


def grid(**values: Sequence[float]) -> list[Settings]:
    return [dict(zip(values, some, strict=True)) for some in product(*values.values())]


# As many trials for each method that has settings of its own; all others have the same values for all methods. In
# the rooms, the weight that matters most has 0.3, 1, 3 and 10 times its best value in the first search on CartPole.
TRIALS: dict[str, dict[str, list[Settings]]] = {
    "cartpole-variants": {
        "evcl": grid(distill=(0.1, 0.3, 1.0, 3.0), tempering=(0.1, 1.0), strength=(0.3,)),
        "vcl": grid(tempering=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)),
        "ewc": grid(strength=(0.3, 3.0, 10.0, 100.0), fisher_temperature=(1.0, 4.0)),
        "clear": grid(clone=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)),
    },
    "minigrid-rooms": {
        "evcl": grid(distill=(0.3, 1.0, 3.0, 10.0), tempering=(1.0,), strength=(0.3,)),
        "vcl": grid(tempering=(0.1, 0.3, 1.0, 3.0)),
        "ewc": grid(strength=(3.0, 10.0, 30.0, 100.0), fisher_temperature=(4.0,)),
        "clear": grid(clone=(0.1, 0.3, 1.0, 3.0)),
    },
}
METHODS = ("evcl", "vcl", "ewc", "clear", "naive", "separate")
TUNED = Path(rl.__file__).with_name("tuned.json")
DOCUMENT = FOLDER.parents[1] / "docs" / "RESULTS.md"


def trained(stream: str, method: str, seeds: Sequence[int], given: Settings, tasks: int | None = None) -> Found:
    """What these seeds gave, side by side on one core, as JSON. There are no returns if a seed diverged."""
    torch.set_num_threads(1)
    about = {"stream": stream, "method": method, "seeds": list(seeds), "torch": torch.__version__}
    about |= {"python": platform.python_version(), "processor": processor()}
    try:
        found = rl.learn(rl.stream(stream, tasks), method, given, seeds)
    except Diverged:
        return {**about, "settings": dict(given), "returns": None, "seconds": 0.0}
    returns = [[[None if math.isnan(v) else round(v, 4) for v in row] for row in one] for one in found.returns.tolist()]
    return {**about, "settings": dict(found.agent.s), "returns": returns, "seconds": round(found.seconds, 1)}


def processor() -> str:
    """The CPU's name, where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def averages(found: Found) -> list[float]:
    """The average return of each seed."""
    return [rl.average_return(one) for one in matrices(found)]


# --- search -----------------------------------------------------------------------------------------------------------


def search(streams: Sequence[str], jobs: int, given: Settings, tasks: int | None) -> None:
    wanted = [
        (stream, method, trial)
        for stream in streams
        for method, trials in TRIALS[stream].items()
        for trial in trials
        if not any(one["method"] == method and one["settings"] == dict(trial) for one in tried(stream))
    ]
    works = [partial(trained, s, m, CHOOSING, {**t, **given}, tasks) for s, m, t in wanted]
    for i, result in finished(works, jobs):
        stream, method, trial = wanted[i]
        each = averages(result)
        mean = statistics.mean(each) if each else None
        line = {"method": method, "settings": dict(trial), "mean": mean, "per_seed": each}
        path = FOLDER / "search" / f"{stream}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "seconds": result["seconds"]}) + "\n")
        say(f"{stream} {method} {dict(trial)}: {mean}")


def tried(stream: str) -> list[dict[str, Any]]:
    path = FOLDER / "search" / f"{stream}.json"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def chosen(stream: str, method: str) -> dict[str, float]:
    """The settings with the best mean; nothing for a method that has none of its own. A stream without a search has
    those of CartPole.
    """
    trials = tried(stream) or tried("cartpole-variants")
    mine = [one for one in trials if one["method"] == method and one["mean"] is not None]
    return dict(max(mine, key=lambda one: float(one["mean"]))["settings"]) if mine else {}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text, "utf-8"))


def tune() -> None:
    """Write the best settings of each method and stream to evcl.rl's tuned.json, beside those of all methods."""
    kept = json.loads(TUNED.read_text("utf-8"))
    made = {s: {"*": kept[s]["*"], **{m: chosen(s, m) for m in TRIALS[s] if chosen(s, m)}} for s in rl.STREAMS}
    write(TUNED, json.dumps(made, indent=1) + "\n")


# --- the runs of the tables -------------------------------------------------------------------------------------------


def final(streams: Sequence[str], methods: Sequence[str], jobs: int, given: Settings, tasks: int | None) -> None:
    """A job per seed, so that no method holds up the others. A file is written when all its seeds are in."""
    wanted = [(s, m, seed) for s in streams for m in methods if not place(s, m).exists() for seed in TESTED]
    works = [partial(trained, s, m, [seed], {**chosen(s, m), **given}, tasks) for s, m, seed in wanted]
    parts: dict[tuple[str, str], dict[int, Found]] = {}
    for i, result in finished(works, jobs):
        stream, method, seed = wanted[i]
        mine = parts.setdefault((stream, method), {})
        mine[seed] = result
        say(f"{stream} {method} {seed}: {averages(result)}")
        if len(mine) == len(TESTED):
            write(place(stream, method), json.dumps(joined([mine[seed] for seed in TESTED])) + "\n")


def joined(parts: Sequence[Found]) -> Found:
    """One result of the results of several seeds. There are no returns if a seed diverged."""
    diverged = any(one["returns"] is None for one in parts)
    returns = None if diverged else [matrix for one in parts for matrix in one["returns"]]
    seeds, seconds = [seed for one in parts for seed in one["seeds"]], round(sum(one["seconds"] for one in parts), 1)
    return {**parts[0], "seeds": seeds, "returns": returns, "seconds": seconds}


def place(stream: str, method: str) -> Path:
    return FOLDER / "results" / stream / f"{method}.json"


def filled(text: str) -> str:
    """A document with its tables written again."""
    return between(text, "agents", tables(list(rl.STREAMS)))


def tables(streams: Sequence[str]) -> str:
    return "\n\n".join(
        [
            *(table(stream) for stream in streams if all(place(stream, m).exists() for m in ("evcl", "separate"))),
            *plain_table(),
        ]
    )


def table(stream: str) -> str:
    """A row per method: means over the seeds, with their standard errors. `evcl` and `separate` must be there."""
    read = {m: json.loads(place(stream, m).read_text("utf-8")) for m in METHODS if place(stream, m).exists()}
    found = {method: one for method, one in read.items() if one["returns"]}
    ceilings = dict(zip(found["separate"]["seeds"], matrices(found["separate"]), strict=True))
    rows = []
    for method, result in found.items():
        each = [(a, ceilings[seed][-1]) for seed, a in zip(result["seeds"], matrices(result), strict=True)]
        own = ", ".join(f"{k}={v:g}" for k, v in chosen(stream, method).items()) or "-"
        columns = (
            [rl.average_return(a) for a, _ in each],
            [100 * rl.normalised_return(a, c) for a, c in each],
            [rl.forgetting(a) for a, _ in each],
            [100 * rl.forward_transfer(a, c) for a, c in each],
        )
        places = 1 if abs(statistics.mean(columns[0])) > 2 else 3
        texts = [spread(values, n) for values, n in zip(columns, (places, 1, places, 1), strict=True)]
        if method == "separate":
            texts[2:] = ["-", "-"]
        ahead = [best - rl.average_return(a) for best, (a, _) in zip(averages(found["evcl"]), each, strict=True)]
        texts.append("-" if method == "evcl" else spread(ahead, places))
        rows.append(f"| `{method}` | {' | '.join(texts)} | {own} |")
    one = found["separate"]
    tasks, steps = len(one["returns"][0]), one["settings"]["steps"]
    heads = ["method", "average return", "% of one agent per task", "forgetting", "forward transfer, %"]
    heads += ["`evcl` minus it, seed by seed", "chosen"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *rows]
    where = f"{one['processor']}, Python {one['python']}, torch {one['torch']}"
    return "\n".join(
        [f"{stream}, {tasks} tasks of {steps:,} environment steps, {len(one['seeds'])} seeds ({where}):", "", *lines]
    )


def matrices(found: Found) -> list[Any]:
    """A matrix of returns for each seed; none if one diverged."""
    return [[[float("nan") if v is None else v for v in row] for row in one] for one in found["returns"] or []]


def spread(values: Sequence[float], places: int) -> str:
    """Mean and standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{places}f} ± {error:.{places}f}"


# --- PPO on plain CartPole --------------------------------------------------------------------------------------------


def ours(seed: int, steps: int) -> dict[str, Any]:
    """Our PPO on CartPole-v1, with plain weights: its return over 100 episodes, and steps per second of a core."""
    return trained_plain("naive", [seed], steps)


def trained_plain(method: str, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    stream = rl.stream("cartpole-variants", 1)
    begun, learned = time.process_time(), 0.0

    def heard(task: int, done: float, returns: object) -> None:
        nonlocal learned
        learned = learned or (time.process_time() - begun if done == 1.0 else 0.0)

    found = rl.learn(stream, method, {"steps": steps, "episodes": 100, "envs": 8}, seeds, on_progress=heard)
    s = found.agent.s
    samples = steps // (s.envs * s.rollout) * s.envs * s.rollout
    return {"returns": found.returns[:, 0, 0].tolist(), "per_second": len(seeds) * samples / learned, "steps": samples}


def theirs(seed: int, steps: int) -> dict[str, Any]:
    """Stable-Baselines3's PPO with the same settings, as far as it has them, measured in the same way."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    s = {name: setting.default for name, setting in rl.method("naive").known_settings.items()}
    envs = make_vec_env("CartPole-v1", n_envs=8, seed=seed)
    agent = PPO(
        "MlpPolicy",
        envs,
        n_steps=s["rollout"],
        batch_size=min(int(s["batch_size"]), 8 * int(s["rollout"])),
        n_epochs=s["passes"],
        gamma=s["discount"],
        gae_lambda=s["gae_decay"],
        clip_range=s["clip"],
        ent_coef=s["entropy"],
        learning_rate=lambda left: left * float(s["lr"]),
        seed=seed,
        device="cpu",
    )
    begun = time.process_time()
    agent.learn(steps)
    seconds = time.process_time() - begun
    mean, _ = evaluate_policy(agent, make_vec_env("CartPole-v1", n_envs=20, seed=seed + 1000), 100, deterministic=False)
    return {"returns": [float(mean)], "per_second": steps / seconds, "steps": steps}


def plain(jobs: int, steps: int) -> None:
    """One core for each seed, and five seeds side by side on one core."""
    path = FOLDER / "results" / "plain.json"
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    kinds: dict[str, dict[str, Any]] = {
        "evcl.rl, a process per seed": {str(seed): partial(ours, seed, steps) for seed in TESTED},
        "Stable-Baselines3": {str(seed): partial(theirs, seed, steps) for seed in TESTED},
        "evcl.rl, five seeds side by side": {"all": partial(trained_plain, "naive", TESTED, steps)},
    }
    for name, works in kinds.items():
        left = [key for key in works if key not in kept.get(name, {})]
        for i, result in finished([works[key] for key in left], jobs):
            kept.setdefault(name, {})[left[i]] = result
            write(path, json.dumps(kept, indent=1) + "\n")
            say(f"{name}, {left[i]}: {result}")


def plain_table() -> list[str]:
    path = FOLDER / "results" / "plain.json"
    if not path.exists():
        return []
    lines = [
        "PPO on CartPole-v1, with the same settings, 100 episodes per seed:",
        "",
        "| | seeds | steps per seed | return | steps per second of a core |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, parts in json.loads(path.read_text("utf-8")).items():
        each = [value for one in parts.values() for value in one["returns"]]
        speeds, steps = [one["per_second"] for one in parts.values()], next(iter(parts.values()))["steps"]
        speed = f"{statistics.mean(speeds):,.0f}"
        lines.append(f"| {name} | {len(each)} | {steps:,} | {spread(each, 1)} | {speed} |")
    return ["\n".join(lines)]


# --- work -------------------------------------------------------------------------------------------------------------


def finished(works: Sequence[Any], jobs: int) -> Iterator[tuple[int, Any]]:
    """(index, result) of each, as it ends."""
    if jobs == 1:
        yield from ((i, work()) for i, work in enumerate(works))
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(work): i for i, work in enumerate(works)}
        for one in as_completed(running):
            yield running[one], one.result()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "tune", "final", "plain", "tables"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--streams", nargs="+", default=list(rl.STREAMS), choices=list(rl.STREAMS))
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, help="of `final`")
    parser.add_argument("--tasks", type=int)
    parser.add_argument("--steps", type=int, help="environment steps per task, in place of the usual ones")
    asked = parser.parse_args()
    given = {} if asked.steps is None else {"steps": asked.steps}
    if asked.what == "search":
        search(asked.streams, asked.jobs, given, asked.tasks)
    elif asked.what == "final":
        final(asked.streams, asked.methods, asked.jobs, given, asked.tasks)
    elif asked.what == "tune":
        tune()
    elif asked.what == "plain":
        plain(asked.jobs, asked.steps or 100_000)
    else:
        write(DOCUMENT, filled(DOCUMENT.read_text("utf-8")))


if __name__ == "__main__":
    main()
