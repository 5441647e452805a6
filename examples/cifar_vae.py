"""A convolutional VAE that learns the classes of CIFAR-10 one after another, without labels.

    python examples/cifar_vae.py --tasks 3 --epochs 10 --device cuda

Each class has its own encoder and its own first layer of the decoder (`evcl.nn.PerTask`). All classes share the
convolutions of the decoder, which EVCL protects. It prints the log-likelihood of each class's test images after each
class, and writes samples of every class to `cifar_vae.png`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import evcl
from evcl.data import load
from evcl.experiments.samples import png

CLASSES = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def network(width: int = 32, latents: int = 64) -> evcl.nn.VAE:
    """3 x 32 x 32 pixels from 0 to 1 -> 64 latent variables -> 3 x 32 x 32 logits."""
    encoder = nn.Sequential(
        nn.Conv2d(3, width, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 64, 2 * latents),
    )
    head = nn.Sequential(nn.Linear(latents, 2 * width * 64), nn.ReLU(), nn.Unflatten(1, (2 * width, 8, 8)))
    shared = nn.Sequential(
        nn.Upsample(scale_factor=2),
        nn.Conv2d(2 * width, width, 5, padding=2),
        nn.ReLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(width, 3, 5, padding=2),
    )
    return evcl.nn.VAE(evcl.nn.PerTask(encoder), nn.Sequential(evcl.nn.PerTask(head), *shared), latents)


def images(rows: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each class, at most this many images to train on and a tenth as many to test."""
    found = load("cifar10")
    parts = ((found.train_images, found.train_labels, rows), (found.test_images, found.test_labels, rows // 10))
    every = []
    for pixels, labels, most in parts:
        x, y = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(labels).long()
        every.append([x[y == k][:most] for k in range(len(CLASSES))])
    return {name: (train, test) for name, train, test in zip(CLASSES, *every, strict=True)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="evcl")
    parser.add_argument("--tasks", type=int, default=3, help="classes to learn [3]")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rows", type=int, default=5000, help="images of each class to train on [5000]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("cifar_vae.png"))
    args = parser.parse_args(words)
    stream = dict(list(images(args.rows).items())[: args.tasks])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        learner = evcl.Learner(
            network(), args.method, likelihood="bound", init="draw", device=args.device, epochs=args.epochs
        )
    for name, (train, _) in stream.items():
        learner.learn(train, task=name)
        seen = {task: float(learner.log_likelihood(stream[task][1], task, draws=100).mean()) for task in learner.tasks}
        print(f"after {name}:", ", ".join(f"{task} {value:.0f} nats" for task, value in seen.items()))
    rows = [torch.cat(list(learner.sample(task, 8).cpu()), 2) for task in learner.tasks]
    args.out.write_bytes(png((255 * torch.cat(rows, 1)).round().to(torch.uint8).numpy()))


if __name__ == "__main__":
    main()
