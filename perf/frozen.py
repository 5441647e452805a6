"""What a task costs whose trunk is frozen, in forward passes of the trunk over the task's rows.

20 epochs of a head on top of a frozen ResNet-18 need the features of each row once. `task` is the whole task with its
end (the Fisher, the statistics of classes), `a prediction` predicts all rows with all draws of the weights.

    python perf/frozen.py [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import evcl
from evcl.benchmarks.networks import resnet18

EPOCHS = 20


def seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=None, help="[256 on a CPU, 10,000 on a GPU]")
    parser.add_argument("--methods", nargs="+", default=["naive", "ewc", "evcl"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = args.rows or (10_000 if args.device == "cuda" else 256)
    source = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, 32, 32, generator=source).to(args.device)
    y = torch.randint(10, (rows,), generator=source).to(args.device)
    trunk = resnet18().to(args.device).eval()

    @torch.no_grad()
    def forward() -> None:
        for some in x.split(128):
            trunk(some)

    forward()
    print(f"ResNet-18, {rows:,} images of 32x32, frozen; {EPOCHS} epochs of a head\n")
    print("| method | task | a prediction |")
    print("|---|---:|---:|")
    for method in args.methods:
        before = seconds(forward, args.device)  # in turn, so that other load slows both
        learner = evcl.Learner(trunk, method, only=[], device=args.device, epochs=EPOCHS, batch_size=128)
        task = seconds(lambda own=learner: own.learn((x, y)), args.device)  # type: ignore[misc]
        predicted = seconds(lambda own=learner: own.predict_proba(x), args.device)  # type: ignore[misc]
        base = (before + seconds(forward, args.device)) / 2
        print(f"| `{method}` | {task / base:.2f} | {predicted / base:.2f} |", flush=True)


if __name__ == "__main__":
    main()
