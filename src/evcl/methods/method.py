"""What a method is: an algorithm that asks for fits, and a memory.

A method reads like the algorithm box of its paper. Its `learn` is a generator: it yields each `Fit` that it wants, is
sent what the fit ended with, and returns what the round ends with. EVCL, without its teacher:

    def learn(memory, round, s):
        beta = tempering(s, round)
        fitted = yield Fit(round.tasks, terms=[KL(memory.prior, beta / round.n), elastic(memory, s, round.n)])
        return Learned(fitted.q, memory.after(fitted, round, fisher(fitted, round, s), s.fisher_decay))

Every [R, P] tensor in a method is over all weights of the network: the engine narrows terms to the weights that a fit
uses, and widens what comes of it. What lies between two yields must be a function of (seed, purpose, round), so that a
run that was stopped can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import generator
from evcl._core.ranks import Ranks
from evcl._core.registry import Registry
from evcl._core.settings import BAYESIAN, CORESET, TRAINING, Setting, Settings
from evcl.likelihoods import Likelihood
from evcl.methods.data import Minibatch, Sampler, TaskData, shuffled
from evcl.methods.memory import Model, Nothing
from evcl.methods.terms import Gradients, Term
from evcl.nn import BayesianNetwork, Gaussian, Layout


class Tracker:
    """Hears every step of one fit, by tensor operations alone. Subclass it and override what you need.

    Everything it changes from step to step is in `buffers()`, so that checkpoints and CUDA graphs have it.
    """

    def begin(self, q: Gaussian) -> None:
        """The fit begins at `q`, over the fit's weights: make the buffers."""

    def before(self, q: Gaussian, grads: Gradients) -> None:
        """A step's gradient is known: of the NLL and the losses, without the terms."""

    def after(self, q: Gaussian) -> None:
        """The step is taken."""

    def buffers(self) -> list[Tensor]:
        return []

    def result(self) -> Tensor | None:
        """[R, P] over the fit's weights; `Fitted.tracked` has it over all weights."""
        return None


class Loss:
    """A loss that sees the network, added to the mean NLL at each step and differentiated by autograd.

    `heads` are the heads it uses beside those of the data: their weights are trained too.
    """

    heads: Sequence[int] = ()

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        """[R]: its value on a step's examples.

        `batch.logits(network, heads)` is what the network says of them, by the step's own pass through the trunk if it
        can be shared; `network.logits(x, heads)` is a pass of its own, for other examples.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Fit:
    """One optimisation: minimise mean NLL of the data + terms + losses.

    Attributes:
        data: the examples, of one task or of several jointly, each through its own head
        terms: penalties on the weights
        losses: functions of the network
        sampler: in which order the examples are seen
        trackers: what hears every step
        start: where the weights start, over all weights; None: where the posterior, or the `model`, is
        moves: [R, P] or [P], true for the weights that move; None: all that the fit uses
        model: another network of the memory's, to be trained in place of the learner's own
        likelihood: what the outputs mean; None: the learner's own
        rule: makes the update; None: Adam, and for sigma what `std_update` says
        capture: False if a term, loss, tracker or rule reads a value on the host: no CUDA graph is made then
        stage: what its epochs are reported as
        number: numbers the generators of its order and noise; None: by round and stage
    """

    data: Sequence[TaskData]
    terms: Sequence[Term] = ()
    losses: Sequence[Loss] = ()
    sampler: Sampler = shuffled
    trackers: Sequence[Tracker] = ()
    start: Gaussian | None = None
    moves: Tensor | None = None
    model: Model | None = None
    likelihood: Likelihood | None = None
    rule: Callable[..., Any] | None = None
    capture: bool = True
    stage: str = "task"
    number: int | None = None


@dataclass(frozen=True)
class Fitted:
    """What one fit ended with.

    Attributes:
        network: how the network that was trained computes
        q: over all weights: those of the fit are learned, the others as they were
        own: the weights of the fit alone
        layout: the names of the fit's weights
        used: [P], 1 for the weights of the fit
        tracked: the trackers' results, over all weights
        model: with `Fit.model`: that network as it is now; `q` and the others are then its own
    """

    network: BayesianNetwork
    q: Gaussian
    own: Gaussian
    layout: Layout
    used: Tensor
    tracked: Sequence[Tensor | None] = ()
    model: Model | None = None


@dataclass(frozen=True)
class Learned:
    """What a round ends with: the posterior over all weights, and what is remembered."""

    posterior: Gaussian
    memory: Any


@dataclass(frozen=True)
class Round:
    """What there is to learn now.

    Attributes:
        number: how many rounds were learned before
        tasks: one, or several jointly
        network: how the learner's network computes; its weights are `posterior`
        posterior: where the round begins
        seen: the heads of earlier rounds
        seeds: one per replica
        likelihood: what the network's outputs mean
        ranks: the processes that train this network together; None: this one alone
    """

    number: int
    tasks: Sequence[TaskData]
    network: BayesianNetwork
    posterior: Gaussian
    seen: Sequence[int]
    seeds: Sequence[int]
    likelihood: Likelihood
    ranks: Ranks | None = None

    @property
    def n(self) -> int:
        """Examples of the round."""
        return sum(task.y.shape[1] for task in self.tasks)

    def of(self, tasks: Sequence[TaskData], posterior: Gaussian | None = None) -> Round:
        """The same round with other examples, beginning elsewhere."""
        return replace(self, tasks=tasks, posterior=posterior or self.posterior)

    def generators(self, purpose: str, *indices: int) -> list[torch.Generator]:
        """One a replica, a function of its seed, the purpose, this round and the indices."""
        return [generator(seed, purpose, self.number, *indices) for seed in self.seeds]

    def same(self, tensor: Tensor) -> Tensor:
        """The tensor that all processes of a run agree on."""
        return tensor if self.ranks is None else self.ranks.broadcast_(tensor)


Learning = Generator[Fit, Fitted, Learned]
"""What `Method.learn` returns: a generator that yields fits, is sent their ends, and returns what was learned."""


def plain(memory: Any, round_: Round, s: Settings) -> Learning:
    """The mean NLL and nothing else."""
    fitted = yield Fit(round_.tasks)
    return Learned(fitted.q, memory)


@dataclass(frozen=True)
class Method:
    """A method of continual learning.

    Attributes:
        name: what it is called
        summary: one line about it
        bayesian: a Gaussian over each weight; otherwise a point
        learn: (memory, round, settings) -> a generator of fits, see `Learning`
        memory: what it remembers: a frozen dataclass, whose fields `per_weight`, `per_layer`, `per_task`, `examples`
            and `model` declare
        settings: its settings beyond those of training and, if it is Bayesian, of every Bayesian method; one of those
            with another default or other choices
        predictor: (memory, posterior, task or None) -> the weights that predict a task; None: the posterior
        stages: how many fits a round has, for those who watch it
        apart: it needs examples that do not touch in the network: the Fisher does, and replicas always do
        jointly: it learns all tasks in one round: not a continual learner but a ceiling
        shares: what its fits learn from: methods that say the same word can share a program on a GPU. A method whose
            fits have other data, order or networks than the round's tasks says a word of its own
    """

    name: str
    summary: str
    bayesian: bool
    learn: Callable[[Any, Round, Settings], Learning] = plain
    memory: type = Nothing
    settings: Mapping[str, Setting] = field(default_factory=dict)
    predictor: Callable[[Any, Gaussian, int | None], Gaussian] | None = None
    stages: int = 1
    apart: bool = False
    jointly: bool = False
    shares: str = "task"

    @property
    def known_settings(self) -> dict[str, Setting]:
        """All settings that it takes, by name."""
        return {**TRAINING, **({**BAYESIAN, **CORESET} if self.bayesian else {}), **self.settings}


METHODS: Registry[Method] = Registry("method")
"""All methods, by name."""


def register(method: Method, *, overwrite: bool = False) -> Method:
    """Add a method of one's own: it then works in `evcl run`, in `Learner` and in the contract tests."""
    if not isinstance(method, Method):
        raise EvclError(
            f"register takes an evcl.methods.Method, not {type(method).__name__}; see docs/own-method.md for an example"
        )
    METHODS.add(method.name, method, overwrite=overwrite)
    return method


def get(method: str | Method) -> Method:
    """The method of this name, or the method itself."""
    return method if isinstance(method, Method) else METHODS[method]
