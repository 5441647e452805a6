"""Run the learners over the streams of months, and write the accuracies to results/STREAM.json.

python experiments/months/months.py                                    # seeds 0 to 4, what is not there yet
python experiments/months/months.py --streams shop --learners evcl ewc --seeds 100,101 --out /tmp/months
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generated import STREAMS, stream
from learners import LEARNERS, TARGET, About, accuracies

from evcl._core.files import in_lines

HERE = Path(__file__).resolve().parent


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201


def one(name: str, learner: str, seed: int) -> dict[str, Any]:
    months = stream(name, seed)
    classes = sorted({label for month in months for label in month.train[TARGET]})
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="evcl-months-") as folder:
        about = About(seed, classes, Path(folder), ".parquet" if name == "census" else ".csv")
        found = accuracies(LEARNERS[learner](about), months)
    return {"accuracy": np.round(found, 4).tolist(), "seconds": round(time.perf_counter() - started, 1)}


def summary(found: list[list[float]]) -> str:
    """All months after the last one, the last month, and each month before it was learned."""
    last, ahead = found[-1], [found[i][i + 1] for i in range(len(found) - 1)]
    return f"all {100 * np.mean(last):.1f}, last {100 * last[-1]:.1f}, next {100 * np.mean(ahead):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS))
    parser.add_argument("--seeds", default="0,1,2,3,4", help="separated by commas [0,1,2,3,4]")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.streams:
        path = args.out / f"{name}.json"
        saved = json.loads(path.read_text()) if path.exists() else {"learners": {}}
        for learner in args.learners:
            for seed in args.seeds.split(","):
                runs = saved["learners"].setdefault(learner, {})
                if seed in runs and not args.again:
                    continue
                runs[seed] = one(name, learner, int(seed))
                say(f"{name} {learner} {seed}: {summary(runs[seed]['accuracy'])}, {runs[seed]['seconds']} s")
                saved["machine"] = {"python": platform.python_version(), "torch": torch.__version__}
                path.write_text(in_lines(saved, 3) + "\n")


if __name__ == "__main__":
    main()
