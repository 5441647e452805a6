"""The contract of a likelihood p(y | outputs), the object that all code asks for what depends on the kind of target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl._core.inputs import Label
from evcl.nn import BayesianNetwork
from evcl.targets.answers import Outcome
from evcl.targets.scale import Scale

NO_DENSITY = (
    "this learner predicts labels: a generative model needs an evcl.nn.VAE and likelihood='bound', and log_likelihood "
    "any energy"
)
OF_NUMBERS = 0.3  # beta for targets that are numbers


class Estimate(NamedTuple):
    """How a Fisher is estimated: `kind` exact, over all targets; sampled, with drawn ones; or empirical, with the true
    ones. `temperature`, a number, or [R, 1] for R replicas, is the T of classes; other targets have none.

    With T, a Fisher is T^2 times that of softmax(z / T): the mean of J^T (diag(p) - p p^T) J, where p = softmax(z / T)
    and J = dz/dtheta is of the logits themselves. So its unit is that of the NLL's curvature, whatever T is.
    """

    kind: str = "exact"
    generators: Sequence[torch.Generator] | None = None
    temperature: Tensor | float = 1.0

    def cooled(self, logits: Tensor) -> Tensor:
        """The logits [R, n, o] divided by the temperature."""
        by = self.temperature
        return logits / (by.unsqueeze(2) if isinstance(by, Tensor) else by)


class Objective(Protocol):
    """What a fit minimises: -log p(y | outputs), or a bound on it, for the concatenated outputs [M, o] of the heads.

    `columns` [M, 2] holds the first and end column of the outputs of each example's head; None: there is one head.
    """

    @property
    def compiled(self) -> bool:
        """Whether nn/chain.py, native.c and the GPU kernels compute this likelihood."""
        ...

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor:
        """[M]: -log p(y | outputs)."""
        ...


class Means(NamedTuple):
    """A network with the mean weights [R, P] that it predicts a task with."""

    network: BayesianNetwork
    weights: Tensor
    seeds: Sequence[int]
    task: int


class Likelihood:
    """p(y | outputs): one object for each kind of target, that all code asks for what depends on the kind. A copy is
    the object itself.

    Targets other than classes are y [..., D], and D outputs of a head explain them.

    Attributes:
        name: what `evcl.Learner` and files call it
        compiled: see `Objective`
        beside: whether further D columns follow those of a head: numbers that are measured instead of learned by
            gradients (see `nn/number_head.py`)
        draws: whether the network draws latent variables from the noise of a step
        heads: whether each task has a head. Otherwise the network's own outputs explain the targets
        softmax: whether a head's outputs are the logits of one softmax, and y is a class: what distillation, and a
            likelihood per class, need
        keeps_rows: whether a memory may keep rows of it
        constant_curvature: whether the curvature of the NLL does not depend on the outputs. Then sigma is moved to its
            optimum when a task ends. Otherwise sigma stays as narrow as the noise of the measured curvature makes it:
            where predictions are certain the curvature vanishes, and nothing else would hold the weights
        usual_tempering: the weight of the KL term if `tempering` is auto; None: it depends on the noise of the labels
    """

    name: str
    compiled: ClassVar[bool] = False
    beside: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    heads: ClassVar[bool] = True
    softmax: ClassVar[bool] = False
    keeps_rows: ClassVar[bool] = False
    constant_curvature: ClassVar[bool] = False
    usual_tempering: ClassVar[float | None] = None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor:
        """[M]: -log p(y | outputs): see `Objective`."""
        raise NotImplementedError

    def predict(self, outputs: Tensor) -> Tensor:
        """[M, ...]: the prediction from one draw of the weights; final predictions average this over draws."""
        raise NotImplementedError

    def outcome(self, averaged: Tensor, scale: Scale, draws: int) -> Outcome:
        """What is predicted [N, ...], averaged over this many draws, means. `scale` is the head's."""
        raise NotImplementedError

    def expected(self, predicted: Tensor, scale: Scale | None) -> Tensor:
        """[N, ...]: what one draw of the weights, which predicts this, expects in the units of the targets."""
        return predicted

    def spread(self, network: BayesianNetwork, k: int, scale: Scale) -> Tensor | None:
        """[D]: how much the targets of head k vary; None: predictions stay as sure beyond the training rows."""
        return None

    def doubt(self, averaged: Tensor, scale: Scale | None, draws: int) -> Tensor:
        """[N]: how unsure predictions [N, ...] are that were averaged over this many draws, from 0 to 1."""
        raise NotImplementedError

    def score(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """[R, N] each: the NLL and the correctness of averaged predictions [R, N, ...] for y [R, N, ...]."""
        raise NotImplementedError

    # --- a task's targets, and their head --------------------------------------------------------------------------

    def read(self, x: Tensor, y: object, verb: str) -> Tensor | list[Label]:
        """The targets of inputs x [N, ...], checked: labels, or a tensor [N, ...]. `verb`: what the user called."""
        raise NotImplementedError

    def given(self, y: Tensor, classes: Sequence[Label], scale: Scale | None) -> Tensor | list[Label]:
        """Targets [N, ...] of a head as the user gave them."""
        return y

    def place(self, network: BayesianNetwork, k: int, before: Scale, y: Tensor, w: Tensor) -> Scale:
        """Prepare head k for targets y [N, D] of these weights w [N, 1]; returns the scale on which it learns them, of
        which `before` is what is known of earlier targets.
        """
        return before

    def expect(self, network: BayesianNetwork, k: int, errors: Tensor, scale: Scale) -> None:
        """Prepare head k for rows that have these squared errors [n, D] before they are learned."""

    def rescale_head(self, head: nn.Linear, network: BayesianNetwork, k: int, scale: Scale) -> None:
        """Let a plain copy of head k predict in the units of the targets, or the log of counts."""

    def described(self, scales: Mapping[str, Scale]) -> dict[str, object]:
        """What a file says about the targets, beside the heads, which have these scales."""
        return {"likelihood": self.name, "scales": {name: scale.described() for name, scale in scales.items()}}

    def scales_in(self, saved: Mapping[str, Any], heads: Mapping[str, Sequence[object]]) -> dict[str, Scale]:
        """The scales of the heads' targets in a file. Raises if one cannot be right."""
        return {}

    # --- the Fisher ------------------------------------------------------------------------------------------------

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """Scalars whose per-example gradients, squared and summed, give the Fisher for outputs [R, n, o]."""
        raise NotImplementedError

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        """Advance the generators as `fisher_targets` of kind `sampled` would for outputs of this shape."""
        raise NotImplementedError

    # --- new examples ----------------------------------------------------------------------------------------------

    def check(self, network: BayesianNetwork, x: Tensor) -> None:
        """Raise unless the network, without heads, gives what is needed for inputs like x [1, ...]."""

    def log_likelihood(self, at: Means, x: Tensor, y: Tensor, samples: int | None = None) -> Tensor:
        """[R, N]: log p(x) of each example [U, N, ...], in nats; of targets y that are no inputs, log p(y | x).
        `samples`: the latent draws of an estimate.
        """
        raise EvclError(NO_DENSITY)

    def sample(self, at: Means, count: int) -> Tensor:
        """[R, count, D]: inputs that a task's model generates. They are a function of the seed."""
        raise EvclError(NO_DENSITY)

    # --- what methods ask ------------------------------------------------------------------------------------------

    def softmaxes(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """If -log p(y | outputs) is a sum of cross-entropies, their logits [M, parts, V] and classes [M, parts]: EVCL
        then also keeps what the network says (see `methods/distillation.py`). Otherwise None.
        """
        return None

    def surprise(self, outputs: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        """[R]: the squared errors of y [R, n, D], as a multiple of what these outputs expect; `weights` [R, n]."""
        raise NotImplementedError

    def known(self, predicted: Tensor, draws: int, weights: Tensor | None) -> Tensor:
        """[R]: how far the predictions [R, n, ...], averaged over this many draws, are known: see `known`."""
        raise NotImplementedError

    def squares(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor | None:
        """[M, D]: the squared errors, whose mean the measured noise follows; None if there is no noise."""
        return None


def own_columns(outputs: Tensor, columns: Tensor | None) -> Tensor:
    """[M, o of one head]: the outputs of each example's head, out of those of all heads; all have equally many."""
    if columns is None:
        return outputs
    width = int(columns[0, 1] - columns[0, 0])
    if bool((columns[:, 1] - columns[:, 0] != width).any()):
        raise ValueError("heads that are learned together must have equally many outputs")
    return outputs.gather(1, columns[:, :1] + torch.arange(width, device=outputs.device))


def weighted(each: Tensor, weights: Tensor | None) -> Tensor:
    """[R]: the mean of numbers [R, n, D] over examples of these weights [R, n], and over D."""
    each = each.mean(2)
    return each.mean(1) if weights is None else (weights * each).sum(1) / weights.sum(1).clamp_min(1e-12)


def known(noise: Tensor, epistemic: Tensor, weights: Tensor | None) -> Tensor:
    """[R], from 0 to 1: the mean of min(1, noise / epistemic) over examples, for variances [R, n, D]."""
    return weighted(
        noise / torch.maximum(noise, epistemic).clamp_min(1e-30), None if weights is None else weights.to(noise)
    )


def drawn(
    of: Callable[[Tensor, torch.Generator], Tensor], each: Tensor, generators: Sequence[torch.Generator] | None
) -> Tensor:
    """[R, ...]: `of` each row, with one generator per replica; computed on the CPU, whatever the device."""
    if generators is None:
        raise ValueError("a sampled Fisher needs generators")
    draws = [of(row.cpu(), source) for row, source in zip(each, generators, strict=True)]
    return torch.stack(draws).to(each.device)


def uniform(like: Tensor, source: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=source, dtype=like.dtype)


def normal(like: Tensor, source: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=source, dtype=like.dtype)
