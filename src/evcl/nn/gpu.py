"""`chain.py` and the update in few kernels: on a GPU a step is as long as its list of kernels.

One Triton kernel a product, with all that lies around it: the examples are read from the data set by the order of the
epoch, squares are taken and noise is drawn where they are used, and what follows a product is done to its result before
that is stored. Neither the order nor the number of the step comes from the host, so that a graph of steps can be
replayed. A replica's results depend on nothing that is beside it, to the last bit: tiles depend on a layer's shape
alone, and nothing is added up in an order that may change. Widths are multiples of four numbers, 16 bytes; a padded
unit is always 0. `Chain` in chain.py and `Update` in training/update.py are the same in plain operations; the tests
compare them, where there is a GPU or by Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from evcl.nn.chain import Batch, Examples, Place
from evcl.randomness import DeviceNoise, Noise

BLOCK = 1024
# Numbers of which the kernels need no versions: whether one is 1, or a multiple of 16, makes no difference to them.
NUMBERS = (
    "orders", "own", "examples", "steps", "full", "size", "layer", "ins4", "outs", "outs4", "units", "width4", "stride4",
)  # fmt: skip
MOST_CLASSES = 128  # a replica's logits are a tile's columns


class Tile(NamedTuple):
    """A program's part of a product: at most `rows` x `columns` of the result, `deep` of the sum at a time."""

    rows: int
    columns: int
    deep: int
    warps: int
    stages: int


# With rows that are no multiple of 64, the compiler takes the matrix instructions that read operands in any order.
TILES = {
    "forward": Tile(64, 32, 32, 4, 4),  # of the first layer, which is the widest
    "hidden forward": Tile(64, 32, 32, 4, 3),
    "loss": Tile(256, MOST_CLASSES, 32, 8, 3),
    "back": Tile(32, 64, 32, 4, 3),
    "weights": Tile(32, 128, 32, 4, 3),  # of the first layer
    "hidden weights": Tile(32, 32, 64, 2, 3),
}
EXACT = Tile(64, 64, 16, 8, 3)  # of all but the loss, without matrix units


def fit(width: int, most: int) -> int:
    """The width of tiles that leave little of themselves empty: 16 for what is no wider, or 32 to `most`."""
    if width <= 16:
        return 16
    covered = {size: triton.cdiv(width, size) * size for size in (256, 128, 64, 32) if size <= most}
    return next(size for size, all_ in covered.items() if all_ <= 1.25 * min(covered.values()))


@triton.jit
def normal(seed, step, layer, at):
    """Standard normal numbers, a function of the replica's seed, the step, the layer and the place in it."""
    zero = at * 0
    a, b, _, _ = tl.philox(seed, at, zero + step, zero + layer, zero, 7)
    z, _ = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b))
    return z


@triton.jit
def _dot(a, b, to, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        to = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), to)
    else:
        to = tl.dot(a, b, to, input_precision=PRECISION)
    return to


@triton.jit
def _forward(x, rows, present, weight, plane, o, outs, ins, DRAW: tl.constexpr, PRECISION: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """x W and x^2 var(W), for the `rows` of x and the columns `o`; variances lie a `plane` behind the means."""
    m = tl.zeros((ROWS, COLUMNS), tl.float32)
    v = tl.zeros((ROWS, COLUMNS), tl.float32)
    from_x = x + rows[:, None] * ins
    from_weight = weight + o[:, None] * ins
    for start in range(0, ins, DEEP):
        i = start + tl.arange(0, DEEP)
        a = tl.load(from_x + i[None, :], mask=present[:, None] & (i[None, :] < ins), other=0.0)
        inside = (o[:, None] < outs) & (i[None, :] < ins)
        m = _dot(a, tl.load(from_weight + i[None, :], mask=inside, other=0.0).T, m, PRECISION)
        if DRAW:
            v = _dot(a * a, tl.load(from_weight + plane + i[None, :], mask=inside, other=0.0).T, v, PRECISION)
    return m, v


@triton.jit
def _batch(order, done, r, orders, examples, steps, stride):
    """Where the numbers of the replica's examples begin: a batch is a step's part of the order."""
    return order + (r % orders).to(tl.int64) * examples + tl.load(done).to(tl.int32) % steps * stride


@triton.jit(do_not_specialize=NUMBERS)
def _activate(x, weight, bias, y, ratio, seeds, order, done, orders, own, examples, steps, full, size, layer,
              ins4, outs4, units, stride4, FIRST: tl.constexpr, DRAW: tl.constexpr, BIAS: tl.constexpr,
              PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """y = relu(m + b + eps s), s = sqrt(v + c); ratio = eps / s. The first layer's x are the examples themselves."""
    ins, outs, stride = ins4 * 4, outs4 * 4, stride4 * 4  # so the compiler knows what they are multiples of
    r = tl.program_id(1)
    tiles = tl.cdiv(outs, COLUMNS)
    b = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    present = b < size
    mine = r.to(tl.int64) * size + b
    rows = mine
    if FIRST:
        batch = _batch(order, done, r, orders, examples, steps, full)
        rows = tl.load(batch + b, mask=present, other=0) + (r % own).to(tl.int64) * examples
    own_weight = r.to(tl.int64) * stride
    plane = tl.num_programs(1).to(tl.int64) * stride
    m, v = _forward(x, rows, present, weight + own_weight, plane, o, outs, ins, DRAW, PRECISION, ROWS, COLUMNS, DEEP)
    known = o < outs
    if BIAS:
        m += tl.load(bias + own_weight + o, mask=known, other=0.0)[None, :]
    at = mine[:, None] * outs + o[None, :]
    inside = present[:, None] & known[None, :]
    if DRAW:
        if BIAS:
            v += tl.load(bias + own_weight + plane + o, mask=known, other=0.0)[None, :]
        s = tl.sqrt(tl.where(v < 1e-30, 1e-30, v))
        eps = normal(tl.load(seeds + r % orders), tl.load(done).to(tl.int32), layer, b[:, None] * outs + o[None, :])
        eps = tl.where(o[None, :] < units, eps, 0.0)
        m += eps * s
        tl.store(ratio + at, eps / s, mask=inside)
    tl.store(y + at, tl.where((o[None, :] >= units) | (m < 0.0), 0.0, m), mask=inside)  # NaN stays NaN


@triton.jit(do_not_specialize=NUMBERS)
def _loss(x, weight, bias, labels, columns, gh, nll, total, seeds, order, done, orders, own, examples, steps, full,
          size, layer, ins4, outs, width4, stride4, HEADS: tl.constexpr, DRAW: tl.constexpr,
          PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """The heads: logits, their NLL and its gradients gh = (g, h); one replica a program."""
    ins, width, stride = ins4 * 4, width4 * 4, stride4 * 4
    r = tl.program_id(0)
    own_weight = r.to(tl.int64) * stride
    plane = tl.num_programs(0).to(tl.int64) * stride
    gh_plane = tl.num_programs(0).to(tl.int64) * size * width
    c = tl.arange(0, COLUMNS)
    known = c < outs
    shift = tl.load(bias + own_weight + c, mask=known, other=0.0)
    batch = _batch(order, done, r, orders, examples, steps, full)
    lost = tl.zeros((ROWS,), tl.float32)
    for start in range(0, size, ROWS):
        b = start + tl.arange(0, ROWS)
        present = b < size
        rows = r.to(tl.int64) * size + b
        z, v = _forward(
            x, rows, present, weight + own_weight, plane, c, outs, ins, DRAW, PRECISION, ROWS, COLUMNS, DEEP
        )
        z += shift[None, :]
        if DRAW:
            v += tl.load(bias + own_weight + plane + c, mask=known, other=0.0)[None, :]
            s = tl.sqrt(tl.where(v < 1e-30, 1e-30, v))
            at = b[:, None] * outs + c[None, :]
            eps = normal(tl.load(seeds + r % orders), tl.load(done).to(tl.int32), layer, at)
            z += eps * s
        source = tl.load(batch + b, mask=present, other=0)
        open_ = known[None, :] & (b[:, None] >= 0)
        if HEADS:
            open_ = open_ & (c[None, :] >= tl.load(columns + 2 * source, mask=present, other=0)[:, None])
            open_ = open_ & (c[None, :] < tl.load(columns + 2 * source + 1, mask=present, other=1)[:, None])
        z = tl.where(open_, z, -float("inf"))
        label = tl.load(labels + source + (r % own).to(tl.int64) * examples, mask=present, other=0)
        hit = c[None, :] == label[:, None]
        top = tl.max(z, 1)
        e = tl.exp(z - top[:, None])
        whole = tl.sum(e, 1)
        lost += tl.where(present, tl.log(whole) + top - tl.sum(tl.where(hit, z, 0.0), 1), 0.0)
        inside = present[:, None] & known[None, :]
        g = tl.where(inside, (e / whole[:, None] - tl.where(hit, 1.0, 0.0)) / size, 0.0)
        to = rows[:, None] * width + c[None, :]
        stored = present[:, None] & (c[None, :] < width)
        tl.store(gh + to, g, mask=stored)
        if DRAW:
            tl.store(gh + gh_plane + to, tl.where(inside, g * eps / s, 0.0), mask=stored)
    whole_loss = tl.sum(lost, 0)
    tl.store(nll + r, whole_loss / size)
    tl.store(total + r, tl.load(total + r) + whole_loss)


@triton.jit(do_not_specialize=NUMBERS)
def _back(gh, weight, y, ratio, below, size, ins4, outs, width4, stride4, DRAW: tl.constexpr,
          PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """From a layer's gh to those of the layer `below`, whose outputs are y.

    g = d_0 + y d_1 where y > 0, h = g ratio, with d the products of gh and the weights.
    """
    ins, width, stride = ins4 * 4, width4 * 4, stride4 * 4
    r = tl.program_id(1)
    tiles = tl.cdiv(ins, COLUMNS)
    b = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    replicas = tl.num_programs(1).to(tl.int64)
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
        d = _dot(g, tl.load(from_weight + o[:, None] * ins, mask=inside, other=0.0), d, PRECISION)
        if DRAW:
            h = tl.load(from_gh + replicas * size * width + o[None, :], mask=taken, other=0.0)
            variance = tl.load(from_weight + replicas * stride + o[:, None] * ins, mask=inside, other=0.0)
            d_square = _dot(h, variance, d_square, PRECISION)
    at = rows[:, None] * ins + i[None, :]
    out = tl.load(y + at, mask=present & known, other=0.0)
    if DRAW:
        d += out * d_square
    d = tl.where(out <= 0.0, 0.0, d)
    tl.store(below + at, d, mask=present & known)
    if DRAW:
        h = d * tl.load(ratio + at, mask=present & known, other=0.0)
        tl.store(below + replicas * size * ins + at, h, mask=present & known)


@triton.jit(do_not_specialize=NUMBERS)
def _weights(x, gh, grad, grad_bias, order, done, orders, own, examples, steps, full, size, ins4, outs, width4,
             stride4, FIRST: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """The gradients g^T x and sum g of a layer or, in the second half of the programs, h^T x^2 and sum h."""
    ins, width, stride = ins4 * 4, width4 * 4, stride4 * 4
    r, square = tl.program_id(1), tl.program_id(2) == 1
    tiles = tl.cdiv(ins, COLUMNS)
    o = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + r
    from_gh = gh + part * size * width + o[None, :]
    batch = _batch(order, done, r, orders, examples, steps, full)
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    sums = tl.zeros((DEEP, ROWS), tl.float32)
    for start in range(0, size, DEEP):
        b = start + tl.arange(0, DEEP)
        present = b < size
        rows = r.to(tl.int64) * size + b
        if FIRST:
            rows = tl.load(batch + b, mask=present, other=0) + (r % own).to(tl.int64) * examples
        a = tl.load(x + rows[:, None] * ins + i[None, :], mask=present[:, None] & (i[None, :] < ins), other=0.0)
        a = tl.where(square, a * a, a)
        g = tl.load(from_gh + b[:, None] * width, mask=present[:, None] & (o[None, :] < width), other=0.0)
        result = _dot(g.T, a, result, PRECISION)
        if BIAS:
            sums += g
    inside = (o[:, None] < outs) & (i[None, :] < ins)
    tl.store(grad + part * stride + o[:, None] * ins + i[None, :], result, mask=inside)
    if BIAS:
        once = (o < outs) & (tl.program_id(0) % tiles == 0)
        tl.store(grad_bias + part * stride + o, tl.sum(sums, 0), mask=once)


class Chain:
    """`chain.Chain` on a GPU, where a batch is part of an order; it adds the sum of its NLL to the batch's total.

    float32 is multiplied as torch does it at the moment: in TF32, or exactly.
    """

    def __init__(
        self, places: list[Place], values: Tensor, grads: Tensor, examples: Examples, low: torch.dtype | None
    ) -> None:
        self.places, self.examples, self.values, self.grads = places, examples, values, grads
        x = examples.x.flatten(2).to(values.dtype)
        missing = places[0].ins - x.shape[2]
        self.x = F.pad(x, (0, missing)) if missing else x.contiguous()
        exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
        self.precision = "bf16" if low is not None else "ieee" if exact else "tf32"
        self.buffers: dict[int, _Buffers] = {}

    def __call__(self, batch: Batch, noise: Noise) -> Tensor:
        assert isinstance(noise, DeviceNoise)
        if batch.size not in self.buffers:
            self.buffers[batch.size] = _Buffers(self, batch.size)
        self._forward(self.buffers[batch.size], batch, noise.seeds)
        self._backward(self.buffers[batch.size], batch)
        return self.buffers[batch.size].nll

    def _forward(self, of: _Buffers, batch: Batch, seeds: Tensor) -> None:
        """All the way to the gradients of the logits."""
        copies, r, stride = self.values.shape
        x, labels, columns = self.x, self.examples.y, self.examples.columns
        common = {"DRAW": copies == 2, "PRECISION": self.precision}
        for layer, place in enumerate(self.places[:-1]):
            tile = self._tile("hidden forward" if layer else "forward")
            width = fit(place.outs, tile.columns)
            _activate[(triton.cdiv(batch.size, tile.rows) * triton.cdiv(place.outs, width), r)](
                x, *_views(place, self.values), of.y[layer], of.ratio[layer], seeds,
                *self._course(batch), layer, place.ins // 4, place.outs // 4, place.units, stride // 4,
                FIRST=layer == 0, BIAS=place.bias is not None, **common, **_options(tile, tile.rows, width, place.ins),
            )  # fmt: skip
            x = of.y[layer]
        place, tile = self.places[-1], TILES["loss"]
        width = triton.next_power_of_2(max(16, place.outs))
        rows = min(tile.rows, 8192 // width)
        _loss[(r,)](
            x, *_views(place, self.values), labels, labels if columns is None else columns, of.gh[-1], of.nll,
            batch.total, seeds, *self._course(batch), len(self.places) - 1, place.ins // 4,
            place.outs, of.gh[-1].shape[3] // 4, stride // 4,
            HEADS=columns is not None, **common, **_options(tile, rows, width, place.ins),
        )  # fmt: skip

    def _backward(self, of: _Buffers, batch: Batch) -> None:
        (copies, r, stride), size = self.values.shape, batch.size
        for layer, place in reversed(list(enumerate(self.places))):
            gh, x = of.gh[layer], of.y[layer - 1] if layer else self.x
            numbers = place.ins // 4, place.outs, gh.shape[3] // 4, stride // 4
            tile = self._tile("hidden weights" if layer else "weights")
            rows, width = fit(place.outs, tile.rows), fit(place.ins, tile.columns)
            _weights[(triton.cdiv(place.outs, rows) * triton.cdiv(place.ins, width), r, copies)](
                x, gh, *_views(place, self.grads), *self._course(batch), *numbers,
                FIRST=layer == 0, BIAS=place.bias is not None, PRECISION=self.precision,
                **_options(tile, rows, width, tile.deep),
            )  # fmt: skip
            if layer:
                tile = self._tile("back")
                width = fit(place.ins, tile.columns)
                _back[(triton.cdiv(size, tile.rows) * triton.cdiv(place.ins, width), r)](
                    gh, _views(place, self.values)[0], x, of.ratio[layer - 1], of.gh[layer - 1], size, *numbers,
                    DRAW=copies == 2, PRECISION=self.precision, **_options(tile, tile.rows, width, place.outs),
                )  # fmt: skip

    def _tile(self, kernel: str) -> Tile:
        return EXACT if self.precision == "ieee" else TILES[kernel]

    def _course(self, batch: Batch) -> tuple[Any, ...]:
        """What a kernel finds its examples by."""
        sizes = len(batch.order), len(self.x), self.x.shape[1], batch.steps, batch.stride, batch.size
        return batch.order, batch.done, *sizes


def _views(place: Place, flat: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's weights and biases; of those, something to point at where there are none."""
    biases = place.biases(flat)
    return place.weights(flat), flat if biases is None else biases


def _options(tile: Tile, rows: int, columns: int, deep: int) -> dict[str, int]:
    return {
        "ROWS": rows, "COLUMNS": columns, "DEEP": tile.deep if deep > 16 else 16, "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip


class _Buffers:
    """What a chain's pass writes for batches of one size: y and ratio [R, size, outs], gh [S, R, size, outs]."""

    def __init__(self, chain: Chain, size: int) -> None:
        copies, r, _ = chain.values.shape
        widths = [-(-place.outs // 4) * 4 for place in chain.places]
        self.y, self.ratio = ([chain.values.new_empty(r, size, width) for width in widths[:-1]] for _ in range(2))
        self.gh = [chain.values.new_empty(copies, r, size, width) for width in widths]
        self.nll = chain.values.new_empty(r)


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x), without the loss of digits near 0."""
    return tl.where(x > -0.1, -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5)))), 1 - tl.exp(x))


@triton.jit
def _update(w, first, second, grad, count, lr, v, a, c, d, u, n, columns,
            LINEAR: tl.constexpr, SQUARE: tl.constexpr, STD: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    weight = tl.load(w + at, mask=inside)
    g = tl.load(grad + at, mask=inside)
    z = weight
    if STD:
        z = tl.load(v + at, mask=inside)
        g *= z
    if LINEAR:
        g += tl.load(a + at, mask=inside) * (z - tl.load(c + at, mask=inside))
    if SQUARE:
        g += tl.load(d + at, mask=inside) * z * (z - tl.load(u + at, mask=inside))
    steps = tl.load(count)
    m = 0.9 * tl.load(first + at, mask=inside) + (1 - 0.9) * g
    s = 0.999 * tl.load(second + at, mask=inside) + (1 - 0.999) * g * g
    unbiased = m / _one_minus_exp(steps * -0.10536051565782628)  # 1 - 0.9 ** steps
    root = tl.sqrt(s / _one_minus_exp(steps * -0.0010005003335835335)) + 1e-8  # 1 - 0.999 ** steps
    weight -= tl.load(lr + at // columns, mask=inside) * unbiased / root
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, s, mask=inside)
    tl.store(w + at, weight, mask=inside)
    if STD:
        tl.store(v + at, tl.exp(2 * weight), mask=inside)


def update(
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    count: Tensor,
    lr: Tensor,
    grad: Tensor,
    variance: Tensor | None,
    springs: Any,
) -> None:
    """Adam on means (`variance` None) or log sigmas, the pull included; `lr` is [R, 1]. All buffers are [R, P].

    `springs` are the stiffness and centre of each part of the pull: the mean's, or the linear and the square one.
    """
    n = weights.numel()
    linear, square = springs[0], springs[1] if len(springs) > 1 else None
    a, c = linear or (weights, weights)
    d, u = square or (weights, weights)
    _update[(triton.cdiv(n, BLOCK),)](
        weights, first, second, grad, count, lr, weights if variance is None else variance, a, c, d, u, n,
        weights.shape[1], LINEAR=linear is not None, SQUARE=square is not None, STD=variance is not None, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _natural(
    w, curvature, grad, count, rate, variance, k, s, d, u, n, columns, SQUARE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(variance + at, mask=inside, other=1.0)
    h = 0.999 * tl.load(curvature + at, mask=inside) + (1 - 0.999) * tl.load(grad + at, mask=inside)
    tl.store(curvature + at, h, mask=inside)
    weight = tl.load(k + at, mask=inside, other=1.0)
    unbiased = h / _one_minus_exp(tl.load(count) * -0.0010005003335835335)  # 1 - 0.999 ** steps
    stiff = weight + tl.where(unbiased < 0.0, 0.0, unbiased)  # NaN stays NaN
    if SQUARE:
        stiff += tl.load(d + at, mask=inside) * (v - tl.load(u + at, mask=inside))
    stiff = tl.where(stiff < 0.1 * weight, 0.1 * weight, stiff)
    ratio = weight / stiff * (tl.load(s + at, mask=inside, other=1.0) / v)
    move = 0.5 * tl.load(rate + at // columns, mask=inside) * tl.log(ratio)
    new = tl.load(w + at, mask=inside) + move
    tl.store(w + at, new, mask=inside)
    tl.store(variance + at, tl.where(move == 0.0, v, tl.exp(2 * new)), mask=inside)


def natural(
    weights: Tensor, curvature: Tensor, count: Tensor, rate: Tensor, grad: Tensor, variance: Tensor, springs: Any
) -> None:
    """The natural step of training/update.py; `rate` is [R, 1]."""
    n, (k, s) = weights.numel(), springs[0]
    d, u = springs[1] or (weights, weights)
    _natural[(triton.cdiv(n, BLOCK),)](
        weights, curvature, grad, count, rate, variance, k, s, d, u, n, weights.shape[1],
        SQUARE=springs[1] is not None, BLOCK=BLOCK,
    )  # fmt: skip
