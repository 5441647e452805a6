"""A network with Gaussian weights: a trunk made from the user's module, and heads on top of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evcl._core.errors import retired
from evcl.nn.initial import log_stds
from evcl.nn.inputs import Call
from evcl.nn.layer import BayesianLayer, Weights
from evcl.nn.layers import Dropout, Embedding, Linear
from evcl.nn.lora import BayesianUp
from evcl.nn.number_head import NumberHead
from evcl.nn.per_task import Sources, TaskWeights
from evcl.nn.sampled import DirectParameters, FreeParameter
from evcl.nn.slots import Slot, head_names
from evcl.nn.trunk import Trunk
from evcl.posterior import Gaussian, Layout

Owned = Sequence[tuple[nn.Module, str, FreeParameter]]
NOTHING = nn.Identity()  # the plain layer of a head: its weights are only in the layout


class BayesianNetwork(Trunk):
    """The result of `bayesianize`. Calling it runs the trunk: [R*B, ...] -> [R*B, features].

    `posterior` holds `mean` and `log_std`, both [R, P]. `layout` names its parts as the plain module names its
    parameters, followed by the heads: `head 0.weight`, `head 0.bias`, ... `centre` [R, P] is the mean of the first
    prior of the trunk's weights: 0, except for the scale of a norm and for values that never move, or, with
    prior="network", the first weights. `scales` holds, by name, the default standard deviation of that prior.

    `task_weights`: those that belong to a task, beside the posterior (see per_task.py); None: there are none.

    `call` says how the trunk is called: how its inputs are packed, and which of its outputs are the features.

    A trunk of columns (see columns.py) trains its last column only. A fit has no part of the others: their weights come
    from `beside`, all weights at the start of the fit.

    `direct`: the parameters that the trunk's own code uses, outside layers; None: it uses none. `frozen`: the weights
    without a Bayesian form that `unsupported="deterministic"` left fixed, each with its module's type.
    """

    def __init__(
        self,
        trunk: nn.Module,
        weights: Weights,
        layout: Layout,
        posterior: Gaussian,
        centre: Tensor,
        scales: dict[str, float],
        owned: Owned = (),
        call: Call | None = None,
        direct: DirectParameters | None = None,
        frozen: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.call = call or Call()
        self.trunk = trunk
        self.weights = weights
        self.layout = layout
        self.posterior = posterior
        self.trunk_names = tuple(layout.shapes)
        self.centre, self.scales = centre, dict(scales)
        self.task_weights: TaskWeights | None = None
        self.heads = nn.ModuleList()
        self.owned = nn.ModuleList(own for _, _, own in owned)
        self.direct, self.frozen = direct, dict(frozen or {})
        self._settled = False
        self.beside = posterior
        self.merges = False  # whether adapters are merged into the trunk after each round
        self.rounds = 1  # the number of rounds that the trunk is made for, if it grows
        self.width: Tensor | None = None  # [1, P] of the trunk: log sigma of its first prior, if that is the user's own
        self.beside_outputs = False  # whether new heads have a measured number beside each output: see number_head.py
        self.whole = 0  # if the trunk has its own classifier, the number of its outputs: the logits of head 0
        self._places = [(module, key) for module, key, _ in owned]
        self._sizes, self._fixed, self._below = {}, None, None
        self.bind(posterior.mean, posterior.variance(), layout)

    @property
    def replicas(self) -> int:
        return self.weights.replicas

    @property
    def takes_tokens(self) -> bool:
        """Whether it has an embedding: its inputs may be numbers that only name things. Not if it has adapters: what
        they are added to turns any inputs into features that never change.
        """
        return not self.base_features and any(
            isinstance(m, (Embedding, nn.Embedding, nn.EmbeddingBag)) for m in self.trunk.modules()
        )

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters' weights (see lora.py). If they are 0, the trunk is the base model."""
        return [name for la in self.trunk_layers() if isinstance(la, BayesianUp) for name in la.names.values()]

    @property
    def base_features(self) -> bool:
        """Whether the trunk without its adapters is a fixed network, whose features never change."""
        return bool(self.adapters) and not self.merges

    def without_adapters(self, weights: Tensor) -> Tensor:
        """[R, P]: these weights, with those of the adapters 0."""
        found = weights.clone()
        for name in self.adapters:
            self.layout.view(found, name).zero_()
        return found

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a forward pass: no layer reads values on the host."""
        return not any(getattr(m, "reads_host", False) for m in self.trunk.modules())

    def add_task_weights(self, tasks: int, sources: Callable[[int], Sources] | None = None) -> None:
        """If the network has weights that belong to a task, have them for at least this many tasks."""
        if self.task_weights is not None:
            self.task_weights = self.task_weights.extended(tasks, sources)

    def add_film(self, tasks: int, sources: Callable[[int], Sources] | None = None) -> None:
        retired("BayesianNetwork.add_film", "call add_task_weights")
        self.add_task_weights(tasks, sources)

    # --- heads -----------------------------------------------------------------------------------------------------

    def logits(self, x: Tensor, heads: Sequence[int], from_below: bool = False) -> Tensor:
        """[R*B, classes]: the outputs of these heads, concatenated. `from_below`: see `forward`."""
        return self.apply_heads(self(x, from_below=True) if from_below else self(x), heads)

    def apply_heads(self, features: Tensor, heads: Sequence[int]) -> Tensor:
        """[R*B, classes]: the outputs of these heads for these features; without heads, the features themselves."""
        if self.whole or not heads:
            return features
        outputs: list[Tensor] = [self.heads[k](features) for k in heads]
        if self.beside_outputs:
            outputs = [self.number_head(k).with_beside(one) for k, one in zip(heads, outputs, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def names_of(self, heads: Sequence[int]) -> list[str]:
        """The names of the trunk's weights that are trained, then of these heads' weights, then of their biases."""
        still = self.at_rest
        trunk = [name for name in self.trunk_names if name not in still]
        own = [] if self.whole else heads
        return [*trunk, *(head_names(k)[key] for key in ("weight", "bias") for k in own)]

    def take_trunk(self, other: BayesianNetwork, rounds: int) -> None:
        """Replace the trunk by another network's, made for this many rounds; the heads stay. The caller lays out the
        weights.
        """
        for layer in other.bayesian_layers():
            layer.weights = self.weights
        heads = {name: scale for name, scale in self.scales.items() if name not in self.trunk_names}
        self.set_form({**other.form(), "scales": {**other.scales, **heads}, "rounds": rounds})

    @property
    def dense(self) -> bool:
        """Whether it has nothing but linear layers: its activations are about as large as its inputs and weights."""
        layers = all(isinstance(layer, (Linear, Dropout)) for layer in self.trunk_layers())
        return layers and self.call.form is None and not any(True for _ in self.trunk.parameters())

    def number_head(self, k: int) -> NumberHead:
        """Head k, whose outputs have measured numbers beside them."""
        found = self.heads[k]
        assert isinstance(found, NumberHead)
        return found

    def add_head(self, outputs: int = 0) -> int:
        """Add the layer of a new head and return its number; `with_slots` makes a layout that includes its weights."""
        k = len(self.heads)
        head = NumberHead(k, outputs, self.posterior.mean) if self.beside_outputs else Linear(NOTHING)
        head.names, head.weights = head_names(k), self.weights
        self.heads.append(head)
        return k

    def with_slots(self, slots: Sequence[Slot]) -> Layout:
        """The layout extended by these slots."""
        added = {name: shape for slot in slots for name, shape in slot.named.items()}
        return self.layout.with_shapes(added)

    def classes(self, k: int) -> int:
        """The number of classes of head k."""
        return self.whole or self.layout.shapes[head_names(k)["bias"]][0]

    def first_log_std(self, std: float | Tensor | str, like: Tensor) -> Tensor:
        """Log sigma of the weights' first prior, [1, P] or [R, 1]. `std` is the setting `prior_std`."""
        found = log_stds(std, self.scales, self.layout, like)
        if self.width is not None:
            found = found.expand(len(found), self.layout.size).clone()
            found[:, : self.width.shape[1]] = self.width.to(found)
        return found

    def first_prior(self, std: float | Tensor | str, like: Tensor) -> Gaussian:
        """The first prior of all weights, over [R, P]; the means of heads are 0."""
        mean = torch.zeros_like(like)
        if not self.centre.is_meta:
            mean[:, : self.centre.shape[1]] = self.centre
        return Gaussian(mean, self.first_log_std(std, like).expand_as(like), self.layout)

    def redrawn(self, mean: Tensor, sources: Sequence[torch.Generator]) -> Tensor:
        """[R, P]: `mean` with new initial values for the weights that are initialised at random, one source per
        replica.
        """
        found = mean.clone()
        layers = {name: layer for layer in self.bayesian_layers() for name in layer.names.values()}
        for name, view in self.layout.views(found).items():
            for row, source in zip(view, sources, strict=True):
                row.copy_(layers[name].redrawn(row, self.scales[name], source))
        return found

    def begin(self) -> None:
        """Called when a task begins."""
        for layer in self._with_state():
            layer.begin()

    def statistics(self) -> dict[str, Tensor]:
        """The layers' state beside the weights (such as running statistics), by name in the plain module: [R, ...]."""
        return {
            f"{layer.path}.{key}" if layer.path else key: buffer
            for layer in self._with_state()
            for key, buffer in layer._buffers.items()
            if buffer is not None and key in layer._non_persistent_buffers_set
        }

    def set_statistics(self, values: Mapping[str, Tensor]) -> None:
        for layer in self._with_state():
            for key in layer._non_persistent_buffers_set:
                setattr(layer, key, values[f"{layer.path}.{key}" if layer.path else key])

    def trunk_layers(self) -> list[BayesianLayer]:
        """The Bayesian layers without the heads, of which there may be thousands."""
        parts = [self.trunk, self.owned, *([] if self.direct is None else [self.direct])]
        return [m for m in dict.fromkeys(m for part in parts for m in part.modules()) if isinstance(m, BayesianLayer)]

    def bayesian_layers(self) -> list[BayesianLayer]:
        return self.layers_of(range(len(self.heads)))

    def layers_of(self, heads: Sequence[int]) -> list[BayesianLayer]:
        """The Bayesian layers of the trunk and of these heads."""
        own: list[Any] = [] if self.whole else [self.heads[k] for k in heads]
        return [*self.trunk_layers(), *own]

    def _with_state(self) -> list[BayesianLayer]:
        """The layers that may have state beside their weights: heads have some only for numbers."""
        return self.bayesian_layers() if self.beside_outputs else self.trunk_layers()
