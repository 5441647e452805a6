"""Run the learners over the reported streams, prequentially, and append a line per job to results/PART.jsonl.

    python experiments/streams/run_streams.py whole --jobs 16        # whole streams, defaults, seed 0
    python experiments/streams/run_streams.py search --jobs 16       # eight trials per learner and stream
    python experiments/streams/run_streams.py first --jobs 16        # the first 20,000 rows, the best settings, 5 seeds

A job is one learner on one stream with one seed and one setting. What is there already is not run again.

The search. On a generated stream, a trial is the first 10,000 rows with seed 1000. On a real stream, it is the first
quarter of the first 20,000 rows; the rows of that quarter are then not scored by `first`. The trial with the lowest
smoothed log-loss is chosen (see stream_scores.py). Learners that no seed changes run once on real data.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from stream_learners import FIXED, PEERS, TRIALS
from stream_scores import Scores

from evcl.streams.sources import REPORTED, Source, get

HERE = Path(__file__).resolve().parent
FIRST, TRIED = 20_000, 10_000  # rows
SEARCHED = 1000  # the seed of a search
SEEDS = range(5)
NAMES = tuple(one.name for one in REPORTED)
SLOW_FIRST = ("adaptive random forest", "evcl", "mlp with replay", "hoeffding adaptive tree")


class Job(NamedTuple):
    """A learner on rows 0 to `stop` of a stream, scored from row `skip` on."""

    part: str
    stream: str
    learner: str
    seed: int
    stop: int
    skip: int = 0
    trial: int = 0


def run(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Predict and learn every row of a job; the result of one job."""
    source = get(job.stream)
    classes = len(source.classes)
    learner = PEERS[job.learner](len(source.names), classes, job.seed, **settings)
    scores, taken = Scores(classes, job.skip), 0.0
    for rows in source.read(1024, job.seed, stop=job.stop):
        start = time.process_time()
        said = learner.step(rows.x, rows.y)
        taken += time.process_time() - start
        scores.add(said, rows.y.numpy())
    return {
        **job._asdict(),
        "settings": settings,
        "scored": scores.scores.rows,
        **scores.found(),
        "alarms": [int(one.row) for one in learner.stream.alarms] if hasattr(learner, "stream") else None,
        "seconds": round(taken, 1),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def first_quarter(source: Source) -> int:
    """The rows of a real stream that a search uses, and that are not scored later."""
    return min(source.rows, FIRST) // 4 if source.drift == "real" else 0


def jobs(part: str, streams: list[str], learners: list[str], most: int | None) -> list[Job]:
    """The jobs of a part, those that take longest first."""
    found = []
    for name in streams:
        source = get(name)
        real, quarter = source.drift == "real", first_quarter(source)
        for learner in learners:
            if part == "whole":
                found.append(Job(part, name, learner, 0, min(source.rows, most or source.rows)))
            elif part == "search":
                seed, stop = (0, quarter) if real else (SEARCHED, TRIED)
                found += [Job(part, name, learner, seed, stop, trial=k) for k in range(len(TRIALS[learner]))]
            else:
                seeds = SEEDS[:1] if real and learner in FIXED else SEEDS
                found += [Job(part, name, learner, seed, min(source.rows, FIRST), quarter) for seed in seeds]
    order = {learner: place for place, learner in enumerate(SLOW_FIRST)}
    return sorted(found, key=lambda job: (order.get(job.learner, len(order)), -job.stop))


def best(stream: str, learner: str, tried: dict[Job, dict[str, Any]]) -> dict[str, Any]:
    """The settings whose trial had the lowest smoothed log-loss."""
    own = {job.trial: one for job, one in tried.items() if (job.stream, job.learner) == (stream, learner)}
    if len(own) < len(TRIALS[learner]):
        raise SystemExit(f"the search of {learner} on {stream} is not complete: run run_streams.py search first")
    return TRIALS[learner][min(own, key=lambda trial: own[trial]["nll_smoothed"])]


def do(asked: tuple[Job, dict[str, Any]]) -> dict[str, Any]:
    """Run a job in a process of its own."""
    torch.set_num_threads(1)
    return run(*asked)


def read(path: Path) -> dict[Job, dict[str, Any]]:
    """The results in a file, by job."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {Job(*(one[name] for name in Job._fields)): one for one in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("whole", "search", "first"))
    parser.add_argument("--streams", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--learners", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--jobs", type=int, default=1, help="processes [1]")
    parser.add_argument("--most", type=int, help="with whole: at most this many rows of each stream [all]")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    path = args.out / f"{args.part}.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    done, tried = read(path), read(args.out / "search.jsonl")
    asked = []
    for job in jobs(args.part, args.streams, args.learners, args.most):
        if job not in done:
            found = best(job.stream, job.learner, tried) if job.part == "first" else TRIALS[job.learner][job.trial]
            asked.append((job, found))
    for name in args.streams:
        next(get(name).read(1))  # fetched once, before the processes start
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for one in pool.imap_unordered(do, asked):
            with path.open("a") as file:
                file.write(json.dumps(one) + "\n")
            measures = ", ".join(f"{name} {one[name]:.4f}" for name in ("accuracy", "nll", "nll_smoothed", "ece"))
            about = f"{one['stream']} {one['learner']} seed {one['seed']} trial {one['trial']}"
            print(f"{time.strftime('%H:%M:%S')} {about}: {measures}, {one['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
