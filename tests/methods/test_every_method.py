"""What public code of these methods got wrong, asked of every method: that it has an effect, that what it remembers is
its own, that importance is that of examples, and that FiLM works or is refused.
"""

from __future__ import annotations

import pytest
import torch
from strengths import HIDDEN, INPUTS, STRENGTHS, WITHOUT, check_strength, made, task
from torch import nn

import evcl
from evcl._core.catalogue import METHOD_SUMMARIES
from evcl._core.errors import EvclError
from evcl._core.settings import resolve
from evcl.methods import METHODS, packing
from evcl.training import Run

CONTINUAL = [name for name, method in METHODS.items() if not method.jointly]
BUILT_IN = [name for name in CONTINUAL if name in METHOD_SUMMARIES]


def test_every_method_has_a_strength_here():
    assert set(METHOD_SUMMARIES) == {*STRENGTHS, *WITHOUT}


@pytest.mark.parametrize("method", STRENGTHS)
def test_its_strength_changes_the_second_task(method):
    """tests/training/test_gpu.py asks the same of a GPU."""
    check_strength(method)


# --- what it remembers -----------------------------------------------------------------------------------------------


def changed(tensors, before):
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])]


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


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
    found, wanted = early.parts.run.tensors(), learned(callbacks=[StopAfter(best)]).parts.run.tensors()
    assert changed(found, wanted) == []


# --- importance ------------------------------------------------------------------------------------------------------

MEASURES = {name: (name, {}) for name in ("si", "mas", "imm-mode")}
for _name in BUILT_IN:
    _importance = METHODS[_name].known_settings.get("importance")
    for _choice in () if _importance is None else _importance.choices:
        if _choice != "none":
            MEASURES[f"{_name} {_choice}"] = _name, {"importance": _choice}


def normalised(method, training, **given):
    """A run of a network with a batch norm and dropout, whose module is in the mode of training or of evaluation."""
    known = METHODS[method].known_settings
    s = resolve(method, known, {"epochs": 2, "batch_size": 20, **given})
    layers = nn.utils.skip_init(nn.Linear, INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Dropout(0.2)
    run = Run(nn.Sequential(*layers), METHODS[method], [s], [0], draw=True)
    run.add_heads(HIDDEN, [2])
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
    run.network.task_weights.table[:, 0].mul_(0)
    run._changed()
    assert float((run.predict(x, 0, task=0) - own).abs().max()) > 0.01
