"""Columns: copies of a network, each with lateral connections from all columns before it (Rusu et al., 2016).

    h_i^k = f(W_i^k h_{i-1}^k + b_i^k + U_i^k (alpha_i^k * relu(V_i^k [h_{i-1}^j]_{j<k} + c_i^k)))

i counts the linear layers and convolutions, which are the same in all columns. The first of them, which reads the
inputs, has no lateral. V has as many outputs as h_{i-1} has units; for a convolution, V is a convolution of size 1, and
U one like W. The last lateral enters before the head: the features are g^k = h_L^k + U (alpha * relu(V [g^j] + c)), and
the logits W g^k, so that U of the output layer's lateral is W U. alpha starts between 0 and 0.1: at first, a new column
is almost one without laterals.

Only the last column learns. The columns before it are computed without gradients, dropout or draws.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn.initial import blank, he_layer
from evcl.nn.layer import BayesianLayer, along
from evcl.posterior import Layout

LATERAL_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)  # the plain layers that have laterals, by exact type
UNSUPPORTED_LAYERS = (nn.MultiheadAttention, nn.Transformer, nn.RNNBase)
MAX_FIRST_ALPHA = 0.1  # largest initial value of alpha
PREFIX, BODY, OUTPUT = "columns", "body", "output"


class Scale(nn.Module):
    """alpha * x, one number per unit; with `channels`, units are along the first axis after the batch."""

    def __init__(self, units: int, channels: bool) -> None:
        super().__init__()
        self.weight, self.channels = nn.Parameter(torch.full((units,), MAX_FIRST_ALPHA / 2)), channels

    def forward(self, x: Tensor) -> Tensor:
        return x * along(self.weight.unsqueeze(0), x.dim(), self.channels)


class BayesianScale(BayesianLayer):
    """The form of `Scale` in a network of replicas."""

    def __init__(self, layer: Scale) -> None:
        super().__init__(layer)
        self.channels = layer.channels

    def initial(self, parameter: str, source: torch.Generator) -> Tensor:
        return self.redrawn(self.own[parameter], 1.0, source)

    def redrawn(self, mean: Tensor, scale: float, source: torch.Generator) -> Tensor:
        return torch.empty(mean.shape, dtype=torch.float64).uniform_(0, MAX_FIRST_ALPHA, generator=source)

    def scale(self, parameter: str) -> float:
        return 1.0  # so that it does not decide the learning rate, as the layer with the smallest weights does

    def forward(self, x: Tensor) -> Tensor:
        each = self.unfold(x)
        alpha = self.drawn("weight", each.shape[1])  # [R, B or 1, units]
        assert alpha is not None
        return (each * along(alpha, each.dim(), self.channels)).view_as(x)

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        both = x * delta
        positions = range(3, both.dim()) if self.channels else range(2, both.dim() - 1)
        return both.sum(list(positions)) if positions else both


class Lateral(nn.Module):
    """U (alpha * relu(V [h^1, ..., h^n] + c)), for a layer that reads the h^j."""

    def __init__(self, layer: nn.Module, earlier: int, source: torch.Generator) -> None:
        super().__init__()
        self.channels = not isinstance(layer, nn.Linear)
        if isinstance(layer, nn.Linear):
            units = layer.in_features
            self.v: nn.Module = he_layer(source, nn.Linear, earlier * units, units)
            self.u: nn.Module = he_layer(source, nn.Linear, units, layer.out_features, bias=False)
        else:
            assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
            units, names = layer.in_channels, ("kernel_size", "stride", "padding", "dilation", "padding_mode")
            self.v = he_layer(source, type(layer), earlier * units, units, kernel_size=1)
            like = {name: getattr(layer, name) for name in names}
            self.u = he_layer(source, type(layer), units, layer.out_channels, bias=False, **like)
        self.alpha = Scale(units, self.channels)

    def forward(self, earlier: Sequence[Tensor]) -> Tensor:
        y: Tensor = self.u(self.alpha(self.v(torch.cat(list(earlier), 1 if self.channels else -1)).relu()))
        return y


class Column(nn.Module):
    """A copy of the network, and its laterals, under the numbers of their layers."""

    def __init__(self, network: nn.Module, earlier: int, source: torch.Generator) -> None:
        super().__init__()
        self.body, self.sites = network, _sites(network)
        self.laterals = nn.ModuleDict()
        if earlier:
            for i, path in list(enumerate(self.sites))[1:]:
                self.laterals[str(i)] = Lateral(network.get_submodule(path), earlier, source)
            last = network.get_submodule(self.sites[-1])
            self.features = int(last.out_features if isinstance(last, nn.Linear) else last.out_channels)  # type: ignore[arg-type]
            like = blank(nn.Linear, self.features, self.features)
            self.laterals[OUTPUT] = Lateral(like, earlier, source)

    def forward(self, x: Tensor, earlier: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What each layer reads, by its number, and the column's features, under OUTPUT."""
        read: dict[str, Tensor] = {}
        handles = []
        for i, path in enumerate(self.sites):
            layer = self.body.get_submodule(path)
            handles.append(layer.register_forward_pre_hook(partial(self._note, str(i), read)))
            if str(i) in self.laterals and earlier:
                handles.append(layer.register_forward_hook(partial(self._add, str(i), earlier)))
        try:
            features: Tensor = self.body(x)
        finally:
            for handle in handles:
                handle.remove()
        if earlier:
            if features.shape[-1] != self.features:
                raise EvclError(
                    f"a network with columns must return one number per unit of its last layer, {self.sites[-1]!r}, "
                    f"which has {self.features}, not {features.shape[-1]}: end it with a linear layer or a global pool"
                )
            features = features + self.laterals[OUTPUT]([each[OUTPUT] for each in earlier])
        return {**read, OUTPUT: features}

    def _note(self, key: str, read: dict[str, Tensor], layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        path = self.sites[int(key)]
        if key in read:
            raise EvclError(f"{path!r} is called twice; a network with columns must call each layer once")
        if not read and key != "0":
            raise EvclError(
                f"{path!r} is called before {self.sites[0]!r}: a network with columns must declare first the layer "
                "that reads its inputs"
            )
        read[key] = args[0]

    def _add(
        self, key: str, earlier: Sequence[Mapping[str, Tensor]], layer: nn.Module, args: object, y: Tensor
    ) -> Tensor:
        added: Tensor = self.laterals[key]([each[key] for each in earlier])
        return y + added


def _sites(network: nn.Module) -> list[str]:
    """The names of the linear layers and convolutions."""
    if any(isinstance(module, UNSUPPORTED_LAYERS) for module in network.modules()):
        raise EvclError(
            "columns need a network of linear layers and convolutions, without attention or recurrent layers: "
            "use another method"
        )
    paths = [path for path, module in network.named_modules() if type(module) in LATERAL_LAYERS]
    if not paths:
        raise EvclError("columns need a network with a linear layer or a convolution, and this one has none")
    return paths


class Columns(nn.Module):
    """`count` columns of a network. The features are those of column `task`; without a task, of the last column.

    With `by_task` False, they are always those of the last column.
    """

    def __init__(self, network: nn.Module, count: int, by_task: bool = True) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        copies = [network, *(copy.deepcopy(network) for _ in range(1, count))]
        self.columns = nn.ModuleList(Column(one, k, source) for k, one in enumerate(copies))
        self.by_task = by_task
        self.task: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        last = len(self.columns) - 1
        chosen = last if self.task is None or not self.by_task else min(self.task, last)
        earlier: list[dict[str, Tensor]] = []
        if chosen:
            weights = next((m.weights for m in self.modules() if isinstance(m, BayesianLayer)), None)
            with torch.no_grad(), nullcontext() if weights is None else weights.restored():
                if weights is not None:  # compute as in a prediction, with the means
                    weights.noise = weights.grads = weights.variance = None
                for column in self.columns[:chosen]:
                    earlier.append(column(x, earlier))
        features: Tensor = self.columns[chosen](x, earlier)[OUTPUT]
        return features

    def at_rest(self, names: Sequence[str]) -> set[str]:
        """Those of these names that belong to a column before the last."""
        prefix = f"{PREFIX}.{len(self.columns) - 1}."
        return {name for name in names if not name.startswith(prefix)}


def in_column(k: int, name: str) -> str:
    """The name in column k of something that the network calls `name`."""
    return f"{PREFIX}.{k}.{BODY}.{name}"


def first_column(layout: Layout) -> tuple[Layout, int]:
    """The weights of the first column, under the network's own names; and the number of columns."""
    start = in_column(0, "")
    first = Layout({name.removeprefix(start): shape for name, shape in layout.shapes.items() if name.startswith(start)})
    numbers = {name.split(".")[1] for name in layout.shapes}
    return first, next(k for k in count() if str(k) not in numbers)
