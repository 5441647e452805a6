from __future__ import annotations

import pickle

import pytest

from evcl import Callback, Learner
from evcl._core.errors import BadExample, Diverged, EvclError, UnknownName, unknown
from evcl.cli.options import Usage, usage
from evcl.experiments import configure
from evcl.nn import mlp
from evcl.training.checkpoint import AnotherRun


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"given": {"epochs": 0}}, "epochs"),
        ({"given": {"fisher": "lr"}}, "fisher"),
        ({"given": {"epoch": 1}}, "epoch"),
        ({"given": {"validation": 2}}, "validation"),
        ({"preset": "pepper"}, "preset"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"device": "tpu"}, None),
    ],
)
def test_an_error_says_which_setting_it_is_about(options, setting):
    with pytest.raises(EvclError) as raised:
        configure("split-digits", "evcl", **options)
    assert raised.value.setting == setting
    assert pickle.loads(pickle.dumps(raised.value)).setting == setting  # noqa: S301  (from a process to another)
    with pytest.raises(Usage) as raised, usage():
        configure("split-digits", "evcl", **options)
    assert raised.value.setting == setting


def test_an_error_that_says_where_is_the_same_error():
    error = EvclError("lr must be above 0", setting="lr").within("task 'b'").within("m.safetensors")
    assert (str(error), error.setting) == ("m.safetensors: task 'b': lr must be above 0", "lr")
    assert type(Diverged("no number", setting="lr").within("x")) is Diverged
    assert pickle.loads(pickle.dumps(error)).setting == "lr"  # noqa: S301
    name = unknown("setting", "lrr", ["lr"], setting="lr").within("a.toml")
    assert (type(name), name.setting) == (UnknownName, "lr")
    assert str(name) == "a.toml: unknown setting 'lrr'; did you mean 'lr'?"
    example = BadExample("it is odd", 3).within("b.csv")
    assert (str(example), example.setting, type(example)) == ("b.csv: example 3: it is odd", None, BadExample)
    assert (example.what, example.row) == ("it is odd", 3)


class OfTwo(EvclError):
    """An error of a user's own."""

    def __init__(self, first, second):
        super().__init__(f"{first} is above {second}", setting="lr")
        self.first, self.second = first, second


def test_an_error_that_is_made_of_two_things_says_where_too():
    owner = AnotherRun("another run's checkpoint", "epochs 1, not 2").within("seed 0")
    assert type(owner) is AnotherRun
    assert owner.difference == "epochs 1, not 2"
    assert str(owner) == "seed 0: another run's checkpoint"
    error = OfTwo(3, 2).within("task 'a'").within("out")
    assert (type(error), error.first, error.second, error.setting) == (OfTwo, 3, 2, "lr")
    assert str(error) == "out: task 'a': 3 is above 2"


def test_a_task_that_fails_says_which_setting_it_is_about():
    """Through all that a learner does around it."""
    learner = Learner(mlp(4, [3]), "ewc", epochs=1)

    class Odd(Callback):
        def end_epoch(self, epoch):
            raise EvclError("epochs must be odd", setting="epochs")

    with pytest.raises(EvclError, match=r"^task 'a': epochs must be odd$") as raised:
        learner.learn(([[0.0] * 4, [1.0] * 4], [0, 1]), "a", callbacks=[Odd()])
    assert raised.value.setting == "epochs"
