"""Run a network's trunk: all of it, or only the layers above those that never change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from evcl._core.devices import limited
from evcl._core.errors import EvclError, NoWeight
from evcl.nn.below import WHOLE, fixed_layers, may_be_kept
from evcl.nn.bound import Bound
from evcl.nn.columns import Columns
from evcl.nn.inputs import Call, described
from evcl.nn.sampled import DirectParameters, SecondAxis
from evcl.nn.sizes import MOST_ROWS, Size, measured

FORM = ("trunk", "trunk_names", "owned", "_places", "direct", "_settled", "centre", "scales", "rounds")  # of a trunk


class Trunk(Bound):
    """The part of a `BayesianNetwork` that runs the trunk: [R*B, ...] -> [R*B, features]."""

    call: Call
    owned: nn.ModuleList
    direct: DirectParameters | None
    _places: list[tuple[nn.Module, str]]
    _settled: bool
    _sizes: dict[tuple[str, torch.Size], Size | None]  # see `size`
    _fixed: int | None  # see `fixed`
    _below: Any  # inputs -> what `below` has found, inside `keeping`

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
        found: Tensor = run(x) if self.direct is None else self.direct(x, run)
        return found

    def _run(self, x: Tensor) -> Tensor:
        """Run the trunk on the replicas that are bound: all of them, or one if it uses parameters directly."""
        for (module, key), own in zip(self._places, self.owned, strict=True):
            setattr(module, key, own(x))
        if isinstance(self.trunk, Columns):
            self.trunk.task = self.weights.task if isinstance(self.weights.task, int) else None
        try:
            with self._lower(x):
                return self._checked(self.call(self.trunk, x), x)
        finally:
            for module, key in self._places:
                module.__dict__.pop(key, None)

    def _lower(self, x: Tensor) -> AbstractContextManager[Any]:
        """The precision of a trunk's own matrix products, outside Bayesian layers."""
        if limited(x.device):
            return nullcontext()
        dtype = self.weights.dtype_of(x)
        return torch.autocast(x.device.type, dtype, dtype != x.dtype, cache_enabled=False)

    def _checked(self, features: Any, x: Tensor) -> Tensor:
        """The trunk's output for x, if it is one vector per example."""
        if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[0] != x.shape[0]:
            came = tuple(features.shape) if isinstance(features, Tensor) else described(features)
            advice = "" if isinstance(features, Tensor) else ": choose one of its outputs, output=NAME or output=0"
            n = x.shape[0]
            raise EvclError(f"the network must turn {n} inputs into [{n}, features], not {came}{advice}")
        return features.to(self.posterior.mean.dtype)

    # --- the part that never changes (see below.py) ------------------------------------------------------------------

    @property
    def fixed(self) -> int:
        """The number of the trunk's first layers that never change, or WHOLE if all of it never changes."""
        if self._fixed is None:
            simple = self.task_weights is None and not self.owned and self.direct is None
            self._fixed = fixed_layers(self.trunk) if simple else 0
        return self._fixed if self._fixed == WHOLE or self.call.form is None else 0

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
        kept = None if self._below is None else self._below.get(x)
        if kept is not None and kept[0] == x._version:
            return kept[1]  # type: ignore[no-any-return]
        found = self._below_all(x)
        if self._below is not None:
            self._below[x] = x._version, found
        return found

    def _below_all(self, x: Tensor) -> Tensor | None:
        one, two = self._first_layers(x[0, :1]), self._first_layers(x[0, :2])
        if not may_be_kept(one, two, x):
            return None
        size = self.size(x, self._first_layers, "below")
        rows = MOST_ROWS if size is None else size.forward_rows(x.is_cuda)
        found = one.new_empty(*x.shape[:2], *one.shape[1:])
        for into, some in zip(found, x, strict=True):
            for a, b in zip(into.split(rows), some.split(rows), strict=True):
                a.copy_(self._first_layers(b))
        return found

    def _first_layers(self, x: Tensor) -> Tensor:
        """In full precision, even if training has a lower one: this is done once."""
        x = x.clone()  # a forward pass may write to it
        if self.fixed == WHOLE:
            return self._checked(self.call(self.trunk, x), x)
        for layer in list(self.trunk.children())[: self.fixed]:
            x = layer(x)
        return x

    def _rest(self, h: Tensor) -> Tensor:
        """The trunk's output from what `below` has made of the inputs."""
        if self.fixed == WHOLE:
            return h
        with self._lower(h):
            found: Any = h
            for layer in list(self.trunk.children())[self.fixed :]:
                found = layer(found)
            return self._checked(self.call.chosen(found, None), h)

    # --- parameters that the trunk's own code uses -------------------------------------------------------------------

    @torch.no_grad()
    def _settle(self, x: Tensor) -> None:
        """Before the first batch, find out how the trunk uses its parameters [1, ...]. If it does not add or expand
        them, one copy per example gives another output, or an error; they are then used directly.
        """
        some = x[: x.shape[0] // self.weights.replicas][:3]
        if len(some) < 2:  # one example cannot tell
            return
        before = self.form()
        found = self._tried(some)
        direct = self._with_direct()
        for (module, key), own in zip(self._places, self.owned, strict=True):
            direct.add(module, key, next(iter(own.names.values())))  # type: ignore[operator]
        self.direct, self.owned, self._places = direct, nn.ModuleList(), []
        wanted = self._tried(some)
        same = found is not None and wanted is not None and torch.allclose(found, wanted, rtol=1e-3, atol=1e-4)
        if wanted is None or same:
            self.set_form(before)
        self._settled = True

    def _tried(self, x: Tensor) -> Tensor | None:
        with self.alone():
            self.weights.batch = len(x)
            try:
                return self._output(x.clone(), self._run)  # not x itself: a forward pass may write to it
            except (EvclError, RuntimeError):
                return None

    def _with_direct(self) -> DirectParameters:
        """A copy of `direct` that more parameters can be added to."""
        found = DirectParameters()
        found.weights = self.weights
        if self.direct is not None:
            found.names, found.places = dict(self.direct.names), list(self.direct.places)
        return found

    def use_directly(self, layer: Any) -> bool:
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

    def form(self) -> dict[str, Any]:
        """The trunk, and what describes its weights. `set_form` restores it."""
        return {name: getattr(self, name) for name in FORM}

    def set_form(self, form: Mapping[str, Any]) -> None:
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
