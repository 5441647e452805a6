"""`chain.py` and the update in few kernels, because on a GPU the number of kernels determines the time of a step.

There is one Triton kernel per matrix product, and it includes everything around the product. It reads the examples from
the data set in the order of the epoch, computes squares and noise where they are used, and applies what follows the
product before the result is stored. Neither the order nor the step number comes from the host, so a CUDA graph of steps
can be replayed. A replica's results do not depend on the other replicas, to the last bit: tiles depend only on a
layer's shape, and sums are never taken in an order that may change (except in the products of `WAYS["cublas"]`). Widths
are multiples of 16 bytes; a padded unit is always 0. `Chain` in chain.py and `Update` in training/rules.py do
the same in plain operations. The tests compare them, on a GPU or with Triton's interpreter.

In bf16, weights, data and intermediate results are stored in bf16. Sums, the loss, gradients of weights and the update
are float32, and the update writes the weights in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from evcl._core.randomness import DeviceNoise, Noise
from evcl.nn.chain import Batch, ChainData, Lessons, Place, up

BLOCK = 1024
# Integer arguments that Triton must not specialise on: it would compile variants for 1 and for multiples of 16.
NUMBER_ARGUMENTS = (
    "orders", "length", "own", "examples", "steps", "full", "size", "layer", "ins_a", "outs", "outs_a", "units", "width_a",
    "stride_a", "parts", "classes", "teachers", "heads",
)  # fmt: skip
MOST_CLASSES = 128  # the logits of a replica must fit in the columns of one tile


class Tile(NamedTuple):
    """What a Triton program computes of a product: at most `rows` x `columns`, adding `deep` terms at a time."""

    rows: int
    columns: int
    deep: int
    warps: int
    stages: int


# If `rows` is not a multiple of 64, the compiler uses matrix instructions that read operands in any order.
TILES = {
    "tf32": {
        "forward": Tile(64, 32, 32, 4, 4),  # of the first layer, which is the widest
        "hidden forward": Tile(64, 32, 32, 4, 3),
        "loss": Tile(64, MOST_CLASSES, 32, 4, 3),
        "back": Tile(32, 64, 32, 4, 3),
        "weights": Tile(32, 128, 32, 4, 3),  # of the first layer
        "hidden weights": Tile(32, 32, 64, 2, 3),
        "tall weights": Tile(64, 128, 32, 4, 4),
        "hidden tall weights": Tile(64, 64, 32, 4, 3),
    },
    "bf16": {
        "forward": Tile(64, 32, 64, 4, 4),
        "hidden forward": Tile(64, 32, 64, 4, 3),
        "loss": Tile(64, MOST_CLASSES, 64, 4, 3),
        "back": Tile(64, 64, 64, 4, 3),
        "tall weights": Tile(64, 128, 64, 4, 5),  # two of the stages are used to look up the rows
        "hidden tall weights": Tile(64, 64, 64, 4, 3),
    },
}
EXACT_TILE = Tile(64, 64, 16, 8, 3)  # for all kernels except the loss, without matrix units


class Way(NamedTuple):
    """How the gradients of a layer's weights are computed, which decides what is stored for them."""

    tall: bool = False  # the rows of a program are the layer's inputs, which pass through registers to be squared
    cublas: bool = False  # computed by torch (cuBLAS) from x and its square


WAYS = {"wide": Way(), "tall": Way(tall=True), "cublas": Way(cublas=True)}


def way(first: bool, place: Place, precision: str) -> Way:
    """Choose how the gradients of a layer's weights are computed.

    Matrix units take 16-bit operands in either order, but 32-bit ones only if the terms of the sum are adjacent in
    memory, and in a sum over examples they are a row apart. For large products, cuBLAS handles that better than `wide`.
    """
    if precision == "bf16":
        return WAYS["tall"]
    if precision == "tf32" and (first or min(place.ins, place.outs) >= 128):
        return WAYS["cublas"]
    return WAYS["wide"]


def fit(width: int, most: int) -> int:
    """A tile width that leaves little of the tile unused: 16 for widths up to 16, otherwise 32 to `most`."""
    if width <= 16:
        return 16
    covered = {size: triton.cdiv(width, size) * size for size in (256, 128, 64, 32) if size <= most}
    return next(size for size, all_ in covered.items() if all_ <= 1.25 * min(covered.values()))


@triton.jit
def normal(seed, step, layer, at):
    """Standard normal numbers, a function of the replica's seed, the step, the layer and the position in the layer."""
    zero = at * 0
    a, b, _, _ = tl.philox(seed, at, zero + step, zero + layer, zero, 7)
    z, _ = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b))
    return z


@triton.jit
def _forward(x, rows, present, weight, plane, o, outs, ins, kept, kept_plane, keeps, mine,
             KEEP: tl.constexpr, DRAW: tl.constexpr, PRECISION: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """x W and x^2 var(W), for the `rows` of x and the columns `o`; variances are stored `plane` numbers after the
    means.

    If `keeps`, it stores x and its square, for the gradients of the weights.
    """
    m = tl.zeros((ROWS, COLUMNS), tl.float32)
    v = tl.zeros((ROWS, COLUMNS), tl.float32)
    from_x = x + rows[:, None] * ins
    from_weight = weight + o[:, None] * ins
    for start in range(0, ins, DEEP):
        i = start + tl.arange(0, DEEP)
        a = tl.load(from_x + i[None, :], mask=present[:, None] & (i[None, :] < ins), other=0.0)
        inside = (o[:, None] < outs) & (i[None, :] < ins)
        w = tl.load(from_weight + i[None, :], mask=inside, other=0.0)
        m = tl.dot(a, w.T, m, input_precision=PRECISION)
        if DRAW:
            w = tl.load(from_weight + plane + i[None, :], mask=inside, other=0.0)
            v = tl.dot(a * a, w.T, v, input_precision=PRECISION)
        if KEEP:  # noqa: SIM102  (known to the compiler, unlike `keeps`)
            if keeps:
                to, stored = kept + mine[:, None] * ins + i[None, :], present[:, None] & (i[None, :] < ins)
                tl.store(to, a, mask=stored)
                if DRAW:
                    tl.store(to + kept_plane, a * a, mask=stored)
    return m, v


@triton.jit
def _batch(order, done, r, orders, length, steps, stride):
    """The start of the replica's example indices: a batch is the part of the order, of this length, that a step uses."""
    return order + (r % orders).to(tl.int64) * length + tl.load(done).to(tl.int32) % steps * stride


@triton.jit(do_not_specialize=NUMBER_ARGUMENTS)
def _activate(x, weight, bias, y, ratio, kept_x, kept_y, seeds, order, done, orders, length, own, examples, steps, full, size,
              layer, ins_a, outs_a, units, stride_a, ALIGN: tl.constexpr, FIRST: tl.constexpr,
              KEEP_X: tl.constexpr, KEEP_Y: tl.constexpr, DRAW: tl.constexpr, BIAS: tl.constexpr,
              PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """y = relu(m + b + eps s), s = sqrt(v + c); ratio = eps / s. The x of the first layer are the examples themselves."""
    ins, outs, stride = ins_a * ALIGN, outs_a * ALIGN, stride_a * ALIGN  # tells the compiler that they are multiples
    r = tl.program_id(1)
    tiles = tl.cdiv(outs, COLUMNS)
    b = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    present = b < size
    mine = r.to(tl.int64) * size + b
    rows = mine
    if FIRST:
        batch = _batch(order, done, r, orders, length, steps, full)
        rows = tl.load(batch + b, mask=present, other=0) + (r % own).to(tl.int64) * examples
    own_weight = r.to(tl.int64) * stride
    plane = tl.num_programs(1).to(tl.int64) * stride
    m, v = _forward(x, rows, present, weight + own_weight, plane, o, outs, ins,
                    kept_x, tl.num_programs(1).to(tl.int64) * size * ins, tl.program_id(0) % tiles == 0, mine,
                    KEEP_X, DRAW, PRECISION, ROWS, COLUMNS, DEEP)  # fmt: skip
    known = o < outs
    if BIAS:
        m += tl.load(bias + own_weight + o, mask=known, other=0.0).to(tl.float32)[None, :]
    at = mine[:, None] * outs + o[None, :]
    inside = present[:, None] & known[None, :]
    if DRAW:
        if BIAS:
            v += tl.load(bias + own_weight + plane + o, mask=known, other=0.0).to(tl.float32)[None, :]
        s = tl.sqrt(tl.where(v < 1e-30, 1e-30, v))
        eps = normal(tl.load(seeds + r % orders), tl.load(done).to(tl.int32), layer, b[:, None] * outs + o[None, :])
        eps = tl.where(o[None, :] < units, eps, 0.0)
        m += eps * s
        tl.store(ratio + at, eps / s, mask=inside)
    m = tl.where((o[None, :] >= units) | (m < 0.0), 0.0, m)  # NaN stays NaN
    tl.store(y + at, m, mask=inside)
    if KEEP_Y:
        tl.store(kept_y + at, m * m, mask=inside)


@triton.jit
def _lessons(z, c, q, told, inside, spans, warm, strengths, heads):
    """For each row, sum_k w_k T^2 KL(q || softmax(z_k / T)) and its gradient with respect to z."""
    z = z / warm
    q = tl.load(q + c[None, :], mask=inside, other=0.0)
    g = z * 0.0
    total = tl.sum(g, 1)
    for k in range(heads):
        mine = (c >= tl.load(spans + 2 * k)) & (c < tl.load(spans + 2 * k + 1))
        own = tl.where(mine[None, :], z, -float("inf"))
        top = tl.max(own, 1)
        e = tl.exp(own - top[:, None])
        whole = tl.sum(e, 1)
        cross = tl.sum(tl.where(mine[None, :], q * (z - top[:, None]), 0.0), 1) - tl.log(whole)
        weight = tl.load(strengths + k) * warm
        g += weight * tl.where(mine[None, :], e / whole[:, None] - q, 0.0)
        total += weight * warm * (tl.load(told + k) - cross)
    return g, total


@triton.jit(do_not_specialize=NUMBER_ARGUMENTS)
def _loss(x, weight, bias, labels, columns, gh, partial_nll, seeds, order, done, orders, length, own, examples, steps, full, size,
          layer, ins_a, outs, width_a, stride_a, q, told, spans, temperature, strengths, classes, teachers, heads,
          ALIGN: tl.constexpr, HEADS: tl.constexpr, LESSONS: tl.constexpr, DRAW: tl.constexpr,
          PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """The heads: logits, the sum of their NLL (one partial sum per program), and its gradients gh = (g, h).

    With LESSONS, the classes after the first `classes` belong to heads that are only distilled; the sum of the
    distillation loss is stored after the NLL.
    """
    ins, width, stride = ins_a * ALIGN, width_a * ALIGN, stride_a * ALIGN
    r = tl.program_id(1)
    own_weight = r.to(tl.int64) * stride
    plane = tl.num_programs(1).to(tl.int64) * stride
    c = tl.arange(0, COLUMNS)
    known = c < outs
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = b < size
    rows = r.to(tl.int64) * size + b
    source = tl.load(_batch(order, done, r, orders, length, steps, full) + b, mask=present, other=0)
    label = tl.load(labels + source + (r % own).to(tl.int64) * examples, mask=present, other=0)
    z, v = _forward(x, rows, present, weight + own_weight, plane, c, outs, ins, x, 0, False, rows,
                    False, DRAW, PRECISION, ROWS, COLUMNS, DEEP)  # fmt: skip
    z += tl.load(bias + own_weight + c, mask=known, other=0.0).to(tl.float32)[None, :]
    if DRAW:
        v += tl.load(bias + own_weight + plane + c, mask=known, other=0.0).to(tl.float32)[None, :]
        s = tl.sqrt(tl.where(v < 1e-30, 1e-30, v))
        # the data's heads draw the same noise with and without distilled heads
        own_layer = layer + (c[None, :] >= classes).to(tl.int32)
        at = tl.where(c[None, :] < classes, b[:, None] * classes, b[:, None] * (outs - classes) - classes) + c[None, :]
        eps = normal(tl.load(seeds + r % orders), tl.load(done).to(tl.int32), own_layer, at)
        z += eps * s
    open_ = known[None, :] & (b[:, None] >= 0)
    logits = z
    if LESSONS:
        open_ = open_ & (c[None, :] < classes)
    if HEADS:
        open_ = open_ & (c[None, :] >= tl.load(columns + 2 * source, mask=present, other=0)[:, None])
        open_ = open_ & (c[None, :] < tl.load(columns + 2 * source + 1, mask=present, other=1)[:, None])
    z = tl.where(open_, z, -float("inf"))
    hit = c[None, :] == label[:, None]
    top = tl.max(z, 1)
    e = tl.exp(z - top[:, None])
    whole = tl.sum(e, 1)
    nll = tl.where(present, tl.log(whole) + top - tl.sum(tl.where(hit, z, 0.0), 1), 0.0)
    tl.store(partial_nll + r * tl.num_programs(0) + tl.program_id(0), tl.sum(nll, 0))
    inside = present[:, None] & known[None, :]
    g = tl.where(inside, (e / whole[:, None] - tl.where(hit, 1.0, 0.0)) / size, 0.0)
    if LESSONS:
        heard, warm = (r % teachers).to(tl.int64) * examples + source, tl.load(temperature + r)
        more, taught = _lessons(logits, c, q + heard[:, None] * outs, told + heard * heads, inside, spans, warm,
                                strengths + r * heads, heads)  # fmt: skip
        g += tl.where(inside, more / size, 0.0)
        behind = partial_nll + (tl.num_programs(1) + r) * tl.num_programs(0) + tl.program_id(0)
        tl.store(behind, tl.sum(tl.where(present, taught, 0.0), 0))
    to = rows[:, None] * width + c[None, :]
    stored = present[:, None] & (c[None, :] < width)
    tl.store(gh + to, g, mask=stored)
    if DRAW:
        gh_plane = tl.num_programs(1).to(tl.int64) * size * width
        tl.store(gh + gh_plane + to, tl.where(inside, g * eps / s, 0.0), mask=stored)


@triton.jit(do_not_specialize=NUMBER_ARGUMENTS)
def _back(gh, weight, y, ratio, below, partial_nll, nll, total, taught, parts, size, ins_a, outs, width_a, stride_a,
          ALIGN: tl.constexpr, MOST_PARTS: tl.constexpr, LESSONS: tl.constexpr, DRAW: tl.constexpr, PRECISION: tl.constexpr,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """From the gh of a layer to that of the layer `below`, whose outputs are y.

    g = d_0 + y d_1 where y > 0, h = g ratio, with d the products of gh and the weights. For the heads, it also adds up
    the `parts` (at most MOST_PARTS) partial sums of the NLL in `partial_nll`, and those of the distillation in
    `taught`.
    """
    ins, width, stride = ins_a * ALIGN, width_a * ALIGN, stride_a * ALIGN
    r = tl.program_id(1)
    tiles = tl.cdiv(ins, COLUMNS)
    b = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    replicas = tl.num_programs(1).to(tl.int64)
    if MOST_PARTS > 0:  # noqa: SIM102
        if tl.program_id(0) == 0:
            p = tl.arange(0, MOST_PARTS)
            whole = tl.sum(tl.load(partial_nll + r * parts + p, mask=p < parts, other=0.0), 0)
            tl.store(nll + r, whole / size)
            tl.store(total + r, tl.load(total + r) + whole)
            if LESSONS:
                behind = partial_nll + (tl.num_programs(1) + r) * parts
                tl.store(taught + r, tl.sum(tl.load(behind + p, mask=p < parts, other=0.0), 0) / size)
    rows = r.to(tl.int64) * size + b
    present, known = b[:, None] < size, i[None, :] < ins
    from_gh = gh + rows[:, None] * width
    from_weight = weight + r.to(tl.int64) * stride + i[None, :]
    d = tl.zeros((ROWS, COLUMNS), tl.float32)
    d_square = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, outs, DEEP):
        o = start + tl.arange(0, DEEP)
        taken, inside = present & (o[None, :] < width), (o[:, None] < outs) & known
        g = tl.load(from_gh + o[None, :], mask=taken, other=0.0)
        w = tl.load(from_weight + o[:, None] * ins, mask=inside, other=0.0)
        d = tl.dot(g, w, d, input_precision=PRECISION)
        if DRAW:
            h = tl.load(from_gh + replicas * size * width + o[None, :], mask=taken, other=0.0)
            w = tl.load(from_weight + replicas * stride + o[:, None] * ins, mask=inside, other=0.0)
            d_square = tl.dot(h, w, d_square, input_precision=PRECISION)
    at = rows[:, None] * ins + i[None, :]
    out = tl.load(y + at, mask=present & known, other=0.0).to(tl.float32)
    if DRAW:
        d += out * d_square
    d = tl.where(out <= 0.0, 0.0, d)
    tl.store(below + at, d, mask=present & known)
    if DRAW:
        h = d * tl.load(ratio + at, mask=present & known, other=0.0).to(tl.float32)
        tl.store(below + replicas * size * ins + at, h, mask=present & known)


@triton.jit(do_not_specialize=NUMBER_ARGUMENTS)
def _weights(x, gh, grad, grad_bias, order, done, orders, length, own, examples, steps, full, size, ins_a, outs, width_a,
             stride_a, ALIGN: tl.constexpr, TALL: tl.constexpr, FIRST: tl.constexpr, BIAS: tl.constexpr,
             PRECISION: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """The gradients g^T x and sum g of a layer or, in the second half of the programs, h^T x^2 and sum h."""
    ins, width, stride = ins_a * ALIGN, width_a * ALIGN, stride_a * ALIGN
    r, square = tl.program_id(1), tl.program_id(2) == 1
    tiles = tl.cdiv(ins, INS)
    o = tl.program_id(0) // tiles * OUTS + tl.arange(0, OUTS)
    i = tl.program_id(0) % tiles * INS + tl.arange(0, INS)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + r
    once = tl.program_id(0) % tiles == 0
    batch = _batch(order, done, r, orders, length, steps, full)
    sums = tl.zeros((OUTS,), tl.float32)
    result = tl.zeros((INS, OUTS) if TALL else (OUTS, INS), tl.float32)
    for start in range(0, size, DEEP):
        b = start + tl.arange(0, DEEP)
        present = b < size
        rows = r.to(tl.int64) * size + b
        if FIRST:
            rows = tl.load(batch + b, mask=present, other=0) + (r % own).to(tl.int64) * examples
        a = tl.load(x + rows[:, None] * ins + i[None, :], mask=present[:, None] & (i[None, :] < ins), other=0.0)
        from_gh = gh + (part * size + b[:, None]) * width + o[None, :]
        g = tl.load(from_gh, mask=present[:, None] & (o[None, :] < width), other=0.0)
        a = tl.where(square, a * a, a)
        if TALL:
            result = tl.dot(a.T, g, result, input_precision=PRECISION)
        else:
            result = tl.dot(g.T, a, result, input_precision=PRECISION)
        if BIAS:  # noqa: SIM102
            if once:
                sums += tl.sum(g.to(tl.float32), 0)
    if TALL:
        result = result.T
    inside = (o[:, None] < outs) & (i[None, :] < ins)
    tl.store(grad + part * stride + o[:, None] * ins + i[None, :], result, mask=inside)
    if BIAS:  # noqa: SIM102
        if once:
            tl.store(grad_bias + part * stride + o, sums, mask=o < outs)


@triton.jit(do_not_specialize=NUMBER_ARGUMENTS)
def _sums(gh, grad_bias, size, outs, width_a, stride_a, ALIGN: tl.constexpr, OUTS: tl.constexpr, DEEP: tl.constexpr):
    """The sums of g and h over the examples, for layers whose products cuBLAS computes."""
    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    sums = tl.zeros((DEEP, OUTS), tl.float32)
    for start in range(0, size, DEEP):
        b = start + tl.arange(0, DEEP)
        at = (part * size + b[:, None]) * width_a * ALIGN + o[None, :]
        sums += tl.load(gh + at, mask=(b[:, None] < size) & (o[None, :] < width_a * ALIGN), other=0.0)
    tl.store(grad_bias + part * stride_a * ALIGN + o, tl.sum(sums, 0), mask=o < outs)


class Chain:
    """`chain.Chain` on a GPU, where a batch is part of an order; it adds the sum of its NLL to the batch's total.

    The pass is computed in the precision of `values`, float32 or bfloat16; `grads` are float32. Products of float32
    follow torch's current setting: TF32, or full precision.
    """

    def __init__(
        self, places: list[Place], values: Tensor, grads: Tensor, examples: ChainData, lessons: Lessons | None = None
    ) -> None:
        self.places, self.examples, self.values, self.grads, self.lessons = places, examples, values, grads, lessons
        x = examples.x.flatten(2).to(values.dtype)
        missing = places[0].ins - x.shape[2]
        self.x = F.pad(x, (0, missing)) if missing else x.contiguous()
        exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
        self.precision = "bf16" if values.dtype == torch.bfloat16 else "ieee" if exact else "tf32"
        self.align = aligned(values.dtype)
        self.ways = [way(layer == 0, place, self.precision) for layer, place in enumerate(places)]
        self.ways[-1] = self.ways[-1]._replace(cublas=False)  # the gh of the loss is narrow
        self.buffers: dict[int, _Buffers] = {}

    def __call__(self, batch: Batch, noise: Noise) -> Tensor:
        assert isinstance(noise, DeviceNoise)
        if batch.size not in self.buffers:
            self.buffers[batch.size] = _Buffers(self, batch.size)
        self._forward(self.buffers[batch.size], batch, noise.seeds)
        self._backward(self.buffers[batch.size], batch)
        return self.buffers[batch.size].nll

    def _forward(self, of: _Buffers, batch: Batch, seeds: Tensor) -> None:
        """The forward pass, up to the gradients of the logits."""
        copies, r, stride = self.values.shape
        x, labels, columns = self.x, self.examples.y, self.examples.columns
        common = {"ALIGN": self.align, "DRAW": copies == 2, "PRECISION": self._multiplied()}
        for layer, place in enumerate(self.places[:-1]):
            tile = self._tile("hidden forward" if layer else "forward")
            width = fit(place.outs, tile.columns)
            keep_x, keep_y = layer == 0 and self.ways[0].cublas, copies == 2 and self.ways[layer + 1].cublas
            _activate[(triton.cdiv(batch.size, tile.rows) * triton.cdiv(place.outs, width), r)](
                x, *_views(place, self.values), of.y[layer], of.ratio[layer], of.kept[0],
                of.kept[layer + 1][-1], seeds, *self._course(batch), layer, place.ins // self.align,
                place.outs // self.align, place.units, stride // self.align, FIRST=layer == 0, KEEP_X=keep_x, KEEP_Y=keep_y,
                BIAS=place.bias is not None, **common, **_options(tile, tile.rows, width, place.ins),
            )  # fmt: skip
            x = of.y[layer]
        place, (rows, width) = self.places[-1], self.loss_shape()
        _loss[(of.partial_nll.shape[2], r)](
            x, *_views(place, self.values), labels, labels if columns is None else columns, of.gh[-1], of.partial_nll,
            seeds, *self._course(batch), len(self.places) - 1, place.ins // self.align,
            place.outs, of.gh[-1].shape[3] // self.align, stride // self.align, *self._taught(), HEADS=columns is not None,
            LESSONS=self.lessons is not None, **common, **_options(self._tile("loss"), rows, width, place.ins),
        )  # fmt: skip

    def _backward(self, of: _Buffers, batch: Batch) -> None:
        (copies, r, stride), size, align = self.values.shape, batch.size, self.align
        for layer, place in reversed(list(enumerate(self.places))):
            self._differentiate(of, batch, layer, place)
            if layer:
                gh, tile, last = of.gh[layer], self._tile("back"), place is self.places[-1]
                width, parts = fit(place.ins, tile.columns), of.partial_nll.shape[2]
                taught = of.nll if self.lessons is None else self.lessons.value
                _back[(triton.cdiv(size, tile.rows) * triton.cdiv(place.ins, width), r)](
                    gh, _views(place, self.values)[0], of.y[layer - 1], of.ratio[layer - 1], of.gh[layer - 1],
                    of.partial_nll, of.nll, batch.total, taught, parts, size, place.ins // align, place.outs,
                    gh.shape[3] // align, stride // align, ALIGN=align, DRAW=copies == 2,
                    MOST_PARTS=triton.next_power_of_2(parts) if last else 0, LESSONS=last and self.lessons is not None,
                    PRECISION=self._multiplied(), **_options(tile, tile.rows, width, place.outs),
                )  # fmt: skip

    def _differentiate(self, of: _Buffers, batch: Batch, layer: int, place: Place) -> None:
        """The gradients of a layer's weights and biases."""
        (copies, r, stride), align, how, gh = self.values.shape, self.align, self.ways[layer], of.gh[layer]
        sizes, views = (gh.shape[3] // align, stride // align), _views(place, self.grads)
        if how.cublas:
            if place.bias is not None:
                _sums[(triton.cdiv(place.outs, 32), r, copies)](
                    gh, views[1], batch.size, place.outs, *sizes, ALIGN=align, OUTS=32, DEEP=64
                )
            views[0].flatten(0, 1).baddbmm_(gh.flatten(0, 1).mT, of.kept[layer].flatten(0, 1), beta=0)
            return
        tile = self._tile(("hidden " if layer else "") + ("tall " if how.tall else "") + "weights")
        outs, ins = (tile.columns, tile.rows) if how.tall else (tile.rows, tile.columns)
        outs, ins = fit(place.outs, outs), fit(place.ins, ins)
        x = of.y[layer - 1] if layer else self.x
        _weights[(triton.cdiv(place.outs, outs) * triton.cdiv(place.ins, ins), r, copies)](
            x, gh, *views, *self._course(batch), place.ins // align, place.outs, *sizes, ALIGN=align, TALL=how.tall,
            FIRST=layer == 0, BIAS=place.bias is not None, PRECISION=self._multiplied(), OUTS=outs, INS=ins,
            DEEP=tile.deep, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def loss_shape(self) -> tuple[int, int]:
        """Rows and columns of a program of the loss: all classes, and fewer rows if there are many classes."""
        width = triton.next_power_of_2(max(16, self.places[-1].outs))
        return min(self._tile("loss").rows, 4096 // width), width

    def _tile(self, kernel: str) -> Tile:
        exact = self.precision == "ieee"
        return EXACT_TILE if exact and kernel != "loss" else TILES["tf32" if exact else self.precision][kernel]

    def _multiplied(self) -> str:
        """The `input_precision` of tl.dot. For float32 it follows torch's setting; for bfloat16 tl.dot ignores it."""
        return "tf32" if self.precision == "bf16" else self.precision

    def _taught(self) -> tuple[Any, ...]:
        """The distillation arguments of the loss kernel; placeholder pointers if there is no distillation."""
        one, nothing = self.lessons, self.grads
        if one is None:
            return *[nothing] * 5, self.places[-1].outs, 1, 0
        return *one[:5], one.own, len(one.q), len(one.spans)

    def _course(self, batch: Batch) -> tuple[Any, ...]:
        """The arguments from which a kernel finds its examples."""
        sizes = *batch.order.shape, len(self.x), self.x.shape[1], batch.steps, batch.stride, batch.size
        return batch.order, batch.done, *sizes


def aligned(dtype: torch.dtype) -> int:
    """The number that widths must be multiples of: how many numbers fit in 16 bytes."""
    return 16 // dtype.itemsize


def _views(place: Place, flat: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's weights and biases; without biases, a placeholder pointer."""
    biases = place.biases(flat)
    return place.weights(flat), flat if biases is None else biases


def _options(tile: Tile, rows: int, columns: int, deep: int) -> dict[str, int]:
    return {
        "ROWS": rows, "COLUMNS": columns, "DEEP": tile.deep if deep > 16 else 16, "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip


class _Buffers:
    """The buffers of a chain's pass for batches of one size: y and ratio [R, size, outs], gh [S, R, size, outs].

    For layers whose gradients cuBLAS computes, `kept` holds the layer's x and its square [S, R, size, ins]; for others
    it is a placeholder.
    """

    def __init__(self, chain: Chain, size: int) -> None:
        (copies, r, _), new = chain.values.shape, chain.values.new_empty
        widths = [up(place.outs, chain.align) for place in chain.places]
        self.ratio = [new(r, size, width) for width in widths[:-1]]
        self.gh = [new(copies, r, size, width) for width in widths]
        parts, sums = triton.cdiv(size, chain.loss_shape()[0]), 1 if chain.lessons is None else 2
        self.nll = chain.grads.new_empty(r)
        self.partial_nll = chain.grads.new_empty(sums, r, parts)  # of the NLL and of the distillation loss
        self.kept = [
            new((copies, r, size, place.ins) if how.cublas else (1,))
            for place, how in zip(chain.places, chain.ways, strict=True)
        ]
        self.y = [
            kept[0] if how.cublas else new(r, size, width)
            for kept, how, width in zip(self.kept[1:], chain.ways[1:], widths, strict=False)
        ]


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x), without loss of precision near 0."""
    return tl.where(x > -0.1, -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5)))), 1 - tl.exp(x))


@triton.jit
def _adam(weight, g, first, second, rate, steps, at, inside):
    """The weights after a step of Adam."""
    m = 0.9 * tl.load(first + at, mask=inside) + (1 - 0.9) * g
    s = 0.999 * tl.load(second + at, mask=inside) + (1 - 0.999) * g * g
    unbiased = m / _one_minus_exp(steps * -0.10536051565782628)  # 1 - 0.9 ** steps
    root = tl.sqrt(s / _one_minus_exp(steps * -0.0010005003335835335)) + 1e-8  # 1 - 0.999 ** steps
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, s, mask=inside)
    return weight - rate * unbiased / root


@triton.jit
def _natural(w, measured, mean_variance, grad, rate, steps, v, k, s, d, u, at, inside, SQUARE: tl.constexpr):
    """The log sigmas after a natural step, and their variances."""
    newest = tl.where(steps < 1999, 2 / (steps + 1), 0.001)
    sum_ = tl.load(measured + at, mask=inside, other=0.0)
    sum_ += newest * (v * grad - sum_)
    all_ = tl.load(mean_variance + at, mask=inside, other=0.0)
    all_ += newest * (v - all_)
    tl.store(measured + at, sum_, mask=inside)
    tl.store(mean_variance + at, all_, mask=inside)
    h = tl.abs(sum_ / all_)
    weight = tl.load(k + at, mask=inside, other=1.0)
    stiff = weight + h
    if SQUARE:
        stiff += tl.load(d + at, mask=inside) * (v - tl.load(u + at, mask=inside))
    stiff = tl.where(stiff < 0.1 * weight, 0.1 * weight, stiff)
    ratio = weight / stiff * (tl.load(s + at, mask=inside, other=1.0) / v)
    move = 0.5 * rate * tl.log(ratio)
    new = w + move
    return new, tl.where(move == 0.0, v, tl.exp(2 * new))


@triton.jit
def _update(mean, first, second, rate, a, c, log_std, std_first, std_second, std_rate, variance, k, s, d, u, grad, rounded,
            count, counts, n, columns, RULE: tl.constexpr, MEAN: tl.constexpr, LINEAR: tl.constexpr,
            SQUARE: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    steps = tl.load(counts + program) + 1
    tl.store(counts + program, steps)
    if program == 0:
        tl.store(count, steps)  # no program reads `count`
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    row = at // columns
    weight = tl.load(mean + at, mask=inside)
    g = tl.load(grad + at, mask=inside)
    if MEAN:
        g += tl.load(a + at, mask=inside) * (weight - tl.load(c + at, mask=inside))
    weight = _adam(weight, g, first, second, tl.load(rate + row, mask=inside), steps, at, inside)
    tl.store(mean + at, weight, mask=inside)
    if ROUNDED:
        tl.store(rounded + at, weight, mask=inside)
    if RULE != "points":
        weight, g = tl.load(log_std + at, mask=inside), tl.load(grad + n + at, mask=inside)
        v, own_rate = tl.load(variance + at, mask=inside, other=1.0), tl.load(std_rate + row, mask=inside)
        if RULE == "natural":
            weight, v = _natural(weight, std_first, std_second, g, own_rate, steps, v, k, s, d, u, at, inside, SQUARE)
        else:
            g *= v
            if LINEAR:
                g += tl.load(k + at, mask=inside) * (v - tl.load(s + at, mask=inside))
            if SQUARE:
                g += tl.load(d + at, mask=inside) * v * (v - tl.load(u + at, mask=inside))
            weight = _adam(weight, g, std_first, std_second, own_rate, steps, at, inside)
            v = tl.exp(2 * weight)
        tl.store(log_std + at, weight, mask=inside)
        tl.store(variance + at, v, mask=inside)
        if ROUNDED:
            tl.store(rounded + n + at, v, mask=inside)


def update(
    states: Sequence[Sequence[Tensor]],
    natural: bool,
    rates: Sequence[Tensor],
    springs: Sequence[tuple[Tensor, Tensor] | None],
    grads: Tensor,
    variance: Tensor | None,
    rounded: Tensor | None,
    count: Tensor,
) -> tuple[Tensor, Callable[[], None]]:
    """The update of training/rules.py: counters of the steps taken, and a function that takes a step, counts it
    and sets `count`. Buffers are [R, P], rates [R, 1].

    `states` are the weights and Adam's moments and, if there are variances, the log sigmas and Adam's moments or, if
    `natural`, the two running means of the natural step. `springs` are the stiffness and centre of each of the mean,
    linear and square springs. New means and variances are also written to `rounded` [S, R, P], if given, in its dtype.
    """
    mean, std = [*states, ()][:2]
    weights, n = mean[0], mean[0].numel()
    (a, c), (k, s), (d, u) = (spring or (weights, weights) for spring in springs)
    rule = "points" if not std else "natural" if natural else "adam"
    own = (*std, weights, weights, weights)[:3]
    counts = weights.new_zeros(triton.cdiv(n, BLOCK))  # one per program, which cannot know when all others have read it
    pointers = (
        *mean, rates[0], a, c, *own, rates[-1], weights if variance is None else variance, k, s, d, u, grads,
        grads if rounded is None else rounded, count, counts,
    )  # fmt: skip
    given = {"MEAN": springs[0], "LINEAR": springs[1], "SQUARE": springs[2], "ROUNDED": rounded}
    constants = {"RULE": rule, "BLOCK": BLOCK, **{name: one is not None for name, one in given.items()}}

    def step() -> None:
        _update[(len(counts),)](*pointers, n, weights.shape[1], **constants)

    return counts, step
