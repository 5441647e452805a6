"""What a method gets for nothing, whoever wrote it. It is stopped and resumed; trained beside other seeds, settings and
methods; by several processes; on a GPU: and ends where it ends alone.

EVCL_PLUGINS=mine.py pytest -m "not soak" -k my-name tests/test_contract.py tests/contract   adds one of yours.
"""

from __future__ import annotations

from functools import cache

import pytest
import small
import torch
from interrupted import assert_stopped_run_ends_the_same
from safetensors.torch import load_file
from two_processes import in_two

import evcl
from evcl.experiments import configure
from evcl.experiments.parallel import programs
from evcl.methods import METHODS

ALL = list(METHODS)
every_method = pytest.mark.parametrize("method", ALL)


@cache
def alone(method, **where):
    """Two seeds."""
    return small.train(method, [0, 1], **where)


def check(found, wanted, most=1e-9):
    """The same tensors, but for rounding, of at most `most`."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=most, atol=most, msg=lambda text, n=name: f"{n}: {text}")


def rounding(method):
    """A generator passes rounding errors on to the next task's examples."""
    return 1e-8 if "dgr" in method else 1e-9


def rows(found, some):
    """What these replicas have of it."""
    return {name: t[some] for name, t in found.items()}


# --- seeds and settings in one program --------------------------------------------------------------------------------


@every_method
def test_three_seeds_in_one_program_are_three_alone(method):
    three = small.train(method, [0, 1, 2])
    for r in range(3):
        check(rows(three, [r]), small.train(method, [r], replicas=[r]), rounding(method))


def halved(method):
    """Every real number that is the method's own, and the learning rate, is half of its default."""
    s = small.settings(method)
    return {name: value / 2 for name, value in s.items() if isinstance(value, float)}


@every_method
def test_two_choices_of_its_settings_share_a_program(method):
    configs = [configured(method), configured(method, **halved(method))]
    assert programs(configs, 8) == [[0, 1]]
    both = [small.settings(method), small.settings(method, **halved(method))]
    found = small.train(method, [0, 0], both, replicas=[0, 1])
    for r in range(2):
        check(rows(found, [r]), small.train(method, [0], [both[r]], replicas=[r]), rounding(method))


def configured(method, **given):
    defaults = {name: setting.default for name, setting in METHODS[method].known_settings.items()}
    rate = {"lr": 0.01} if "lr" in defaults else {}
    return configure("split-digits", method, "tuned", (0,), 2, {**defaults, **rate, **given})


# --- stopped and resumed ---------------------------------------------------------------------------------------------


@every_method
def test_stopped_again_and_again_it_ends_to_the_bit_where_it_would_have(method, tmp_path):
    known = METHODS[method].known_settings
    given = {"epochs": 2, "batch_size": 40, "coreset_size": 80, "memory": 60}
    given = {name: value for name, value in given.items() if name in known}
    config = configure("split-digits", method, "paper", (0, 1), 2, given)
    stopped = assert_stopped_run_ends_the_same(
        config, tmp_path, (1, 2, 6, 3), least=2 if METHODS[method].generative else 3
    )
    rounds = range(1 if METHODS[method].jointly else 2)
    assert stopped >= {(number, stage) for number in rounds for stage in range(METHODS[method].stages)}


# --- heads that grow -------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.filterwarnings("ignore::evcl.ForgettingWarning")
def test_a_head_may_grow(method, tmp_path):
    """A later task brings a class that its head did not know; saved and loaded, it goes on as it would have."""
    if METHODS[method].jointly:
        return
    one = evcl.Learner(evcl.nn.mlp(small.INPUTS, [12]), method, seed=0, epochs=2)
    x = small.tasks([0], torch.zeros(1))[0].x[0]
    one.learn((x, (x[:, 0] > 0).long()), "two")
    one.learn((x, (x[:, 0] > 0).long() + (x[:, 1] > 0)), "three", head="two")
    one.save(tmp_path / "model.safetensors")
    two = evcl.load(tmp_path / "model.safetensors")
    for each in (one, two):
        each.learn((x, (x[:, 2] > 0).long()), "again", head="two")
        assert each.predict_proba(x, task="three").shape == (len(x), 3)
    assert torch.equal(one.predict_proba(x, task="again"), two.predict_proba(x, task="again"))


# --- elsewhere -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_two(request, tmp_path_factory):
    """What two processes end with that train together: of a method, what each of them has."""
    asked = [item.callspec.params["method"] for item in request.session.items if "by_two" in item.fixturenames]
    folder = tmp_path_factory.mktemp("ranks")
    in_two(small.main, folder, list(dict.fromkeys(asked)))
    return lambda method: [load_file(folder / f"{method} {rank}") for rank in range(2)]


@every_method
def test_two_processes_end_where_one_does(method, by_two):
    first, second = by_two(method)
    assert all(torch.equal(first[name], second[name]) for name in first)
    check(first, alone(method), rounding(method))


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@on_a_gpu
@every_method
def test_a_gpu_learns_as_much(method):
    benchmark = evcl.benchmarks.get("split-digits", tasks=2)
    accuracy = []
    for device in ("cpu", "cuda"):
        one = evcl.Learner(evcl.nn.mlp(benchmark.inputs, [50]), method, seed=0, epochs=20, device=device)
        if one.method.jointly:
            one.learn_jointly(benchmark)
        else:
            for task in benchmark:
                one.learn(task)
        accuracy.append(sum(one.evaluate(benchmark).values()) / 2)
    assert accuracy[1] == pytest.approx(accuracy[0], abs=0.02)


@on_a_gpu
@every_method
def test_a_learner_that_moves_to_a_gpu_goes_on(method):
    benchmark = evcl.benchmarks.get("split-digits", tasks=2)
    one = evcl.Learner(evcl.nn.mlp(benchmark.inputs, [50]), method, seed=0, epochs=20)
    for device, task in zip(("cpu", "cuda"), benchmark, strict=True):
        one.to(device)
        if one.method.jointly:
            one.learn_jointly([task])
        else:
            one.learn(task)
    assert min(one.evaluate(benchmark).values()) > 0.8
