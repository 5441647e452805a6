"""The contract of a method: an algorithm that requests fits, and a memory.

A method reads like the algorithm box of its paper. Its `learn` is a generator: it yields each `Fit` that it needs,
receives the result of that fit, and returns the result of the round. EVCL, without its teacher:

    def learn(memory, round, s):
        beta = tempering(s, round)
        fitted = yield Fit(round.tasks, terms=[KL(memory.prior, beta / round.n), elastic(memory, s, round.n)])
        return Learned(fitted.q, memory.after(fitted, round, fisher(fitted, round, s), s.fisher_decay))

Every [R, P] tensor in a method covers all weights of the network: the engine narrows terms to the weights that a fit
uses, and widens the results again. Anything computed between two yields must be a function of (seed, purpose, round),
so that a stopped run can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from evcl._core.catalogue import METHOD_SUMMARIES
from evcl._core.errors import EvclError, retired
from evcl._core.randomness import Noise, generator
from evcl._core.ranks import Ranks
from evcl._core.settings import BAYESIAN, CORESET, TRAINING, Setting, Settings
from evcl.methods.data import Minibatch, Sampler, TaskData, shuffled
from evcl.methods.memory import Model, Nothing
from evcl.methods.terms import Gradients, Number, Term
from evcl.nn import BayesianNetwork, Gaussian, Layout, Part, copied
from evcl.targets import Likelihood, Objective

if TYPE_CHECKING:
    from evcl.methods.parts import Part as MethodPart


class Tracker:
    """Is called at every step of one fit, and may use tensor operations only. Subclass it and override what you need.

    `buffers()` must return every tensor that changes from step to step, so that checkpoints and CUDA graphs include it.
    """

    @property
    def perturbs(self) -> bool:
        """Whether it overrides `perturb`."""
        return type(self).perturb is not Tracker.perturb

    def begin(self, q: Gaussian, part: Part) -> None:
        """Called when the fit begins at `q`, over the fit's weights: create the buffers here. `part.gather(v)` narrows
        a tensor v [R, P] over all weights, such as one from the memory, to the fit's weights, as terms are narrowed.
        """

    def perturb(self, q: Gaussian, noise: Noise) -> None:
        """Called before a step's gradient is computed. It may change q.mean in place, so that the gradient is computed
        there; `before` must then restore it. Draw numbers for all examples of the batch from `noise.shared()`.
        """

    def before(self, q: Gaussian, grads: Gradients) -> None:
        """Called when a step's gradient is known: that of the NLL and the losses, without the terms.

        It may change `grads.mean` and `grads.variance` in place: the terms are added to what it leaves, and the update
        rule receives the sum. It may not change `q`, except to undo its own `perturb`.
        """

    def after(self, q: Gaussian) -> None:
        """Called after the update."""

    def buffers(self) -> list[Tensor]:
        return []

    def result(self) -> Tensor | None:
        """[R, P] over the fit's weights; `Fitted.tracked` holds it over all weights."""
        return None


class Taught(NamedTuple):
    """A distillation loss: sum_k w_k T^2 mean_b KL(q_k(x_b) || softmax(z_k(x_b) / T)), for the logits z_k of head k.

    Attributes:
        heads: the heads k
        said: log q_k, the teacher's log-probabilities for each of the fit's examples, [R, N, classes] per head
        strength: w_k, one per head
        temperature: T
    """

    heads: Sequence[int]
    said: Sequence[Tensor]
    strength: Sequence[Tensor | float]
    temperature: Tensor | float


class Loss:
    """A loss that uses the network. It is added to the mean NLL at each step and differentiated by autograd.

    `heads` are the heads that it uses in addition to those of the data: their weights are trained too.
    """

    heads: Sequence[int] = ()

    def prepare(self, network: BayesianNetwork, batch: Minibatch) -> None:
        """Called at each step, before the network's forward pass."""

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        """[R]: the loss on the examples of a step.

        `batch.logits(network, heads)` returns the network's logits for these examples and reuses the step's forward
        pass through the trunk if possible; `network.logits(x, heads)` makes a separate forward pass, for other
        examples.
        """
        raise NotImplementedError

    def renew(self, x: Tensor) -> None:
        """The fit's first examples are now x [U, n, ...]: compute again what the loss stores for each row. It is called
        only if examples are read anew in each epoch.
        """
        raise EvclError(f"a {type(self).__name__} loss has values for each row: leave out reread")

    def taught(self) -> Taught | None:
        """If it is a distillation loss, its parts: an MLP then computes it in its compiled pass."""
        return None


@dataclass(frozen=True)
class Fit:
    """One optimisation: minimise mean NLL of the data + terms + losses.

    Attributes:
        data: the examples, of one task or of several jointly, each through its own head
        terms: penalties on the weights
        losses: functions of the network
        sampler: chooses the order of the examples
        trackers: objects that are called at every step
        start: the initial weights, over all weights; None: the current posterior, or that of `model`
        moves: [R, P] or [P], True for the weights to train; None: all weights that the fit uses
        model: a second network from the memory, to be trained in place of the learner's own
        likelihood: how the outputs are interpreted; None: the learner's likelihood
        rule: makes the update rule; None: the one named by `optimizer`, and for sigma the rule named by `std_update`
        rates: settings with another value in this fit, such as rates that are auto if the method has a rule for them
        capture: False if a term, loss, tracker or rule reads a value on the host: then no CUDA graph is captured
        film: False if the FiLM rows of the round's tasks stay as they are
        fresh: True if its weights are random and have learned nothing, as those of a first task: lr=auto may be larger
        stage: the name under which its epochs are reported
        number: index of the generators of its example order and noise; None: derived from round and stage
        batch: number of rows per step; None: `batch_size`
        project: True for A-GEM: with the sampler `Interleaved`, the gradient of the new rows is computed apart from
            that of the kept rows, and is projected so that it does not point against it
    """

    data: Sequence[TaskData]
    terms: Sequence[Term] = ()
    losses: Sequence[Loss] = ()
    sampler: Sampler = shuffled
    trackers: Sequence[Tracker] = ()
    start: Gaussian | None = None
    moves: Tensor | None = None
    model: Model | None = None
    likelihood: Objective | None = None
    rule: Callable[..., Any] | None = None
    rates: Mapping[str, object] = field(default_factory=dict)
    capture: bool = True
    film: bool = True
    fresh: bool = False
    stage: str = "task"
    number: int | None = None
    batch: int | None = None
    project: bool = False


@dataclass(frozen=True)
class Fitted:
    """The result of one fit.

    Attributes:
        network: how the network that was trained computes
        q: over all weights: those of the fit are trained, the others unchanged
        own: the weights of the fit alone
        layout: their layout
        used: [P], 1 for the weights of the fit
        tracked: the trackers' results, over all weights
        model: with `Fit.model`: that network after the fit; `q` and the other fields then refer to it
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
    """The result of a round: the posterior over all weights, and the memory."""

    posterior: Gaussian
    memory: Any


@dataclass(frozen=True)
class Round:
    """The input of a round: what there is to learn, and the state it starts from.

    Attributes:
        number: number of rounds learned before
        tasks: one task, or several to learn jointly
        network: the learner's network, without weights; they are in `posterior`
        posterior: the weights at the start of the round
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

    def last_task(self, head: int) -> int | None:
        """The number of the last task of an earlier round that used this head; None: there is none."""
        return max((i for i, k in enumerate(self.seen) if k == head), default=None)

    @property
    def n(self) -> int:
        """Number of examples in the round."""
        return sum(task.n for task in self.tasks)

    def of(self, tasks: Sequence[TaskData], posterior: Gaussian | None = None) -> Round:
        """The same round with other examples and, if given, another starting point."""
        return replace(self, tasks=tasks, posterior=posterior or self.posterior)

    def generators(self, purpose: str, *indices: int) -> list[torch.Generator]:
        """One generator per replica: a function of its seed, the purpose, this round and the indices."""
        return [generator(seed, purpose, self.number, *indices) for seed in self.seeds]

    def same(self, tensor: Tensor) -> Tensor:
        """Make all processes of a run use process 0's tensor."""
        return tensor if self.ranks is None else self.ranks.broadcast_(tensor)


class Past(NamedTuple):
    """How a round protects what was learned before, where more than the method's own penalties do."""

    losses: Sequence[Loss] = ()  # distillation losses
    prior: Number = 1.0  # fraction of the last posterior's precision that is kept: one number, or [R, 1]
    elastic: Number = 1.0  # factor on the elastic term: one number, or [R, 1]


ALONE = Past()


def more_rows(rows: Mapping[int, Tensor], round_: Round) -> dict[int, Tensor]:
    """`rows`, the number of rows per head, after this round."""
    totals, like = dict(rows), round_.posterior.mean
    for task in round_.tasks:
        totals[task.head] = totals.get(task.head, 0) + like.new_full((len(like), 1), task.n)
    return totals


Learning = Generator[Fit, Fitted, Learned]
"""What `Method.learn` returns: a generator that yields fits, is sent their ends, and returns what was learned."""


def plain(memory: Any, round_: Round, s: Settings) -> Learning:
    """Minimise the mean NLL alone."""
    fitted = yield Fit(round_.tasks)
    return Learned(fitted.q, memory)


class Asked(NamedTuple):
    """What to predict: x [U, N, ...] (see TaskData), through these heads of a network, for replicas with the seeds."""

    network: BayesianNetwork
    x: Tensor
    heads: Sequence[int]
    seeds: Sequence[int]
    settings: Mapping[str, Any] = {}


class Newcomer(NamedTuple):
    """A task of known classes, whose domain is asked for. Its inputs, and the heads of its classes, are `Asked`."""

    y: Tensor  # [U, N]: classes, numbered in any way; -1 for rows of new classes, which say nothing about domains
    classes: Sequence[Sequence[int]]  # for each of the heads, the number of the class of each of its outputs
    domains: Sequence[int]  # for each of the heads, its domain, from 0


@dataclass(frozen=True)
class Method:
    """A continual learning method.

    Attributes:
        name: its name
        summary: a one-line description; empty: that of the built-in method of this name
        bayesian: True: a Gaussian over each weight; False: point weights
        learn: (memory, round, settings) -> a generator of fits: see `Learning`. One that distillation is added to
            takes a `Past` too
        memory: what it remembers: a frozen dataclass, whose fields `per_weight`, `per_layer`, `per_task`, `examples`
            and `model` declare
        settings: its own settings, in addition to those of training and, if it is Bayesian, of every Bayesian method;
            an entry may also override one of those with another default or other choices, or be None to remove it
        adapt: (a copy of the user's network, the settings of each replica) -> the network to train in its place
        predictor: (memory, posterior, task or None) -> the weights that predict a task; None: the posterior
        structure: (memory, network, settings) -> the posterior from which predictions draw, if it is not diagonal, such
            as a `KroneckerGaussian`
        settled: (settings, network, likelihood) -> the settings, with those chosen that depend on the network
        trunk: (the user's network, number of rounds) -> the trunk to train in the last of these rounds, for a method
            whose network grows. Weights keep their values under their names; None: the user's network
        log_joint: (memory, posterior, asked) -> [R, N, C] for each of the heads asked for: log p(x, class) up to a
            constant; None if it is unknown. A method with such a likelihood per class can tell apart classes that were
            never learned together. So the new classes of a task that lacks half of its head's old classes, or more, get
            a softmax of their own there
        domains: (memory, posterior, asked, newcomer) -> whether a task whose classes are known is a new domain [R], and
            how many of its rows belong to each known domain [R, domains]; None if it is unknown. A task that is a new
            domain of its head gets a softmax of its own there, and `log_joint` tells which softmax predicts an input
        generative: True if `log_joint` alone predicts, without the network
        replays: True if earlier classes take part in every round in some form, as generated rows or as outputs of their
            own, so that a task which lacks them does no harm
        needs_task: True if the weights that predict differ from task to task, also for tasks that share a head
        no_memory: why it cannot be given a memory of examples (the setting `memory`); empty if it can
        only_classes: why it learns only classes, and no other targets; empty if it learns any
        kept_as: how examples that it is given a memory of are used. "rows": they join the data of its fits; "evidence":
            as in evcl-er, whose `learn` takes the place of EVCL's. A method made from EVCL with a `learn` of its own
            sets "rows"
        stages: number of fits per round, for progress reports
        apart: True if examples of a batch must not affect each other in the network. The Fisher needs this, and so do
            replicas, for any method
        jointly: True if it learns all tasks in one round: an upper bound, not a continual learner
        parts: what it was composed of: see `evcl.methods.compose`
        shares: has no effect, and is deprecated: the seeds and real-valued settings of one method share a program
    """

    name: str
    summary: str = ""
    bayesian: bool = False
    learn: Callable[..., Learning] = plain
    memory: type = Nothing
    settings: Mapping[str, Setting | None] = field(default_factory=dict)
    adapt: Callable[[nn.Module, Sequence[Settings]], nn.Module] | None = None
    predictor: Callable[[Any, Gaussian, int | None], Gaussian] | None = None
    structure: Callable[[Any, BayesianNetwork, Settings], Any] | None = None
    settled: Callable[[Settings, BayesianNetwork, Likelihood], Settings] | None = None
    trunk: Callable[[nn.Module, int], nn.Module] | None = None
    log_joint: Callable[[Any, Gaussian, Asked], list[Tensor] | None] | None = None
    domains: Callable[[Any, Gaussian, Asked, Newcomer], tuple[Tensor, Tensor] | None] | None = None
    generative: bool = False
    replays: bool = False
    needs_task: bool = False
    no_memory: str = ""
    only_classes: str = ""
    kept_as: Literal["rows", "evidence"] = "rows"
    stages: int = 1
    apart: bool = False
    jointly: bool = False
    parts: Sequence[MethodPart] = ()
    shares: str = ""

    def __post_init__(self) -> None:
        if self.shares:
            object.__setattr__(self, "shares", "")
            retired("Method(shares=...)", "it has no effect")
        object.__setattr__(self, "summary", self.summary or METHOD_SUMMARIES.get(self.name, ""))

    def changed(self, network: nn.Module, settings: Sequence[Settings]) -> nn.Module:
        """A copy of the user's network as this method trains it, for replicas with these settings."""
        network = copied(network) if isinstance(network, nn.Module) else network
        return network if self.adapt is None else self.adapt(network, settings)

    @property
    def known_settings(self) -> dict[str, Setting]:
        """All settings that it takes, by name."""
        known = {**TRAINING, **({**BAYESIAN, **CORESET} if self.bayesian else {}), **self.settings}
        return {name: setting for name, setting in known.items() if setting is not None}
