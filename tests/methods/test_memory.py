"""Memories: how a dataclass's fields live."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.methods import memories, per_weight
from evcl.methods.memories import Fresh
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Inner:
    importance: Tensor = per_weight(low=0)


@dataclass(frozen=True)
class Outer:
    """Its annotations are texts here, as `from __future__ import annotations` makes them."""

    inner: Inner
    used: Tensor = per_weight()


@dataclass(frozen=True)
class Silent:
    used: Tensor = field(default=None)


@dataclass(frozen=True)
class Unknown:
    inner: NoSuchClass  # noqa: F821


def fresh():
    gaussian = Gaussian(torch.ones(2, 3), None)
    return Fresh(gaussian, gaussian)


def test_a_field_may_be_a_memory_itself():
    found = memories.initial(Outer, fresh(), None)
    assert isinstance(found.inner, Inner)
    assert torch.equal(found.inner.importance, torch.zeros(2, 3))
    doubled = memories.mapped(found, lambda t: t + 2)
    assert torch.equal(doubled.inner.importance, torch.full((2, 3), 2.0))


def test_a_field_that_does_not_say_how_it_lives_is_refused():
    with pytest.raises(EvclError, match="'used' must declare how it is stored"):
        memories.initial(Silent, fresh(), None)
    with pytest.raises(EvclError, match="'inner': name 'NoSuchClass' is not defined"):
        memories.initial(Unknown, fresh(), None)
