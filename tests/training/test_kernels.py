"""Triton's kernels against plain operations: on a GPU or, without one, by Triton's interpreter (see conftest.py)."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from evcl._core.randomness import DeviceNoise
from evcl._core.settings import resolve
from evcl.methods import METHODS, Distillation, Spring, Springs
from evcl.nn import Gaussian
from evcl.nn.chain import Batch, Chain, find_chain, find_places, padded
from evcl.training import Pool, Run, TaskData, matmul_precision
from evcl.training.data import find_lessons
from evcl.training.rules import Update, gpu_kernels
from evcl.training.run import stack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.importorskip("triton", reason="needs Triton, which make test-all installs on Linux")
tl = triton.language
normal = gpu_kernels().normal

if DEVICE == "cpu":
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    plain_dot, plain_mul, plain_cast = builder.create_dot, builder.create_fmul, builder.cast_impl

    def patch_index(tensor, scope):
        """The interpreter takes int() of arrays of one number, which numpy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def cast(self, src, to):
        """To bf16 the interpreter cuts digits off, where a GPU rounds."""
        if src.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            found = torch.from_numpy(src.data.copy()).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(found, tl.bfloat16)
        return plain_cast(self, src, to)

    def single(self, *operands):
        """The interpreter keeps bf16 as 16-bit integers, and would multiply those."""
        return [self.cast_impl(t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in operands]

    def dot(self, a, b, d, *rest):
        return plain_dot(self, *single(self, a, b), d, *rest)

    def mul(self, a, b):
        product = plain_mul(self, *single(self, a, b))
        return self.cast_impl(product, a.dtype) if a.dtype.scalar == tl.bfloat16 else product

    interpreter._patch_lang_tensor = patch_index
    builder.create_dot, builder.create_fmul, builder.cast_impl = dot, mul, cast


@triton.jit
def drawn(out, seeds, step, layer, orders, n, BLOCK: tl.constexpr):
    r = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + r * n + at, normal(tl.load(seeds + r % orders), step, layer, at), mask=at < n)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Handed:
    """The noise that the kernels draw, layer by layer, for plain operations; widths are multiples of `align`."""

    def __init__(self, seeds, step, layers, align, own=None):
        """`own` classes of the data's heads: those of others are one layer more."""
        self.seeds, self.step, self.layers, self.layer, self.align = seeds, step, layers, 0, align
        self.own = own

    def normal_(self, out):
        last = self.layer >= self.layers - 1
        if self.layer == self.layers - 1 and self.own not in (None, out.shape[2]):
            for part in (out[..., : self.own], out[..., self.own :]):
                self.normal_(part)
                self.own = None
            return out
        width = out.shape[2] if last else -(-out.shape[2] // self.align) * self.align  # not the heads
        found = torch.empty(*out.shape[:2], width, device=DEVICE)
        n = found[0].numel()
        grid, orders = (triton.cdiv(n, 1024), len(found)), len(self.seeds)
        drawn[grid](found, self.seeds, self.step, self.layer, orders, n, BLOCK=1024)
        self.layer += 1
        return out.copy_(found[..., : out.shape[2]])


def low(t):
    """In bf16's numbers."""
    return t.bfloat16().to(t.dtype)


class Case:
    """R replicas, V orders and U sets of data; a chain of kernels and a plain one, on the same values."""

    def __init__(
        self, r=3, v=3, u=1, hidden=(44, 30), heads=1, bayesian=True, bias=True, ins=37, examples=90, taught=()
    ):
        """Heads that are `taught`, a number of classes each, are more than those of the data; the first of those is
        taught too.
        """
        linear = partial(torch.nn.utils.skip_init, torch.nn.Linear, bias=bias)
        layers = [m for i, o in zip((ins, *hidden), hidden, strict=False) for m in (linear(i, o), torch.nn.ReLU())]
        method = METHODS["evcl" if bayesian else "ewc"]
        settings = [resolve(method.name, method.known_settings, {"init_std": 0.1} if bayesian else {})] * r
        run = Run(torch.nn.Sequential(*layers), method, settings, range(r), draw=True, device=DEVICE)
        self.tasks = []
        for k in range(heads):
            x = draw(u, ins, examples, seed=k).mT  # of another stride than the kernels want
            y = torch.arange(examples, device=DEVICE).expand(u, examples) % (2 + k)
            self.tasks.append(TaskData(x, y, run.add_head(hidden[-1], 2 + k)))
        self.run, self.layers, self.bayesian, self.heads = run, len(hidden) + 1, bayesian, range(heads)
        n = heads * examples
        self.losses = []
        if taught:
            self.heads = [*self.heads, *(run.add_head(hidden[-1], classes) for classes in taught)]
            said = [draw(r, n, k, seed=k).log_softmax(2) for k in taught]
            said.append(draw(1, n, 2, seed=9).log_softmax(2))
            weights = [draw(r, 1, seed=k).abs() for k in range(len(said))]
            self.losses = [Distillation(said, 1 + draw(r, 1).abs(), weights, [*self.heads[heads:], 0])]
        self.order = draw(v, n, seed=5).argsort(1)
        self.seeds = torch.arange(v, device=DEVICE) * 2**61 + 12345
        self.total = torch.full((r,), 2.0, device=DEVICE)

    def batch(self, size=70, done=5):
        """The second batch of two; `done` counts across epochs."""
        done = torch.tensor(float(done), device=DEVICE)
        return Batch(self.order, done, 2, self.order.shape[1] - size, size, self.total)

    def values(self, part, device, dtype):
        layout, posterior = self.run.network.layout, self.run.network.posterior
        mean = layout.gather(posterior.mean, part).to(device, dtype)
        if not self.bayesian:
            return mean.unsqueeze(0)
        return torch.stack([mean, (2 * layout.gather(posterior.log_std, part).to(device, dtype)).exp()])

    def part(self, align=1):
        layout, names = self.run.network.layout, self.run.network.names_of(self.heads)
        found = find_chain(self.run.network, self.tasks[0].x)
        return layout.part(names, padded(found, layout, self.heads, align), align)

    def places(self, part):
        return find_places(find_chain(self.run.network, self.tasks[0].x), part, self.heads)

    def by_kernels(self, batch, precision="fp32", align=4):
        """(nll, grads [S, R, P]), in a padded layout."""
        part = self.part(align)
        values = self.values(part, DEVICE, torch.float32).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        grads = torch.full_like(values, 7.0, dtype=torch.float32)
        noise = DeviceNoise(torch.Generator(DEVICE), self.seeds)
        with matmul_precision(precision):
            pool = Pool(self.tasks, self.run.classes)
            lessons = find_lessons(self.losses, pool, self.run.classes, grads[0], None)
            chain = gpu_kernels().Chain(self.places(part), values, grads, pool, lessons)
            nll = chain(batch, noise)
            self.value = None if lessons is None else lessons.value
            return nll, grads

    def plainly(self, batch):
        """The same in float64 on the CPU, in the plain layout."""
        part = self.part()
        values = self.values(part, "cpu", torch.float64)
        grads = torch.full_like(values, 7.0)
        pool = Pool([TaskData(t.x.cpu().double(), t.y.cpu(), t.head) for t in self.tasks], self.run.classes)
        noise = Handed(self.seeds, int(batch.done), self.layers, 4, pool.classes)
        lessons = find_lessons(self.losses, pool, self.run.classes, values[0], None)
        nll = Chain(self.places(part), values, grads, pool, None, lessons)(batch.rows().cpu(), noise)
        self.plain_value = None if lessons is None else lessons.value
        return nll, grads

    def rounded(self, batch):
        """The same in float64 in a layout for bf16, where all that the kernels store in bf16 is rounded to it."""
        part, noise = self.part(8), Handed(self.seeds, int(batch.done), self.layers, 8)
        values, places, pool = (
            self.values(part, "cpu", torch.float64),
            self.places(part),
            Pool(self.tasks, self.run.classes),
        )
        values, grads = low(values), torch.zeros_like(values)
        rows, seen = batch.rows(), []
        x, y = (t.cpu() for t in TaskData(pool.x, pool.y, -1).take(rows))
        x = torch.nn.functional.pad(low(x.double()), (0, places[0].ins - x.shape[2]))
        for place in places:
            (w, *var_w), (b, *var_b) = place.weights(values), place.biases(values)
            z, ratio = x @ w.mT + b.unsqueeze(1), None
            if self.bayesian:
                s = (low(x * x) @ var_w[0].mT + var_b[0].unsqueeze(1)).clamp_min(1e-30).sqrt()
                eps = noise.normal_(torch.empty_like(z)) * (torch.arange(place.outs) < place.units)
                z, ratio = z + eps * s, low(eps / s)
            seen.append((x, ratio))
            x = low(z.relu())
        own = torch.nn.functional.one_hot(y, z.shape[2]).double()
        g = (z.softmax(2) - own) / batch.size
        nll = -(z.log_softmax(2) * own).sum(2).mean(1)
        d = g if not self.bayesian else torch.stack([g, g * eps / s])  # the loss has its own ratio, in full
        gh = low(d if self.bayesian else d.unsqueeze(0))
        for k in reversed(range(len(places))):
            x, place = seen[k][0], places[k]
            place.weights(grads).copy_(gh.mT @ torch.stack([x, low(x * x)][: len(gh)]))
            place.biases(grads).copy_(gh.sum(2))
            d = gh @ place.weights(values)
            g = (d[0] + x * d[1] if self.bayesian else d[0]) * (x > 0)
            if k > 0:
                gh = low(torch.stack([g, g * seen[k - 1][1]]) if self.bayesian else g.unsqueeze(0))
        return nll, grads

    def compare(self, batch, rtol=1e-3, atol=1e-5):
        before = self.total.clone()
        nll, grads = self.by_kernels(batch)
        wanted, slow = self.plainly(batch)
        torch.testing.assert_close(nll.cpu().double(), wanted, rtol=rtol, atol=atol)
        if self.losses:
            torch.testing.assert_close(self.value.cpu().double(), self.plain_value, rtol=rtol, atol=atol)
        torch.testing.assert_close(self.total, before + nll * batch.size, rtol=1e-5, atol=1e-5)
        padded_part, part = self.part(4), self.part()
        for s, flat in enumerate(grads):
            views = part.views(slow[s])
            for name, view in padded_part.views(flat).items():
                torch.testing.assert_close(view.cpu().double(), views[name], rtol=rtol, atol=atol)
        inside = torch.zeros_like(grads[0])  # a padded unit gets no gradient, so that it stays what it is
        for view in padded_part.views(inside).values():
            view.fill_(1)
        end = list(padded_part.spans.values())[-1].stop  # of what the chain writes to
        assert not (grads * (1 - inside))[..., :end].any()


@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("r", "v", "u"), [(1, 1, 1), (3, 3, 1), (4, 2, 2), (4, 2, 4)])
def test_a_chain_of_kernels_is_the_plain_one(bayesian, bias, heads, r, v, u):
    """The same NLL and gradients as plain operations in float64, given the noise that the kernels drew."""
    case = Case(r, v, u, heads=heads, bayesian=bayesian, bias=bias)
    case.compare(case.batch())


@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("r", "v", "u", "taught", "size"), [(1, 1, 1, [5], 70), (4, 2, 2, [3, 40, 2], 80)])
def test_lessons_in_the_kernel_of_the_loss(bayesian, heads, r, v, u, taught, size):
    case = Case(r, v, u, heads=heads, bayesian=bayesian, taught=taught)
    case.compare(case.batch(size))
    assert case.value.count_nonzero() == r


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden": (20,), "ins": 130, "size": 1},
        {"hidden": (3, 1, 260), "ins": 1, "size": 90},
        {"hidden": (100, 8), "ins": 64, "heads": 7, "size": 300},  # 35 classes, and more rows than a tile has
    ],
)
def test_other_shapes(shape):
    size = shape.pop("size")
    case = Case(2, 1, 1, **shape)
    case.compare(case.batch(size, done=4), atol=1e-4)


@pytest.mark.parametrize("name", ["wide", "tall", "cublas"])
@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("size", [70, 71])
def test_every_way_to_the_gradients_of_weights(monkeypatch, name, bayesian, size):
    kernels = gpu_kernels()
    monkeypatch.setattr(kernels, "way", lambda first, place, precision: kernels.WAYS[name])
    case = Case(4, 2, 2, hidden=(44, 30, 21), bayesian=bayesian, bias=size == 70)
    case.compare(case.batch(size))


@pytest.mark.parametrize("bayesian", [True, False])
def test_tf32_is_close(bayesian):
    """The interpreter has no TF32: it runs the tiles and ways of TF32, but multiplies in float32."""
    case = Case(2, 2, 1, bayesian=bayesian)
    batch = case.batch()
    exact, rough = case.by_kernels(batch), case.by_kernels(batch, "tf32")
    for a, b in zip(_tensors(case.part(4), rough), _tensors(case.part(4), exact), strict=True):
        assert (a - b).norm() < (1e-5 if DEVICE == "cpu" else 0.05) * b.norm()
    assert DEVICE == "cpu" or not torch.equal(rough[1], exact[1])


@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("shape", [{}, {"hidden": (100, 8), "ins": 64, "u": 2}, {"hidden": (20,), "ins": 130}])
def test_bf16_is_what_its_rounding_makes_it(bayesian, shape):
    """Against float64 it is some hundredths off, most of it from units whose sign the rounding changes. Against
    float64 that rounds in the same places it is close.
    """
    case = Case(2, 2, bayesian=bayesian, **shape)
    batch = case.batch()
    found, wanted = case.by_kernels(batch, "bf16", align=8), case.rounded(batch)
    for a, b in zip(_tensors(case.part(8), found), _tensors(case.part(8), wanted), strict=True):
        assert (a.cpu().double() - b).norm() < 0.01 * b.norm()


def _tensors(part, found):
    """The NLL, and the gradient of each weight."""
    return [found[0], *part.views(found[1]).values()]


@pytest.mark.parametrize("bayesian", [True, False])
def test_a_replica_is_the_same_alone_to_the_last_bit(bayesian):
    case = Case(4, 2, 4, bayesian=bayesian)
    batch = case.batch()
    nll, grads = (t.clone() for t in case.by_kernels(batch))
    whole, (x, y) = case.values(case.part(4), DEVICE, torch.float32), (case.tasks[0].x, case.tasks[0].y)
    for r in range(4):
        case.tasks = [TaskData(x[r : r + 1], y[r : r + 1], case.tasks[0].head)]
        case.values = lambda *_, r=r: whole[:, r : r + 1].clone()
        own = batch._replace(order=batch.order[r % 2 : r % 2 + 1].contiguous(), total=torch.zeros(1, device=DEVICE))
        seeds, case.seeds = case.seeds, case.seeds[r % 2 : r % 2 + 1].clone()
        alone = case.by_kernels(own)
        case.seeds = seeds
        assert torch.equal(alone[0], nll[r : r + 1])
        assert torch.equal(alone[1], grads[:, r : r + 1])


def test_noise_is_normal_and_new_in_every_place():
    """Across seeds, steps, layers and places."""
    seeds, numbers = torch.tensor([3, 2**62 + 3], device=DEVICE), []
    for step in (0, 1):
        for layer in (0, 1):
            found = torch.empty(2, 5000, device=DEVICE)
            drawn[(5, 2)](found, seeds, step, layer, 2, 5000, BLOCK=1024)
            numbers.append(found)
    found = torch.cat(numbers).double().cpu()
    assert torch.allclose(found.mean(1), torch.zeros(8).double(), atol=0.06)
    assert torch.allclose(found.corrcoef(), torch.eye(8).double(), atol=0.06)
    assert torch.allclose(found.square().mean(1), torch.ones(8).double(), atol=0.08)
    assert found.unique().numel() > 39_900


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, by the interpreter
def test_what_is_no_number_stays_so_and_stays_alone():
    case = Case(2, 1, 2)
    batch = case.batch()
    case.tasks[0].x[1, batch.rows()[1, 3], 2] = torch.nan
    nll, grads = case.by_kernels(batch)
    assert nll.isnan().tolist() == [False, True]
    assert grads[:, 0].isfinite().all()
    weight = case.part(4).views(grads)[next(iter(case.part(4).shapes))]
    assert weight[:, 1].isnan().any()


@pytest.mark.parametrize(
    ("rule", "parts"),  # a natural step needs a KL
    [(rule, parts) for rule in ("points", "adam", "natural") for parts in range(3) if (rule, parts) != ("natural", 0)],
)
def test_the_update_kernels_are_the_plain_update(rule, parts):
    """Five steps in float32 against plain operations in float64; a rate a replica."""
    known = METHODS["naive" if rule == "points" else "vcl"].known_settings
    given = {} if rule == "points" else {"std_update": rule, "std_rate": 0.01}
    each = [resolve("", known, {**given, "lr": lr}) for lr in (1e-3, 1e-2, 0.1)]
    found = []
    for dtype in (torch.float32, torch.float64):
        start, springs = draw(3, 501, seed=20).to(dtype), []
        for k in range(3):
            springs.append(
                Spring(draw(3, 501, seed=k).square().to(dtype), draw(3, 501, seed=10 + k).square().to(dtype))
            )
        pull = Springs(springs[0] if parts else None)
        if rule != "points":
            pull.linear, pull.square = springs[1] if parts else None, springs[2] if parts == 2 else None
        q = Gaussian(start.clone(), None if rule == "points" else 0.1 * start)
        variance = None if q.log_std is None else (2 * q.log_std).exp()
        grads = torch.zeros(1 if rule == "points" else 2, 3, 501, device=DEVICE, dtype=dtype)
        copy = torch.zeros_like(grads, dtype=torch.bfloat16)
        update = Update(q, variance, grads, pull, stack(each, start), copy)
        if DEVICE == "cpu" and dtype == torch.float32:
            update._move = update._kernels(gpu_kernels(), pull)
        assert (update._move is None) == (dtype == torch.float64)
        for k in range(5):
            grads.copy_(torch.stack([draw(3, 501, seed=30 + k + 10 * s) for s in range(len(grads))]))
            update()
        assert update.count == 5
        values = q.mean.unsqueeze(0) if variance is None else torch.stack([q.mean, variance])
        assert torch.equal(copy, values.bfloat16())
        found.append([t.double() for t in (q.mean, q.log_std, variance) if t is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-4, atol=1e-5)
