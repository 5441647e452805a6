"""The likelihood per class: that it is what its equations say, forgets nothing, and lets no old class fall silent."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import small_runs
import torch
from small_runs import F64, same
from test_groups import DIGITS as ALL_DIGITS
from test_groups import X, covariance, five, groups, learned
from test_groups import stream as stream_of
from torch import nn
from torch.distributions import MultivariateNormal
from torch.nn.utils import skip_init

import evcl
from evcl._core.randomness import generator
from evcl.experiments import execute
from evcl.methods import METHODS, TaskData, class_statistics
from evcl.methods.method import Asked

DIGITS = ALL_DIGITS["class"]
Y = torch.cat([task.test.y for task in DIGITS])
made = partial(small_runs.run_of, hidden=(6,), usual={"epochs": 2, "lr": 0.01})
classifier = partial(made, "generative-classifier")


def blobs(classes, rows=30, inputs=small_runs.INPUTS, seed=0, dtype=F64):
    """Rows of these classes, each around a centre of its own."""
    source = torch.Generator().manual_seed(seed)
    centres = torch.randn(10, inputs, generator=torch.Generator().manual_seed(99), dtype=dtype) * 3
    y = torch.tensor(classes).repeat(rows)
    return centres[y] + torch.randn(len(y), inputs, generator=source, dtype=dtype), y


def task(head, classes, seed=0, number=0, **options):
    x, y = blobs(classes, seed=seed, **options)
    return TaskData(x.unsqueeze(0), (y - min(classes)).unsqueeze(0), head, task=number)


def statistics(run):
    return run.memory.classes if isinstance(run.memory, METHODS["evcl"].memory) else run.memory


# --- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [30, 600])
def test_it_is_a_gaussian_per_class_with_a_common_covariance(rows):
    """By torch's own Gaussian, from the rows of all tasks at once. Of a large task one fold in five is held out."""
    run = classifier()
    parts = [task(0, [0, 1], rows=rows), task(1, [2, 3], 1, 1, rows=rows), task(0, [0, 1], 2, 2, rows=20)]
    for one in parts:
        run.learn([one])
    found, x = statistics(run), blobs([0, 1, 2, 3], 5, seed=7)[0]
    f = [(one.head, one.y[0], class_statistics.units(one.x[0], found.common, 0, 0)) for one in parts]
    each = [torch.cat([rows[y == c] for head, y, rows in f if head == k]) for k in range(2) for c in range(2)]
    centred = torch.cat([one - one.mean(0) for one in each])
    shared, new = covariance(centred.T @ centred, len(centred)), class_statistics.units(x, found.common, 0, 0)
    wanted = torch.stack([MultivariateNormal(one.mean(0), shared).log_prob(new) for one in each], 1)
    wanted = (wanted + torch.tensor([len(one) for one in each]).log()) / found.temperature
    scores = torch.cat(run.log_joint(x.unsqueeze(0), [0, 1]), 2)[0]
    torch.testing.assert_close(scores.log_softmax(1), wanted.log_softmax(1))
    for head, own in ((0, wanted[:, :2]), (1, wanted[:, 2:])):
        torch.testing.assert_close(run.predict(x.unsqueeze(0), head)[0], own.softmax(1))


def test_a_class_without_rows_is_never_predicted():
    run = classifier(heads=(4,))
    run.learn([task(0, [0, 1])])
    p = run.predict(blobs([0, 1], 5)[0].unsqueeze(0), 0)
    assert float(p[:, :, 2:].max()) == 0
    torch.testing.assert_close(p.sum(2), torch.ones(1, 10, dtype=F64))


def test_the_temperature_makes_it_honest():
    found = execute(stream_of("generative-classifier", scenario="class"))
    assert found.average_accuracy.mean > 0.95
    assert found.nll.mean < 0.2
    assert found.ece.mean < 0.04


@pytest.mark.parametrize("shape", [(1, 9, 9), (40,), (300,)])
def test_features_and_scatter_in_pieces_are_those_of_all_rows_at_once(shape):
    """Of images, convolutions; of other inputs, and of what a fixed trunk puts out, random units."""
    x = torch.rand(1, 2100, *shape, generator=generator(0, "x"), dtype=F64)
    y, fixed = torch.arange(2100).unsqueeze(0) % 2, shape == (300,)
    x[0, y[0] == 1, ..., :6] += 1
    with torch.random.fork_rng():
        network = nn.Sequential(nn.Flatten(), nn.Linear(x[0, 0].numel(), 300))
    given = {"options": {"draw": False, "only": []}} if fixed else {}
    run = made("evcl" if fixed else "generative-classifier", network=network, features=300, **given)
    run.learn([TaskData(x, y, 0)])
    common = statistics(run).common
    if fixed:
        x = evcl.nn.outputs(run.network, run.network.posterior.mean, run.network.layout, x, [])
    width = len(class_statistics.square(common["scatter"][0]))
    z, source = (x[0] - common["centre"][0].view(shape)) / common["scale"][0], generator(0, "features")
    if len(shape) == 3:
        filters = torch.randn(width // 16, 1, 7, 7, generator=source).double()
        filters /= filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        f = nn.functional.adaptive_avg_pool2d(nn.functional.conv2d(z, filters, padding=3).relu(), 4).flatten(1)
    else:
        f = z @ (torch.randn(*shape, width, generator=source) / shape[0] ** 0.5).double()
        f = (f + torch.randn(width, generator=source).double()).relu()
    torch.testing.assert_close(class_statistics.units(x[0], common, 0, 0), f)
    apart = torch.cat([f[y[0] == c] - f[y[0] == c].mean(0) for c in range(2)])
    torch.testing.assert_close(class_statistics.square(common["scatter"][0]), apart.T @ apart)
    if not fixed:
        assert float((run.predict(x, 0).argmax(2) == y).double().mean()) > 0.9


def test_statistics_that_do_not_fit_are_refused():
    run = classifier(heads=(2,))
    run.learn([task(0, [0, 1])])
    good = statistics(run)
    asked = Asked(run.network, blobs([0], 2)[0].unsqueeze(0), [0], [0])
    for name in ("scatter", "nll", "scale"):
        bad = class_statistics.Statistics(good.classes, {**good.common, name: good.common[name][:, :-1]})
        with pytest.raises(evcl.EvclError, match="the statistics of its classes do not fit each other"):
            class_statistics.log_joint(bad, run.network.posterior, asked)
    less = class_statistics.Statistics({0: good.classes[0][:, :, :-1]}, good.common)
    with pytest.raises(evcl.EvclError, match="do not fit each other"):
        class_statistics.log_joint(less, run.network.posterior, asked)


def adapted():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return evcl.nn.LoRA(rank=2)(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6)))


@pytest.mark.parametrize("network", [None, adapted], ids=["trained", "adapters"])
def test_replicas_side_by_side_are_each_alone(network):
    parts = [task(0, [0, 1]), task(1, [2, 3], seed=1, number=1)]
    each = ((3, 4), (3,), (4,))
    together, *alone = (
        made("evcl", seeds=seeds, network=network and network(), options={"draw": network is None}) for seeds in each
    )
    for run in (together, *alone):
        for one in parts:
            run.learn([one])
    x = blobs([0, 3], 4)[0].unsqueeze(0)
    found = together.evidence(x, [0, 1])
    for r, run in enumerate(alone):
        torch.testing.assert_close(found[r : r + 1], run.evidence(x, [0, 1]))
    apart = float((found[0] - found[1]).abs().max())
    assert apart < 1e-9 if network else apart > 1e-3  # each seed has its own random features; a base model has none


# --- new classes in one head -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner():
    return five("class")


def test_new_classes_do_not_silence_the_old_ones(learner):
    assert learner.measure((X, Y)).accuracy > 0.92
    assert learner.measure((X, Y)).ece < 0.06
    assert learner.classes() == tuple(range(10))
    with pytest.warns(evcl.ForgettingWarning, match=r"task '1' has no rows of 0, 1, which its head knows"):
        silenced = learned(DIGITS[:2], one_softmax=True)
    assert silenced.measure((DIGITS[0].test.x, DIGITS[0].test.y)).accuracy < 0.5


def test_the_trunk_is_computed_once_for_all_groups(learner):
    """And every group says what it says alone, bit for bit."""
    run, ((name, own),) = learner.state.run, learner.state.session.groups.items()
    alone = [run.predict(X.unsqueeze(0), group.number) for group in own]
    passes = []
    hook = run.network.register_forward_pre_hook(lambda network, args: passes.append(len(args[0])))
    together = run.predict_each(X.unsqueeze(0), [group.number for group in own])
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert (len(own), len(passes)) == (5, learner.settings.predict_samples)
    passes.clear()
    p = learner.predict_proba(X)
    hook.remove()
    assert len([rows for rows in passes if rows > 1]) == learner.settings.predict_samples  # one row tries the network
    assert torch.equal(p, learner.state.session.mixed(X.unsqueeze(0), name, alone)[0])


def test_given_the_group_it_is_task_incremental_evcl(learner):
    """So adding classes changes the odds of old classes of a group only as far as another task with a head would."""
    apart = learned(DIGITS, shared=False)
    p = learner.predict_proba(X)
    for k in range(5):
        own = p[:, 2 * k : 2 * k + 2]
        torch.testing.assert_close(own / own.sum(1, keepdim=True), apart.predict_proba(X, k), rtol=1e-4, atol=1e-5)
    means = (one.state.run.network.posterior.mean for one in (learner, apart))
    assert torch.equal(*means)


def test_one_class_at_a_time():
    """The network has nothing to tell apart, and the likelihoods do everything."""
    learner = evcl.EVCL(evcl.nn.mlp(5, [8]), epochs=3)
    learner.learn(blobs([0, 1], dtype=torch.float32), "0")
    for c in (2, 3):
        learner.learn(blobs([c], seed=c, dtype=torch.float32), str(c), "0")
    x, y = blobs([0, 1, 2, 3], seed=8, dtype=torch.float32)
    assert learner.measure((x, y)).accuracy > 0.9
    assert np.isfinite(learner.predictions(x.numpy()).unfamiliar).all()


def test_classes_named_in_advance_are_new_when_their_rows_come():
    learner = evcl.EVCL(evcl.nn.mlp(64, [50]), epochs=10)
    for k, one in enumerate(DIGITS[:3]):
        data = one.train.x, one.train.y
        learner.learn(data, str(k), "0" if k else "new", classes=range(6))
    rows = Y < 6
    assert learner.classes() == tuple(range(6))
    assert learner.measure((X[rows], Y[rows])).accuracy > 0.9
    torch.testing.assert_close(learner.predict_proba(X).sum(1), torch.ones(len(X)))


def test_what_a_head_of_several_groups_cannot_do(learner):
    with pytest.raises(evcl.EvclError, match="the classes of this head were learned in 5 groups"):
        learner.mean_network()


def test_inputs_of_another_shape_are_not_told_apart_without_a_word():
    network = nn.Sequential(skip_init(nn.Conv2d, 1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    one = evcl.Learner(network, "evcl", init="draw", epochs=1)
    for task in DIGITS[:2]:
        one.learn((task.train.x.view(-1, 1, 8, 8), task.train.y), task.name, head="new" if task is DIGITS[0] else 0)
    images = X[:20].view(-1, 1, 8, 8)
    assert one.predict_proba(images).shape == (20, 4)
    with pytest.warns(UserWarning, match=r"2 groups .* inputs of shape \(1, 9, 9\) .* one_softmax=True"):
        p = one.predict_proba(nn.functional.pad(images, (0, 1, 0, 1)))
    torch.testing.assert_close(p[:, :2].sum(1), torch.full((20,), 0.5))


def test_tokens_have_no_likelihood():
    with torch.random.fork_rng():
        trunk = nn.Sequential(nn.Embedding(20, 4), nn.Flatten())
    x = torch.randint(20, (60, 3), generator=torch.Generator().manual_seed(0))
    learner = evcl.EVCL(trunk, epochs=1)
    learner.learn((x, x[:, 0] % 2), "0")
    with pytest.warns(evcl.ForgettingWarning):
        learner.learn((x, 2 + x[:, 1] % 2), "1", "0")
    assert len(groups(learner)) == 1
    other = evcl.Learner(trunk, "generative-classifier")
    with pytest.raises(evcl.EvclError, match="cannot be learned from tokens"):
        other.learn((x, x[:, 0] % 2), "0")


# --- streams ---------------------------------------------------------------------------------------------------------


stream = partial(stream_of, scenario="class")


def test_the_task_is_inferred_and_measured():
    """By the likelihood of the inputs far better than by the uncertainty of a head that has never seen the like."""
    found = execute(stream("evcl", scenario="task")).inferred_accuracy
    assert set(found) == {"entropy", "information", "likelihood"}
    assert found["likelihood"].mean > 0.9
    assert 0.3 < found["entropy"].mean < 0.8
    assert set(execute(stream("vcl", scenario="task")).inferred_accuracy) == {"entropy", "information"}
    assert execute(stream("naive", scenario="task")).inferred_accuracy == {}
    assert execute(stream("evcl")).inferred_accuracy == {}  # there is one head


def test_a_learner_infers_the_task_by_likelihood_too():
    learner = learned(DIGITS[:3], shared=False)
    rows = Y < 6
    found = learner.predictions(X[rows], "infer")
    assert float((found.labels == Y[rows]).double().mean()) > 0.9
    assert float((torch.tensor(found.tasks.astype(int)) == Y[rows] // 2).double().mean()) > 0.9


@pytest.mark.parametrize("method", ["xdg", "evcl-film", "progressive"])
def test_a_method_that_needs_the_task_infers_it_where_it_is_not_given(method):
    """So it is worse than with the task, but better than a network that forgets."""
    notes = []
    config = stream(method, scenario="domain")
    found = execute(config, lambda event: notes.append(event.note) if event.note else None)
    line = f"scenario domain does not give the task, which {method} needs to predict: it is inferred"
    assert notes == [line]
    told = execute(stream(method, scenario="task"))
    assert 0.5 < found.average_accuracy.mean < told.average_accuracy.mean


# --- rows that are kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["evcl", "naive"])
def test_a_learner_that_keeps_rows_from_now_on(method, tmp_path):
    """It is the setting `memory`, from the next task on, also for a learner from a file."""
    learner = evcl.Learner(evcl.nn.mlp(64, [20]), method, epochs=3)
    one, two, three = (task.train for task in DIGITS[:3])
    learner.learn((one.x, one.y), "0")
    before = learner.predict_proba(X)
    with pytest.raises(evcl.EvclError, match="no rows of earlier tasks are kept"):
        learner.evaluate()
    learner.save(tmp_path / "m")
    ends = []
    for other in (learner, evcl.load(tmp_path / "m")):
        other.keep(30)
        assert torch.equal(other.predict_proba(X), before)
        other.learn((two.x, two.y), "1")
        assert other.kept == 30
        other.keep(12).learn((three.x, three.y), "2")
        assert (other.kept, other.settings.memory) == (12, 12)
        found = other.evaluate()
        assert list(found) == ["1", "2"]  # nothing of the first task was there to be kept
        assert min(found.values()) > 0.5
        ends.append(other)
    assert same(*ends)


def test_keeping_rows_from_the_first_task_is_the_setting():
    ends = []
    for given in ({"memory": 25}, {}):
        learner = evcl.EVCL(evcl.nn.mlp(64, [20]), epochs=2, **given)
        if not given:
            learner.keep(25)
        for k, one in enumerate(DIGITS[:3]):
            learner.learn((one.train.x, one.train.y), str(k), "0" if k else "new")
        ends.append(learner)
    assert same(*ends)


def test_without_kept_rows_the_warning_asks_for_rows_of_every_class():
    learner = evcl.Learner(evcl.nn.mlp(64, [20]), "xdg", epochs=1)
    one, two = DIGITS[0].train, DIGITS[1].train
    learner.learn((one.x, one.y), "0")
    with pytest.warns(evcl.ForgettingWarning, match="give every task rows of every class"):
        learner.learn((two.x, two.y), "1", "0")


@pytest.mark.filterwarnings("ignore::evcl.ForgettingWarning")
def test_tasks_that_share_a_class_do_not_silence_the_others():
    """With rows of half of the old classes or fewer, new classes are a group of their own; with more, they join."""
    whole = evcl.benchmarks.get("permuted-digits", tasks=1)[0]
    (x, y), learner = whole.train, evcl.EVCL(evcl.nn.mlp(64, [30]), epochs=10)
    for k, some in enumerate(([0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0])):
        rows = torch.isin(y, torch.tensor(some))
        learner.learn((x[rows], y[rows]), str(k), "0" if k else "new")
    assert [group.classes for group in groups(learner)] == [[0, 1, 2], [3, 4], [5, 6], [7, 8], [9]]
    assert learner.measure(whole.test, "0").accuracy > 0.9  # in one softmax, 0.6
    joined = evcl.EVCL(evcl.nn.mlp(64, [8]), epochs=1)
    for k, some in enumerate(([0, 1, 2], [1, 2, 3])):
        rows = torch.isin(y, torch.tensor(some))
        joined.learn((x[rows], y[rows]), str(k), "0" if k else "new")
    assert [group.classes for group in groups(joined)] == [[0, 1, 2, 3]]
    again = evcl.EVCL(evcl.nn.mlp(64, [8]), epochs=1)
    for k, some in enumerate(([0, 1, 2], [2, 3, 4])):
        rows = torch.isin(y, torch.tensor(some))
        data = torch.utils.data.TensorDataset(x[rows], y[rows])
        again.learn(data, task=str(k), head="0" if k else "new", reread=True)  # its rows cannot be divided
    assert [group.classes for group in groups(again)] == [[0, 1, 2, 3, 4]]
