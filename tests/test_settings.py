"""What a type checker and an editor are told of settings is what they are."""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import evcl
from evcl._core.settings import BAYESIAN, CORESET, ELASTIC, TRAINING, Settings
from evcl.learner import kinds as options
from evcl.methods import METHODS

KNOWN = {**TRAINING, **BAYESIAN, **ELASTIC, "distill": METHODS["vcl"].known_settings["distill"], **CORESET}


def parts(hint):
    """The types of a union, and the words of a Literal."""
    if get_origin(hint) is Literal:
        return set(), set(get_args(hint))
    kinds, words = set(), set()
    for one in get_args(hint) or (hint,):
        more = parts(one) if get_args(one) else ({one}, set())
        kinds, words = kinds | more[0], words | more[1]
    return kinds, words


@pytest.mark.parametrize("name", ["EVCL", "VCL", "EWC", "Naive"])
def test_an_editor_completes_every_setting_of_a_learner(name):
    hints = get_type_hints(getattr(options, f"{name}Options"))
    own = get_type_hints(options.LearnerOptions)
    known = METHODS[name.lower()].known_settings
    assert hints.keys() - own.keys() == known.keys()
    for key, setting in known.items():
        kinds, words = parts(hints[key])
        if setting.choices:
            assert (kinds, words) == (set(), set(setting.choices)), key
        else:
            assert kinds == {type(setting.default) if isinstance(setting.default, int) else float}, key
            assert words == ({"auto"} if setting.auto else set()), key
    assert issubclass(getattr(evcl, name), evcl.Learner)


def test_a_type_checker_knows_every_setting():
    hints = Settings.__annotations__
    assert hints.keys() == {*KNOWN, "validation"}
    for key, setting in KNOWN.items():
        wanted = "str" if setting.choices else "Number"
        wanted = type(setting.default).__name__ if isinstance(setting.default, int) else wanted
        assert hints[key] == (f"{wanted} | Auto" if setting.auto else wanted), key
