"""The training pass of a feed-forward network, written by hand: linear layers with ReLUs between them, and a softmax.

For such a network, autograd spends as long on launching operations as the hardware does on the matrix products, and
allocates memory for each. Here every operation writes into an existing buffer. With S = 2 for means and variances, or
S = 1 for point weights, and the layers' inputs x_0, x_1, ...:

    m = x W + b      v = x^2 var(W) + var(b)      t = eps / sqrt(v)      next x = relu(m + t v)

and in the backward pass, from the gradient g of a layer's output,

    h = t g     dW = g^T x     db = sum g     2 dvar(W) = h^T x^2     2 dvar(b) = sum h     dx = g W + x (h var(W))

Distillation (`Lessons`) adds columns to the last layer, and a gradient to its g. FiLM (film.py) replaces m and v by
c m + b and c^2 v, c being the scale. In the backward pass,

    dc = sum (g m + c h v)     db = sum g     and g and h become c g and c^2 h

The tests compare this with autograd on the network itself. Everything between two matrix products is one pass of
native.c if that is available; `gpu.py` does the same in GPU kernels, without FiLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from evcl._core.randomness import Noise
from evcl.kernels.native import Native, native
from evcl.nn.film import Film
from evcl.nn.layers import Linear
from evcl.nn.network import BayesianNetwork
from evcl.nn.perceptron import MLP
from evcl.nn.slots import foreign, head_names
from evcl.posterior import Layout


class ChainData(Protocol):
    """The data that a chain trains on; `evcl.training.Pool` implements it."""

    x: Tensor  # [U, N, ...]: replica r learns from row r mod U
    y: Tensor  # [U, N]: class indices within all heads, concatenated
    columns: Tensor | None  # [N, 2]: first and end column of the classes of an example's head; None: there is one head
    weights: Tensor | None  # [U, N]: weight of each example in the mean; None: all 1


class Batch(NamedTuple):
    """The examples of a step, computed on the device from the number of steps taken, without data from the host."""

    order: Tensor  # [V, n]: replica r follows row r mod V
    done: Tensor  # the number of steps taken
    steps: int  # steps per epoch
    stride: int  # examples between the starts of two steps
    size: int  # examples per step
    total: Tensor  # [R]: a chain adds the sum of its NLL to this

    def rows(self) -> Tensor:
        """[R, size]: the rows of this step."""
        start = self.done.long() % self.steps * self.stride
        rows = self.order.index_select(1, torch.arange(self.size, device=self.order.device) + start)
        return rows.repeat(len(self.total) // len(rows), 1)


class Place(NamedTuple):
    """The position of a layer's weights in flat buffers [S, R, P], with padding."""

    weight: slice
    bias: slice | None
    outs: int
    ins: int
    units: int  # number of `outs` that are not padding

    def weights(self, flat: Tensor) -> Tensor:
        """[S, R, o, i]"""
        return flat[..., self.weight].view(*flat.shape[:-1], self.outs, self.ins)

    def biases(self, flat: Tensor) -> Tensor | None:
        """[S, R, o]"""
        return None if self.bias is None else flat[..., self.bias]


LayerNames = list[tuple[str, str | None]]  # the names of each layer's weight and bias


def find_chain(network: BayesianNetwork, x: Tensor) -> LayerNames | None:
    """The layers of the trunk if it is a chain for inputs like x [R, N, ...]; otherwise None.

    A chain is an `mlp`, or an `nn.Sequential` of alternating `nn.Linear` and `nn.ReLU`, optionally after an
    `nn.Flatten`.
    """
    trunk = network.trunk
    if not network.call.plain:
        return None
    modules = list(trunk) if type(trunk) in (nn.Sequential, MLP) else []  # type: ignore[call-overload]
    if modules and type(modules[0]) is nn.Flatten and (modules[0].start_dim, modules[0].end_dim) == (1, -1):
        del modules[0]
    elif x.dim() != 3:
        return None
    linear, between = modules[::2], modules[1::2]
    plain = all(type(m) is Linear for m in linear) and all(type(m) is nn.ReLU for m in between)
    every = [network, *trunk.modules()]
    watched = any(m._forward_pre_hooks or m._backward_hooks for m in every)
    watched = watched or not all(isinstance(hook, Film) for m in every for hook in m._forward_hooks.values())
    if not linear or len(linear) != len(between) or not plain or watched:
        return None
    pairs = [(layer.names["weight"], layer.names.get("bias")) for layer in linear]
    if network.layout.shapes[pairs[0][0]][1] != x[0, 0].numel():  # the network's forward raises the error
        return None
    names = [name for pair in pairs for name in pair if name is not None]
    return pairs if len(names) == len(set(names)) else None  # gradients of tied weights would have to be summed


def padded(chain: LayerNames, layout: Layout, heads: Sequence[int], multiple: int) -> dict[str, tuple[int, ...]]:
    """The shapes in which a chain's weights are stored on a GPU: widths are rounded up to multiples of `multiple`, as
    its matrix units need; the number of classes of a head is not.
    """

    shapes = layout.shapes
    names = [name for pair in chain for name in pair if name is not None]
    stored = {name: tuple(up(n, multiple) for n in shapes[name]) for name in names}
    for name in (head_names(k)["weight"] for k in heads):
        stored[name] = (shapes[name][0], up(shapes[name][1], multiple))
    return stored


def up(n: int, multiple: int) -> int:
    """n, rounded up to a multiple."""
    return -(-n // multiple) * multiple


def find_places(chain: LayerNames, layout: Layout, heads: Sequence[int]) -> list[Place]:
    """The trunk's layers, and the heads as one last layer, because their weights are adjacent in the layout."""
    spans, stored = layout.spans, layout.stored
    places = [
        Place(spans[w], None if b is None else spans[b], stored[w][0], stored[w][1], layout.shapes[w][0])
        for w, b in chain
    ]
    first, last = head_names(heads[0]), head_names(heads[-1])
    weight, bias = (slice(spans[first[k]].start, spans[last[k]].stop) for k in ("weight", "bias"))
    classes = bias.stop - bias.start
    assert classes == sum(stored[head_names(k)["bias"]][0] for k in heads)
    return [*places, Place(weight, bias, classes, stored[first["weight"]][1], classes)]


class Lessons(NamedTuple):
    """The distillation loss sum_k w_k T^2 mean_b KL(q || softmax(z_k / T)), with q the teacher's probabilities.

    The columns C are those of the chain's last layer: the heads of the data, then the heads that are only distilled.
    """

    q: Tensor  # [U, N, C], 0 for columns that are not distilled; replica r uses row r mod U
    told: Tensor  # [U, N, K]: sum q log q of each distilled head
    spans: Tensor  # [K, 2]: first and end column of each distilled head
    temperature: Tensor  # [R]
    strengths: Tensor  # [R, K], or [R, N, K] for each example its own
    own: int  # number of columns of the data's heads
    value: Tensor  # [R]: where a chain writes the value of the loss


class LessonPass:
    """Distillation in plain operations, without native.c's `loss_and_lessons`; it also draws the last layer's noise."""

    def __init__(self, of: Lessons, z: Tensor) -> None:
        self.of, self.z, self.q, self.told = of, z, torch.empty_like(z), z.new_empty(*z.shape[:2], len(of.spans))
        teachers = [r % len(of.q) for r in range(len(z))]
        self.strengths = of.strengths.unsqueeze(1) if of.strengths.dim() == 2 else torch.empty_like(self.told)
        self.parts = [[(of.q[u], self.q[r]), (of.told[u], self.told[r])] for r, u in enumerate(teachers)]
        if of.strengths.dim() == 3:
            for part, strengths, out in zip(self.parts, of.strengths, self.strengths, strict=True):
                part.append((strengths, out))
        self.heads = [slice(*span) for span in of.spans.tolist()]
        taught = of.strengths.ne(0).flatten(1).any(1)
        self.rows = [rows.nonzero().flatten() for rows in (taught, ~taught)]  # replicas with distillation, and without
        self.drawn: list[tuple[Tensor, list[Tensor]]] = []
        self.noises: tuple[Noise, list[Noise]] | None = None

    def draw(self, noise: Noise, out: Tensor) -> Tensor:
        """Draw the noise. A replica without distillation draws the same numbers whether or not others have it."""
        if len(self.rows[0]) == len(out) or self.of.own == out.shape[2]:
            return noise.normal_(out)
        if not self.drawn:
            out.zero_()
            for rows, columns in zip(self.rows, (out.shape[2], self.of.own), strict=True):
                places = [out[r, :, :columns] for r in rows.tolist()]
                self.drawn.append((out.new_empty(len(rows), out.shape[1], columns), places))
        if self.noises is None or self.noises[0] is not noise:
            self.noises = noise, [noise.of(rows) for rows in self.rows]
        for source, (numbers, places) in zip(self.noises[1], self.drawn, strict=True):
            for place, part in zip(places, source.normal_(numbers), strict=True):
                place.copy_(part)
        return out

    def take(self, z: Tensor, rows: Tensor) -> None:
        """Store a batch's logits, divided by the temperature, and look up the teacher's probabilities for it."""
        torch.div(z, self.of.temperature.view(-1, 1, 1), out=self.z)
        for part, index in zip(self.parts, rows, strict=True):
            for every, out in part:
                torch.index_select(every, 0, index, out=out)

    def add_gradient(self, g: Tensor) -> None:
        """Add the gradient to `g`, that of the mean NLL, and store the value of the loss."""
        value, warm, n = self.of.value.zero_(), self.of.temperature, g.shape[1]
        for columns, q_log_q, strength in zip(self.heads, self.told.unbind(2), self.strengths.unbind(2), strict=True):
            log_p, q = self.z[..., columns].log_softmax(2), self.q[..., columns]
            value += (strength * (q_log_q - (q * log_p).sum(2))).sum(1)
            g[..., columns] += (strength * warm.view(-1, 1) / n).unsqueeze(2) * (log_p.exp() - q)
        value.mul_(warm.square() / n)


class Chain:
    """Call it with rows [R, B] to write the gradients of their mean NLL into `grads`; it returns the NLL, [R].

    `values` and `grads` are [S, R, P]: means and variances, or point weights. For a variance, `grads` holds twice the
    gradient. With `compute_dtype`, the pass is computed in it, while values, gradients and loss keep theirs. With
    `lessons`, the gradients of the distillation loss are added, and its value is written to `lessons.value`. `film`
    holds the scale and shift of each layer but the last, [R, units] each, and buffers for their gradients, if wanted.
    `beside`: (logits [R, B, classes], rows) -> a gradient with respect to the logits, to be added.
    """

    def __init__(
        self,
        places: list[Place],
        values: Tensor,
        grads: Tensor,
        examples: ChainData,
        compute_dtype: torch.dtype | None,
        lessons: Lessons | None = None,
        film: Sequence[Sequence[Tensor]] = (),
        beside: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.places, self.examples, self.full, self.lessons = places, examples, (values, grads), lessons
        self.film, self.beside = film, beside
        self.rounded = None if compute_dtype is None else (values.to(compute_dtype), grads.to(compute_dtype))
        self.x = examples.x.flatten(2).to(compute_dtype or values.dtype).contiguous()
        self.passes: dict[int, _Pass] = {}

    def __call__(self, rows: Tensor, noise: Noise) -> Tensor:
        size = rows.shape[1]
        if size not in self.passes:
            self.passes[size] = _Pass(self, size)
        if self.rounded is None:
            return self.passes[size](rows, noise)
        self.rounded[0].copy_(self.full[0])
        nll = self.passes[size](rows, noise)
        self.full[1].copy_(self.rounded[1])
        return nll

    def squares(self, size: int, into: Tensor) -> None:
        """Write the mean over the examples of their squared gradients in the last pass, of `size` examples, to `into`
        [R, P]: B (g^2)^T x^2 for each layer. For point weights, and examples without weights.
        """
        for place, layer in zip(self.places, self.passes[size].layers, strict=True):
            g, x = layer.g.square().mul_(size), layer.x.square()
            place.weights(into).copy_(torch.bmm(g.mT, x))
            biases = place.biases(into)
            if biases is not None:
                biases.copy_(g.sum(1))


class _Layer:
    """The buffers of one layer, and its matrix products as (operands, result), one for each s and r."""

    def __init__(
        self,
        place: Place,
        values: Tensor,
        grads: Tensor,
        x: Tensor,
        below: _Layer | None,
        film: Sequence[Tensor] | None = None,
    ) -> None:
        """`x` [S, R, B, i] holds the layer's input and, with variances, its square."""
        self.bayesian, self.biased = len(values) == 2, place.bias is not None
        shape = (*x.shape[:3], place.outs)
        self.y, self.gh = x.new_empty(shape), x.new_empty(shape)  # y: the next layer's x
        d, self.variance, self.ratio = torch.empty_like(x), x.new_empty(shape[1:]), x.new_empty(shape[1:])
        self.noise = values.new_empty(shape[1:])
        self.draw: Callable[[Noise, Tensor], Tensor] = lambda noise, out: noise.normal_(out)
        # Indexing a tensor takes as long as a small operation on it, so it is done once, here.
        (self.x, self.square), (self.out, self.out_square) = (
            t.unbind() if self.bayesian else (t[0], t[0]) for t in (x, self.y)
        )
        (self.g, self.h), (self.d, self.d_square) = (
            t.unbind() if self.bayesian else (t[0], t[0]) for t in (self.gh, d)
        )
        weight, grad_weight = (_each(place.weights(flat)) for flat in (values, grads))
        xs, gs = _each(x), _each(self.gh)
        self.film = None if film is None else _FilmPass(film, self)
        outs = [*self.out, *self.variance] if self.film is None else [*self.film.mean, *self.film.variance]
        outs = outs[: len(xs)]
        biases = place.biases(values)
        shifts = outs if biases is None else _each(biases)
        self.forward = list(zip(shifts, xs, [w.mT for w in weight], outs, strict=True))
        self.for_weight = list(zip([g.mT for g in gs], xs, grad_weight, strict=True))
        self.for_input = [] if below is None else list(zip(gs, weight, _each(d), strict=True))
        self.grad_bias = place.biases(grads)
        compiled = native() if self.bayesian and x.dtype == torch.float32 else None
        self.finish = self.through_relu = None  # one pass of native.c each
        if compiled is not None:
            own = self.out, self.out_square, self.ratio, self.variance
            self.finish = compiled.bind("activate", self.out.numel(), *own)
            if below is not None:
                state = (below.g, below.h, self.d, self.d_square, self.x, below.ratio)
                self.through_relu = compiled.bind("pass_on", below.g.numel(), *state)

    def activate(self, noise: Noise, last: bool) -> None:
        """out <- relu(x W + b + t v), and its square; without the ReLU in the last layer.

        With native.c, the loss completes the last layer.
        """
        for bias, x, weight, out in self.forward:
            torch.addmm(bias, x, weight, out=out, beta=int(self.biased))
        if self.film is not None:
            self.film.forward()
        if self.finish is not None:
            self.draw(noise, self.ratio)
            if not last:
                self.finish()
            return
        if self.bayesian:
            if not self.biased:  # an input of zeros has variance 0
                self.variance.clamp_min_(1e-30)
            torch.rsqrt(self.variance, out=self.ratio).mul_(self.draw(noise, self.noise))
            self.out.addcmul_(self.ratio, self.variance)
        if not last:
            self.out.clamp_min_(0)
            if self.bayesian:
                torch.mul(self.out, self.out, out=self.out_square)

    def differentiate(self) -> None:
        """From g and h, compute the gradients of the weights, and the two products for the gradient of the input."""
        if self.film is not None:
            self.film.backward()
        for a, b, out in self.for_weight:
            torch.mm(a, b, out=out)
        if self.grad_bias is not None:
            torch.sum(self.gh, 2, out=self.grad_bias)
        for a, b, out in self.for_input:
            torch.mm(a, b, out=out)

    def pass_on(self, below: _Layer) -> None:
        """Pass the gradient of the input back through the ReLU of the layer below, giving that layer's g and h."""
        if self.through_relu is not None:
            self.through_relu()
            return
        if self.bayesian:
            self.d.addcmul_(self.x, self.d_square)
        torch.ops.aten.threshold_backward.grad_input(self.d, self.x, 0, grad_input=below.g)
        if self.bayesian:
            torch.mul(below.g, below.ratio, out=below.h)


class _FilmPass:
    """FiLM after one layer: it writes c m + b and c^2 v to where the layer reads its m and v."""

    def __init__(self, film: Sequence[Tensor], layer: _Layer) -> None:
        self.bayesian, self.out, self.out_variance = layer.bayesian, layer.out, layer.variance
        self.g, self.h, self.grads = layer.g, layer.h, film[2:]
        self.mean, self.variance = torch.empty_like(layer.out), torch.empty_like(layer.variance)  # m and v
        self.live = [t.unsqueeze(1) for t in film[:2]]
        self.rounded = film[0].dtype != layer.out.dtype
        self.scale, self.shift = (t.to(layer.out.dtype) for t in self.live)  # the same tensors, unless rounded
        self.square, self.scratch = torch.empty_like(self.scale), torch.empty_like(layer.out)

    def forward(self) -> None:
        if self.rounded:
            self.scale.copy_(self.live[0])
            self.shift.copy_(self.live[1])
        torch.addcmul(self.shift, self.mean, self.scale, out=self.out)
        if self.bayesian:
            torch.mul(self.scale, self.scale, out=self.square)
            torch.mul(self.variance, self.square, out=self.out_variance)

    def backward(self) -> None:
        if self.grads:
            torch.sum(self.g, 1, dtype=self.grads[1].dtype, out=self.grads[1])
            products = torch.mul(self.g, self.mean, out=self.scratch)
            torch.sum(products, 1, dtype=self.grads[0].dtype, out=self.grads[0])
            if self.bayesian:
                torch.mul(self.h, self.variance, out=self.scratch).mul_(self.scale)
                self.grads[0].add_(self.scratch.sum(1))
        self.g.mul_(self.scale)
        if self.bayesian:
            self.h.mul_(self.square)


class _Pass:
    """A chain's forward and backward pass for batches of one size."""

    def __init__(self, chain: Chain, size: int) -> None:
        values, grads = chain.rounded or chain.full
        replicas, y = range(values.shape[1]), chain.examples.y
        self.columns = chain.examples.columns
        self.inputs, self.targets = ([data[r % len(data)] for r in replicas] for data in (chain.x, y))
        x = values.new_empty(*values.shape[:2], size, chain.x.shape[2])
        self.layers: list[_Layer] = []
        for place, film in zip_longest(chain.places, chain.film):
            self.layers.append(_Layer(place, values, grads, x, self.layers[-1] if self.layers else None, film))
            x = self.layers[-1].y
        full, shape = chain.full[0], x.shape[1:]
        self.log_p, self.of_label = full.new_empty(shape), full.new_empty(*shape[:2], 1)
        self.labels = torch.empty(*shape[:2], 1, dtype=torch.long)
        self.minus, self.nll = full.new_full((*shape[:2], 1), -1.0), full.new_empty(shape[0])
        self.rows = torch.empty(*shape[:2], dtype=torch.long)
        batch = self.rows, self.layers[0].x, self.labels.squeeze(2)
        self.parts = list(zip(self.inputs, self.targets, *batch, strict=True))
        self.own = None if self.columns is None else torch.empty(*shape[:2], 2, dtype=torch.long)
        self.weights, self.counts = chain.examples.weights, full.new_ones(*shape[:2], 1)
        self.lessons = None if chain.lessons is None else LessonPass(chain.lessons, full.new_empty(shape))
        if self.lessons is not None:
            self.layers[-1].draw = self.lessons.draw
        self.beside = chain.beside
        written = self.beside is None and (len(values) == 2 or self.lessons is not None)  # in native.c
        self._bind(native() if values.dtype == torch.float32 and written else None)

    def _bind(self, compiled: Native | None) -> None:
        """Bind the passes of native.c, one per replica."""
        self.takes: list[Callable[[], None]] = []
        self.losses: list[Callable[[], None]] = []
        if compiled is None:
            return
        bottom, top = self.layers[0], self.layers[-1]
        for r, (x, _, rows, out, labels) in enumerate(self.parts):
            own = None if self.own is None else self.own[r]
            counts = None if self.weights is None else self.counts[r]
            variance = top.variance[r] if top.bayesian else None
            state = (labels, own, counts, self.nll[r], top.out[r], variance, top.ratio[r], top.g[r], top.h[r])
            if top.bayesian:
                self.takes.append(compiled.bind("take", *out.shape, rows, x, out, bottom.square[r]))
            if self.lessons is None:
                self.losses.append(compiled.bind("loss", *top.out.shape[1:], *state))
                continue
            one = self.lessons.of
            sizes, u = (*top.out.shape[1:], one.own, len(one.spans), one.strengths.dim() - 2), r % len(one.q)
            lesson = (rows, one.q[u], one.told[u], one.spans, one.temperature[r], one.strengths[r], one.value[r])
            self.losses.append(compiled.bind("loss_and_lessons", *sizes, *state, *lesson))

    def __call__(self, rows: Tensor, noise: Noise) -> Tensor:
        self._take(rows)
        top = self.layers[-1]
        for layer in self.layers:
            layer.activate(noise, layer is top)
        self._loss()
        top.differentiate()
        for previous, layer in zip(self.layers[-2::-1], self.layers[:0:-1], strict=True):
            layer.pass_on(previous)
            previous.differentiate()
        return self.nll

    def _take(self, rows: Tensor) -> None:
        self.rows.copy_(rows)
        for x, y, mine, out, labels in self.parts:
            torch.index_select(y, 0, mine, out=labels)
            if not self.takes:
                torch.index_select(x, 0, mine, out=out)
        for take in self.takes:
            take()
        bottom = self.layers[0]
        if bottom.bayesian and not self.takes:
            torch.mul(bottom.x, bottom.x, out=bottom.square)
        if self.columns is not None and self.own is not None:
            torch.index_select(self.columns, 0, self.rows.flatten(), out=self.own.view(-1, 2))
        if self.weights is not None:
            for r, mine in enumerate(self.rows):
                torch.index_select(self.weights[r % len(self.weights)], 0, mine, out=self.counts[r, :, 0])

    def _loss(self) -> None:
        """Compute the mean NLL, and g and h of the last layer."""
        top = self.layers[-1]
        for loss in self.losses:
            loss()
        if self.losses:
            return
        self.log_p.copy_(top.out)
        if self.lessons is not None:
            self.lessons.take(self.log_p, self.rows)
            self.log_p[..., self.lessons.of.own :] = -torch.inf
        if self.own is not None:
            self.log_p.masked_fill_(foreign(self.own, self.log_p.shape[2]), -torch.inf)
        torch.log_softmax(self.log_p, 2, out=self.log_p)
        torch.gather(self.log_p, 2, self.labels, out=self.of_label)
        if self.weights is not None:
            self.of_label.mul_(self.counts)
        torch.mean(self.of_label, (1, 2), out=self.nll).neg_()
        self.log_p.exp_().scatter_add_(2, self.labels, self.minus)
        if self.weights is not None:
            self.log_p.mul_(self.counts)
        self.log_p.div_(self.rows.shape[1])
        if self.lessons is not None:
            self.lessons.add_gradient(self.log_p)
        if self.beside is not None:
            self.log_p.add_(self.beside(top.out.to(self.log_p), self.rows))
        top.g.copy_(self.log_p)
        if top.bayesian:
            torch.mul(top.g, top.ratio, out=top.h)


def _each(flat: Tensor) -> list[Tensor]:
    """[S, R, ...] -> S * R parts."""
    return list(flat.flatten(0, 1).unbind(0))
