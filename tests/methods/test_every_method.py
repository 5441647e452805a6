"""What public code of these methods got wrong, asked of every method: that it has an effect, that what it remembers is
its own, that importance is that of examples, and that FiLM works or is refused.
"""

from __future__ import annotations

import pytest
import small_runs
import torch
from small_runs import F64, Handed, by_sign, copies, run_of
from strengths import HIDDEN, INPUTS, STRENGTHS, WITHOUT, check_strength, made, task
from torch import nn

import evcl
from evcl._core.catalogue import METHOD_SUMMARIES
from evcl._core.errors import EvclError
from evcl._core.settings import resolve
from evcl.methods import METHODS, TaskData, packing
from evcl.training import Observer, Run, learn_stream

CONTINUAL = [name for name, method in METHODS.items() if not method.jointly]
BUILT_IN = [name for name in CONTINUAL if name in METHOD_SUMMARIES]


def test_every_method_has_a_strength_here():
    assert set(METHOD_SUMMARIES) == {*STRENGTHS, *WITHOUT}


@pytest.mark.parametrize("method", STRENGTHS)
def test_its_strength_changes_the_second_task(method):
    """tests/training/test_gpu.py asks the same of a GPU."""
    check_strength(method)


# --- how it learns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["er", "derpp", "agem", "evcl-er", "gvcl", "td-vcl"])
def test_the_written_training_pass_is_autograds(method):
    """Of two tasks that share a head; tests/training asks the same of evcl, vcl and ewc."""
    known = METHODS[method].known_settings
    given = {name: value for name, value in {"memory": 10, "std_update": "adam"}.items() if name in known}
    ends = []
    for reference in (False, True):
        run = run_of(method, **given)
        for number in range(2):
            run.learn([small_runs.task(number, 0)], reference=reference, noise=Handed(0.0))
        ends.append(run.network.posterior)
    torch.testing.assert_close(ends[0].mean, ends[1].mean, rtol=1e-8, atol=1e-10)
    if ends[0].log_std is not None:
        torch.testing.assert_close(ends[0].log_std, ends[1].log_std, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("method", "given"), [("si", {"optimizer": "sgd"}), ("noisy-kfac", {})])
def test_a_replica_that_diverges_leaves_the_other_as_it_is(method, given):
    one, found = task(0, 0), []
    options = {"allow_divergence": True, "dtype": torch.float32}
    for seeds in ([0, 1], [1]):
        network = {"network": evcl.nn.mlp(INPUTS, [HIDDEN]), "features": HIDDEN, "heads": [2]}
        run = run_of(method, seeds=seeds, usual={"epochs": 2, "batch_size": 10}, options=options, **network, **given)
        x = one.x * torch.tensor([1e30, 1.0])[seeds].view(-1, 1, 1)
        run.learn([TaskData(x, one.y.expand(len(seeds), -1), 0)])
        found.append(run)
    assert found[0].diverged.tolist() == [True, False]
    for name, wanted in found[1].tensors().items():
        torch.testing.assert_close(found[0].tensors()[name][1:], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("method", "epochs"), [("vogn", 1), ("ivon", 1), ("noisy-kfac", 1), ("ekf", None)])
def test_a_replica_that_has_stopped_stays_where_it_is(method, epochs):
    """After an epoch below `stop_nll`, while the other replica trains on. A filter needs to know all epochs."""
    known, found = METHODS[method].known_settings, []
    for stop, last in ((0.0, 3), (50.0, 3), (0.0, epochs or 3)):
        given = {"epochs": last, "factor_every": 1, "inverse_every": 1, "lr_schedule": "constant"}
        given = {name: value for name, value in given.items() if name in known}
        settings = [resolve(method, known, {**given, "stop_nll": one}) for one in (stop, 0.0)]
        run = Run(evcl.nn.mlp(INPUTS, [4]), METHODS[method], settings, [0, 1], draw=True, dtype=F64)
        run.add_heads(4, [2])
        run.learn([by_sign(0, inputs=INPUTS)])
        found.append(run.tensors())
    longer, stopped, one_epoch = found
    for name in [name for name in longer if "posterior" in name or "factors" in name]:
        assert torch.equal(stopped[name][1], longer[name][1])
        assert epochs is None or torch.equal(stopped[name][0], one_epoch[name][0])
    assert not torch.equal(stopped["posterior.log_std"][0], longer["posterior.log_std"][0])


BAD = [
    *(("imm-mean", given) for given in ({"l2_transfer": -1}, {"drop_transfer": 1.0})),
    *(("si", given) for given in ({"xi": 0}, {"xi": "no"}, {"strength": -1})),
    *(("lwf", given) for given in ({"strength": -1}, {"distill.temperature": 0})),
    *(("xdg", given) for given in ({"gated": 1.0}, {"importance": "guess"})),
    ("evcl", {"importance": "no"}),
    ("td-vcl", {"batch_size": 1}),  # a batch needs room for kept rows
]


@pytest.mark.parametrize(("method", "given"), BAD)
def test_settings_out_of_bounds_are_refused(method, given):
    with pytest.raises(EvclError, match=next(iter(given))):
        evcl.Learner(evcl.nn.mlp(3, [3]), method, **given)


GATES = {"importance": "none"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "given", "other", "hidden", "by"),
    [
        ("imm-mean", {}, ("naive", {}), [100, 100], 0.03),
        ("imm-mode", {}, ("imm-mean", {}), [100, 100], 0.03),
        ("xdg", GATES, ("naive", {}), [100], 0.05),
        ("xdg", {}, ("xdg", GATES), [100], 0.02),
        ("xdg", {}, ("xdg", {"gated": 0.0}), [100], 0.02),
        ("noisy-kfac", {"tempering": 0.02}, ("naive", {}), [20], 0.1),
        ("noisy-kfac", {"tempering": 0.1}, ("naive", {}), [20], 0.1),
    ],
)
def test_it_forgets_less_than_another_method(method, given, other, hidden, by):
    """Four permuted tasks, two seeds."""
    final = []
    for name, own in ((method, given), other):
        s = resolve(name, METHODS[name].known_settings, {"epochs": 10 * len(hidden), **own})
        run = Run(evcl.nn.mlp(64, hidden), METHODS[name], [s] * 2, range(2), draw=True)
        streams = [evcl.benchmarks.get("permuted-digits", seed, 4) for seed in range(2)]
        final.append(float(learn_stream(run, streams).accuracy[:, -1].mean()))
    assert final[0] > final[1] + by


# --- what it remembers -----------------------------------------------------------------------------------------------


def changed(tensors, before):
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])]


@pytest.mark.parametrize("method", CONTINUAL)
def test_what_it_remembers_is_no_view_of_live_weights_or_data(method):
    """All weights are trained, in place, while the memory of the first task is still held."""
    run = made(method, heads=(2,))
    first, second = task(0, 0), task(1, 0)
    run.learn([first])
    held, weights = packing.tensors(run.memory), run.predictor(0).mean.clone()
    before = copies(held)
    run.learn([second])
    now, idle = run.predictor(1).mean, run.method.generative
    assert idle or now.shape != weights.shape or float((now - weights).norm()) > 0.01  # another shape: it grows
    assert changed(held, before) == []

    held = packing.tensors(run.memory)
    before = copies(held)
    for one in (first, second):
        one.x.add_(1)
    assert changed(held, before) == []

    q = run.network.posterior
    live = [part for part in (q.mean, q.log_std) if part is not None]
    for part in live:
        part.add_(1)
    whole = {part.data_ptr() for part in live}  # the last posterior is stored once, as the weights and as the prior
    assert {held[name].data_ptr() for name in changed(held, before)} <= whole
    assert all(held[name].shape == q.mean.shape for name in changed(held, before))


class StopAfter(evcl.Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def end_epoch(self, epoch):
        return epoch.epoch == self.epochs


@pytest.mark.full
@pytest.mark.parametrize("method", [name for name in BUILT_IN if METHODS[name].stages == 1])
def test_early_stopping_remembers_the_best_epoch_and_no_later_one(method):
    """What is remembered is that of a task which ended with its best epoch: its path, its factors, its statistics."""
    layers = nn.utils.skip_init(nn.Linear, INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU()
    given = {"rank": 2} if method == "ekf" else {"importance": "si"} if method in ("ewc", "xdg") else {}
    one = task(0, 0)

    def learned(**options):
        learner = evcl.Learner(nn.Sequential(*layers), method, init="draw", epochs=12, batch_size=10, **given)
        learner.learn((one.x[0], one.y[0]), "task", validation=0.3, **options)
        return learner

    early = learned(patience=12)
    nll = [epoch.validation_nll for epoch in early.history["task"]]
    best = 1 + nll.index(min(nll))
    assert (len(nll), best < 12) == (12, True)
    found, wanted = early.state.run.tensors(), learned(callbacks=[StopAfter(best)]).state.run.tensors()
    assert changed(found, wanted) == []


class Fails(Observer):
    def end_epoch(self, progress):
        raise KeyboardInterrupt


@pytest.mark.parametrize("method", BUILT_IN)
def test_a_round_that_fails_leaves_it_as_it_was(method):
    """Its weights, its memory, the size of its network and the scales and shifts of its tasks."""
    run, other = (made(method) for _ in range(2))
    for one in (run, other):
        one.learn([task(0, 0)])
    before = copies(run.tensors())
    if not run.method.generative:  # that has no epochs
        with pytest.raises(KeyboardInterrupt):
            run.forked(run.network.call).learn([task(1, 1)], observer=Fails())
    after = run.tensors()
    assert after.keys() == before.keys()
    assert changed(after, before) == []
    assert run.network.layout == other.network.layout
    for one in (run, other):
        one.learn([task(1, 1)])
    assert changed(run.tensors(), other.tensors()) == []


# --- importance ------------------------------------------------------------------------------------------------------

MEASURES = {name: (name, {}) for name in ("si", "mas", "imm-mode")}
for _name in BUILT_IN:
    _importance = METHODS[_name].known_settings.get("importance")
    for _choice in () if _importance is None else _importance.choices:
        if _choice != "none":
            MEASURES[f"{_name} {_choice}"] = _name, {"importance": _choice}


def normalised(method, training, **given):
    """A run of a network with a batch norm and dropout, whose module is in the mode of training or of evaluation."""
    layers = nn.utils.skip_init(nn.Linear, INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Dropout(0.2)
    options = {"network": nn.Sequential(*layers), "features": HIDDEN, "options": {"dtype": torch.float32}}
    run = run_of(method, heads=[2], usual={"epochs": 2, "batch_size": 20}, **options, **given)
    for number in range(2):
        run.network.train(training)
        run.learn([task(number, 0)])
    return run


@pytest.mark.full
@pytest.mark.parametrize("measure", MEASURES)
def test_importance_is_at_least_0_and_the_same_in_either_mode_of_a_batch_norm(measure):
    """That it does not change with the size of the batches it is measured in: tests/curvature."""
    method, given = MEASURES[measure]
    run, other = (normalised(method, training, **given) for training in (True, False))
    found, same = packing.tensors(run.memory), packing.tensors(other.memory)
    words = ("importance", "weight", "factors")
    measured = [name for name in found if any(word in name for word in words) and not name.startswith("past/")]
    assert measured
    for name in measured:
        assert torch.equal(found[name], same[name])
        matrix = "factors" in name
        least, most = (torch.linalg.eigvalsh(found[name].double()) if matrix else found[name]).aminmax()
        assert float(least) >= (-1e-6 * float(most) if matrix else 0)
    assert any(float(found[name].max()) > 0 for name in measured)


# --- FiLM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BUILT_IN)
def test_film_works_or_is_refused(method):
    """The first task's row stays as it was, and its predictions change with it."""
    if METHODS[method].known_settings["film"].refuses:
        with pytest.raises(EvclError, match=r"film=True cannot be used with this method: .* FiLM's scales"):
            evcl.Learner(evcl.nn.mlp(INPUTS, [HIDDEN]), method, film=True)
        return
    run = made(method, heads=(2,), film=True)
    run.learn([task(0, 0)])
    row = run.network.task_weights.table.clone()
    run.learn([task(1, 0)])
    assert torch.equal(run.network.task_weights.table[:, :1], row)
    x = task(0, 0).x
    own, other = (run.predict(x, 0, task=number) for number in range(2))
    assert float((own - other).abs().max()) > 0.01
    tensors = copies(run.tensors())
    tensors["film 0"].zero_()
    run.load_tensors(tensors, run.outline(), run.rounds, run.seen)
    assert float((run.predict(x, 0, task=0) - own).abs().max()) > 0.01
