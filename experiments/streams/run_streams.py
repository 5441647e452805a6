"""Run the learners over the reported streams, prequentially, and write a small file per job to results/.

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
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

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

    def path(self, out: Path) -> Path:
        name = f"{self.learner.replace(' ', '-')}-{self.trial if self.part == 'search' else self.seed}.json"
        return out / self.part / self.stream / name


def run(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Predict and learn every row of a job; the result of one job."""
    source = get(job.stream)
    classes = len(source.classes)
    learner = PEERS[job.learner](len(source.names), classes, job.seed, **settings)
    scores, taken = Scores(classes, job.skip), 0.0
    for rows in source.read(1024, job.seed, stop=job.stop):
        start = time.perf_counter()
        said = learner.step(rows.x, rows.y)
        taken += time.perf_counter() - start
        scores.add(said, rows.y.numpy())
    return {
        **job._asdict(),
        "settings": settings,
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


def chosen(job: Job, out: Path) -> dict[str, Any]:
    """The settings of a job: defaults, those of its trial, or the best of the search."""
    trials = TRIALS[job.learner]
    if job.part == "search":
        return trials[job.trial]
    if job.part == "whole":
        return {}
    tried = [job._replace(part="search", trial=k).path(out) for k in range(len(trials))]
    missing = [path for path in tried if not path.exists()]
    if missing:
        raise SystemExit(f"{missing[0]} is missing: run run_streams.py search first")
    losses = [json.loads(path.read_text())["nll_smoothed"] for path in tried]
    return trials[losses.index(min(losses))]


def do(asked: tuple[Job, Path]) -> str:
    """Run a job and write its file; returns a line about it."""
    import torch

    torch.set_num_threads(1)
    job, out = asked
    found = run(job, chosen(job, out))
    write(job.path(out), found)
    measures = f"accuracy {found['accuracy']:.4f}, log-loss {found['nll']:.4f}, ECE {found['ece']:.4f}"
    return f"{job.part} {job.stream} {job.learner} {job.seed} {job.trial}: {measures}, {found['seconds']} s"


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("whole", "search", "first"))
    parser.add_argument("--streams", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--learners", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--jobs", type=int, default=1, help="processes [1]")
    parser.add_argument("--most", type=int, help="with whole: at most this many rows of each stream [all]")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    found = [job for job in jobs(args.part, args.streams, args.learners, args.most) if not job.path(args.out).exists()]
    for name in args.streams:
        next(get(name).read(1))  # fetched once, before the processes start
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for line in pool.imap_unordered(do, [(job, args.out) for job in found]):
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    main()
