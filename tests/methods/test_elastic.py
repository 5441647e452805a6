"""Methods that hold weights, by plain torch: EWC, online and offline, SI, MAS, IMM and XdG; measures of importance."""

from __future__ import annotations

from functools import partial

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import EXAMPLES, F64, TASKS, adam, assert_weights, by_sign, copies, learned, logits, plain, run_of
from torch import nn

import evcl
from evcl._core.randomness import GeneratorNoise, generator
from evcl._core.settings import ELASTIC
from evcl.methods import Elastic, TaskData
from evcl.methods.ewc_offline import Anchors
from evcl.methods.imm import FISHER_EPSILON
from evcl.methods.importance import drawn_points
from evcl.methods.measures import IMPORTANCE, XI
from evcl.methods.terms import Spring
from evcl.methods.xdg import widths
from evcl.nn import Gaussian, Layout

HALF = {"ewc": 0.5, "ewc-offline": 0.5, "si": 1.0, "mas": 1.0}  # of the squared distance


def sensitivities(used, outputs, x):
    """The sum over the rows of x of |d ||f(x)||^2 / d w|, by name: no labels are needed."""
    total = {name: torch.zeros_like(w) for name, w in used.items()}
    for row in x:
        grads = torch.autograd.grad(outputs(row).square().sum(), list(used.values()))
        for name, grad in zip(used, grads, strict=True):
            total[name] += grad.abs()
    return total


def path_integrals(used, start, path, xi, n):
    moved = {name: (w.detach() - start[name]).square() for name, w in used.items()}
    every = torch.cat([m.flatten() for m in moved.values()])
    damping = XI * every[every > 0].mean() if xi == "auto" else xi
    return {name: n * path[name] / (moved[name] + damping) for name in used}


def by_hand(method, strength, xi=None):
    """The weights after the tasks, and the anchors with their importance: of every task, or of all tasks together."""
    network, kept = plain(small_runs.run_of(method)), []
    weights = dict(network.named_parameters())
    for one in TASKS:
        used = small_runs.used_by(network, one.head)
        start, path = copies(used), {name: torch.zeros_like(w) for name, w in used.items()}
        adam = torch.optim.Adam(used.values(), lr=small_runs.PLAIN["lr"])
        for _ in range(small_runs.PLAIN["epochs"]):
            loss = F.cross_entropy(logits(network, one.x[0], one.head), one.y[0])
            g = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
            before = copies(used)
            for name, w in used.items():
                pulls = (f[name] / one.n * (before[name] - anchor[name]) for anchor, f in kept)
                w.grad = g[name] + 2 * HALF[method] * strength * sum(pulls)
            adam.step()
            for name, w in used.items():
                path[name] -= g[name] * (w.detach() - before[name])  # the penalty is not in g
        found = {
            "si": lambda: path_integrals(used, start, path, xi, one.n),  # noqa: B023
            "mas": lambda: sensitivities(used, lambda x: logits(network, x, one.head), one.x[0]),  # noqa: B023
        }.get(method, lambda: small_runs.fisher_by_definition(used, lambda x: logits(network, x, one.head), one.x[0]))()  # noqa: B023
        whole = {name: found.get(name, torch.zeros_like(w)) for name, w in weights.items()}
        if method != "ewc-offline" and kept:
            whole = {name: (kept[-1][1][name] + more).clamp_min(0) for name, more in whole.items()}
        one_more = copies(weights), {name: f.clamp_min(0) for name, f in whole.items()}
        kept = [*kept, one_more] if method == "ewc-offline" else [one_more]
    return weights, kept


@pytest.mark.parametrize(
    ("method", "strength", "given"),
    [
        ("ewc", 2.0, small_runs.PLAIN_FISHER),
        ("ewc-offline", 2.0, small_runs.PLAIN_FISHER),
        ("si", 0.7, {"xi": 0.05}),
        ("si", 0.7, {"xi": "auto"}),
        ("mas", 0.2, {}),
    ],
)
def test_it_is_what_plain_torch_makes_of_its_equations(method, strength, given):
    weights, kept = by_hand(method, strength, given.get("xi"))
    run = learned(method, TASKS, strength=strength, **given)
    assert_weights(run, run.network.posterior.mean, weights)
    offline = method == "ewc-offline"
    importance = run.memory.importance if offline else [run.memory.importance]
    for found, (_, wanted) in zip(importance, kept, strict=True):
        assert_weights(run, found, wanted)
    for found, (wanted, _) in zip(run.memory.anchors, kept, strict=True) if offline else ():
        assert_weights(run, found, wanted)
    assert float((importance[0] > 0).double().mean()) > 0.3


def test_the_anchors_are_one_spring_and_their_penalties_sum(generator):
    pairs = [
        (torch.rand(2, 9, generator=generator, dtype=F64), torch.randn(2, 9, generator=generator, dtype=F64))
        for _ in range(4)
    ]
    pairs[2][0][:, 3:] = 0  # a weight that a task did not use
    for w, _ in pairs:
        w[:, 8] = 0  # and one that none has used
    each = [Elastic(Gaussian(c, None), w) for w, c in pairs]
    whole = Anchors.of([Spring(w, c) for w, c in pairs])
    q = Gaussian(torch.randn(2, 9, generator=generator, dtype=F64), None)
    torch.testing.assert_close(whole.loss(q), sum(one.loss(q) for one in each))
    small_runs.assert_springs([whole], q)
    pull = whole.springs().mean
    assert not (pull.w * (q.mean - pull.c))[:, 8].any()


# --- measures of importance, all with the Fisher's sum ---------------------------------------------------------------


METHODS, OTHERS = ["ewc", "evcl", "ewc-offline"], ["si", "mas"]


def importance_of(method, importance="fisher", tasks=TASKS[:1], **given):
    """[R, P], after these tasks."""
    found = learned(method, tasks, importance=importance, **given).memory.importance
    return found if isinstance(found, torch.Tensor) else sum(found)


def test_the_setting_names_every_measure():
    assert ELASTIC["importance"].choices == (*IMPORTANCE, "kfac")


@pytest.mark.parametrize("importance", OTHERS)
@pytest.mark.parametrize("method", METHODS)
def test_it_is_another_division_of_the_fishers_sum(method, importance):
    """The first task trains without a penalty: all measures see the same weights."""
    given = {"posterior": "diagonal"} if method == "evcl" else {}
    ours, theirs = (importance_of(method, name, replicas=2, **given) for name in (importance, "fisher"))
    torch.testing.assert_close(ours.sum(1), theirs.sum(1))
    assert not torch.allclose(ours, theirs, rtol=0.1)
    assert float(ours.min()) >= 0
    unused = run_of("naive").network.layout.view(ours[:1], "head 1.weight")
    assert not unused.any()


@pytest.mark.parametrize("importance", list(IMPORTANCE))
def test_a_strength_means_the_same_for_any_number_of_rows(importance):
    """Twice the rows, all of them twice: the penalty on the next task, of as many rows as before, counts twice."""
    one = TASKS[0]
    twice = TaskData(one.x.repeat(1, 2, 1), one.y.repeat(1, 2), 0, task=0)
    once, double = (importance_of("ewc", importance, [data], batch_size=data.n) for data in (one, twice))
    torch.testing.assert_close(double, 2 * once)


@pytest.mark.parametrize("method", ["ewc", "imm-mode", "mas"])
def test_it_is_that_of_examples_and_not_of_batches(method):
    """The weights being equal, the batch size of training does not enter; how many examples are measured does."""
    measured = "examples" if method == "mas" else "fisher_examples"
    given = {"lr": 1e-12, "epochs": 1}  # the weights stay as they are
    memories = [
        learned(method, TASKS[:1], batch_size=rows, **{measured: examples}, **given).memory
        for rows, examples in ((EXAMPLES, EXAMPLES), (7, EXAMPLES), (EXAMPLES, 10))
    ]
    found, other, few = (one.weight if method == "imm-mode" else one.importance for one in memories)
    torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-14)
    assert not torch.allclose(found, few, rtol=1e-2)
    assert float(found.min()) >= 0
    assert float(found.max()) > 1e-4


@pytest.mark.parametrize("importance", OTHERS)
def test_it_is_that_of_the_method_of_this_name_up_to_a_factor(importance):
    """Without a spread, and without sigma."""
    one = importance_of("ewc", importance, fisher_spread=0.0)
    omega = learned(importance, TASKS[:1]).memory.importance
    torch.testing.assert_close(one / one.sum(), omega / omega.sum())


@pytest.mark.parametrize("importance", OTHERS)
def test_units_that_were_silent_are_protected_too(importance):
    """`fisher_spread` gives the weights out of a silent unit a part of their neighbours' importance."""
    found = {}
    for spread in (0.0, 0.2):
        run = run_of("ewc", importance=importance, fisher_spread=spread)
        run.network.layout.view(run.network.posterior.mean, "1.bias")[0, 2] = -100.0  # unit 2 is silent
        run.learn([TASKS[0]])
        found[spread] = run.network.layout.view(run.memory.importance, "head 0.weight")[0]
    assert not found[0.0][:, 2].any()
    assert (found[0.2][:, 2] > 0).all()


@pytest.mark.parametrize("importance", OTHERS)
def test_coresets_and_tasks_learned_jointly(importance):
    run = learned("evcl", TASKS, importance=importance, coreset="random", coreset_size=4)
    least, most = run.memory.inner.importance.aminmax()
    assert 0 <= float(least) < float(most)
    both = run_of("evcl", importance=importance), run_of("evcl", posterior="diagonal")
    for one in both:
        one.learn(TASKS[:2])  # both heads in one round
    torch.testing.assert_close(*(one.memory.importance.sum(1) for one in both))


def test_posterior_draws_do_not_depend_on_padding():
    """On a GPU, the buffers of a fit are padded; the weights that are drawn must be those of a CPU."""
    plain = Layout({"weight": (2, 3), "bias": (2,)})
    padded = plain.part(["weight", "bias"], {"weight": (2, 4)}, align=16)
    q = Gaussian(torch.arange(8.0).unsqueeze(0), torch.zeros(1, 8))
    wide = q.map(lambda flat: plain.gather(flat, padded))
    ours, theirs = (drawn_points(*given, 2, [generator(0, "draw")]) for given in ((q, plain), (wide, padded)))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(padded.gather(b, plain), a)
        assert not torch.equal(a, q.mean)


# --- incremental moment matching: what predicts is the closed form ---------------------------------------------------


HEADS = (2, 2, 2)
METHOD_NAMES = ("imm-mean", "imm-mode")


@pytest.mark.parametrize("heads", [(0, 1, 2), (0, 0, 0)])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_what_predicts_is_the_closed_form_and_not_the_last_weights(method, heads):
    """The trunk is merged, and a head that tasks share; a head of one task is as its task left it."""
    tasks = [by_sign(k, head) for k, head in enumerate(heads)]
    run, ends, weights = (
        run_of(method, heads=HEADS, **(small_runs.PLAIN_FISHER if method == "imm-mode" else {})),
        [],
        [],
    )
    for task in tasks:
        run.learn([task])
        network = plain(run)
        used = small_runs.used_by(network, task.head)
        own = {name: torch.ones_like(w) for name, w in used.items()}
        if method == "imm-mode":
            own = small_runs.fisher_by_definition(used, lambda x, n=network, k=task.head: logits(n, x, k), task.x[0])
            own = {name: total / task.n + FISHER_EPSILON for name, total in own.items()}
        ends.append(copies(dict(network.named_parameters())))
        weights.append({name: own.get(name, torch.zeros_like(w)) for name, w in ends[-1].items()})
    found, last = small_runs.named(run, run.predictor(0).mean), ends[-1]
    for name, view in found.items():
        total = sum(w[name] for w in weights)
        wanted = sum(w[name] * mu[name] for w, mu in zip(weights, ends, strict=True)) / total
        used = bool((total > 0).all())  # or else a head that no task has used
        torch.testing.assert_close(view, wanted if used else last[name], rtol=1e-8, atol=1e-10)
        if name.startswith("head") and sum(name.startswith(f"head {k}.") for k in heads) == 1:
            torch.testing.assert_close(view, ends[heads.index(int(name[5]))][name], rtol=1e-10, atol=0)
    assert float((found["1.weight"] - last["1.weight"]).abs().max()) > 0.01
    mean = sum(mu["1.weight"] for mu in ends) / 3
    assert (float((found["1.weight"] - mean).abs().max()) > 0.01) == (method == "imm-mode")
    network.load_state_dict(found)
    for task in tasks:  # and these weights are what the network computes with
        p = logits(network, task.x[0], task.head).softmax(1).detach()
        torch.testing.assert_close(run.predict(task.x, task.head, task=task.task)[0], p)


def test_l2_transfer_is_that_of_plain_torch():
    """+ lam ||mu_k - mu_{k-1}||^2 without a half, from the second task on; a new head is not held."""
    run = run_of("imm-mean", l2_transfer=0.3)
    network = plain(run)
    for k in range(2):
        task, held = by_sign(k, k), copies(dict(network["1"].named_parameters()))

        def loss(k=k, task=task, held=held):
            away = sum(((w - held[n]) ** 2).sum() for n, w in network["1"].named_parameters())
            return F.cross_entropy(logits(network, task.x[0], k), task.y[0]) + 0.3 * bool(k) * away

        adam(small_runs.used_by(network, k), loss)
        run.learn([task])
    assert_weights(run, run.network.posterior.mean, dict(network.named_parameters()))


def test_drop_transfer_is_that_of_plain_torch():
    """mu + m (theta - mu), m of a unit shared by its weights and its bias; the gradient by autograd through it."""
    p, noise = 0.4, generator(3, "noise")
    run = run_of("imm-mean", hidden=(7, 6), drop_transfer=p, l2_transfer=0.0)
    run.learn([by_sign(0)])
    network, task = plain(run), by_sign(1, 1)
    start, dropped = copies(dict(network.named_parameters())), []

    def loss():
        now = dict(network.named_parameters())
        for layer, width in (("1", 7), ("3", 6)):
            keep = torch.empty(1, width, dtype=F64).uniform_(generator=noise)[0] >= p
            dropped.append(int((~keep).sum()))
            m = keep.to(F64) / (1 - p)
            for name, factor in ((f"{layer}.weight", m.unsqueeze(1)), (f"{layer}.bias", m)):
                now[name] = start[name] + factor * (now[name] - start[name])
        h = torch.relu(task.x[0] @ now["1.weight"].T + now["1.bias"])
        h = torch.relu(h @ now["3.weight"].T + now["3.bias"])
        return F.cross_entropy(h @ now["head 1.weight"].T + now["head 1.bias"], task.y[0])

    adam(small_runs.used_by(network, 1), loss)
    run.learn([task], noise=GeneratorNoise([generator(3, "noise")]))
    assert 5 < sum(dropped) < 47
    assert_weights(run, run.network.posterior.mean, dict(network.named_parameters()))


# --- context-dependent gating: gates on any network ------------------------------------------------------------------


UNSCALED = {**small_runs.PLAIN_FISHER, "fisher_scale": "none"}
gated_run = partial(small_runs.run_of, "xdg", hidden=(7, 6))


def gates_of(run, task, r=0):
    """By name, [inputs] each."""
    sizes = list(widths(run.network.layout))
    parts = run.memory.gates[task][r].to(F64).split([width for _, width in sizes])
    return dict(zip([name for name, _ in sizes], parts, strict=True))


def say(network, gates, x, head):
    """A unit's output times its gate."""
    first = gates["3.weight"] * torch.relu(network["1"](x))
    return network[f"head {head}"](gates["heads"] * torch.relu(network["3"](first)))


@pytest.mark.parametrize("importance", ["none", "fisher"])
@pytest.mark.parametrize("heads", [(0, 0, 0), (0, 1, 0)])
def test_xdg_trains_as_plain_torch_does(importance, heads):
    """Gates on the units' outputs, Adam, and a Fisher of the gated network, a gradient for every row and class."""
    run = gated_run(strength=20.0, importance=importance, **UNSCALED)
    network = plain(run)
    weights = dict(network.named_parameters())
    fisher = {name: torch.zeros_like(value) for name, value in weights.items()}
    for k, head in enumerate(heads):
        task = by_sign(k, head)
        run.learn([task])
        gates, used = gates_of(run, k), small_runs.used_by(network, head)
        assert 0 < float(gates["3.weight"].sum()) < 7
        anchor = copies(used)

        def loss(task=task, gates=gates, used=used, anchor=anchor):
            held = sum((fisher[name] * (w - anchor[name]).square()).sum() for name, w in used.items())
            return F.cross_entropy(say(network, gates, task.x[0], task.head), task.y[0]) + 10 * held

        adam(used, loss)
        if importance == "fisher":
            found = small_runs.fisher_by_definition(used, lambda x, g=gates, h=head: say(network, g, x, h), task.x[0])
            for name, more in found.items():
                fisher[name] += more / task.n
        assert_weights(run, run.network.posterior.mean, weights)
        assert_weights(run, run.memory.base.importance, fisher, atol=1e-12)
    for k, head in enumerate(heads):  # each task is predicted through its own gates
        p = say(network, gates_of(run, k), by_sign(k).x[0], head).softmax(1).detach()
        torch.testing.assert_close(run.predict(by_sign(k).x, head, task=k)[0], p)


def test_gates_are_drawn_once_per_task_from_the_seed():
    both, alone = (
        learned("xdg", [by_sign(0), by_sign(1)], hidden=(7, 6), seeds=seeds, gated=0.4).memory.gates
        for seeds in ([3, 4], [4])
    )
    assert torch.equal(both[0][1:], alone[0])
    assert torch.equal(both[1][1:], alone[1])
    assert not torch.equal(both[0][0], both[0][1])
    assert not torch.equal(both[0], both[1])
    inputs, first, second = both[0].split([5, 7, 6], 1)
    assert bool((inputs == 1).all())  # the network's own inputs have no gates
    assert first.sum(1).tolist() == [5, 5]  # 0.6 of 7 rounded up
    assert second.sum(1).tolist() == [4, 4]
    assert both[0].dtype == torch.uint8


class Odd(nn.Module):
    """A convolution, a batch norm, an activation that is not 0 at 0, groups, a layer norm, a residual connection."""

    def __init__(self):
        super().__init__()
        source = generator(0, "odd")
        skip = nn.utils.skip_init
        self.first, self.norm = skip(nn.Conv2d, 1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = skip(nn.Conv2d, 4, 6, 2, groups=2)
        self.third, self.layer_norm = skip(nn.Linear, 6 * 9, 8), nn.LayerNorm(8)
        self.fourth = skip(nn.Linear, 8, 8)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=source) / 2)

    def forward(self, x):
        h = torch.sigmoid(self.norm(self.first(x.view(-1, 1, 4, 4))))
        h = torch.tanh(self.second(h)).flatten(1)
        h = torch.sigmoid(self.layer_norm(self.third(h)))
        return h + F.gelu(self.fourth(h))


def test_gates_close_the_units_of_any_network():
    """Each layer reads its input times the gates; the convolution with two groups has one set for both."""
    run = gated_run(network=Odd(), features=8, seeds=[0, 1], gated=0.5)
    tasks = [by_sign(k, inputs=16) for k in range(2)]
    for task in tasks:
        run.learn([task])
    assert [name for name, _ in widths(run.network.layout)] == [
        "first.weight", "second.weight", "third.weight", "fourth.weight", "heads",
    ]  # fmt: skip
    for r in range(2):
        plain = Odd().to(F64).eval()
        views = run.network.layout.views(run.network.posterior.mean)
        plain.load_state_dict({name: v[r] for name, v in views.items() if not name.startswith("head")}, strict=False)
        for key, value in run.network.statistics().items():
            plain.get_buffer(key).copy_(value[r])
        for k, task in enumerate(tasks):
            gates = gates_of(run, k, r)
            assert bool(gates["first.weight"].all())
            assert gates["second.weight"].sum() == 1
            assert gates["third.weight"].sum() == 27
            shapes = {"second": gates["second.weight"].repeat(2).view(1, 4, 1, 1)}
            shapes |= {name: gates[f"{name}.weight"] for name in ("third", "fourth")}
            handles = [
                getattr(plain, name).register_forward_pre_hook(lambda _, args, g=gate: (args[0] * g,))
                for name, gate in shapes.items()
            ]
            features = plain(task.x[0]) * gates["heads"]
            for handle in handles:
                handle.remove()
            z = features @ views["head 0.weight"][r].T + views["head 0.bias"][r]
            torch.testing.assert_close(run.predict(task.x, 0, task=k)[r], z.softmax(1))


def test_predictions_use_the_gates_of_the_task_that_is_named():
    learner = evcl.Learner(evcl.nn.mlp(64, [20]), "xdg", epochs=2)
    benchmark = evcl.benchmarks.get("permuted-digits", tasks=2)
    for task in benchmark:
        learner.learn(task, head=0 if learner.tasks else "new")
    x = benchmark[0].test.x[:20]
    first, second = (learner.predict_proba(x, task=task.name) for task in benchmark)
    assert not torch.allclose(first, second, atol=1e-2)
    assert torch.equal(learner.predict_proba(x, task=0), first)
    assert torch.equal(learner.predict_proba(x), second)


def test_a_network_without_hidden_units_is_refused():
    learner = evcl.Learner(nn.Flatten(), "xdg", epochs=2)
    with pytest.raises(evcl.EvclError, match="closes hidden units"):
        learner.learn(evcl.benchmarks.get("split-digits", tasks=1)[0])
    assert learner.tasks == ()
