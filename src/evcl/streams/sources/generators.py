"""Generated streams from the literature, written from the papers: STAGGER, SEA, Agrawal, hyperplane, LED and RBF.

Each generator makes rows [n] with their labels from a seed, given where each row stands between two concepts
(`drift.Phase`). Where a concept is a rule, a row between two concepts follows one of them, drawn at random. Where it is
a set of numbers (a hyperplane, centres), these move in a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from evcl._core.errors import EvclError, unknown
from evcl._core.randomness import Purpose, generator
from evcl.streams.sources.drifting import Drift, Phase, drift
from evcl.streams.sources.source import ROWS_AT_ONCE, Rows, Source


class Rule(Protocol):
    """A generator: the names of its inputs and classes, and how many concepts it has."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def concepts(self) -> int: ...

    def rows(self, phase: Phase, seed: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs [n, inputs] and labels [n]; `source` draws the rows, and `seed` the concepts."""
        ...


def _uniform(source: torch.Generator, *shape: int) -> Tensor:
    """Numbers from 0 to 1 that float32 represents exactly, so that labels follow from the inputs as they are given."""
    return torch.rand(shape, generator=source, dtype=torch.float32).double()


def _integers(source: torch.Generator, low: int, high: int, count: int) -> Tensor:
    """Whole numbers from `low` to `high`, both included."""
    return torch.randint(low, high + 1, (count,), generator=source)


def _flipped(labels: Tensor, noise: float, source: torch.Generator) -> Tensor:
    """Labels 0 and 1, of which a fraction is exchanged."""
    return labels ^ (torch.rand(len(labels), generator=source) < noise).long()


@dataclass(frozen=True)
class Stagger:
    """J. Schlimmer, R. Granger: Incremental learning from noisy data. Machine Learning 1, 1986.

    Objects of three sizes, colours and shapes. Concept 0: small and red. 1: green or circle. 2: medium or large. A row
    has one indicator per value.
    """

    names = (
        *("size=small", "size=medium", "size=large", "color=red", "color=blue", "color=green"),
        *("shape=circle", "shape=square", "shape=triangle"),
    )
    classes = ("0", "1")
    concepts = 3

    def rows(self, phase: Phase, seed: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        concept = phase.drawn(source)
        size, color, shape = (_integers(source, 0, 2, len(concept)) for _ in range(3))
        x = torch.cat([one_hot(values, 3) for values in (size, color, shape)], 1)
        rules = torch.stack([(size == 0) & (color == 0), (color == 2) | (shape == 0), size > 0])
        return x, rules.long().gather(0, concept[None])[0]


@dataclass(frozen=True)
class SEA:
    """W. Street, Y. Kim: A streaming ensemble algorithm (SEA) for large-scale classification. KDD 2001.

    Three inputs from 0 to 10. The label is whether the sum of the first two exceeds the concept's threshold, with a
    fraction `noise` exchanged.
    """

    noise: float = 0.1
    names = ("0", "1", "2")
    classes = ("0", "1")
    concepts = 4

    def rows(self, phase: Phase, seed: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        concept = phase.drawn(source)
        x = (10 * _uniform(source, len(concept), 3)).float().double()
        thresholds = torch.tensor([8.0, 9.0, 7.0, 9.5], dtype=torch.float64)[concept]
        return x, _flipped((x[:, 0] + x[:, 1] > thresholds).long(), self.noise, source)


@dataclass(frozen=True)
class Agrawal:
    """R. Agrawal, T. Imielinski, A. Swami: Database mining: a performance perspective. IEEE TKDE 5(6), 1993.

    People who ask for a loan, and ten rules for whether they get it: concept k is the paper's function k + 1. After the
    label is determined, each number is moved by up to the fraction `perturbation` of its range.
    """

    perturbation: float = 0.05
    names = ("salary", "commission", "age", "elevel", "car", "zipcode", "hvalue", "hyears", "loan")
    classes = ("0", "1")
    concepts = 10

    def rows(self, phase: Phase, seed: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        concept = phase.drawn(source)
        n = len(concept)
        salary = 20_000 + 130_000 * _uniform(source, n)
        commission = torch.where(salary >= 75_000, 0.0, 10_000 + 65_000 * _uniform(source, n))
        age, elevel, car = (_integers(source, *ends, n) for ends in ((20, 80), (0, 4), (1, 20)))
        zipcode = _integers(source, 0, 8, n)
        hvalue = (9 - zipcode) * 100_000 * (0.5 + _uniform(source, n))
        hyears, loan = _integers(source, 1, 30, n), 500_000 * _uniform(source, n)
        x = torch.stack([salary, commission, age, elevel, car, zipcode, hvalue, hyears, loan], 1).float().double()
        return self._perturbed(x, source), agrawal_rules(x).long().gather(0, concept[None])[0]

    def _perturbed(self, x: Tensor, source: torch.Generator) -> Tensor:
        low = torch.tensor([20_000, 0, 20, 0, 1, 0, 50_000, 1, 0]).double()
        high = torch.tensor([150_000, 75_000, 80, 4, 20, 8, 1_350_000, 30, 500_000]).double()
        numbers = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, 1])  # the others are codes
        moved = x + numbers * self.perturbation * (high - low) * (2 * _uniform(source, *x.shape) - 1)
        moved[:, 1] = torch.where(x[:, 1] == 0, 0.0, moved[:, 1])  # no commission stays none
        moved[:, [2, 7]] = moved[:, [2, 7]].round()
        return moved.clamp(low, high)


def agrawal_rules(x: Tensor) -> Tensor:
    """The labels of people [n, 9] by each of the ten functions [10, n]; 1 is the group that the function names."""
    salary, commission, age, elevel, _, _, hvalue, hyears, loan = x.unbind(1)
    total = salary + commission

    def by_age(young: Tensor, middle: Tensor, old: Tensor) -> Tensor:
        return torch.where(age < 40, young, torch.where(age < 60, middle, old))

    def within(value: Tensor, low: int, high: int) -> Tensor:
        return (low * 1_000 <= value) & (value <= high * 1_000)

    def among(*levels: int) -> Tensor:
        return torch.isin(elevel, torch.tensor(levels).double())

    equity = torch.where(hyears >= 20, hvalue * (hyears - 20) / 10, 0.0)
    income = 2 * total / 3
    return torch.stack(
        [
            (age < 40) | (age >= 60),
            by_age(within(salary, 50, 100), within(salary, 75, 125), within(salary, 25, 75)),
            by_age(among(0, 1), among(1, 2, 3), among(2, 3, 4)),
            by_age(
                torch.where(among(0, 1), within(salary, 25, 75), within(salary, 50, 100)),
                torch.where(among(1, 2, 3), within(salary, 50, 100), within(salary, 75, 125)),
                torch.where(among(2, 3, 4), within(salary, 50, 100), within(salary, 25, 75)),
            ),
            by_age(
                torch.where(within(salary, 50, 100), within(loan, 100, 300), within(loan, 200, 400)),
                torch.where(within(salary, 75, 125), within(loan, 200, 400), within(loan, 300, 500)),
                torch.where(within(salary, 25, 75), within(loan, 300, 500), within(loan, 100, 300)),
            ),
            by_age(within(total, 50, 100), within(total, 75, 125), within(total, 25, 75)),
            income - loan / 5 - 20_000 <= 1,
            income - 5_000 * elevel - 20_000 <= 1,
            income - 5_000 * elevel - loan / 5 - 10_000 <= 1,
            income - 5_000 * elevel + equity / 5 - 10_000 <= 1,
        ]
    )


@dataclass(frozen=True)
class Hyperplane:
    """G. Hulten, L. Spencer, P. Domingos: Mining time-changing data streams. KDD 2001.

    Inputs from 0 to 1. The label is whether their weighted sum is at least half of the sum of the weights, with a
    fraction `noise` exchanged. A concept is a set of weights from 0 to 1.
    """

    inputs: int = 10
    noise: float = 0.05
    classes = ("0", "1")
    concepts = 4

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.inputs)))

    def rows(self, phase: Phase, seed: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        before, after = (_numbers(Purpose.HYPERPLANE, seed, concepts, self.inputs) for concepts in phase[:2])
        weights = torch.lerp(before, after, phase.mix[:, None])
        x = _uniform(source, len(weights), self.inputs)
        return x, _flipped(above(x, weights), self.noise, source)


def above(x: Tensor, weights: Tensor) -> Tensor:
    """Whether the weighted sum of each row [n, inputs] is at least half of the sum of its weights."""
    return ((weights * x).sum(1) >= 0.5 * weights.sum(1)).long()


def _numbers(purpose: str, seed: int, concepts: Tensor, *shape: int) -> Tensor:
    """Uniform numbers [n, *shape] that belong to each row's concept."""
    distinct, place = concepts.unique(return_inverse=True)
    return torch.stack([_uniform(generator(seed, purpose, int(one)), *shape) for one in distinct])[place]


@dataclass(frozen=True)
class LED:
    """L. Breiman, J. Friedman, R. Olshen, C. Stone: Classification and regression trees. 1984.

    The digit that seven segments show, each wrong with probability `noise`, among 17 segments that mean nothing. In
    concept k > 0, the seven have changed places with seven of the 17.
    """

    noise: float = 0.1
    names = tuple(map(str, range(24)))
    classes = tuple("0123456789")
    concepts = 4

    def rows(self, phase: Phase, seed: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        concept = phase.drawn(source)
        digit = _integers(source, 0, 9, len(concept))
        wrong = torch.rand(len(digit), 7, generator=source) < self.noise
        segments = SEGMENTS[digit] ^ wrong
        x = torch.cat([segments, torch.randint(0, 2, (len(digit), 17), generator=source).bool()], 1)
        places = torch.stack([_places(seed, k) for k in range(int(concept.max()) + 1)])
        return x.gather(1, places[concept]), digit


def _places(seed: int, concept: int) -> Tensor:
    """Which segment each of the 24 inputs shows."""
    places = torch.arange(24)
    if concept:
        others = 7 + torch.randperm(17, generator=generator(seed, Purpose.LED, concept))[:7]
        places[:7], places[others] = others, torch.arange(7)
    return places


_SHAPES = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")
SEGMENTS = torch.tensor([[segment == "1" for segment in shape] for shape in _SHAPES])
"""The segments that show each digit: top, left above, right above, middle, left below, right below, bottom."""


@dataclass(frozen=True)
class RBF:
    """Random radial basis functions: A. Bifet et al.: New ensemble methods for evolving data streams. KDD 2009.

    Clusters, each with a class, a weight and a spread. A row is the centre of a cluster plus a step in a random
    direction, whose length is normal. A concept is a set of centres; classes, weights and spreads stay.
    """

    inputs: int = 10
    kinds: int = 5
    centres: int = 50
    concepts = 4

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.inputs)))

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.kinds)))

    def rows(self, phase: Phase, seed: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        kinds = _integers(generator(seed, Purpose.RBF_CLASSES), 0, self.kinds - 1, self.centres)
        weights, spreads = _uniform(generator(seed, Purpose.RBF), 2, self.centres)
        cluster = torch.multinomial(weights, len(phase.mix), replacement=True, generator=source)
        shape, own = (self.centres, self.inputs), torch.arange(len(cluster))
        before, after = (_numbers(Purpose.RBF_CENTRES, seed, some, *shape)[own, cluster] for some in phase[:2])
        centre = torch.lerp(before, after, phase.mix[:, None])
        return centre + steps(spreads[cluster], self.inputs, source), kinds[cluster]


def steps(spreads: Tensor, inputs: int, source: torch.Generator) -> Tensor:
    """A step for each spread [n]: in the direction of a random point of a cube, with a normal length."""
    direction = 2 * _uniform(source, len(spreads), inputs) - 1
    length = torch.randn(len(spreads), generator=source).double() * spreads
    return direction * (length / direction.square().sum(1).sqrt())[:, None]


RULES: dict[str, Rule] = {
    "stagger": Stagger(),
    "sea": SEA(),
    "agrawal": Agrawal(),
    "hyperplane": Hyperplane(),
    "led": LED(),
    "rbf": RBF(),
}
"""The generators, by name."""


def generated(
    rule: str | Rule, how: str | Drift = "none", rows: int = 100_000, name: str | None = None, summary: str = ""
) -> Source:
    """A generated stream with a drift: one of `drifting.DRIFT_KINDS`, or a Drift of your own.

    Every block of rows has its own generator, so that reading can begin anywhere.
    """
    if isinstance(rule, str) and rule not in RULES:
        raise unknown("generator", rule, RULES)
    maker = RULES[rule] if isinstance(rule, str) else rule
    label = type(maker).__name__.lower()
    change = drift(how, rows, maker.concepts) if isinstance(how, str) else how
    if rows < 1 or max(change.concepts) >= maker.concepts:
        raise EvclError(f"{label} has the concepts 0 to {maker.concepts - 1}, not {change.concepts}; rows: {rows}")

    @lru_cache(maxsize=2)
    def block(number: int, seed: int) -> tuple[Tensor, Tensor]:
        phase = change.phase(torch.arange(number * ROWS_AT_ONCE, (number + 1) * ROWS_AT_ONCE))
        x, y = maker.rows(phase, seed, generator(seed, Purpose.STREAM.of(label), number))
        return x.float(), y

    def part(start: int, stop: int, seed: int) -> Rows:
        first = start // ROWS_AT_ONCE
        blocks = [block(number, seed) for number in range(first, -(-stop // ROWS_AT_ONCE))]
        rows = slice(start - first * ROWS_AT_ONCE, stop - first * ROWS_AT_ONCE)
        return Rows(torch.cat([x for x, _ in blocks])[rows], torch.cat([y for _, y in blocks])[rows], maker.names)

    title = name or f"{label}-{change.kind}"
    return Source(title, summary, rows, maker.names, maker.classes, change.kind, True, part, change.at)
