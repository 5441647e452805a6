"""FROMP: against a loop over tasks and classes in plain torch, the kernel against the Jacobian row by row."""

from __future__ import annotations

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import F64, HIDDEN, INPUTS, assert_weights, first_fit, learned, logits, plain, round_of, run_of, task
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.errors import EvclError
from evcl._core.randomness import generator
from evcl.curvature import kernels
from evcl.methods import TaskData
from evcl.methods.fromp import functional
from evcl.targets import Poisson

TASKS = [task(0, 0), task(1, 1, 20), task(2, 0), task(3, 1)]
GIVEN = {"strength": 0.3, "clip": 0.0, "memory": 24, "points": 6, "prior_precision": 0.05, "jitter": 1e-3}


def jacobian(network, weights, x, head, c):
    """[M, P]: d p_c / d theta, one example after another."""
    rows = []
    for one in x:
        p = logits(network, one, head).softmax(-1)[c]
        grads = torch.autograd.grad(p, list(weights.values()), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


def flat(named_tensors):
    return torch.cat([tensor.flatten() for tensor in named_tensors.values()])


def chosen(network, one, count):
    """The memorable points of a task: of every class the least certain example, then of every class the next."""
    p = logits(network, one.x[0], one.head).softmax(1)
    scores = (p * (1 - p)).sum(1).tolist()
    ranked = []
    for c in range(2):
        own = sorted((one.y[0] == c).nonzero().flatten().tolist(), key=lambda i: -scores[i])
        ranked += [(rank, -scores[i], i) for rank, i in enumerate(own)]
    return one.x[0][[i for _, _, i in sorted(ranked)][:count]].clone()


def by_hand(run, s):
    """The weights and H after the tasks: one backward pass for each class and task, as the paper's equation says."""
    network = plain(run)
    weights = dict(network.named_parameters())
    h = {name: torch.zeros_like(w) for name, w in weights.items()}
    points: list[tuple[torch.Tensor, int]] = []
    for number, one in enumerate(TASKS):
        old = []
        variance = 1 / (flat(h) + s["prior_precision"])
        for x, head in points:
            m = logits(network, x, head).softmax(1).detach()
            jacobians = [jacobian(network, weights, x, head, c) for c in range(2)]
            k = [j @ (variance.unsqueeze(1) * j.T) + s["jitter"] * torch.eye(len(x), dtype=F64) for j in jacobians]
            old.append((x, head, m, [torch.linalg.inv(one) for one in k]))
        used = {
            name: w
            for head in {one.head, *(h for _, h in points)}
            for name, w in small_runs.used_by(network, head).items()
        }
        adam = torch.optim.Adam(used.values(), lr=0.02)
        for _ in range(4):
            adam.zero_grad()
            F.cross_entropy(logits(network, one.x[0], one.head), one.y[0]).backward()
            for x, head, m, inverse in old:
                for c in range(2):
                    p = logits(network, x, head).softmax(1)[:, c]
                    force = inverse[c] @ (p.detach() - m[:, c])
                    grads = torch.autograd.grad(p, list(used.values()), force, allow_unused=True)
                    for w, grad in zip(used.values(), grads, strict=True):
                        if grad is not None:
                            w.grad = s["strength"] * grad + (0 if w.grad is None else w.grad)
            if s.get("clip"):
                nn.utils.clip_grad_norm_(list(used.values()), s["clip"])
            adam.step()
        fisher = small_runs.fisher_by_definition(weights, lambda x: logits(network, x, one.head), one.x[0])  # noqa: B023
        h = {name: h[name] + more for name, more in fisher.items()}
        points = [(x[: s["memory"] // (number + 1)], head) for x, head in points]
        points.append((chosen(network, one, min(s["points"], s["memory"] // (number + 1))).detach(), one.head))
    return {name: w.detach() for name, w in weights.items()}, h, points


@pytest.mark.parametrize("given", [GIVEN, {**GIVEN, "clip": 0.1}, {**GIVEN, "memory": 12}], ids=["", "clip", "few"])
def test_it_is_the_papers_loop_over_tasks_and_classes(given):
    weights, h, points = by_hand(run_of("fromp", **given), given)
    run = learned("fromp", TASKS, **given)
    assert_weights(run, run.network.posterior.mean, weights, rtol=1e-6)
    assert_weights(run, run.memory.precision, h, rtol=1e-6)
    assert [one.head for one in run.memory.points] == [head for _, head in points]
    for found, (x, _) in zip(run.memory.points, points, strict=True):
        assert torch.equal(found.x[0], x)


def test_a_step_makes_one_pass_of_all_points():
    """However many tasks and classes there are."""
    run, rows = learned("fromp", TASKS[:3], **GIVEN), []
    hook = run.network.trunk.register_forward_hook(lambda module, args, out: rows.append(out))
    run.learn([TASKS[3]])
    hook.remove()
    trained = [len(out) for out in rows if out.requires_grad]
    assert trained[:11] == [6, 6, 6] + 4 * [30, 18]  # the kernels; then in each step the data and all 18 points


def convolution():
    layers = skip_init(nn.Conv2d, 1, 3, 2), nn.ReLU(), nn.Flatten(), skip_init(nn.Linear, 12, 6), nn.Tanh()
    return nn.Sequential(*layers)


def test_the_kernel_is_that_of_the_jacobian_for_any_network_and_in_blocks(monkeypatch):
    network = evcl.nn.bayesianize(convolution(), init_std=None, replicas=2, dtype=F64,
                                  generators=[generator(r, "init") for r in range(2)])  # fmt: skip
    run_x = torch.randn(2, 9, 1, 3, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    mean, layout = network.posterior.mean, network.layout
    variance = torch.rand(mean.shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    found = {}
    for rows in (100, 4):
        monkeypatch.setattr("evcl.curvature.kernel.rows_at_once", lambda uses, rows=rows: rows)
        found[rows] = kernels(network, mean, layout, run_x, [], variance)  # without a head: the features
    torch.testing.assert_close(found[100], found[4])
    p, k = found[100]
    for r in range(2):
        plain_ = convolution().double()
        plain_.load_state_dict({name: view[r] for name, view in layout.views(mean).items()})
        weights = dict(plain_.named_parameters())
        for c in range(6):
            rows = []
            for x in run_x[r]:
                q = plain_(x.unsqueeze(0)).softmax(1)[0, c]
                rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(q, list(weights.values()))]))
            j = torch.stack(rows)
            scales = torch.cat([layout.view(variance, name)[r].flatten() for name in weights])
            torch.testing.assert_close(k[r, c], j @ (scales.unsqueeze(1) * j.T), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(p[r], plain_(run_x[r]).softmax(1))


def test_nearly_equal_points_in_float32_leave_the_kernel_positive():
    """Rounding errors of float32 would be larger than the jitter."""
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x + 1e-4 * i * x for i in range(30)], 1)
    network = evcl.nn.bayesianize(evcl.nn.mlp(64, [50]), init_std=None, generators=[generator(0, "init")])
    mean = network.posterior.mean
    _, k = kernels(network, mean, network.layout, x, [], torch.full_like(mean, 1e5))
    _, failed = torch.linalg.cholesky_ex(k + 1e-6 * torch.eye(30, dtype=F64))
    assert not failed.any()


def test_memorable_points_are_the_least_certain_of_each_class():
    """With classes of very different sizes, and never more points than examples."""
    run = run_of("fromp", **{**GIVEN, "points": 10, "memory": 10})
    x = torch.randn(1, 30, INPUTS, generator=torch.Generator().manual_seed(5), dtype=F64)
    y = torch.zeros(1, 30, dtype=torch.long)
    y[0, :3] = 1
    run.learn([TaskData(x, y, 0)])
    (points,) = run.memory.points
    assert points.y[0].tolist() == [*points.y[0, :6].tolist(), 0, 0, 0, 0]
    assert sorted(points.y[0, :6].tolist()) == [0, 0, 0, 1, 1, 1]
    p = logits(plain(run), x[0], 0).softmax(1)
    scores = (p * (1 - p)).sum(1)[y[0] == 0].sort(descending=True).values
    own = logits(plain(run), points.x[0][points.y[0] == 0], 0).softmax(1)
    torch.testing.assert_close((own * (1 - own)).sum(1), scores[:7])
    small = run_of("fromp", **{**GIVEN, "points": 100, "memory": 100})
    small.learn([task(0, 0, 7)])
    assert small.memory.points[0].y.shape == (1, 7)


def test_the_memory_is_bounded_and_shared_by_the_tasks():
    run = run_of("fromp", memory=12, points=8, epochs=1)
    sizes = []
    for number in range(15):
        run.learn([task(number, number % 2)])
        sizes.append([one.y.shape[1] for one in run.memory.points])
    assert sizes[0] == [8]
    assert sizes[1] == [6, 6]
    assert sorted(sizes[4]) == [2, 2, 2, 3, 3]
    assert sizes[11:] == [[1] * 12] * 4  # more tasks than points
    assert len({one.task for one in run.memory.points}) == 12


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_penalty_is_exactly_0_in_the_first_step(dropout):
    """Adam would turn a rounding error into a full step. Dropout does not reach the points."""
    learner = evcl.Learner(evcl.nn.mlp(INPUTS, [HIDDEN], dropout=dropout), "fromp", epochs=1, batch_size=30)
    for number in range(2):
        learner.learn((TASKS[number].x[0].float(), TASKS[number].y[0] * 2), head="0" if number else "new")
    (epoch,) = learner.history["1"]
    assert epoch.terms["functional"] == 0


@pytest.mark.filterwarnings("ignore::evcl.ForgettingWarning")
def test_a_head_that_grows_keeps_old_classes():
    """New classes in one head: naive training forgets the old ones at once."""
    benchmark = evcl.benchmarks.get("split-digits", tasks=2, scenario="class")
    accuracy = {}
    for method in ("naive", "fromp"):
        learner = evcl.Learner(evcl.nn.mlp(64, [50]), method, epochs=20)
        for one in benchmark:
            learner.learn(one)
        accuracy[method] = learner.evaluate(benchmark)[benchmark[0].name]
    assert accuracy["fromp"] > 0.8
    assert accuracy["naive"] < 0.2


def test_classes_that_a_head_has_got_since_are_held_at_0_and_not_at_random_probabilities():
    """What is held at an old point is what the network said of it before its head grew."""
    run = learned("fromp", [task(0, 0), task(1, 0)], **GIVEN)
    x = torch.cat([one.x for one in run.memory.points], 1)
    said = run.predict(x, 0)[0]
    run.grow_head(0, 5)
    (wanted,) = functional(run.memory, round_of(run, [TASKS[1]]), run.settings).wanted  # [R, S, C, M]
    wanted = wanted[0].transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(wanted[:, :2], said)
    assert not wanted[:, 2:].any()


def test_other_likelihoods_are_refused():
    run = run_of("fromp")
    run.likelihood = Poisson()
    with pytest.raises(EvclError, match="class probabilities"):
        first_fit(run, [TASKS[0]])
