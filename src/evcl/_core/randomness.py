"""Random generators. Each is a function of (seed, purpose, indices), and none is global.

Because generators are derived and never carried over, a run needs no saved generator state to resume: its seed and the
number of tasks learned are enough. The one exception is the noise, whose generators advance from step to step within an
epoch. `Purpose` is the table of all purposes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache
from typing import Protocol

import torch
from torch import Tensor


def generator(seed: int, purpose: str, *indices: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Make the generator for one purpose, independent of every other purpose, index and seed."""
    key = ":".join([str(seed), purpose, *map(str, indices)]).encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return torch.Generator(device=device).manual_seed(number & (2**63 - 1))


class Purpose(StrEnum):
    """What random numbers are drawn for. These strings decide every number that the library gives: changing one changes
    results. A new use of random numbers is a new line here; a user's own method may pass any other string.

    The comments say what is drawn and, in square brackets, with which indices.
    """

    # Weights before they are learned
    INIT = "init"  # the first weights of the user's network; of(field): of a second network that a memory keeps
    INIT_PRIVATE = "init private"  # a task's private layers [task]
    INIT_GENERATOR = "init generator"  # the network that draws rows of earlier tasks, for each task anew
    ACTIVE_COLUMN = "active column"  # the column that learns a task, in progress and compress [round]
    OUTPUT_LAYER = "output layer"  # the last layer of a new column, in progressive networks [round]
    REDRAW = "redraw"  # all weights at the start of a task, for methods that begin anew [round]
    GATES = "gates"  # the hidden units of a task that are on, in context-dependent gating [round]
    LORA = "lora"  # of(path): the rows of a layer's first factor [turn]
    FEATURES = "features"  # the random features of class statistics
    FEATURE = "feature"  # the same, for an input that was added later [input]
    STREAM = "stream"  # the random features of a row stream; of(generator): a block of generated rows [block]

    # Training
    ORDER = "order"  # the order of the examples in an epoch [fit, epoch, ...]; of an agent [task, iteration, pass]
    SETTLING = "settling"  # the noise with which sigma is settled at the end of a fit [fit]
    NOISE = "noise"  # the noise of the weights in an epoch [fit, epoch]; of an agent [task, iteration, ...]
    GPU = "gpu"  # noise that is made on a GPU; of(seeds): for these replicas [fit, epoch]
    LENGTH = "length"  # how many examples a batch of several tasks has: the draw itself is not used
    LOADER = "loader"  # the order of a DataLoader, which is read again for every epoch [fit, epoch]
    WINDOW = "window"  # the examples of a DataLoader that are held in memory, to look at [reading]
    TRIAL = "trial"  # the rows that a number head is first fitted to [round]
    VALIDATION = "validation"  # the examples held out for validation [round or task]

    # Methods
    FISHER = "fisher"  # the examples and labels that importance is estimated from [round, task]
    SENSITIVITY = "sensitivity"  # the same, for the sensitivity of outputs [round, task]
    ACCOUNT = "account"  # the examples and weights that an account is measured with [round, task], and signs [name]
    UNLEARNED = "unlearned"  # the examples that show what a network has not learned [round, task]
    AGREEMENT = "agreement"  # the examples on which teacher and pupil are compared [round]
    DOUBT = "doubt"  # the examples whose labels are doubted [round]; weights to measure a teacher's doubt [round, task]
    TAUGHT = "taught"  # the earlier heads that are distilled, if there are many [round]
    RIVALS = "rivals"  # the earlier heads that a task is compared with, if there are many [round]
    FOLDS = "folds"  # the parts of a task in cross-validation [round, task]
    DOMAIN = "domain"  # the rows by which a domain is recognised [rows]
    MIXTURES = "mixtures"  # the kept examples that are mixed into batches [round, task]
    MEMORY = "memory"  # the examples that a memory keeps [round] or [round, task]
    KEPT = "kept"  # the examples that td-vcl keeps [round, task]
    CORESET = "coreset"  # the coreset of a task [round, task]
    GENERATED = "generated"  # the rows that a generator draws of earlier tasks [round]

    # Predictions and measures
    PREDICT = "predict"  # the draws of the weights for predictions [draw, head]
    IMPORTANCE = "importance"  # the latents that the likelihood of a generative model is estimated with [task]
    SAMPLE = "sample"  # the latents of generated examples [task]; the examples that a foreign loop keeps [tasks]
    CLASSIFIER = "classifier"  # the order of examples for the classifier that judges generated ones
    PSEUDO_ROWS = "pseudo-rows"  # made-up rows of a table's earlier months [task]
    SUMMARY = "summary"  # the rows by which a table's month is remembered [months]

    # Benchmarks and generated streams
    PERMUTATION = "permutation"  # the order of pixels [task]
    TEST = "test"  # the test part of a user's own data
    NOTMNIST = "notmnist"  # the test part of a data set that has none; the next three likewise
    DIGITS = "digits"
    BBC = "bbc"  # of(part): the texts of other topics, beside a topic's own [topic]
    MAILS = "mails"  # of(number): the test part of a group of months
    HYPERPLANE = "hyperplane"  # the weights of a concept [concept]
    LED = "led"  # which segments changed places in a concept [concept]
    RBF = "rbf"  # the weights and spreads of the clusters
    RBF_CLASSES = "rbf classes"  # their classes
    RBF_CENTRES = "rbf centres"  # their centres [concept]

    # Agents
    POLICY_WEIGHTS = "policy weights"  # the first weights of the trunk of the policy
    VALUES_WEIGHTS = "values weights"  # the same, of the values
    EPISODE = "episode"  # of(what for): how an episode begins [environment, episode]
    ACTIONS = "actions"  # the actions of a rollout [task, iteration]
    RANDOM_ACTIONS = "random actions"  # which actions are random, and these [task, iteration]
    MEASURED_ACTIONS = "measured actions"  # the actions while an agent is measured [task]
    DRAW = "draw"  # the weights that act in a rollout [task, iteration]
    THOMPSON = "thompson"  # the weights that act in an episode [task, environment, episode]
    REPLAY = "replay"  # the replayed steps [task, iteration, ...]
    RESERVOIR = "reservoir"  # which steps a full memory takes in [task, iteration]
    FILM = "film"  # the actions of a filmed episode [task]

    def of(self, name: object) -> str:
        """This purpose for one of several things of a kind, such as the network of a memory's field."""
        return _not_taken(f"{self} {name}")


PURPOSES = frozenset(map(str, Purpose))


def weights_of(name: str, network: str = "") -> str:
    """The purpose of new weights: their name, such as "head 0.weight"; before it, that of a memory's network."""
    return _not_taken(f"{network} {name}" if network else name)


def _not_taken(text: str) -> str:
    if text in PURPOSES:
        raise ValueError(f"{text!r} is another purpose of random numbers: choose another name")
    return text


class Noise(Protocol):
    """The source of random numbers for layers in training. It fills a tensor [replicas, examples, ...]."""

    def normal_(self, out: Tensor) -> Tensor: ...

    def uniform_(self, out: Tensor) -> Tensor: ...

    def shared(self) -> Noise:
        """The source for draws that all examples of a batch share: tensors without an example axis."""
        ...

    def of(self, rows: Tensor) -> Noise:
        """The source for these replicas alone."""
        ...


class DeviceNoise:
    """Noise on a GPU. Kernels that generate their own noise use `seeds` [V]: replica r uses `seeds[r % V]`, so its
    draws do not depend on other replicas. Layers share one generator, so their draws do depend on the other replicas.
    """

    def __init__(self, source: torch.Generator, seeds: Tensor) -> None:
        self.source, self.seeds = source, seeds

    def normal_(self, out: Tensor) -> Tensor:
        return out.normal_(generator=self.source)

    def uniform_(self, out: Tensor) -> Tensor:
        return out.uniform_(generator=self.source)

    def shared(self) -> DeviceNoise:
        return self

    def of(self, rows: Tensor) -> DeviceNoise:
        return self


class GeneratorNoise:
    """Noise from one generator per replica, so that a replica's draws do not depend on the other replicas."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators
        self._bits: dict[int, tuple[Tensor, Tensor]] = {}

    def normal_(self, out: Tensor) -> Tensor:
        """Fill `out` with values of `normal_table`, each chosen by 16 random bits: twice as fast as torch's normal_.

        For contiguous tensors on the CPU; on a GPU use `DeviceNoise`.
        """
        table = normal_table(out.dtype)
        for row, source in zip(out, self.generators, strict=True):
            n = row.numel()
            if n not in self._bits:
                self._bits[n] = torch.empty(-(-n // 4), dtype=torch.long), torch.empty(n, dtype=torch.int32)
            bits, index = self._bits[n]
            bits.random_(-(2**63), None, generator=source)
            index.copy_(bits.view(torch.uint16)[:n])
            torch.index_select(table, 0, index, out=row.view(-1))
        return out

    def uniform_(self, out: Tensor) -> Tensor:
        for row, source in zip(out, self.generators, strict=True):
            row.uniform_(generator=source)
        return out

    def shared(self) -> GeneratorNoise:
        return self

    def of(self, rows: Tensor) -> GeneratorNoise:
        return GeneratorNoise([self.generators[r] for r in rows.tolist()])


class HostNoise:
    """Noise for a device without generators of its own: drawn on the CPU, so it is the same as there, and copied."""

    def __init__(self, noise: Noise) -> None:
        self.noise = noise

    def normal_(self, out: Tensor) -> Tensor:
        return out.copy_(self.noise.normal_(torch.empty(out.shape, dtype=out.dtype)))

    def uniform_(self, out: Tensor) -> Tensor:
        return out.copy_(self.noise.uniform_(torch.empty(out.shape, dtype=out.dtype)))

    def shared(self) -> HostNoise:
        return HostNoise(self.noise.shared())

    def of(self, rows: Tensor) -> HostNoise:
        return HostNoise(self.noise.of(rows))


class Mirrored:
    """The negative of a noise. What is odd in the noise cancels in the mean of a gradient with each of the two."""

    def __init__(self, noise: Noise) -> None:
        self.noise, self.uniform_ = noise, noise.uniform_

    def normal_(self, out: Tensor) -> Tensor:
        return self.noise.normal_(out).neg_()

    def shared(self) -> Mirrored:
        return Mirrored(self.noise.shared())

    def of(self, rows: Tensor) -> Mirrored:
        return Mirrored(self.noise.of(rows))


class PartNoise:
    """The noise of a part of a batch. Each process draws the noise of the whole batch and takes its part, so that every
    example gets the same noise as in a single process; the cost is that more processes do not make drawing faster.
    """

    def __init__(self, noise: Noise, part: slice, examples: int) -> None:
        self.noise, self.part, self.examples = noise, part, examples

    def normal_(self, out: Tensor) -> Tensor:
        return self._taken(self.noise.normal_, out)

    def uniform_(self, out: Tensor) -> Tensor:
        return self._taken(self.noise.uniform_, out)

    def shared(self) -> Noise:
        return self.noise

    def of(self, rows: Tensor) -> PartNoise:
        return PartNoise(self.noise.of(rows), self.part, self.examples)

    def _taken(self, draw: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
        """Draw for the whole batch and copy this part to `out`. An example may have several consecutive rows."""
        rows = out.shape[1] // (self.part.stop - self.part.start)
        whole = draw(out.new_empty(len(out), rows * self.examples, *out.shape[2:]))
        return out.copy_(whole[:, rows * self.part.start : rows * self.part.stop])


@cache
def normal_table(dtype: torch.dtype) -> Tensor:
    """The standard normal distribution as 65,536 equally likely values: the mean of each quantile bin, scaled to
    variance 1.

    They range from -4.4 to 4.4, and their fourth moment is 3 to three digits, which is enough for training.
    """
    edges = torch.special.ndtri(torch.arange(65537, dtype=torch.float64) / 65536)
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    values = (density[:-1] - density[1:]) * 65536
    return (values / values.square().mean().sqrt()).to(dtype)
