"""Alarms on 20 generated streams with one change each, beside ADWIN, DDM and KSWIN at the same rate of false alarms.

    python experiments/streams/run_alarms.py --jobs 16       # writes results/alarms.jsonl: a line per stream

Every stream has 10,000 rows. In the 20 of `CHANGES`, the concept changes at row 5,000, at once or over 1,000 rows
around it; a change is found by an alarm within 2,500 rows of its beginning. `calibration` and `check` are 20 streams
each without a change, with other seeds. On the first, one parameter of each detector is chosen: of those in PARAMETERS
with at most one false alarm per 10,000 rows, the one with most of them. On the second, false alarms are counted.

River's detectors get the errors (0 or 1) of River's logistic regression with its defaults, or of `evcl.Stream`. They
start anew after each alarm. evcl's alarms are its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stream_learners import PEERS, StreamPeer

from evcl.streams.sources import Drift, Source, generated

HERE = Path(__file__).resolve().parent
ROWS, AT, WIDTH, WITHIN = 10_000, 5_000, 1_000, 2_500
PARAMETERS: dict[str, tuple[float, ...]] = {
    "evcl": (1e-3, 3e-4, 1e-4, 3e-5, 1e-5),  # false_alarms
    "ADWIN": (0.05, 0.01, 0.002, 5e-4, 1e-4, 1e-5, 1e-6, 1e-8),  # delta
    "DDM": (2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0),  # drift_threshold
    "KSWIN": (5e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8),  # alpha
}
CHANGES: tuple[tuple[str, int, int, int], ...] = (  # generator, concepts before and after, width
    *(("stagger", a, b, 0) for a, b in ((0, 1), (1, 2), (2, 0))),
    *(("sea", a, b, 0) for a, b in ((0, 1), (1, 2), (2, 3), (3, 2))),
    *(("agrawal", a, b, 0) for a, b in ((0, 2), (2, 6), (6, 8), (1, 5))),
    *(("hyperplane", 0, 1, width) for width in (0, 0, WIDTH)),
    *(("led", 0, 1, width) for width in (0, WIDTH)),
    *(("rbf", 0, 1, width) for width in (0, WIDTH)),
    *(("agrawal", a, b, WIDTH) for a, b in ((0, 2), (2, 6))),
)


class Job(NamedTuple):
    """A stream, and what it is for: changes, calibration or check."""

    part: str
    number: int
    rule: str
    before: int
    after: int
    width: int

    def source(self) -> Source:
        change = (
            Drift((self.before,)) if self.part != "changes" else Drift((self.before, self.after), (AT,), self.width)
        )
        return generated(self.rule, change, ROWS)

    @property
    def seed(self) -> int:
        return {"changes": 500, "calibration": 600, "check": 700}[self.part] + self.number


def jobs() -> list[Job]:
    return [Job(part, k, *one) for part in ("calibration", "check", "changes") for k, one in enumerate(CHANGES)]


def detected(name: str, parameter: float, errors: NDArray[np.int64]) -> list[int]:
    """The rows at which a detector of River raises an alarm."""
    from river import drift

    detector: Any = {
        "ADWIN": lambda: drift.ADWIN(delta=parameter),
        "DDM": lambda: drift.binary.DDM(warning_threshold=min(2.0, parameter), drift_threshold=parameter),
        "KSWIN": lambda: drift.KSWIN(alpha=parameter, seed=0),
    }[name]()
    found = []
    for row, error in enumerate(errors.tolist()):
        detector.update(bool(error) if name == "DDM" else error)
        if detector.drift_detected:
            found.append(row)
    return found


def run(job: Job) -> dict[str, Any]:
    """The alarms of every detector with every parameter on one stream."""
    torch.set_num_threads(1)
    source = job.source()
    inputs, classes = len(source.names), len(source.classes)
    alarms: dict[str, list[list[int]]] = {"evcl": []}
    errors = {}
    for rate in PARAMETERS["evcl"]:
        learner = StreamPeer(classes, job.seed, 16, false_alarms=rate)
        parts = [learner.step(rows.x, rows.y).argmax(1) != rows.y.numpy() for rows in source.read(1024, job.seed)]
        errors["evcl"] = np.concatenate(parts).astype(np.int64)
        alarms["evcl"].append([int(alarm.row) for alarm in learner.stream.alarms])
    other = PEERS["logistic regression"](inputs, classes, job.seed)
    parts = [other.step(rows.x, rows.y).argmax(1) != rows.y.numpy() for rows in source.read(1024, job.seed)]
    errors["logistic regression"] = np.concatenate(parts).astype(np.int64)
    for of, series in errors.items():
        for name in ("ADWIN", "DDM", "KSWIN"):
            alarms[f"{name} of {of}"] = [detected(name, parameter, series) for parameter in PARAMETERS[name]]
    return {
        **job._asdict(),
        "error rate": {of: round(float(s.mean()), 4) for of, s in errors.items()},
        "alarms": alarms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes [1]")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    path = args.out / "alarms.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    there = (
        {(one["part"], one["number"]) for one in map(json.loads, path.read_text().splitlines())}
        if path.exists()
        else ()
    )
    asked = [job for job in jobs() if (job.part, job.number) not in there]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for one in pool.imap_unordered(run, asked):
            with path.open("a") as file:
                file.write(json.dumps(one) + "\n")
            print(f"{time.strftime('%H:%M:%S')} {one['part']} {one['number']} {one['rule']}", flush=True)


if __name__ == "__main__":
    main()
