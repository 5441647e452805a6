"""A variational auto-encoder (Kingma and Welling, 2014) that generates inputs like those of earlier tasks.

    -log p(x) <= -log p(x | z) + KL(q(z | x) || N(0, I)),   z = mu(x) + sigma(x) eps

Encoder and decoder mirror each other: two hidden layers of `generator_width` ReLU units each, and `latents` numbers z.
p(x | z) is a Bernoulli for each input if the first task's inputs are all within 0 to 1, as pixels are; otherwise a
Gaussian, whose mean depends on z and whose variance is learned for each input, on standardised inputs. A generated row
is the mean of p(x | z) for a Bernoulli and a draw for a Gaussian, limited to the range that each input had.

Its weights are in the memory by name. The network itself is made again in each round, since only the data knows how
many inputs there are; it has no heads, and its trunk's outputs (those of p(x | z), then mu and log sigma^2) are what
`Bound` reads.
"""

from __future__ import annotations

from collections.abc import Generator as Yields
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl._core.settings import Setting, Settings
from evcl.methods.data import NO_HEAD, Minibatch, TaskData
from evcl.methods.memory import Model, per_head, per_layer
from evcl.methods.method import Fit, Fitted, Loss, Round
from evcl.nn import BayesianNetwork, Gaussian, bayesianize
from evcl.nn.initial import blank
from evcl.nn.layers import Embedding
from evcl.nn.vae import Draw
from evcl.targets.bound import LEAST_LOG_VARIANCE, Bound

GENERATED_AT_ONCE = 8192  # rows generated at once

GENERATOR: dict[str, Setting] = {
    "generator_width": Setting(
        400, "units of each hidden layer of the generator's encoder and decoder", low=1, high=100_000
    ),
    "latents": Setting(
        0, "number of latent variables of the generator; 0: a sixteenth of the inputs, but from 4 to 100", high=100_000
    ),
    "generator_lr": Setting(1e-3, "the generator's learning rate", high=10.0, open_low=True),
}


@dataclass(frozen=True)
class Memory:
    """What is kept of earlier tasks: a generator of their inputs, and how many rows there were."""

    weights: dict[str, Tensor] = per_layer()  # of the generator, by name
    inputs: dict[str, Tensor] = per_layer()  # `shape` [R, axes]; `low`, `high` and, for a Gaussian, `shift`, `scale`
    rows: dict[int, Tensor] = per_head()  # [R, classes]: number of rows of each class

    def total(self) -> Tensor:
        """[R, 1]: the number of rows of all earlier tasks."""
        return torch.stack([rows.sum(1, keepdim=True) for rows in self.rows.values()]).sum(0)

    def known(self, head: int, classes: int) -> Tensor:
        """[R, 1, classes]: True for the classes of a head that earlier tasks had."""
        rows = self.rows[head]
        return F.pad(rows, (0, classes - rows.shape[1])).unsqueeze(1) > 0


class VAE(nn.Module):
    """[M, D] -> [M, outputs of p(x | z), 2 latents]. Without `gaussian`, the D outputs are logits of a Bernoulli; with
    it, there are D means and D log variances.
    """

    def __init__(self, inputs: int, width: int, latents: int, gaussian: bool) -> None:
        super().__init__()
        self.encoder = _layers(inputs, width, width, 2 * latents)
        self.draw = Draw()
        self.decoder = _layers(latents, width, width, inputs)
        self.log_variance = nn.Parameter(torch.zeros(1, inputs)) if gaussian else None

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        parts = [self.decoder(self.draw(code))]
        if self.log_variance is not None:
            parts.append(self.log_variance.expand(len(x), -1))
        return torch.cat([*parts, code], 1)


def _layers(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for ins, outs in pairwise(widths):
        layer = blank(nn.Linear, ins, outs)
        for parameter in layer.parameters():
            parameter.data.zero_()  # `made` draws them
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class ReplayedInputs(Loss):
    """`strength` times the mean of the negative ELBO on generated rows, one for each row of the fit."""

    rows: TaskData
    elbo: Bound
    strength: Tensor  # [R, 1]
    name: ClassVar[str] = "replay"

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        x = self.rows.take(batch.rows)[0].flatten(0, 1)
        nll = self.elbo.nll(network(x), x).view(batch.rows.shape)
        return self.strength.flatten() * nll.mean(1)


class Inputs(NamedTuple):
    """The inputs that a generator has seen, and how they are scaled for it."""

    shape: tuple[int, ...]
    low: Tensor  # [R, 1, D]
    high: Tensor
    shift: Tensor | None  # [R, 1, D]; None: inputs are within 0 to 1, and are used as they are
    scale: Tensor | None

    @property
    def gaussian(self) -> bool:
        return self.shift is not None

    def scaled(self, x: Tensor) -> Tensor:
        """[U, N, ...] -> [U or R, N, D]"""
        flat = x.flatten(2)
        if self.shift is None or self.scale is None:
            return flat
        return (flat[torch.arange(len(self.shift)) % len(flat)] - self.shift) / self.scale

    def stored(self) -> dict[str, Tensor]:
        shape = self.low.new_tensor(self.shape).long().expand(len(self.low), -1)
        parts = {"low": self.low, "high": self.high, "shift": self.shift, "scale": self.scale}
        return {"shape": shape.clone(), **{name: part[:, 0] for name, part in parts.items() if part is not None}}


def described(memory: Memory, round_: Round) -> Inputs:
    """The inputs of earlier tasks and of this round; raise if a generator cannot learn them."""
    _check_numbers(round_)
    kept = memory.inputs
    shapes = {tuple(task.x.shape[2:]) for task in round_.tasks}
    before = tuple(kept["shape"][0].tolist()) if kept else None
    if len(shapes) > 1 or (before is not None and shapes != {before}):
        which = " and ".join(str(shape) for shape in sorted(shapes | ({before} if before is not None else set())))
        raise EvclError(f"generative replay needs inputs of one shape, but these have {which}: use another method")
    r = len(round_.seeds)
    whole = [
        task.x.flatten(2)[torch.arange(r) % len(task.x)] if len(task.x) > 1 else task.x.flatten(2)
        for task in round_.tasks
    ]
    low = torch.stack([x.amin(1, keepdim=True).expand(r, -1, -1) for x in whole]).amin(0)
    high = torch.stack([x.amax(1, keepdim=True).expand(r, -1, -1) for x in whole]).amax(0)
    within = bool((low >= 0).all() & (high <= 1).all())
    shift = scale = None
    if kept:
        shift, scale = (kept[name].unsqueeze(1) if name in kept else None for name in ("shift", "scale"))
        if shift is None and not within:
            raise EvclError(
                "the inputs of the first task were within 0 to 1, and the generator learned them as such; these range "
                f"from {float(low.min()):g} to {float(high.max()):g}: scale all inputs alike before learning them"
            )
        low = torch.minimum(low, kept["low"].unsqueeze(1))
        high = torch.maximum(high, kept["high"].unsqueeze(1))
    elif not within:
        every = torch.cat([x.expand(r, -1, -1) for x in whole], 1)
        shift, spread = every.mean(1, keepdim=True), every.std(1, keepdim=True, correction=0)
        scale = torch.where(spread > 0, spread, 1.0)
    (shape,) = shapes
    return Inputs(shape, low, high, shift, scale)


def _check_numbers(round_: Round) -> None:
    if any(isinstance(m, (Embedding, nn.Embedding, nn.EmbeddingBag)) for m in round_.network.modules()):
        raise EvclError(
            "generative replay cannot generate token indices, which this network's embedding reads: use another method"
        )


def made(memory: Memory, inputs: Inputs, round_: Round, s: Settings) -> Model:
    """The generator as the last round left it, or before the first one, with weights of each replica's own seed."""
    d, like = inputs.low.shape[2], round_.posterior.mean
    latents = s.latents or min(100, max(4, d // 16))
    module = VAE(d, s.generator_width, latents, inputs.gaussian)
    sources = [generator(seed, Purpose.INIT_GENERATOR) for seed in round_.seeds]
    network = bayesianize(module, init_std=None, generators=sources, device=like.device, dtype=like.dtype)
    if memory.weights:
        shapes = {name: (len(like), *shape) for name, shape in network.layout.shapes.items()}
        if {name: tuple(t.shape) for name, t in memory.weights.items()} != shapes:
            raise EvclError("the generator in the memory has other layers: generator_width and latents cannot change")
        flat = torch.cat([memory.weights[name].flatten(1) for name in shapes], 1)
        network.posterior = Gaussian(flat, None)
    return Model(network, network.posterior, network.statistics(), "generator")


@torch.no_grad()
def generated(model: Model, inputs: Inputs, round_: Round) -> Tensor:
    """[R, N, ...]: as many rows as the round has, a function of the generator, the seeds and the round."""
    network, like = model.network, model.posterior.mean
    network.bind(like, None, network.layout)
    network.weights.noise = None
    vae = network.trunk
    latents = network.layout.shapes["decoder.0.weight"][1]
    sources = round_.generators(Purpose.GENERATED)
    pieces, r = [], len(like)
    for n in _chunks(round_.n):
        z = torch.stack([torch.randn(n, latents, generator=g) for g in sources]).to(like)
        x = vae.decoder(z.flatten(0, 1)).unflatten(0, (r, n))  # type: ignore[operator]
        if inputs.shift is None or inputs.scale is None:
            x = x.sigmoid()
        else:
            spread = network.layout.view(like, "log_variance").clamp_min(LEAST_LOG_VARIANCE)  # [R, 1, D]
            eps = torch.stack([torch.randn(x.shape[1:], generator=g) for g in sources]).to(like)
            x = inputs.shift + inputs.scale * (x + (0.5 * spread).exp() * eps)
        pieces.append(torch.minimum(torch.maximum(x, inputs.low), inputs.high))
    return round_.same(torch.cat(pieces, 1).unflatten(2, inputs.shape))


def _chunks(n: int) -> list[int]:
    return [min(GENERATED_AT_ONCE, n - start) for start in range(0, n, GENERATED_AT_ONCE)]


class Replay(NamedTuple):
    """What generates the inputs of earlier tasks in a round, and the inputs that it generated."""

    model: Model
    inputs: Inputs
    x: Tensor | None  # [R, N, ...]; None: there are no earlier tasks


def begun(memory: Memory, round_: Round, s: Settings) -> Replay:
    """Generate rows of earlier tasks for this round."""
    inputs = described(memory, round_)
    model = made(memory, inputs, round_, s)
    if not memory.weights:
        return Replay(model, inputs, None)
    before = Inputs(inputs.shape, memory.inputs["low"].unsqueeze(1), memory.inputs["high"].unsqueeze(1), *inputs[3:])
    return Replay(model, inputs, generated(model, before, round_))


def retrained(replay: Replay, memory: Memory, round_: Round, s: Settings) -> Yields[Fit, Fitted, Memory]:
    """Train the generator on the round's inputs and on generated ones; return the memory after the round.

    Like the classifier's, its objective is the mean over new rows plus N_past / N_t times that over generated ones.
    """
    inputs, elbo = replay.inputs, Bound(replay.inputs.gaussian)
    tasks = [(task.task, inputs.scaled(task.x)) for task in round_.tasks]
    losses: Sequence[Loss] = ()
    if replay.x is not None:
        old = inputs.scaled(replay.x)
        losses = [ReplayedInputs(TaskData(old, old, NO_HEAD), elbo, memory.total() / round_.n)]
    fitted = yield Fit(
        [TaskData(x, x, NO_HEAD, task=number) for number, x in tasks],
        losses=losses,
        model=replay.model,
        likelihood=elbo,
        rates={"lr": s.generator_lr, "optimizer": "adam", "stop_nll": 0.0},
        stage="generator",
    )
    views = fitted.network.layout.views(fitted.q.mean)
    return Memory({name: view.clone() for name, view in views.items()}, inputs.stored(), _more_rows(memory, round_))


def _more_rows(memory: Memory, round_: Round) -> dict[int, Tensor]:
    """The number of rows of each class after this round."""
    rows, r, like = dict(memory.rows), len(round_.seeds), round_.posterior.mean
    for task in round_.tasks:
        classes = round_.network.classes(task.head)
        counts = torch.stack([torch.bincount(y, minlength=classes) for y in task.y]).to(like)
        counts = counts[torch.arange(r) % len(counts)]
        if task.head in rows:
            before = rows[task.head]
            counts = counts + F.pad(before, (0, classes - before.shape[1]))
        rows[task.head] = counts
    return rows
