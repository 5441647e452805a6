"""Training and prediction should use one posterior, the same distribution of weights.

Small networks learn scikit-learn's digits, with the defaults except for `--set`. Then, on the training data:

    trained   mean NLL of a pass at the final weights with the noise of training, over a few passes
    drawn     mean NLL of a prediction with one draw of the weights, over many draws: should equal `trained`
    blended   NLL of the mean probability of many passes with the noise of training
    predict   NLL of predict_proba with the default number of draws; `many`, with many: should equal `blended`
    means     NLL of the network with the posterior means

The NLL of a mean probability is at most the mean NLL (Jensen's inequality), so `predict` may be below `trained`. On the
test data: the accuracy of predict, of many draws and of mean_network. All numbers are means over the seeds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import evcl
from evcl._core.randomness import GeneratorNoise, generator
from evcl._core.settings import Settings

ROWS, BATCH = 1300, 64  # training rows, of 1,797; batch size
PASSES, DRAWS = 16, 32


class Block(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), norm(outs)
        self.conv2, self.norm2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), norm(outs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), norm(16), nn.ReLU())
        self.blocks = nn.Sequential(Block(16, 16, 1, norm), Block(16, 32, 2, norm))

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1)


class ViT(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(1, width, 2, 2), nn.Parameter(torch.zeros(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.patches(x).flatten(2).transpose(1, 2) + self.places)
        return out.mean(1)


class LSTM(nn.Module):
    """A digit as a sequence of its rows, read in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.LSTM(8, 32, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(x.squeeze(1))[0].mean(1)  # type: ignore[no-any-return]


class Direct(nn.Module):
    """Weights that the network's own code uses, drawn once per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Parameter(0.1 * torch.randn(64, 64)), nn.Parameter(torch.ones(64))
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.out(F.relu(F.linear(x.flatten(1), self.inner) * self.scale)))


def volume() -> nn.Module:
    """A digit as a volume, in which every two rows are a slice."""
    first = nn.Unflatten(2, (4, 2)), nn.Conv3d(1, 8, (2, 2, 3), padding=(0, 0, 1)), nn.ReLU()
    return nn.Sequential(*first, nn.Conv3d(8, 16, (2, 1, 3), padding=(0, 0, 1)), nn.ReLU(), nn.Flatten())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet, batch norm": lambda: ResNet(nn.BatchNorm2d),
    "ResNet, group norm": lambda: ResNet(lambda c: nn.GroupNorm(4, c)),
    "ViT": ViT,
    "Conv3d": volume,
    "LSTM": LSTM,
    "direct parameters": Direct,
}


@dataclass(frozen=True)
class Digits:
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits() -> Digits:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    images = torch.from_numpy((x[order] / 16).astype("float32")).view(-1, 1, 8, 8)
    labels = torch.from_numpy(y[order].astype("int64"))
    return Digits(images[:ROWS], labels[:ROWS], images[ROWS:], labels[ROWS:])


@contextmanager
def training(learner: evcl.Learner) -> Iterator[None]:
    """The network as in a step of the last task; statistics that a batch norm measures meanwhile are discarded."""
    network = learner.state.run.network
    before = network.statistics()
    network.set_statistics({name: value.clone() for name, value in before.items()})
    network.bind(network.posterior.mean, network.posterior.variance(), network.layout)
    network.weights.noise = GeneratorNoise([generator(learner.seed, "law")])
    try:
        with torch.no_grad():
            yield
    finally:
        network.weights.noise = None
        network.set_statistics(before)


def passes(learner: evcl.Learner, data: Digits) -> Iterator[Tensor]:
    """Log-probabilities [N, classes] of passes over the training data with training noise, each in its own order."""
    network = learner.state.run.network
    with training(learner):
        for number in range(PASSES):
            order = torch.randperm(ROWS, generator=generator(learner.seed, "order of the law", number))
            found = torch.cat([network.logits(data.x[rows], [0]).log_softmax(1) for rows in order.split(BATCH)])
            yield torch.empty_like(found).index_copy_(0, order, found)


def nll(log_p: Tensor, y: Tensor) -> float:
    return float(F.nll_loss(log_p, y))


def accuracy(p: Tensor, y: Tensor) -> float:
    return 100 * float((p.argmax(1) == y).double().mean())


def blend(log_p: Tensor) -> Tensor:
    """The log of the mean probability over S, from log-probabilities [S, N, classes]."""
    return log_p.logsumexp(0) - math.log(len(log_p))


def measure(make: Callable[[], nn.Module], seed: int, epochs: int, settings: dict[str, Any]) -> dict[str, float]:
    data = digits()
    torch.manual_seed(seed)
    learner = evcl.EVCL(make(), seed=seed, init="draw", epochs=epochs, **settings)
    learner.learn((data.x, data.y), "digits")
    trained = torch.stack(list(passes(learner, data)))
    run = learner.state.run
    default = run.settings
    run.settings = Settings({**default, "predict_samples": DRAWS})
    draws = list(run.draws([0]))
    drawn = torch.cat([run.predict(data.x.unsqueeze(0), 0, [draw]) for draw in draws]).clamp_min(1e-30).log()
    test = torch.cat([run.predict(data.test_x.unsqueeze(0), 0, [draw]) for draw in draws])
    run.settings, run._kept = default, None
    means = learner.mean_network()
    with torch.no_grad():
        at_mean, test_mean = means(data.x).log_softmax(1), means(data.test_x)
    return {
        "trained": float(np.mean([nll(one, data.y) for one in trained])),
        "drawn": float(np.mean([nll(one, data.y) for one in drawn])),
        "blended": nll(blend(trained), data.y),
        "predict": nll(learner.predict_proba(data.x).clamp_min(1e-30).log(), data.y),
        "many": nll(blend(drawn), data.y),
        "means": nll(at_mean, data.y),
        "acc predict": accuracy(learner.predict_proba(data.test_x), data.test_y),
        "acc many": accuracy(test.mean(0), data.test_y),
        "acc means": accuracy(test_mean, data.test_y),
        "test NLL": nll(learner.predict_proba(data.test_x).clamp_min(1e-30).log(), data.test_y),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare what training and prediction draw from.")
    parser.add_argument("--network", action="append", choices=NETWORKS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the method")
    given = parser.parse_args()
    settings = dict(word.split("=", 1) for word in given.set)
    torch.set_num_threads(1)
    for name in given.network or NETWORKS:
        rows = [measure(NETWORKS[name], seed, given.epochs, settings) for seed in range(given.seeds)]
        found = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
        if name == (given.network or [*NETWORKS])[0]:
            print(f"{'':<20}" + "".join(f"{key:>13}" for key in found))
        print(f"{name:<20}" + "".join(f"{value:>13.4g}" for value in found.values()), flush=True)


if __name__ == "__main__":
    main()
