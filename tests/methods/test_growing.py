"""Progressive networks, and Progress & Compress: training by plain torch, what stays as it is, and any network."""

from __future__ import annotations

import json
from functools import partial

import pytest
import small_runs
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from small_runs import F64, INPUTS, by_sign, copies
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.randomness import generator
from evcl.experiments import configure
from evcl.experiments.parallel import programs
from evcl.nn import bayesianize
from evcl.nn.columns import MAX_FIRST_ALPHA, Columns, Scale
from evcl.training.observer import Observer

WIDTHS = [7, 6]
run_of = partial(small_runs.run_of, hidden=WIDTHS)


def weights(network, mean):
    return {name: v[0].clone() for name, v in network.layout.views(mean).items()}


def lateral(w, k, layer, earlier):
    """U (alpha * relu(V h + c)) into a layer of column k, from what it reads in the earlier columns."""
    own = f"columns.{k}.laterals.{layer}"
    a = torch.relu(torch.cat(earlier, 1) @ w[f"{own}.v.weight"].T + w[f"{own}.v.bias"])
    return (w[f"{own}.alpha.weight"] * a) @ w[f"{own}.u.weight"].T


def features(w, k, x):
    """The features of column k, by the equation in nn/columns.py."""
    firsts, ends = [], []
    for j in range(k + 1):
        one, two = (f"columns.{j}.body.{layer}" for layer in (1, 3))
        first = torch.relu(x @ w[f"{one}.weight"].T + w[f"{one}.bias"])
        before = first @ w[f"{two}.weight"].T + w[f"{two}.bias"]
        end = torch.relu(before + lateral(w, j, 1, firsts)) if j else torch.relu(before)
        if j:
            end = end + lateral(w, j, "output", ends)
        firsts.append(first)
        ends.append(end)
    return ends[-1]


def logits(w, k, head, x):
    return features(w, k, x) @ w[f"head {head}.weight"].T + w[f"head {head}.bias"]


def trained(w, names, loss):
    """`w` after four steps of Adam on these weights."""
    leaves = {name: nn.Parameter(w[name].clone()) for name in names}
    small_runs.adam(leaves, lambda: loss({**w, **leaves}))
    return {**w, **copies(leaves)}


def close(view, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(view[name], value, rtol=1e-7, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


# --- progressive networks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(0, 0, 0), (0, 1, 0)])
def test_a_progressive_network_trains_as_plain_torch_does(heads):
    run = run_of("progressive")
    for k, head in enumerate(heads):
        task, network = by_sign(k, head), run.network
        run.grow_trunk(k + 1)
        w = weights(network, network.posterior.mean)
        if head in heads[:k]:  # an output layer of its own
            drawn = network.redrawn(network.posterior.mean, [generator(0, "output layer", k)])
            w |= {name: v for name, v in weights(network, drawn).items() if name.startswith(f"head {head}.")}
        names = [name for name in w if name.startswith((f"columns.{k}.", f"head {head}."))]
        after = trained(w, names, lambda w: F.cross_entropy(logits(w, k, head, task.x[0]), task.y[0]))  # noqa: B023
        run.learn([task])
        close(weights(network, network.posterior.mean), after)
        p = logits(after, k, head, task.x[0]).softmax(1)
        torch.testing.assert_close(run.predict(task.x, head, task=k)[0], p)
        moved = [name for name in names if not torch.equal(w[name], after[name])]
        assert set(moved) == set(names)  # every lateral of the column learns


def test_new_columns_are_drawn_from_the_seed_and_laterals_begin_small():
    run = run_of("progressive", seeds=(3, 4))
    first = run.network.posterior.mean.clone()
    run.grow_trunk(3)
    alone = run_of("progressive", seeds=(4,))
    alone.grow_trunk(3)
    assert torch.equal(run.network.posterior.mean[1:], alone.network.posterior.mean)
    views = run.network.layout.views(run.network.posterior.mean)
    kept = torch.cat([v.flatten(1) for name, v in views.items() if name.startswith(("columns.0.", "head"))], 1)
    assert torch.equal(kept, first)
    a, b = (views[f"columns.{k}.body.1.weight"] for k in (1, 2))
    assert not torch.equal(a, b)
    assert not torch.equal(a[0], a[1])
    alphas = torch.cat([v.flatten() for name, v in views.items() if "alpha" in name])
    assert float(alphas.min()) >= 0
    assert 0.8 * MAX_FIRST_ALPHA < float(alphas.max()) <= MAX_FIRST_ALPHA


def test_a_column_gives_classes_that_came_later_no_probability():
    one = evcl.Learner(evcl.nn.mlp(INPUTS, [12]), "progressive", epochs=30, lr=0.02)
    x = by_sign(0).x[0].float()
    one.learn((x, (x[:, 0] > 0).long()), "old")
    before = one.predict_proba(x, task="old")
    one.learn((x, 2 + (x[:, 1] > 0).long()), "later", head="old")
    after = one.predict_proba(x, task="old")
    torch.testing.assert_close(after[:, :2], before)
    assert not after[:, 2:].any()
    assert set(one.predict(x, task="later").tolist()) <= {2, 3}
    assert torch.equal(one.predict_proba(x), one.predict_proba(x, task="later"))  # without a task: the last column


def test_a_tasks_columns_can_be_exported_as_a_plain_module():
    one = evcl.Learner(evcl.nn.mlp(INPUTS, WIDTHS), "progressive", epochs=3)
    for k in range(3):
        one.learn((by_sign(k).x[0].float(), by_sign(k).y[0]), f"task {k}", head="new" if k < 2 else "task 0")
    x = by_sign(4).x[0].float()
    for k in range(3):
        plain = one.mean_network(k)
        assert len(plain[0].columns) == k + 1
        torch.testing.assert_close(plain(x).softmax(1), one.predict_proba(x, task=k))


class Convolutions(nn.Module):
    """Two convolutions, a norm, a global pool and a linear layer, for images of 4 x 4."""

    def __init__(self, norm=nn.BatchNorm2d, last=True):
        super().__init__()
        self.first, self.norm = skip_init(nn.Conv2d, 1, 4, 3, padding=1), norm(4)
        self.second = skip_init(nn.Conv2d, 4, 6, 3, stride=2, padding=1, groups=2)
        self.last = skip_init(nn.Linear, 6, 5) if last else None

    def forward(self, x):
        h = torch.relu(self.second(torch.relu(self.norm(self.first(x.view(-1, 1, 4, 4)))))).mean((2, 3))
        return h if self.last is None else torch.relu(self.last(h))


images = partial(by_sign, inputs=16)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda channels: nn.GroupNorm(2, channels), nn.Identity])
@pytest.mark.parametrize("method", ["progressive", "progress-compress"])
def test_convolutions_side_by_side_are_as_alone(method, norm, last):
    found = []
    for seeds in ([0, 1], [1]):
        run = run_of(method, seeds=seeds, network=Convolutions(norm, last), features=5 if last else 6)
        said = []
        for k, head in enumerate((0, 1, 0)):
            run.learn([images(k, head)])
            said.append(run.predict(images(k).x, head, task=k)[-1])
        if method == "progressive":
            assert torch.equal(run.predict(images(0).x, 0, task=0)[-1], said[0])
        found.append(torch.stack(said))
    torch.testing.assert_close(*found)


def test_a_convolutions_lateral_is_that_of_its_equation():
    columns = Columns(Convolutions(nn.Identity), 2).double()
    source = torch.Generator().manual_seed(1)
    for parameter in columns.parameters():
        parameter.data.uniform_(-0.5, 0.5, generator=source)
    x = images(0).x[0]
    a, b = columns.columns
    old = torch.relu(a.body.first(x.view(-1, 1, 4, 4)))
    new = torch.relu(b.body.first(x.view(-1, 1, 4, 4)))
    into = b.laterals["1"]
    adapted = into.alpha.weight.view(-1, 1, 1) * torch.relu(F.conv2d(old, into.v.weight, into.v.bias))
    h = torch.relu(b.body.second(new) + F.conv2d(adapted, into.u.weight, stride=2, padding=1)).mean((2, 3))
    ends = torch.relu(a.body.second(old)).mean((2, 3))
    adapted = b.laterals["2"].alpha.weight * torch.relu(b.laterals["2"].v(ends))
    h = torch.relu(b.body.last(h) + b.laterals["2"].u(adapted))
    adapted = b.laterals["output"].alpha.weight * torch.relu(b.laterals["output"].v(a(x, [])["output"]))
    torch.testing.assert_close(columns(x), h + b.laterals["output"].u(adapted))
    columns.task = 0
    torch.testing.assert_close(columns(x), a.body(x))
    network = bayesianize(columns, init_std=None, dtype=F64)
    torch.testing.assert_close(network(x), h + b.laterals["output"].u(adapted))


def filled(network, seed):
    """The network with parameters and buffers of this seed's."""
    source = torch.Generator().manual_seed(seed)
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=source) * 0.5 + 0.1)
    return network


@pytest.mark.parametrize("init", ["draw", "network"])
@pytest.mark.parametrize("make", [Convolutions, lambda: evcl.nn.mlp(16, [5])])
@pytest.mark.parametrize("method", ["progressive", "progress-compress"])
def test_columns_added_after_loading_start_as_in_an_uninterrupted_run(method, make, init, tmp_path):
    """Whatever the weights of the network that is passed to `load`."""
    one = evcl.Learner(filled(make(), 1), method, epochs=2, init=init)
    tasks = [(images(k).x[0].float(), images(k).y[0]) for k in range(4)]
    one.learn(tasks[0])
    one.save(tmp_path / "model")
    two = evcl.load(tmp_path / "model", network=None if isinstance(one.state.plain, evcl.nn.MLP) else filled(make(), 2))
    for task in tasks[1:3]:
        one.learn(task)
        two.learn(task)
    two.save(tmp_path / "model")
    three = evcl.load(tmp_path / "model", network=filled(make(), 3))
    for each in (one, three):
        each.learn(tasks[3])
    assert small_runs.same(one, three)


FIRST = "first weights of a new column"
COLUMNS = "the number of its columns does not fit the number of its rounds"


@pytest.mark.parametrize(
    ("about", "tensors", "message"),
    [
        ({}, {"first.second.weight": torch.zeros(3)}, FIRST),
        ({}, {"first.last.bias": torch.full((5,), torch.nan)}, FIRST),
        ({}, {"first.more": torch.zeros(2)}, FIRST),
        *(({"rounds": rounds}, {}, COLUMNS) for rounds in (1, 3, 10**9)),
    ],
)
def test_a_file_that_does_not_fit_is_refused(about, tensors, message, tmp_path):
    one = evcl.Learner(filled(Convolutions(), 1), "progressive", epochs=1)
    for k in range(2):
        one.learn((images(k).x[0].float(), images(k).y[0]))
    description, known = one.described()
    save_file({**known, **tensors}, tmp_path / "model", {"evcl": json.dumps({**description, **about})})
    with pytest.raises(evcl.EvclError, match=message) as caught:
        evcl.load(tmp_path / "model", network=Convolutions())
    assert "\n" not in str(caught.value)


def test_dropout_in_earlier_columns_is_off():
    """Their units are inputs of the new column, in training as in predictions."""
    run = run_of("progressive", network=evcl.nn.mlp(INPUTS, WIDTHS, dropout=0.5), epochs=1)
    run.learn([by_sign(0)])
    read = []

    class Watches(Observer):
        def begin_fit(self, stage, step, stopped, epochs, batches):
            into = run.network.trunk.columns[1].laterals["output"].v
            into.register_forward_pre_hook(lambda layer, args: read.append(args[0]))

    run.learn([by_sign(1)], observer=Watches())
    views = weights(run.network, run.network.posterior.mean)
    first = {name.replace("body.4", "body.3"): value for name, value in views.items()}
    far = torch.cdist(read[0], features(first, 0, by_sign(1).x[0])).min(1).values  # the batch is in random order
    torch.testing.assert_close(far, torch.zeros_like(far), rtol=0, atol=1e-6)


# --- Progress & Compress ---------------------------------------------------------------------------------------------


def base_logits(w, head, x):
    one = {name if name.startswith("head") else f"columns.0.body.{name}": value for name, value in w.items()}
    return logits(one, 0, head, x)


@pytest.mark.parametrize("heads", [(0, 0, 0), (0, 1, 0)])
def test_progress_and_compress_trains_as_plain_torch_does(heads):
    """The active column, distillation, the penalty with gamma F, and a Fisher of mean 1 over the weights in use."""
    strength, gamma = 0.3, 0.8
    given = {"fisher_temperature": 1.0, "fisher_spread": 0.0, "strength": strength, "fisher_decay": gamma}
    run = run_of("progress-compress", **given)
    fisher = {name: torch.zeros_like(v) for name, v in weights(run.network, run.network.posterior.mean).items()}
    for k, head in enumerate(heads):
        task, network, active = by_sign(k, head), run.network, run.memory.active
        x, y = task.x[0], task.y[0]
        base = weights(network, network.posterior.mean)
        drawn = active.network.redrawn(active.posterior.mean, [generator(0, "active column", k)])
        w = weights(active.network, drawn)
        w |= {f"columns.0.body.{name}": v for name, v in base.items() if not name.startswith("head")}
        names = [name for name in w if name.startswith(("columns.1.", f"head {head}."))]
        w = trained(w, names, lambda w: F.cross_entropy(logits(w, 1, head, x), y))  # noqa: B023
        said = logits(w, 1, head, x).log_softmax(1)
        used = [name for name in base if not name.startswith("head") or name.startswith(f"head {head}.")]

        def loss(now):
            told = F.kl_div(base_logits(now, head, x).log_softmax(1), said, log_target=True, reduction="batchmean")  # noqa: B023
            far = [(fisher[n] * (now[n] - base[n]).square()).sum() for n in used]  # noqa: B023
            return told + strength / 2 * gamma * sum(far)

        after = trained(base, used, loss)
        run.learn([task])
        close(weights(active.network, run.memory.active.posterior.mean), w)
        close(weights(network, network.posterior.mean), after)

        leaves = {name: nn.Parameter(after[name]) for name in used}
        said = partial(base_logits, {**after, **leaves}, head)
        own = small_runs.fisher_by_definition(leaves, lambda row: said(row[None])[0], x)  # noqa: B023
        mean = sum(float(f.sum()) for f in own.values()) / sum(f.numel() for f in own.values())
        fisher |= {name: gamma * fisher[name] + own[name] / mean for name in used}
        close(weights(network, run.memory.base.importance), fisher)
        torch.testing.assert_close(run.predict(task.x, head, task=k)[0], base_logits(after, head, x).softmax(1))


def test_an_early_end_of_progress_does_not_end_compress():
    """Labels have no weight in compress: its NLL is 0."""
    one = evcl.Learner(evcl.nn.mlp(INPUTS, WIDTHS), "progress-compress", epochs=60, stop_nll=0.3)
    one.learn((by_sign(0).x[0].float(), by_sign(0).y[0]), "a")
    stages = [epoch.stage for epoch in one.history["a"]]
    assert 0 < stages.count("progress") < 60
    assert stages.count("compress") == 60


def test_validation_data_stops_compress_at_the_bases_best_epoch():
    one = evcl.Learner(evcl.nn.mlp(INPUTS, WIDTHS), "progress-compress", epochs=40)
    one.learn((by_sign(0).x[0].float(), by_sign(0).y[0]), "a", validation=0.3, patience=3)
    seen = [(epoch.stage, epoch.validation_nll) for epoch in one.history["a"]]
    assert [nll for stage, nll in seen if stage == "progress"] == [None] * 40
    nll = [nll for stage, nll in seen if stage == "compress"]
    assert nll.index(min(nll)) == len(nll) - 4


# --- what cannot be done ---------------------------------------------------------------------------------------------


class Called(nn.Module):
    """Linear layers of these sizes, called in this order."""

    def __init__(self, order, **sizes):
        super().__init__()
        self.order = order
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, skip_init(nn.Linear, inputs, outputs))

    def forward(self, x):
        for name in self.order:
            x = torch.relu(self.get_submodule(name)(x))
        return x


class Unpooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = skip_init(nn.Conv1d, 1, 3, 2)

    def forward(self, x):
        return self.one(x.unsqueeze(1)).flatten(1)


def fixed():
    network = evcl.nn.mlp(INPUTS, [7])
    network[1].requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (
            lambda: Called(["one", "two", "two"], one=(INPUTS, 7), two=(7, 7)),
            {},
            "'two' is called twice; a network with columns must call each layer once",
        ),
        (
            lambda: Called(["one", "two"], two=(7, 7), one=(INPUTS, 7)),
            {},
            "'one' is called before 'two': a network with columns must declare first",
        ),
        (Unpooled, {}, "one number per unit of its last layer, 'one', which has 3, not 12: end it with a linear layer"),
        (
            lambda: skip_init(nn.TransformerEncoderLayer, INPUTS, 1),
            {},
            "columns need a network of linear layers and convolutions",
        ),
        (nn.Flatten, {}, "columns need a network with a linear layer or a convolution, and this one has none"),
        (lambda: evcl.nn.mlp(INPUTS, [7]), {"only": "1"}, "leave out only and skip"),
        (lambda: evcl.nn.mlp(INPUTS, [7]), {"film": True}, "film=True cannot be used with this method"),
    ],
)
@pytest.mark.parametrize("method", ["progressive", "progress-compress"])
def test_networks_that_cannot_have_columns_are_refused(method, network, options, message):
    def learn_two():
        one = evcl.Learner(network(), method, epochs=1, init="draw", **options)
        for k in range(2):
            one.learn((by_sign(k).x[0].float(), by_sign(k).y[0]))

    with pytest.raises(evcl.EvclError, match=message) as caught:
        learn_two()
    assert "\n" not in str(caught.value)


def test_a_progressive_network_refuses_fixed_layers_and_tasks_learned_jointly():
    with pytest.raises(evcl.EvclError, match=r"progressive trains every layer of its network, but '.*1.weight' is fix"):
        evcl.Learner(fixed(), "progressive")
    benchmark = evcl.benchmarks.get("split-digits", tasks=2)
    one = evcl.Learner(evcl.nn.mlp(benchmark.inputs, [7]), "progressive", epochs=1)
    with pytest.raises(evcl.EvclError, match="one column per task: learn the tasks one after another, not jointly"):
        one.learn_jointly(benchmark)
    one.learn(benchmark[0])


# --- the layer that multiplies by alpha ------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "shape"), [(False, (4,)), (False, (3, 4)), (True, (4, 3)), (True, (4, 2, 3))])
def test_scales_are_those_of_each_replica_and_so_are_their_gradients(channels, shape):
    plain = Scale(4, channels)
    network = bayesianize(plain, init_std=None, generators=[generator(r, "init") for r in range(2)], dtype=F64)
    alpha = network.posterior.mean
    x, delta = (torch.randn(2, 5, *shape, generator=generator(s, "x"), dtype=F64) for s in range(2))
    axes = [1] * (len(shape) - 1)
    wide = [a.view(4, *axes) if channels else a.view(*axes, 4) for a in alpha]
    y = network.trunk(x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(y, torch.stack([x[r] * wide[r] for r in range(2)]))
    found = network.trunk.example_gradient("weight", x, delta)
    both = x * delta
    wanted = both.flatten(3).sum(3) if channels else both.flatten(2, -2).sum(2) if len(shape) > 1 else both
    torch.testing.assert_close(found, wanted)


def test_choices_that_second_networks_cannot_share_are_in_programs_of_their_own():
    configs = [
        configure("split-digits", "progress-compress", "default", (0,), 2, {"fisher": labels, "strength": strength})
        for labels in ("exact", "sampled")
        for strength in (0.1, 0.2)
    ]
    assert programs(configs, 8) == [[0, 1], [2, 3]]
    assert programs([configs[0], configure("split-digits", "ewc", "default", (0,), 2)], 8) == [[0], [1]]
