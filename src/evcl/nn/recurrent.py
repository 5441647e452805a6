"""Bayesian forms of LSTM, GRU, RNN and their cells.

Each layer and direction is one Bayesian layer, a `Sweep`, which reads its sequences from left to right. Its weights are
drawn once per batch, and all time steps use the same draw: so do all calls in one forward pass of the network, because
a cell is called once per time step. Torch's fused kernels run the sweep of each replica. For the Fisher, the sweep is
written out instead, so that one backward pass gives the gradients of the gates at each time step:

    LSTM: i, f, g, o = s(a_i), s(a_f), tanh(a_g), s(a_o),   c <- f c + i g,   h <- o tanh(c)
    GRU:  r, z = s(a_r), s(a_z),   n = tanh(x_n + r h_n),   h <- (1 - z) n + z h
    RNN:  h <- tanh(a) or relu(a)

where a = x W_ih^T + b_ih + h W_hh^T + b_hh, and x_n and h_n are the two halves of a_n. With d_t the gradient of the
gates at time t, the gradient of W_ih is sum_t d_t x_t^T, and that of W_hh is sum_t d_t h_(t-1)^T.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from evcl._core.errors import EvclError
from evcl.nn.layer import EXAMPLE_GRADIENT_NUMBERS, BayesianLayer, of_units, product
from evcl.nn.layers import Dropout
from evcl.nn.sampled import Composite

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_VF: Any = torch._VF
FUSED = {"LSTM": _VF.lstm, "GRU": _VF.gru, "RNN_TANH": _VF.rnn_tanh, "RNN_RELU": _VF.rnn_relu}
# What torch says where it has no faster kernel: cuDNN copies the weights into one buffer, oneDNN has no projections.
SLOWER_WARNINGS = "RNN module weights are not part of single contiguous chunk", "LSTM with projections is not supported"
GRADIENTS_AT_ONCE = 500_000  # on a CPU, this many numbers of per-example gradients are computed at a time
State = Tensor | tuple[Tensor, Tensor]  # h, or h and c of an LSTM
Values = dict[str, Tensor]  # weights by parameter, [R, *shape]


class Sweep(BayesianLayer):
    """One layer and direction, on rows [R*B, T*i + p + h + 1] that hold all of an example: its inputs at T time steps,
    its initial state, for an LSTM also the initial c, and the number of time steps that count.

    The output is [R*B, T*p + p + h]: the outputs at all time steps, 0 behind the last one that counts, then the last
    state. p is the size of the state, h that of c: they differ if the layer has projections.
    """

    def __init__(
        self, layer: nn.RNNBase | nn.RNNCellBase, mode: str, suffix: str, inputs: int, step: bool = False
    ) -> None:
        """`suffix` of the parameters' names: "_l0", "_l0_reverse". `step`: it is a cell, with one time step."""
        super().__init__(nn.Identity())
        keys = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        self.own = {key: p for key in keys if isinstance(p := getattr(layer, key + suffix, None), nn.Parameter)}
        self.mode, self.step, self.reverse = mode, step, suffix.endswith("_reverse")
        self.inputs, self.cells = inputs, layer.hidden_size
        self.states = getattr(layer, "proj_size", 0) or self.cells
        self._drawn: tuple[int, dict[str, Tensor], Values] | None = None
        self._notes: tuple[Tensor, Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.mean[self.names["weight_ih"]].dtype

    def fan_in(self, parameter: str) -> int:
        return self.cells if parameter == "weight_hr" else self.inputs + self.states

    def scale(self, parameter: str) -> float:
        """1 / sqrt(fan in): the units saturate, so that their weights start smaller than those of a ReLU."""
        return float(self.fan_in(parameter) ** -0.5)

    def initial(self, parameter: str, source: torch.Generator) -> Tensor:
        return self.redrawn(self.own[parameter], self.scale(parameter), source)

    def forward(self, rows: Tensor, full: bool = True) -> Tensor:
        """`full`: all time steps of all examples count."""
        drawn = self._weights()
        x, h, c, length = self._parts(self.unfold(rows))
        if self.reverse:
            x = _reversed(x, length, full)
        if self.weights.recorded:
            y, h, c = self._noted(drawn, x, h, c, None if full else length)
        elif self.step or self.weights.mapped:
            y, h, c = self._written_out(drawn, x, h, c, length)[:3]
        else:
            each = zip(zip(*drawn.values(), strict=True), x, h, c, length, strict=True)
            parts = [self._fused(*one, full) for one in each]
            y, h, c = (torch.stack(some) for some in zip(*parts, strict=True))
        if self.reverse:
            y = _reversed(y, length, full)
        return torch.cat([y.flatten(2), h, c], 2).flatten(0, 1)

    def _weights(self) -> Values:
        """One draw per replica, which serves the whole forward pass of the network."""
        weights, cached = self.weights, self._drawn
        if weights.variance is None:
            return {key: value for key in self.names if (value := self.mean(key)) is not None}
        if cached is None or cached[0] != weights.passes or cached[1] is not weights.mean:
            drawn = {key: value.squeeze(1) for key in self.names if (value := self.drawn(key, 1, True)) is not None}
            cached = self._drawn = weights.passes, weights.mean, drawn
        return cached[2]

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [R, B, T, i], h [R, B, p], c [R, B, h] or [R, B, 0], and the lengths [R, B]."""
        cells = self.cells if self.mode == "LSTM" else 0
        x, h, c, length = rows.split([rows.shape[2] - self.states - cells - 1, self.states, cells, 1], 2)
        return x.unflatten(2, (-1, self.inputs)), h, c, length.squeeze(2)

    def split(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of the output: y [N, T, p], h [N, p], c [N, h] or [N, 0]."""
        cells = self.cells if self.mode == "LSTM" else 0
        y, h, c = out.split([out.shape[1] - self.states - cells, self.states, cells], 1)
        return y.unflatten(1, (-1, self.states)), h, c

    def _fused(
        self, weights: Sequence[Tensor], x: Tensor, h: Tensor, c: Tensor, length: Tensor, full: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Torch's kernel on the examples x [B, T, i] of one replica."""
        ordered = list(weights)  # in the order of `names`, which is torch's: w_ih, w_hh, b_ih, b_hh, w_hr
        how = ("bias_ih" in self.names, 1, 0.0, torch.is_grad_enabled(), False)
        kernel, steps = FUSED[self.mode], x.shape[1]
        with warnings.catch_warnings():
            for message in SLOWER_WARNINGS:
                warnings.filterwarnings("ignore", message)
            if full:
                y, *state = kernel(x, self._state(h, c), ordered, *how, True)
                return y, state[0].squeeze(0), state[1].squeeze(0) if len(state) > 1 else c
            packed = pack_padded_sequence(x, length.long().cpu(), batch_first=True, enforce_sorted=False)
            order, back = packed.sorted_indices, packed.unsorted_indices
            assert order is not None
            assert back is not None
            data, *state = kernel(packed.data, packed.batch_sizes, self._state(h[order], c[order]), ordered, *how)
        y = pad_packed_sequence(packed._replace(data=data), batch_first=True, total_length=steps)[0]
        return y, state[0][0][back], state[1][0][back] if len(state) > 1 else c

    def _state(self, h: Tensor, c: Tensor) -> State:
        h, c = h.unsqueeze(0).contiguous(), c.unsqueeze(0).contiguous()
        return (h, c) if self.mode == "LSTM" else h

    def _written_out(
        self, weights: Values, x: Tensor, h: Tensor, c: Tensor, length: Tensor | None, added: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same, step by step, on x [R, B, T, i]; also the states before each step and what is projected after it.

        `length`: None if all time steps count. `added`: what to add to the gates, to those of a GRU that are computed
        from h, and to the projections, [R, B, T, .] each; without columns where there is no such thing.
        """
        bias = weights.get("bias_hh")
        from_x = product(x.flatten(1, 2), weights["weight_ih"], weights.get("bias_ih")).unflatten(1, x.shape[1:3])
        more = [part.unbind(2) for part in added]  # not part[:, :, t], whose backward pass is quadratic in T
        outputs, before, inside = [], [], []
        for t, one in enumerate((from_x + added[0] if added else from_x).unbind(2)):
            before.append(h)
            from_h = product(h, weights["weight_hh"], bias)
            from_h = from_h + more[1][t] if more and self.mode == "GRU" else from_h
            new, new_c = _gated(self.mode, one, from_h, h, c)
            inside.append(new)
            if "weight_hr" in weights:
                new = product(new, weights["weight_hr"], None)
                new = new + more[2][t] if more else new
            if length is None:
                outputs.append(new)
                h, c = new, new_c
                continue
            counts = (t < length).unsqueeze(2)
            outputs.append(torch.where(counts, new, 0.0))
            h, c = torch.where(counts, new, h), torch.where(counts, new_c, c)
        return torch.stack(outputs, 2), h, c, torch.stack(before, 2), torch.stack(inside, 2)

    def _noted(self, weights: Values, x: Tensor, h: Tensor, c: Tensor, length: Tensor | None) -> tuple[Tensor, ...]:
        """The same, with a note of what the gradients of single examples are made of: see `watched`."""
        added = x.new_zeros(x.shape[0] * x.shape[1], x.shape[2], sum(self._columns)).requires_grad_()
        parts = self.unfold(added).split(self._columns, 3)
        y, h, c, before, inside = self._written_out(weights, x, h, c, length, parts)
        inputs = [x, before, inside] if "weight_hr" in weights else [x, before]
        self._notes = torch.cat([part.detach() for part in inputs], 3).flatten(0, 1), added
        return y, h, c

    @property
    def _columns(self) -> list[int]:
        """The sizes of what is noted at each time step: gates, those of a GRU that are computed from h, projections."""
        gates = GATES[self.mode] * self.cells
        return [gates, gates if self.mode == "GRU" else 0, self.states if "weight_hr" in self.names else 0]

    def watched(self, x: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """What weights multiply at each step, [R*B, T, .], and zeros added to the results, with their gradients."""
        assert self._notes is not None
        notes, self._notes = self._notes, None
        return notes

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """sum_t d_t a_t^T: what is multiplied with a weight at time t, and the gradient of the result."""
        gates: Tensor
        gates, from_h, projected = delta.split(self._columns, 3)
        from_h = from_h if self.mode == "GRU" else gates
        if parameter.startswith("bias"):
            return (gates if parameter == "bias_ih" else from_h).sum(2)
        inputs, before, inside = x.split([self.inputs, self.states, x.shape[3] - self.inputs - self.states], 3)
        pairs: dict[str, tuple[Tensor, Tensor]] = {
            "weight_ih": (gates, inputs),
            "weight_hh": (from_h, before),
            "weight_hr": (projected, inside),
        }
        outputs, multiplied = pairs[parameter]
        return outputs.mT @ multiplied

    def rows_at_once(self, parameter: str, x: Tensor, delta: Tensor) -> int:
        """On a CPU, as many gradients as stay in its cache."""
        most = super().rows_at_once(parameter, x, delta)
        return most if x.is_cuda else max(1, min(most, GRADIENTS_AT_ONCE * most // EXAMPLE_GRADIENT_NUMBERS))

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        """The state that W_hh and W_hr multiply is always learned."""
        return of_units(importance, learned or parameter in ("weight_hh", "weight_hr"))


def _gated(mode: str, from_x: Tensor, from_h: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One time step: the new state, before a projection, and the new c."""
    if mode == "GRU":
        (xr, xz, xn), (hr, hz, hn) = from_x.chunk(3, -1), from_h.chunk(3, -1)
        update = (xz + hz).sigmoid()
        new = (xn + (xr + hr).sigmoid() * hn).tanh()
        return new + update * (h - new), c
    gates = from_x + from_h
    if mode != "LSTM":
        return gates.tanh() if mode == "RNN_TANH" else gates.relu(), c
    new, c = _LSTMStep.apply(gates, c)  # type: ignore[no-untyped-call]
    return new, c


class _LSTMStep(torch.autograd.Function):
    """i, f, g, o = s(a_i), s(a_f), tanh(a_g), s(a_o),   c' = f c + i g,   h = o tanh(c')

    Autograd on these lines would put the gradients of the four gates together by a copy in each time step.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = gates.chunk(4, -1)
        new = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
        return o.sigmoid() * new.tanh(), new

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        gates, c, new = ctx.saved_tensors
        a_i, a_f, a_g, a_o = gates.chunk(4, -1)
        i, f, g, o, tanh = a_i.sigmoid(), a_f.sigmoid(), a_g.tanh(), a_o.sigmoid(), new.tanh()
        dc = torch.addcmul(dc, dh * o, 1 - tanh * tanh)
        parts = dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * tanh * o * (1 - o)
        return torch.cat(parts, -1), dc * f


def _reversed(x: Tensor, length: Tensor, full: bool) -> Tensor:
    """x [R, B, T, .] with the time steps that count, the first `length` [R, B], in the opposite order."""
    if full:
        return x.flip(2)
    time = torch.arange(x.shape[2], device=x.device).expand(x.shape[:3])
    last = length.long().unsqueeze(2) - 1
    return x.gather(2, torch.where(time <= last, last - time, time).unsqueeze(3).expand_as(x))


class Recurrent(Composite):
    """nn.LSTM, nn.GRU and nn.RNN with any options and inputs: also projections, dropout and packed sequences."""

    reads_host = False  # True once it has seen packed sequences, whose lengths are on the host: no CUDA graph then

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.mode, self.batch_first, self.bias = layer.mode, layer.batch_first, layer.bias
        self.input_size, self.hidden_size, self.proj_size = layer.input_size, layer.hidden_size, layer.proj_size
        self.num_layers, self.bidirectional = layer.num_layers, layer.bidirectional
        directions = ("", "_reverse") if layer.bidirectional else ("",)
        width = (layer.proj_size or layer.hidden_size) * len(directions)
        sizes = [layer.input_size, *[width] * (layer.num_layers - 1)]
        self.sweeps = nn.ModuleList(
            Sweep(layer, layer.mode, f"_l{k}{suffix}", size) for k, size in enumerate(sizes) for suffix in directions
        )
        self.dropout = Dropout(nn.Dropout(layer.dropout))

    def flatten_parameters(self) -> None:
        """For code that calls it: the weights are already in one buffer."""

    def forward(self, input: Tensor | PackedSequence, hx: State | None = None) -> tuple[Tensor | PackedSequence, State]:
        lengths = None
        if isinstance(input, PackedSequence):
            self.reads_host = True
            x, lengths = pad_packed_sequence(input, batch_first=True)
        else:
            if input.dim() != 3:
                shape = tuple(input.shape)
                raise EvclError(f"a recurrent layer takes a batch of sequences (3 axes), not shape {shape}")
            x = input if self.batch_first else input.transpose(0, 1)
        first = cast(Sweep, self.sweeps[0])
        x = x.to(first.dtype)  # lengths are among a sweep's inputs, and bf16 has too few digits for them
        h, c = self._state(x, hx)
        length = x.new_full((len(x), 1), x.shape[1]) if lengths is None else lengths.to(x).unsqueeze(1)
        last_h, last_c, both = [], [], 2 if self.bidirectional else 1
        for k in range(self.num_layers):
            outputs = []
            for place in range(both * k, both * (k + 1)):
                sweep = cast(Sweep, self.sweeps[place])
                rows = torch.cat([x.flatten(1), h[place], c[place], length], 1)
                y, hn, cn = sweep.split(sweep(rows, lengths is None))
                outputs.append(y)
                last_h.append(hn)
                last_c.append(cn)
            x = outputs[0] if both == 1 else torch.cat(outputs, 2)
            x = self.dropout(x) if k + 1 < self.num_layers else x
        h = torch.stack(last_h)
        state: State = (h, torch.stack(last_c)) if self.mode == "LSTM" else h
        if isinstance(input, PackedSequence):
            return _packed_like(input, x), state
        return x if self.batch_first else x.transpose(0, 1), state

    def _state(self, x: Tensor, hx: Any) -> tuple[Tensor, Tensor]:
        """The initial h and c, [layers, N, .] each; c has no columns if it is not an LSTM."""
        layers, cells = len(self.sweeps), self.hidden_size if self.mode == "LSTM" else 0
        h, c = hx if self.mode == "LSTM" and hx is not None else (hx, None)
        wanted = [(layers, len(x), self.proj_size or self.hidden_size), (layers, len(x), cells)]
        for given, shape in zip((h, c), wanted, strict=True):
            if given is not None and given.shape != shape:
                raise EvclError(f"the initial state of this layer has shape {tuple(shape)}, not {tuple(given.shape)}")
        h, c = (x.new_zeros(shape) if t is None else t for t, shape in zip((h, c), wanted, strict=True))
        return h, c


def _packed_like(packed: PackedSequence, x: Tensor) -> PackedSequence:
    """Sequences x [N, T, .] packed as `packed` is."""
    order = packed.sorted_indices
    x = x if order is None else x.index_select(0, order)
    data = [x[:size, t] for t, size in enumerate(packed.batch_sizes.tolist())]
    return packed._replace(data=torch.cat(data))


class RecurrentCell(Composite):
    """nn.LSTMCell, nn.GRUCell and nn.RNNCell. All calls in one forward pass use the same draw of the weights."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        kinds = {nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}
        mode = kinds.get(type(layer)) or f"RNN_{layer.nonlinearity.upper()}"
        self.input_size, self.hidden_size, self.bias, self.mode = layer.input_size, layer.hidden_size, layer.bias, mode
        self.sweep = Sweep(layer, mode, "", layer.input_size, step=True)

    def forward(self, input: Tensor, hx: Any = None) -> State:
        if input.dim() != 2:
            raise EvclError(f"a recurrent cell takes [batch, inputs], not shape {tuple(input.shape)}")
        lstm, input = self.mode == "LSTM", input.to(self.sweep.dtype)
        h, c = hx if lstm and hx is not None else (hx, None)
        h = input.new_zeros(len(input), self.hidden_size) if h is None else h
        c = input.new_zeros(len(input), self.hidden_size if lstm else 0) if c is None else c
        rows = torch.cat([input, h, c, input.new_ones(len(input), 1)], 1)
        _, h, c = self.sweep.split(self.sweep(rows))
        return (h, c) if lstm else h
