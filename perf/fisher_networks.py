"""The Fisher of networks that are not perceptrons: its time relative to an epoch of plain PyTorch over the same rows,
and the memory it adds.

    python perf/fisher_networks.py                          # all networks, on one core
    python perf/fisher_networks.py --networks resnet-18 --rows 128 --kinds empirical

The memory is the largest that the process has used so far, minus what it used before: each network needs a process of
its own, which this program starts. On a GPU it is torch's own count.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from evcl._core.settings import resolve
from evcl.benchmarks.networks import reduced_resnet18, resnet18
from evcl.curvature import Sample, fisher
from evcl.methods import METHODS
from evcl.training import Run

BATCH = 64


class Reader(nn.Module):
    """An LSTM, 128 wide, on 32 words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.reads = nn.Embedding(1000, 64), nn.LSTM(64, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.reads(self.words(x.long()))[1][0][-1]
        return found


def images(rows: int) -> Tensor:
    return torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def texts(rows: int) -> Tensor:
    return torch.randint(1000, (rows, 32), generator=torch.Generator().manual_seed(0)).float()


Make = Callable[[], nn.Module]
NETWORKS: dict[str, tuple[Make, int, Callable[[int], Tensor], int, int]] = {  # features, inputs, classes, rows
    "resnet-18": (lambda: resnet18(norm="group"), 512, images, 10, 128),
    "reduced resnet-18": (lambda: reduced_resnet18(norm="group"), 160, images, 10, 256),
    "lstm": (Reader, 128, texts, 4, 1024),
}


def used(device: str) -> float:
    """GB, the largest so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(name: str, rows: int | None, kinds: list[str], device: str) -> None:
    make, features, inputs, classes, usual = NETWORKS[name]
    x, n = inputs(rows or usual).to(device), rows or usual
    y = torch.arange(n, device=device) % classes
    settings = resolve("ewc", METHODS["ewc"].known_settings, {})
    run = Run(make(), METHODS["ewc"], [settings], [0], draw=False, device=device)
    run.add_head(features, classes)
    plain = nn.Sequential(make(), nn.Linear(features, classes)).to(device)
    optimizer = torch.optim.Adam(plain.parameters())
    sample = Sample(run.network, run.network.posterior.mean, run.network.layout, [0], x.unsqueeze(0), y.unsqueeze(0))
    before, found = used(device), []
    for kind in kinds:
        start = time.perf_counter()
        total = float(fisher(sample, kind).sum())  # waits for the device
        found.append((kind, time.perf_counter() - start, used(device) - before))
        assert total > 0
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for some in torch.arange(n, device=device).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(plain(x[some]), y[some])
            loss.backward()
            optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - start)
    epoch = min(seconds)
    for kind, time_, memory in found:
        print(f"| {name}, {n:,} rows, {classes} classes | {kind} | {time_ / epoch:.2f} | {memory:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--kinds", nargs="+", default=["empirical", "exact"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.alone:
        measure(args.networks[0], args.rows, args.kinds, args.device)
        return
    print("| network | Fisher | epochs | GB more |\n|---|---|---:|---:|", flush=True)
    for name in args.networks:
        rest = [] if args.rows is None else ["--rows", str(args.rows)]
        command = [sys.executable, __file__, "--alone", "--networks", name, "--device", args.device, *rest]
        subprocess.run([*command, "--kinds", *args.kinds], check=True)


if __name__ == "__main__":
    main()
