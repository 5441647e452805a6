"""A network with Gaussian weights: a trunk made from the user's module, and heads on top of it.

Its layers compute with flat buffers, which `bind` puts in front of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from typing import cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from evcl._core.devices import limited
from evcl._core.errors import EvclError, NoWeight, retired
from evcl.nn.columns import Columns
from evcl.nn.initial import log_stds
from evcl.nn.inputs import Call, described
from evcl.nn.layer import BayesianLayer, Grads, Named, Weights, state_of
from evcl.nn.layers import Dropout, Embedding, Linear
from evcl.nn.lora import BayesianUp
from evcl.nn.number_head import NumberHead
from evcl.nn.per_task import Mixture, Sources, TaskRows, TaskWeights
from evcl.nn.sampled import DirectParameters, FreeParameter, SecondAxis
from evcl.nn.sizes import MOST_ROWS, Size, measured
from evcl.nn.slots import Slot, head_names
from evcl.posterior import Gaussian, Layout

Owned = Sequence[tuple[nn.Module, str, FreeParameter]]
NO_LAYER = nn.Identity()  # the plain layer of a head: its weights are only in the layout
KEPT_NUMBERS = 2**26  # that may always be kept, 256 MB in float32; more only if the inputs are half as large
ALL_LAYERS = -1  # instead of a number of layers
FORM_ATTRIBUTES = ("trunk", "trunk_names", "owned", "_places", "direct", "_settled", "centre", "scales", "rounds")


class BayesianNetwork(nn.Module):
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
        self.call, self.trunk, self.weights = call or Call(), trunk, weights
        self.layout, self.trunk_names = layout, tuple(layout.shapes)
        self.posterior, self.centre, self.scales = posterior, centre, dict(scales)
        self.task_weights: TaskWeights | None = None
        self.heads = Heads(weights)
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
        self._sizes: dict[tuple[str, torch.Size], Size | None] = {}
        self._fixed: int | None = None
        self._below: MutableMapping[Tensor, tuple[int, Tensor | None]] | None = None  # inputs, inside `keeping`
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
        base = weights.clone()
        for name in self.adapters:
            self.layout.view(base, name).zero_()
        return base

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

    # --- the weights that its layers compute with ---------------------------------------------------------------------

    def bind(
        self,
        mean: Tensor,
        variance: Tensor | None,
        layout: Layout,
        grads: tuple[Tensor, Tensor | None] | None = None,
        task_rows: TaskRows | None = None,
    ) -> None:
        """Compute with these flat buffers from now on.

        The leaf tensors to differentiate, `weights.mean` and `weights.variance`, are made when a layer asks for them:
        there may be thousands of heads. They share memory with the buffers, so the next forward pass uses values
        updated in place. With `grads`, also flat buffers, a backward pass followed by `collect_gradients` adds the
        gradients to them. `task_rows`: rows to use instead of the network's own.
        """
        self.weights.replicas = len(mean)
        if task_rows is None and self.task_weights is not None:
            task_rows = TaskRows(self.task_weights.table)
            task_rows = task_rows if self.weights.rows is None else task_rows.of(self.weights.rows)
        self.weights.task_rows = task_rows
        self.weights.mean = _leaves(layout, mean)
        self.weights.variance = None if variance is None else _leaves(layout, variance)
        if others := self.at_rest - layout.shapes.keys():
            rest = self.beside.mean if self.weights.rows is None else self.beside.mean[self.weights.rows]
            self.weights.mean |= {name: self.layout.view(rest, name) for name in others}
        self.weights.grads = None
        if grads is not None:
            self.weights.grads = Grads(layout.views(grads[0]), None if grads[1] is None else layout.views(grads[1]))

    def leaves(self, layout: Layout) -> list[Tensor]:
        """The leaf tensors to differentiate: the parts of the means, in the layout's order, then of the variances."""
        bound = [self.weights.mean, *([] if self.weights.variance is None else [self.weights.variance])]
        return [named[name] for named in bound for name in layout.shapes]

    def collect_gradients(self) -> None:
        """Add gradients in `.grad` to the flat buffers, for layers that do not write there directly."""
        weights = self.weights
        assert weights.grads is not None
        both = ((weights.mean, weights.grads.mean, 1), (weights.variance, weights.grads.variance, 2))
        for leaves, views, scale in both:
            for name, leaf in (leaves or {}).items():
                if leaf.grad is not None and views is not None:
                    views[name].add_(leaf.grad, alpha=scale)
                    leaf.grad = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside this context, compute with replica 0 alone, at the posterior's mean."""
        with self.weights.restored():
            self.weights.rows, self.weights.noise = [0], None
            self.bind(self.posterior.mean[:1], None, self.layout)
            yield

    @contextmanager
    def only(self, rows: Sequence[int]) -> Iterator[None]:
        """Inside this context, the bound weights belong to these replicas."""
        retired("BayesianNetwork.only")
        with self.weights.restored():
            self.weights.rows = rows
            yield

    @contextmanager
    def narrowed(self, rows: Tensor) -> Iterator[None]:
        """Inside this context, compute with these replicas alone, out of those bound; autograd takes the gradients."""
        retired("BayesianNetwork.narrowed")
        weights = self.weights
        with weights.restored():
            weights.replicas, weights.rows, weights.grads = len(rows), rows, None
            weights.narrow(rows, rows)
            yield

    @contextmanager
    def lent(self, weights: Tensor, layout: Layout) -> Iterator[None]:
        """Inside this context, a training step computes with these weights [R, P] instead of its own, without noise."""
        with self.weights.restored():
            self.bind(weights, None, layout)
            self.weights.noise = None
            yield

    @contextmanager
    def using(self, task: int | Mixture | None) -> Iterator[None]:
        """Inside this context, compute with the weights of this task; None: as before."""
        before = self.weights.task
        self.weights.task = before if task is None else task
        try:
            yield
        finally:
            self.weights.task = before

    @property
    def at_rest(self) -> set[str]:
        """The names of the trunk's weights that are no longer trained: those of all columns but the last."""
        return self.trunk.at_rest(self.trunk_names) if isinstance(self.trunk, Columns) else set()

    # --- running the trunk -----------------------------------------------------------------------------------------

    def forward(self, x: Tensor, from_below: bool = False) -> Tensor:
        """`from_below`: x is what `below` has made of the inputs, and only the rest of the trunk runs."""
        self.weights.batch = x.shape[0]
        self.weights.passes += 1
        if self.owned and not self._settled:
            self._settle(x)
        while True:
            try:
                return self._output(x, self._rest if from_below else self._run)
            except NoWeight as error:  # `F.linear(h, self.words.weight)`: from now on, this weight is used directly
                if not self.use_directly(error.layer):
                    raise

    def _output(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        y: Tensor = run(x) if self.direct is None else self.direct(x, run)
        return y

    def _run(self, x: Tensor) -> Tensor:
        """Run the trunk on the replicas that are bound: all of them, or one if it uses parameters directly."""
        for (module, key), parameter in zip(self._places, self.owned, strict=True):
            setattr(module, key, parameter(x))
        if isinstance(self.trunk, Columns):
            self.trunk.task = self.weights.task if isinstance(self.weights.task, int) else None
        try:
            with self._lower(x):
                return self._checked(self.call(self.trunk, x), x)
        finally:
            for module, key in self._places:
                module.__dict__.pop(key, None)

    def _lower(self, x: Tensor) -> AbstractContextManager[object]:
        """The precision of a trunk's own matrix products, outside Bayesian layers."""
        if limited(x.device):
            return nullcontext()
        dtype = self.weights.dtype_of(x)
        return torch.autocast(x.device.type, dtype, dtype != x.dtype, cache_enabled=False)

    def _checked(self, features: object, x: Tensor) -> Tensor:
        """The trunk's output for x, if it is one vector per example."""
        if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[0] != x.shape[0]:
            came = tuple(features.shape) if isinstance(features, Tensor) else described(features)
            advice = "" if isinstance(features, Tensor) else ": choose one of its outputs, output=NAME or output=0"
            n = x.shape[0]
            raise EvclError(f"the network must turn {n} inputs into [{n}, features], not {came}{advice}")
        return features.to(self.posterior.mean.dtype)

    # --- the part that never changes ---------------------------------------------------------------------------------
    # What it makes of an example is the same in every epoch, for every draw of the weights and for all replicas, so it
    # is computed once, and the rest of the trunk goes on from there.

    @property
    def fixed(self) -> int:
        """The number of the trunk's first layers that never change, or ALL_LAYERS if all of it never changes."""
        if self._fixed is None:
            simple = self.task_weights is None and not self.owned and self.direct is None
            self._fixed = _fixed_layers(self.trunk) if simple else 0
        return self._fixed if self._fixed == ALL_LAYERS or self.call.form is None else 0

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside this context, what `below` has found is kept as long as the inputs exist."""
        before = self._below
        self._below = WeakTensorKeyDictionary() if before is None else before
        try:
            yield
        finally:
            self._below = before

    @torch.no_grad()
    def below(self, x: Tensor) -> Tensor | None:
        """[U, N, ...]: what the part of the trunk that never changes makes of x [U, N, ...]. None if there is no such
        part, if its output is too large to be kept, or if examples affect each other there.
        """
        if not self.fixed or x.numel() == 0:
            return None
        cached = None if self._below is None else self._below.get(x)
        if cached is not None and cached[0] == x._version:
            return cached[1]
        features, one = None, self._first_layers(x[0, :1])
        if _can_be_kept(one, self._first_layers(x[0, :2]), x):
            size = self.size(x, self._first_layers, "below")
            rows = MOST_ROWS if size is None else size.forward_rows(x.is_cuda)
            features = one.new_empty(*x.shape[:2], *one.shape[1:])
            for into, xs in zip(features, x, strict=True):
                for a, b in zip(into.split(rows), xs.split(rows), strict=True):
                    a.copy_(self._first_layers(b))
        if self._below is not None:
            self._below[x] = x._version, features
        return features

    def _first_layers(self, x: Tensor) -> Tensor:
        """In full precision, even if training has a lower one: this is done once."""
        x = x.clone()  # a forward pass may write to it
        if self.fixed == ALL_LAYERS:
            return self._checked(self.call(self.trunk, x), x)
        return cast(Tensor, cast(nn.Sequential, self.trunk)[: self.fixed](x))

    def _rest(self, h: Tensor) -> Tensor:
        """The trunk's output from what `below` has made of the inputs."""
        if self.fixed == ALL_LAYERS:
            return h
        with self._lower(h):
            return self._checked(self.call.chosen(cast(nn.Sequential, self.trunk)[self.fixed :](h), None), h)

    # --- parameters that the trunk's own code uses -------------------------------------------------------------------

    @torch.no_grad()
    def _settle(self, x: Tensor) -> None:
        """Before the first batch, find out how the trunk uses its parameters [1, ...]. If it does not add or expand
        them, one copy per example gives another output, or an error; they are then used directly.
        """
        examples = x[: x.shape[0] // self.weights.replicas][:3]
        if len(examples) < 2:  # one example cannot tell
            return
        before = self.form()
        folded = self._tried(examples)
        direct = self._with_direct()
        for (module, key), parameter in zip(self._places, self.owned, strict=True):
            direct.add(module, key, next(iter(parameter.names.values())))  # type: ignore[operator]
        self.direct, self.owned, self._places = direct, nn.ModuleList(), []
        wanted = self._tried(examples)
        same = folded is not None and wanted is not None and torch.allclose(folded, wanted, rtol=1e-3, atol=1e-4)
        if wanted is None or same:
            self.set_form(before)
        self._settled = True

    def _tried(self, x: Tensor) -> Tensor | None:
        x = x.clone()  # a forward pass may write to it
        with self.alone():
            self.weights.batch = len(x)
            try:
                return self._output(x, self._run)
            except (EvclError, RuntimeError):
                return None

    def _with_direct(self) -> DirectParameters:
        """A copy of `direct` that more parameters can be added to."""
        direct = DirectParameters()
        direct.weights = self.weights
        if self.direct is not None:
            direct.names, direct.places = dict(self.direct.names), list(self.direct.places)
        return direct

    def use_directly(self, layer: object) -> bool:
        """Put the plain layer in the place of a Bayesian one, and use its parameters directly. False if it cannot."""
        plain = getattr(layer, "__dict__", {}).get("plain")
        if plain is None:
            return False
        self.direct, self._fixed = self._with_direct(), None
        for place in plain.places:
            self.direct.add(*place)
        for module in list(self.trunk.modules()):
            for key, child in module._modules.items():
                if child is layer or (isinstance(child, SecondAxis) and child.layer is layer):
                    module._modules[key] = plain.layer
        return True

    # --- its form and size -------------------------------------------------------------------------------------------

    def form(self) -> dict[str, object]:
        """The trunk, and what describes its weights. `set_form` restores it."""
        return {name: getattr(self, name) for name in FORM_ATTRIBUTES}

    def set_form(self, form: Mapping[str, object]) -> None:
        self._sizes, self._fixed = {}, None
        for name, value in form.items():
            setattr(self, name, value)

    def size(self, x: Tensor, run: Callable[[Tensor], object], name: str) -> Size | None:
        """The size of a pass of examples like x [U, N, ...] through one replica by `run`, which is known by this name.
        None if the network cannot take so few examples.
        """
        key = name, x.shape[2:]
        if key not in self._sizes:
            settled, self._settled = self._settled, True  # a few examples, perhaps equal ones, must not settle it
            try:
                with self.alone():
                    self._sizes[key] = measured(run, x[0, :2])
            except (EvclError, RuntimeError):
                self._sizes[key] = None
            finally:
                self._settled = settled
        return self._sizes[key]

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
        head = self.heads[k]
        assert isinstance(head, NumberHead)
        return head

    def add_head(self, outputs: int = 0) -> int:
        """Add the layer of a new head and return its number; `with_slots` makes a layout that includes its weights."""
        return self.heads.add(
            NumberHead(len(self.heads), outputs, self.posterior.mean) if self.beside_outputs else None
        )

    def with_slots(self, slots: Sequence[Slot]) -> Layout:
        """The layout extended by these slots."""
        added = {name: shape for slot in slots for name, shape in slot.named.items()}
        return self.layout.with_shapes(added)

    def classes(self, k: int) -> int:
        """The number of classes of head k."""
        return self.whole or self.layout.shapes[head_names(k)["bias"]][0]

    def first_log_std(self, std: float | Tensor | str, like: Tensor) -> Tensor:
        """Log sigma of the weights' first prior, [1, P] or [R, 1]. `std` is the setting `prior_std`."""
        log_std = log_stds(std, self.scales, self.layout, like)
        if self.width is not None:
            log_std = log_std.expand(len(log_std), self.layout.size).clone()
            log_std[:, : self.width.shape[1]] = self.width.to(log_std)
        return log_std

    def first_prior(self, std: float | Tensor | str, like: Tensor) -> Gaussian:
        """The first prior of all weights, over [R, P]; the means of heads are 0."""
        mean = torch.zeros_like(like)
        if not self.centre.is_meta:
            mean[:, : self.centre.shape[1]] = self.centre
        return Gaussian(mean, self.first_log_std(std, like).expand_as(like), self.layout)

    def redrawn(self, mean: Tensor, sources: Sequence[torch.Generator]) -> Tensor:
        """[R, P]: `mean` with new initial values for the weights that are random at first, one source per replica."""
        weights = mean.clone()
        layers = {name: layer for layer in self.bayesian_layers() for name in layer.names.values()}
        for name, view in self.layout.views(weights).items():
            for row, source in zip(view, sources, strict=True):
                row.copy_(layers[name].redrawn(row, self.scales[name], source))
        return weights

    def begin(self) -> None:
        """Called when a task begins."""
        for layer in self._with_state():
            layer.begin()

    def statistics(self) -> dict[str, Tensor]:
        """The layers' state beside the weights (such as running statistics), by name in the plain module: [R, ...]."""
        each = [(layer.path, *item) for layer in self._with_state() for item in state_of(layer).items()]
        return {f"{path}.{key}".removeprefix("."): state for path, key, state in each}

    def set_statistics(self, values: Mapping[str, Tensor]) -> None:
        for layer in self._with_state():
            for key in state_of(layer):
                setattr(layer, key, values[f"{layer.path}.{key}".removeprefix(".")])

    def trunk_layers(self) -> list[BayesianLayer]:
        """The Bayesian layers without the heads, of which there may be thousands."""
        parts = [self.trunk, self.owned, *([] if self.direct is None else [self.direct])]
        return [m for m in dict.fromkeys(m for part in parts for m in part.modules()) if isinstance(m, BayesianLayer)]

    def bayesian_layers(self) -> list[BayesianLayer]:
        return self.layers_of(range(len(self.heads)))

    def layers_of(self, heads: Sequence[int]) -> list[BayesianLayer]:
        """The Bayesian layers of the trunk and of these heads."""
        return [*self.trunk_layers(), *([] if self.whole else [self.heads[k] for k in heads])]

    def _with_state(self) -> list[BayesianLayer]:
        """The layers that may have state beside their weights: heads have some only for numbers."""
        return self.bayesian_layers() if self.beside_outputs else self.trunk_layers()


class Heads:
    """The layers of the heads. Those without state are made when they are first used: there may be thousands."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.count = weights, 0
        self.made: dict[int, Linear] = {}
        self.measuring: dict[int, NumberHead] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Linear:
        head = self.measuring.get(k) or self.made.get(k)
        if head is None:
            if not 0 <= k < self.count:
                raise IndexError(k)
            self.made[k] = head = Linear(NO_LAYER)
            head.names, head.weights = head_names(k), self.weights
        return head

    def add(self, head: NumberHead | None) -> int:
        """Add a head, and return its number."""
        if head is not None:
            self.measuring[self.count] = head
            head.names, head.weights = head_names(self.count), self.weights
        self.count += 1
        return self.count - 1

    def __deepcopy__(self, memo: dict[int, object]) -> Heads:
        heads = Heads(copy.deepcopy(self.weights, memo))
        heads.count, heads.measuring = self.count, copy.deepcopy(self.measuring, memo)
        return heads


def forked(network: BayesianNetwork, call: Call) -> BayesianNetwork:
    """A network with modules of its own, called by `call`, and the same tensors: they are replaced, and not changed in
    place.
    """
    values = network.posterior, network.beside, network.layout, network.task_weights
    memo: dict[int, object] = {**sharing(network), **{id(one): one for one in values}}
    memo |= {id(network.weights): copy.copy(network.weights), id(network.call): call}
    with CopiedTensors(shared=True):
        return copy.deepcopy(network, {**memo, id(network.scales): dict(network.scales)})


class CopiedTensors(TorchFunctionMode):
    """In this context `copy.deepcopy` also takes tensors that were computed, which torch refuses, wherever a user's
    module keeps them: they are copied without their history or, if `shared`, every tensor is the same one.
    """

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Tensor, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is Tensor.__deepcopy__ and (self.shared or not args[0].is_leaf):
            return args[0] if self.shared else args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def sharing(module: nn.Module) -> dict[int, object]:
    """The memo for `copy.deepcopy` with which a copy of this module has the same tensors."""
    parts = [some for one in module.modules() for some in (vars(one), *vars(one).values()) if isinstance(some, dict)]
    return {id(t): t for some in parts for t in some.values() if isinstance(t, Tensor)}


def _leaves(layout: Layout, flat: Tensor) -> Named:
    return Named(lambda name: layout.view(flat.detach(), name).detach().requires_grad_())


def _fixed_layers(trunk: nn.Module) -> int:
    """The number of first layers that never change, or ALL_LAYERS; 0 if they have no weights."""

    def never_changes(part: nn.Module) -> bool:
        layers = [layer for layer in part.modules() if isinstance(layer, BayesianLayer)]
        return all(isinstance(layer, Dropout) and layer.p == 0 for layer in layers)

    if never_changes(trunk):
        return ALL_LAYERS if any(True for _ in trunk.parameters()) else 0
    if type(trunk) is not nn.Sequential or trunk._forward_hooks or trunk._forward_pre_hooks:
        return 0
    layers = list(takewhile(never_changes, trunk))
    return len(layers) if any(True for layer in layers for _ in layer.parameters()) else 0


def _can_be_kept(first: Tensor, first_two: Tensor, x: Tensor) -> bool:
    """Whether the outputs for all of x [U, N, ...] can be kept: they are not too large, and those for its first row
    alone agree with those for its first two rows, because examples do not affect each other.
    """
    if len(first) != 1 or len(first_two) != min(2, x.shape[1]) or first.shape[1:] != first_two.shape[1:]:
        return False
    alone = bool((first_two[:1] - first).abs().max() <= 1e-3 * first.abs().max().clamp_min(1e-30))
    return alone and first.numel() * x.shape[0] * x.shape[1] <= max(KEPT_NUMBERS, 2 * x.numel())
