"""A teacher's lessons in a chain's own pass, against the same loss by autograd in a second one."""

from __future__ import annotations

import copy
import os
import shutil

import pytest
import torch
from calls import counted
from checks import run_of

import evcl
from evcl._core.randomness import GeneratorNoise
from evcl._core.settings import resolve
from evcl.kernels.native import native
from evcl.methods import METHODS, Distillation, Fit, Loss, TaskData
from evcl.nn.chain import Chain, find_chain
from evcl.training import Pool, Step
from evcl.training.data import all_heads, find_lessons
from evcl.training.step import ByAutograd

F32, F64 = torch.float32, torch.float64
HIDDEN, CLASSES, EXAMPLES, REPLICAS, SIZE = [11, 12], (2, 3, 4), 20, 3, 8
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")


class Handed:
    """Noise of which each layer has its own, known by its width, and each head too: the same in every pass."""

    rows = slice(None)

    def __init__(self, *sets):
        each = [[CLASSES[k] for k in heads] for heads in sets]
        self.widths = {sum(widths): widths for widths in each}  # of heads that are one layer of a chain

    def of(self, rows):
        found = copy.copy(self)
        found.rows = rows
        return found

    def normal_(self, out):
        (_, b, width), r = out.shape, REPLICAS
        widths = self.widths.get(width, [width])
        each = [torch.randn(r, b, w, generator=torch.Generator().manual_seed(w)) for w in widths]
        return out.copy_(torch.cat(each, 2)[self.rows])


class Apart(Loss):
    """A loss that a chain does not know."""

    def __init__(self, loss):
        self.loss, self.heads = loss, loss.heads

    def __call__(self, network, batch):
        return self.loss(network, batch)


class Case:
    """Three heads; the data have some of them, and some are taught: each replica is taught otherwise."""

    def __init__(
        self,
        method="evcl",
        dtype=F64,
        data=(1,),
        taught=(2, 0),
        weighted=False,
        shared=True,
        precision=None,
        by_example=False,
    ):
        source = torch.Generator().manual_seed(0)
        given = {"init_std": 0.3, "std_rate": 0.01, "std_update": "adam"} if method == "evcl" else {}
        self.settings = resolve(method, METHODS[method].known_settings, {"lr": 0.005, **given})
        more = {"dtype": dtype} if precision is None else {"precision": precision}
        heads = HIDDEN[-1], CLASSES
        self.run = run_of(method, evcl.nn.mlp(6, HIDDEN), self.settings, range(REPLICAS), heads, **more)
        tasks, n = [], len(data) * EXAMPLES
        for k in data:
            x = torch.randn(1 if shared else REPLICAS, EXAMPLES, 6, generator=source, dtype=dtype)
            y = torch.randint(CLASSES[k], x.shape[:2], generator=source)
            weights = torch.rand(y.shape, generator=source, dtype=dtype) + 0.5 if weighted else None
            tasks.append(TaskData(x, y, k, weights))
        self.tasks, self.pool = tasks, Pool(tasks, self.run.classes, REPLICAS)
        said = [
            torch.randn(u, n, CLASSES[k], generator=source, dtype=dtype).log_softmax(2)
            for k, u in zip(taught, (1, REPLICAS, REPLICAS), strict=False)
        ]
        strengths = [torch.tensor([[1.0], [0.0], [0.5]], dtype=dtype), 2.0, 0.3]
        if by_example:
            strengths[0] = strengths[0] * torch.rand(REPLICAS, n, generator=source, dtype=dtype)
        warm = torch.tensor([[1.0], [2.0], [0.5]], dtype=dtype)
        self.lesson = Distillation(said, warm, strengths[: len(taught)], taught)
        self.noise = Handed(self.pool.heads, all_heads(self.pool, [self.lesson]))
        self.rows = torch.stack([torch.randperm(n, generator=source)[:SIZE] for _ in range(REPLICAS)])

    def step(self, losses):
        network = self.run.network
        part = network.layout.part(network.names_of(all_heads(self.pool, losses)))
        q = network.posterior.map(lambda t: network.layout.gather(t, part), part)
        chain = find_chain(network, self.pool.x)
        return Step(network, q, Fit(self.tasks, losses=losses), self.settings, self.pool, chain)

    def both(self):
        """(NLL, lessons, gradients) of the chain and by autograd."""
        found = []
        for loss in (self.lesson, Apart(self.lesson)):
            step = self.step([loss])
            assert isinstance(step.source, Chain if loss is self.lesson else ByAutograd)
            nll = step.source(self.rows, self.noise)
            (value,) = step.losses_now().values()
            grads = [step.grads.mean] if step.grads.variance is None else [step.grads.mean, step.grads.variance]
            found.append((nll.clone(), value, torch.stack(grads)))
        return found


@pytest.mark.parametrize("method", ["evcl", "lwf"])
@pytest.mark.parametrize("data", [(1,), (0, 1)])
@pytest.mark.parametrize("taught", [(2, 0), (2, 0, 1), (1,)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("by_example", [True, False])
def test_lessons_are_autograds(method, data, taught, weighted, shared, by_example):
    """Also of a head that the data use, and where replicas and examples differ in strengths; some of those are 0."""
    fast, slow = Case(method, F64, data, taught, weighted, shared, by_example=by_example).both()
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert fast[1].count_nonzero() == (2 if taught == (1,) else 3)


@needs_compiler
@pytest.mark.parametrize("method", ["evcl", "lwf"])
@pytest.mark.parametrize("data", [(1,), (0, 1)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("by_example", [True, False])
def test_compiled_lessons_are_the_plain_ones(monkeypatch, method, data, weighted, by_example):
    assert native() is not None
    fast, slow = Case(method, F32, data, (2, 0, 1), weighted, by_example=by_example).both()
    monkeypatch.setenv("EVCL_NATIVE", "0")
    plain, _ = Case(method, F32, data, (2, 0, 1), weighted, by_example=by_example).both()
    for other in (slow, plain):
        for a, b in zip(fast, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not all(torch.equal(a, b) for a, b in zip(fast, plain, strict=True))


def test_lessons_in_bf16_are_close_and_keep_float32():
    rough, _ = Case("evcl", F32, precision="bf16").both()
    exact, _ = Case("evcl", F32).both()
    for a, b in zip(rough, exact, strict=True):
        assert a.dtype == F32
        assert (a - b).norm() < 0.05 * b.norm()
        assert not torch.equal(a, b)


@needs_compiler
@pytest.mark.parametrize("method", ["evcl", "lwf"])
def test_what_is_no_number_stays_so_and_stays_alone(method):
    case = Case(method, F32, shared=False)
    case.tasks[0].x[1, case.rows[1, 3], 2] = torch.nan
    step = case.step([case.lesson])
    assert step.source(case.rows, case.noise).isnan().tolist() == [False, True, False]
    assert step.losses_now()["distillation"].isnan().tolist() == [False, True, False]
    assert step.grads.mean[0].isfinite().all()


@needs_compiler
def test_a_step_with_lessons_takes_no_memory():
    case = Case("evcl", F32)
    step = case.step([case.lesson])
    step(case.rows, case.noise)

    class Silent:
        def normal_(self, out):
            return out.zero_()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(case.rows, Silent())
    taken = {e.key: e.self_cpu_memory_usage for e in profile.key_averages() if e.self_cpu_memory_usage}
    assert all(abs(taken) <= 64 for taken in taken.values()), taken


class Own(Apart):
    """A loss of the user's own that is a distillation loss, and says so."""

    def taught(self):
        return self.loss.taught()


class Doubled(Distillation):
    def __call__(self, network, batch):
        return 2 * super().__call__(network, batch)


def test_a_distillation_loss_of_your_own_is_computed_in_the_chains_pass():
    case = Case()
    about = case.pool, case.run.classes, case.run.network.posterior.mean, None
    wanted, found = (find_lessons([loss], *about) for loss in (case.lesson, Own(case.lesson)))
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    lesson = case.lesson
    doubled = Doubled(lesson.said, lesson.temperature, lesson.strength, lesson.heads)
    assert find_lessons([doubled], *about) is None  # it computes something else


def test_other_losses_are_left_to_autograd():
    case = Case()
    lesson, like, classes = case.lesson, case.run.network.posterior.mean, case.run.classes

    def known(*losses, pool=case.pool, most=None):
        return find_lessons(losses, pool, classes, like, most) is not None

    assert known(lesson)
    assert known(lesson, most=9)
    assert not known(lesson, most=8)
    assert not known()
    assert not known(Apart(lesson))
    assert not known(lesson, lesson)
    assert not known(lesson, Apart(lesson))
    twice = Distillation([*lesson.said, lesson.said[0]], 1.0, [1.0] * 3, (2, 0, 2))
    assert not known(twice)
    own = TaskData(case.tasks[0].x.repeat(REPLICAS, 1, 1), case.tasks[0].y.repeat(REPLICAS, 1), 0)
    pool = Pool([case.tasks[0], own], classes, REPLICAS)
    both = Distillation([torch.cat([said, said + 1], 1) for said in lesson.said], 2.0, [1.0, 1.0], lesson.heads)
    found = find_lessons([both], pool, classes, like, None)
    for r in range(REPLICAS):  # at the places of its own rows in the pool
        for k, span in enumerate(found.spans.tolist()):
            wanted = both.said[k][r % len(both.said[k])].exp()
            torch.testing.assert_close(found.q[r, pool.own[r], slice(*span)], wanted.to(like))


def test_a_replica_that_is_not_taught_draws_what_it_draws_alone():
    """A strength of 0 is no lesson: its weights move as they do without."""
    moved = []
    for strength in (None, 0.0, 1.0):
        case = Case("evcl", F64)
        weights = [torch.tensor([[1.0], [strength or 0.0], [1.0]], dtype=F64)] * 2
        loss = Distillation(case.lesson.said, 1.0, weights, case.lesson.heads)
        step = case.step([] if strength is None else [loss])
        noise = GeneratorNoise([torch.Generator().manual_seed(r) for r in range(REPLICAS)])
        for _ in range(3):
            step(case.rows, noise)
        moved.append(step.q.part("head 1.weight")[1])
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(moved[2], moved[0], rtol=1e-3)


def learned(apart):
    """The weights after three tasks of LwF, each with a head of its own; a network that is watched is no chain."""
    given, heads = {"epochs": 3, "batch_size": 8, "lr": 0.005}, (HIDDEN[-1], CLASSES)
    run = run_of("lwf", evcl.nn.mlp(6, HIDDEN), given, range(2), heads, dtype=F64)
    if apart:
        run.network.trunk[1].register_forward_hook(lambda *_: None)
    source = torch.Generator().manual_seed(0)
    for k in range(3):
        x = torch.randn(1, EXAMPLES, 6, generator=source, dtype=F64)
        run.learn([TaskData(x, torch.randint(2, x.shape[:2], generator=source), k, task=k)])
    return run.network.posterior.mean


def test_a_stream_ends_where_autograd_ends():
    """Plain weights: no noise is drawn, so that the two differ in rounding alone."""
    with counted() as calls:
        fast = learned(False)
    assert calls["find_lessons"] > 0
    torch.testing.assert_close(fast, learned(True), rtol=1e-7, atol=1e-9)
