"""Growth with tasks, one head: time of training and consolidation, and memory, of task 50 against task 2."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

import evcl
from evcl.methods import METHODS
from evcl.randomness import generator
from evcl.settings import resolve
from evcl.training import Run, TaskData

TASKS, EXAMPLES = 50, 2_000


def resident() -> float:
    """MB of memory in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def main() -> None:
    torch.set_num_threads(1)
    settings = resolve("evcl", METHODS["evcl"].known_settings, {"batch_size": 256, "epochs": 4})
    run = Run(evcl.nn.mlp(784, [100, 100]), METHODS["evcl"], [settings], [0], draw=True)
    source = torch.Generator().manual_seed(0)
    x = torch.rand(EXAMPLES, 784, generator=source)
    y = torch.randint(10, (1, EXAMPLES), generator=source)
    head = run.add_head(100, 10)
    times, memory = [], []
    for k in range(TASKS):
        order = torch.randperm(784, generator=generator(0, "permutation", k))
        start = time.perf_counter()
        run.train([TaskData(x[:, order].unsqueeze(0), y, head)])
        times.append(time.perf_counter() - start)
        memory.append(resident())
    early, late = statistics.median(times[1:6]), statistics.median(times[-5:])
    print(
        f"torch {torch.__version__}, one thread, 784-100-100, {EXAMPLES:,} examples, 4 epochs and the Fisher a task\n"
    )
    print(f"tasks 2 to 6     {early:.3f} s a task    {memory[5]:.0f} MB after them")
    print(f"tasks 46 to 50   {late:.3f} s a task    {memory[-1]:.0f} MB after them")
    print(f"ratio            {late / early:.2f}               {memory[-1] - memory[5]:+.1f} MB")


if __name__ == "__main__":
    main()
