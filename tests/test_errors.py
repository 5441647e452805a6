from __future__ import annotations

import pickle

import pytest

from evcl.errors import EvclError
from evcl.experiments import configure
from evcl.options import Usage, usage


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
