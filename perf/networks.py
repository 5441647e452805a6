"""Seconds per epoch and memory of a ResNet-18 and a vision transformer: learners relative to plain PyTorch with Adam.

Plain PyTorch trains in the same precision (by autocast, with images in channels-last order) on data that are on the
device, with no other work. An epoch is timed as the difference between tasks of 3 epochs and of 1, so that captures and
the end of a task do not count; `task end` is what a task costs beyond its epochs, in plain epochs. `--peers` adds
bayesian-torch: its `dnn_to_bnn` replaces the convolutions and linear layers of the same network, which trains in the
same loop as plain PyTorch, with its KL added to the loss.

    python perf/networks.py --device cuda --precision bf16    (or tf32, fp32)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import evcl
from evcl.benchmarks.networks import resnet18

BATCH, EPOCHS = 128, 2


class ViT(nn.Module):
    """A vision transformer for 32x32 images: patches of 4x4, 6 blocks, 192 wide."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = (nn.Parameter(0.02 * torch.randn(1, n, width)) for n in (1, 65))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        found: Tensor = self.norm(self.blocks(x)[:, 0])
        return found


KL = Callable[[nn.Module], Tensor]
PEERS = {"bayesian-torch": "Reparameterization", "bayesian-torch, flipout": "Flipout"}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {"resnet-18": (resnet18, 512), "vit": (ViT, 192)}


class Clock:
    """Seconds and, on a GPU, the largest memory in GB between two looks."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> Clock:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start
        self.gigabytes = torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else float("nan")


def plain(model: nn.Module, x: Tensor, y: Tensor, precision: str, kl: KL | None = None) -> tuple[float, float]:
    """Seconds per epoch, and memory, of an ordinary training loop; `kl` is a term of the loss that the model has."""
    device = x.device.type
    model = model.to(device)
    if device == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    torch.backends.cuda.matmul.fp32_precision = "ieee" if precision == "fp32" else "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee" if precision == "fp32" else "tf32"  # type: ignore[attr-defined]
    optimizer = torch.optim.Adam(model.parameters(), fused=device == "cuda")

    def epoch() -> None:
        order = torch.randperm(len(x), device=x.device)
        for rows in order.split(BATCH):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext():
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                loss = loss if kl is None else loss + kl(model) / len(x)
            loss.backward()
            optimizer.step()

    epoch()
    with Clock(device) as clock:
        for _ in range(EPOCHS):
            epoch()
    return clock.seconds / EPOCHS, clock.gigabytes


def bayesian_torch(model: nn.Module, kind: str) -> tuple[nn.Module, KL]:
    """The model with bayesian-torch's layers in it, as its documentation describes, and its KL."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    options = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    dnn_to_bnn(model, {**options, "type": kind, "moped_enable": False, "moped_delta": 0.5})
    return model, get_kl_loss


def learner(method: str, network: nn.Module, x: Tensor, y: Tensor, precision: str) -> tuple[float, float, float]:
    """Seconds per epoch, memory, and seconds of a task beyond its epochs; of the second task, whose prior is the
    first's.
    """
    device = x.device.type
    own = evcl.Learner(network, method, device=device, precision=precision, batch_size=BATCH)  # type: ignore[arg-type]
    own.learn((x, y), epochs=1)
    found: list[Any] = []
    for epochs in (1, 1 + EPOCHS):
        with Clock(device) as clock:
            own.learn((x, y), epochs=epochs)
        found.append(clock)
    each = (found[1].seconds - found[0].seconds) / EPOCHS
    return each, max(clock.gigabytes for clock in found), found[0].seconds - each


def whole(network: nn.Module, features: int) -> nn.Module:
    """The network with a linear layer for 10 classes on it."""
    return nn.Sequential(network, nn.Linear(features, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", default=["naive", "ewc", "evcl"])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--peers", action="store_true", help="also bayesian-torch, if it is installed")
    args = parser.parse_args()
    source = torch.Generator().manual_seed(0)
    x = torch.randn(args.rows, 3, 32, 32, generator=source).to(args.device)
    y = torch.randint(10, (args.rows,), generator=source).to(args.device)
    print("| network | method | seconds per epoch | / plain | GB | / plain | task end |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in args.networks:
        make, features = NETWORKS[name]
        base, memory = plain(whole(make(), features), x, y, args.precision)
        print(f"| {name} | plain PyTorch | {base:.2f} | 1.00 | {memory:.2f} | 1.00 | - |", flush=True)
        for peer, kind in PEERS.items() if args.peers else ():
            model, kl = bayesian_torch(whole(make(), features), kind)
            each, size = plain(model, x, y, args.precision, kl)
            row = f"{each:.2f} | {each / base:.2f} | {size:.2f} | {size / memory:.2f} | -"
            print(f"| {name} | {peer} | {row} |", flush=True)
        for method in args.methods:
            each, size, end = learner(method, make(), x, y, args.precision)
            row = f"{each:.2f} | {each / base:.2f} | {size:.2f} | {size / memory:.2f} | {end / base:.1f}"
            print(f"| {name} | `{method}` | {row} |", flush=True)


if __name__ == "__main__":
    main()
