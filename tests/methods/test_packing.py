"""A memory of every kind of field: it grows with the network, is saved and loaded, and a damaged one is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace

import pytest
import torch
from small_runs import F64, INPUTS, fitting, run_of, same
from torch import Tensor, nn

import evcl
from evcl.methods import (
    KL,
    METHODS,
    Fit,
    Learned,
    Method,
    Model,
    TaskData,
    examples,
    model,
    per_layer,
    per_task,
    per_weight,
    tempering,
)
from evcl.nn import Gaussian

R, OUT = 2, 3


@dataclass(frozen=True)
class Inner:
    importance: Tensor = per_weight(low=0)


@dataclass(frozen=True)
class Everything:
    inner: Inner
    prior: Gaussian = per_weight(Gaussian, "prior")
    first: Gaussian = per_weight(Gaussian, "posterior")
    signed: Tensor = per_weight()
    between: Tensor = per_weight(low=0, high=1)
    past: tuple[Gaussian, ...] = per_weight(tuple, "prior")
    named: dict[str, Tensor] = per_weight(dict)
    factors: dict[str, tuple[Tensor, Tensor]] = per_layer()
    masks: dict[int, Tensor] = per_task()
    kept: tuple[TaskData, ...] = examples()
    second: Model = model()


def learn(memory, round_, s):
    fitted = yield Fit(round_.tasks, terms=[KL(memory.prior, tempering(s, round_) / round_.n)])
    other = yield Fit(round_.tasks, model=memory.second)
    q, task = fitted.q, round_.tasks[0]
    moved = q.mean - memory.prior.mean
    rows = torch.stack([torch.randperm(task.y.shape[1], generator=g)[:3] for g in round_.generators("kept")])
    factor = moved[:, :3].unsqueeze(2)
    return Learned(
        q,
        Everything(
            inner=Inner(memory.inner.importance + moved.square()),
            prior=q,
            first=memory.first,
            signed=memory.signed - moved,
            between=torch.maximum(memory.between, fitted.used),
            past=(*memory.past, q),
            named={**memory.named, f"a/b {round_.number}": moved},
            factors={"1.weight": (factor, factor @ factor.mT)},
            masks={**memory.masks, round_.number: (moved[:, :OUT] > 0)},
            kept=(*memory.kept, task.select(rows)),
            second=other.model,
        ),
    )


EVERYTHING = replace(METHODS["vcl"], name="everything", learn=learn, memory=Everything, stages=2)


def task(head):
    x = torch.randn(1, 20, INPUTS, generator=torch.Generator().manual_seed(head), dtype=F64)
    return TaskData(x, (x[..., head] > 0).long(), head, torch.full((1, 20), 1.0, dtype=F64) if head else None, head)


def new(heads=0):
    usual = {"epochs": 1, "batch_size": 8, "lr": 0.02, "std_update": "adam", "prior_std": 0.25, "init_std": 1e-3}
    linear = nn.utils.skip_init(nn.Linear, INPUTS, OUT)
    network = nn.Sequential(nn.Flatten(), linear, nn.BatchNorm1d(OUT), nn.ReLU())
    return run_of(EVERYTHING, seeds=[5, 6], network=network, features=OUT, heads=[2] * heads, usual=usual)


def learned():
    run = new()
    for head in range(2):
        run.add_head(OUT, 2)
        run.learn([task(head)])
    return run


LEARNED = learned()


def saved():
    """What a file has of it, for this test alone."""
    tensors = {name: t.clone() for name, t in LEARNED.tensors().items()}
    return tensors, json.loads(json.dumps(LEARNED.outline()))


def load(tensors, outline):
    run = new(2)
    run.load_tensors(tensors, outline, LEARNED.rounds, LEARNED.seen)
    return run


# --- growing ---------------------------------------------------------------------------------------------------------


def test_every_field_grows_with_the_network():
    """What was there stays; a new weight starts as its field says, in every Gaussian of a tuple or dict too."""
    run = copy.deepcopy(LEARNED)
    before, old = run.memory, run.network.layout
    run.add_head(OUT, 4)
    after, new_layout = run.memory, run.network.layout
    posterior, s = run.network.posterior, run.settings
    added = ["head 2.weight", "head 2.bias"]

    def check(was, now, start):
        for name in old.shapes:
            assert torch.equal(new_layout.view(now, name), old.view(was, name))
        for name in added:
            found = new_layout.view(now, name)
            torch.testing.assert_close(found, start(name, found), rtol=1e-12, atol=0)

    def constant(value):
        return lambda name, like: torch.full_like(like, value)

    zero, drawn = constant(0.0), lambda name, like: new_layout.view(posterior.mean, name)
    prior_std, init_std = (constant(float(torch.tensor(std, dtype=F64).log())) for std in (s.prior_std, s.init_std))
    check(before.inner.importance, after.inner.importance, zero)
    check(before.signed, after.signed, zero)
    check(before.between, after.between, zero)
    for was, now in ((before.prior, after.prior), *zip(before.past, after.past, strict=True)):
        check(was.mean, now.mean, zero)
        check(was.log_std, now.log_std, prior_std)
    check(before.first.mean, after.first.mean, drawn)
    check(before.first.log_std, after.first.log_std, init_std)
    assert before.named.keys() == after.named.keys()
    for key in before.named:
        check(before.named[key], after.named[key], zero)
    second = after.second.posterior
    check(before.second.posterior.mean, second.mean, lambda name, like: new_layout.view(second.mean, name))
    heads = [new_layout.view(q.mean, "head 2.weight") for q in (second, posterior)]
    assert not torch.equal(*heads)  # drawn each for itself
    for same_ in ("factors", "masks", "kept"):
        assert getattr(before, same_) is getattr(after, same_)


# --- there and back --------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_what_was_saved_and_goes_on_alike():
    run = load(*saved())
    assert same(run, LEARNED)
    assert run.outline() == LEARNED.outline()
    memory = run.memory
    assert list(memory.masks) == [0, 1]
    assert memory.masks[0].dtype == torch.bool
    assert [(one.head, one.task) for one in memory.kept] == [(0, 0), (1, 1)]
    assert memory.kept[0].weights is None
    assert memory.kept[1].weights.shape == (R, 3)
    assert (memory.signed < 0).any()
    assert (memory.signed > 0).any()
    other = copy.deepcopy(LEARNED)
    for one in (run, other):
        one.add_head(OUT, 2)
        one.learn([task(2)])
    assert same(run, other)


def test_a_method_with_every_field_is_saved_by_a_learner(tmp_path):
    evcl.methods.register(EVERYTHING, overwrite=True)
    try:
        learner = evcl.Learner(evcl.nn.mlp(INPUTS, [OUT]), "everything", epochs=1, seed=3, std_update="adam")
        for head in range(2):
            learner.learn((task(head).x[0].float(), task(head).y[0]))
        learner.save(tmp_path / "model.safetensors")
        again = evcl.load(tmp_path / "model.safetensors")
        assert same(again, learner)
        for one in (learner, again):
            one.learn((task(2).x[0].float(), task(2).y[0]))
        assert same(again, learner)
    finally:
        METHODS.remove("everything")


# --- damage ----------------------------------------------------------------------------------------------------------

NAMES = [name for name in LEARNED.tensors() if name.startswith("memory/")]


def with_value(value):
    """A change of a tensor's first number."""
    return lambda tensor: torch.where(torch.arange(tensor.numel()).view(tensor.shape) == 0, value, tensor)


DAMAGES = {
    "missing": lambda t: None,
    "another replica": lambda t: torch.cat([t, t[:1]]),
    "no replicas": lambda t: t[0, ...],
    "a number": lambda t: t.flatten()[0],
    "nan": with_value(torch.nan),
    "inf": with_value(-torch.inf),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tensor_is_refused(damage):
    for name in NAMES:
        tensors, outline = saved()
        if tensors[name].is_floating_point() or damage not in ("nan", "inf"):
            changed = DAMAGES[damage](tensors.pop(name))
            tensors |= {} if changed is None else {name: changed}
            with pytest.raises(evcl.EvclError):
                load(tensors, outline)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("memory/prior/mean", lambda t: t.float()),
        ("memory/prior/mean", lambda t: t[:, :-1]),
        ("memory/prior/mean", with_value(1e19)),
        ("memory/prior/log_std", with_value(60.0)),
        ("memory/past/1/log_std", with_value(60.0)),
        ("memory/inner/importance", with_value(-1e-9)),
        ("memory/between", with_value(1.01)),
        ("memory/between", with_value(-0.01)),
        ("memory/between", lambda t: t.bool()),
        ("memory/kept/0/x", lambda t: t.float()),
        ("memory/kept/0/x", lambda t: t[:, :2]),
        ("memory/kept/0/y", with_value(2)),
        ("memory/kept/0/y", with_value(-1)),
        ("memory/kept/0/y", lambda t: t.int()),
        ("memory/kept/1/weights", lambda t: t[:, :2]),
        ("memory/second/posterior/mean", lambda t: t.float()),
        ("memory/second/posterior/log_std", with_value(60.0)),
        ("memory/second/statistics/2.running_var", lambda t: t[:, :1]),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(name, change):
    tensors, outline = saved()
    tensors[name] = change(tensors[name])
    with pytest.raises(evcl.EvclError):
        load(tensors, outline)


def places(tree, path=()):
    """Where each part of an outline stands."""
    yield path
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def put(tree, path, value):
    if not path:
        return value
    tree = copy.copy(tree)
    tree[path[0]] = put(tree[path[0]], path[1:], value)
    return tree


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


PLACES = list(places(LEARNED.outline()))
OTHERS = [
    None, "tensor", "", 3, -1, True, 1.5, [], {}, [[]], {"dict": []}, {"dict": [[0, "tensor"]]},
    {"dict": [[None, None]]}, {"gaussian": ["tensor", None]}, {"gaussian": [None, "tensor"]},
    {"gaussian": ["tensor", "tensor"]}, {"gaussian": []}, {"fields": {}}, {"examples": {}}, {"model": []},
    {"what": 1}, {"gaussian": [], "dict": []}, "x" * 1000,
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("path", PLACES, ids=lambda path: "/".join(map(str, path)))
def test_a_changed_outline_is_refused_or_still_a_memory(path):
    """What it says is checked against what the fields are: the little that is taken can be gone on with."""
    tensors, outline = saved()
    for other in OTHERS:
        if other == at(outline, path):
            continue
        try:
            run = load(dict(tensors), put(outline, path, other))
        except evcl.EvclError as error:
            assert "\n" not in str(error)  # noqa: PT017
            continue
        run.predict(task(0).x, 0)
        run.learn([task(1)])


@pytest.mark.parametrize("path", [p for p in PLACES if len(p) == 2], ids=lambda path: path[-1])
def test_a_field_of_another_kind_is_refused(path):
    """What the method may have remembered earlier is taken: empty tuples and dicts, the masks of the first task."""
    tensors, outline = saved()
    before = at(outline, path)
    empty = {"dict": []} if isinstance(before, dict) and "dict" in before else [] if isinstance(before, list) else None
    earlier = [before, empty, *([{"dict": [[0, "tensor"]]}] if path[-1] == "masks" else [])]
    for other in OTHERS:
        if other not in earlier:
            with pytest.raises(evcl.EvclError):
                load(dict(tensors), put(outline, path, other))


def test_a_memory_of_another_method_is_refused():
    tensors, outline = saved()
    for other in ([], [outline], None, {}, "tensor"):
        with pytest.raises(evcl.EvclError):
            load(tensors, other)
    more = copy.deepcopy(outline)
    more["fields"]["more"] = None
    with pytest.raises(evcl.EvclError, match=r"its memory has the fields .*more"):
        load(tensors, more)
    del more["fields"]["more"], more["fields"]["signed"]
    with pytest.raises(evcl.EvclError, match=r"this method.s has .*signed"):
        load(tensors, more)


@dataclass(frozen=True)
class Small:
    importance: torch.Tensor = per_weight(low=0)
    masks: dict[int, torch.Tensor] = per_task()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda mean: {"importance": torch.full_like(mean, -1.0)}, "importance must be at least 0"),
        (lambda mean: {"importance": mean / 0}, "importance is not finite for some weights"),
        (lambda mean: {"importance": None}, "importance must be a Tensor"),
        (lambda mean: {"importance": mean > 0}, r"importance must be torch.float32 \(1, 37\) .* is torch.bool"),
        (lambda mean: {"importance": mean[:, :3]}, r"importance must be torch.float32 \(1, 37\) .* \(1, 3\)"),
        (lambda mean: {"masks": {0: torch.ones(5)}}, "masks/0 must be finite and have the replica axis first"),
    ],
    ids=["below its least", "infinite", "none", "boolean", "of another shape", "without replicas"],
)
def test_what_could_not_be_loaded_is_refused_when_it_is_learned(make, message):
    """And the learner stays as it was."""

    def learn(memory, round_, s):
        fitted = yield Fit(round_.tasks)
        return Learned(fitted.q, replace(memory, **make(fitted.q.mean)))

    learner = evcl.Learner(evcl.nn.mlp(4, [5]), Method("odd", "", bayesian=False, learn=learn, memory=Small), epochs=1)
    with pytest.raises(evcl.EvclError, match=f"^task '0': (the memory's )?{message}") as raised:
        learner.learn(torch.eye(4), [0, 1, 0, 1])
    assert "\n" not in str(raised.value)
    assert (learner.tasks, learner.state.run.rounds) == ((), 0)


@dataclass(frozen=True)
class Others:
    first: evcl.methods.Model = model()
    second: evcl.methods.Model = model()


def test_a_second_network_cannot_be_the_learners_own():
    odd = []

    def learn(memory, round_, s):
        fitted = yield Fit(round_.tasks)
        if odd:
            own = Model(round_.network, fitted.q, round_.network.statistics())
            memory = replace(memory, first=own)
        return Learned(fitted.q, memory)

    method = Method("same", "", bayesian=False, learn=learn, memory=Others)
    learner = evcl.Learner(evcl.nn.mlp(4, [5]), method, epochs=1)
    learner.learn(torch.eye(4), [0, 1, 0, 1], task="a")
    before = copy.deepcopy(learner.state.run)
    odd.append(True)
    with pytest.raises(evcl.EvclError, match=r"^task 'b': first in the memory must keep its own network: .*$"):
        learner.learn(torch.eye(4), [0, 1, 0, 1], task="b")
    assert learner.tasks == ("a",)
    assert same(learner, before)
    odd.clear()
    learner.learn(torch.eye(4), [0, 1, 0, 1], task="b")  # and it goes on


def test_two_networks_of_a_memory_have_heads_of_their_own():
    method = Method("two", "", bayesian=False, memory=Others, learn=fitting())
    learner = evcl.Learner(evcl.nn.mlp(4, [5]), method, epochs=1)
    for name in "ab":
        learner.learn(torch.eye(4), [0, 1, 0, 1], task=name)
    memory = learner.state.run.memory
    for head in ("head 0.weight", "head 1.weight"):
        first, second = (one.network.layout.view(one.posterior.mean, head) for one in (memory.first, memory.second))
        assert (first != second).any()


@dataclass(frozen=True)
class Silent:
    used: Tensor = None


@dataclass(frozen=True)
class Unknown:
    inner: NoSuchClass  # noqa: F821


@pytest.mark.parametrize(
    ("memory", "message"),
    [(Silent, "'used' must declare how it is stored"), (Unknown, "'inner': name 'NoSuchClass' is not defined")],
)
def test_a_field_that_does_not_say_how_it_lives_is_refused(memory, message):
    with pytest.raises(evcl.EvclError, match=message):
        evcl.Learner(evcl.nn.mlp(4, [5]), Method("silent", "", bayesian=False, memory=memory), epochs=1)
