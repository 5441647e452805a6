"""How recognisable the samples of a generative model are: the uncertainty of a classifier on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.randomness import Purpose, generator
from evcl.benchmarks import Benchmark
from evcl.nn import VAE
from evcl.nn.vae import layers
from evcl.training import Run

WIDTH, EPOCHS, STEPS, BATCH, LR = 256, 30, 1000, 128, 1e-3  # of the classifier; it takes at most this many steps
ASKED = 100  # samples of each task


def uncertainty(run: Run, stream: Benchmark) -> list[float]:
    """For each replica, the mean over tasks k and their samples x of KL(one-hot k || p(. | x)) = -log p(k | x) after
    the last task, in nats. p is a classifier, an MLP trained on the training sets of all tasks (Nguyen et al., 2018).
    """
    if not isinstance(run.network.trunk, VAE):
        return []
    classify = _classifier(stream, run.network.posterior.mean.device)
    with torch.no_grad():
        each = [-classify(run.sample(k, ASKED))[:, :, k].mean(1) for k in range(len(stream))]
    found: list[float] = torch.stack(each).mean(0).tolist()
    return found


def _classifier(stream: Benchmark, device: torch.device) -> Callable[[Tensor], Tensor]:
    """x [R, n, D] -> log-probabilities [R, n, tasks]. It is a function of the stream alone."""
    x = torch.cat([task.train.x.flatten(1) for task in stream]).to(device)
    y = torch.cat([torch.full((len(task.train),), k) for k, task in enumerate(stream)]).to(device)
    source = generator(0, Purpose.CLASSIFIER)
    network = torch.nn.Sequential(*layers([x.shape[1], WIDTH, WIDTH, len(stream)], source)).to(device)
    optimiser = torch.optim.Adam(network.parameters(), LR)
    for rows in _batches(len(x), source):
        optimiser.zero_grad()
        F.cross_entropy(network(x[rows.to(device)]), y[rows.to(device)]).backward()
        optimiser.step()
    return lambda images: network(images).log_softmax(2)


def _batches(n: int, source: torch.Generator) -> Sequence[Tensor]:
    return torch.randint(n, (min(STEPS, 1 + EPOCHS * n // BATCH), BATCH), generator=source).unbind(0)
