"""EVCL with FiLM (Loo et al., 2021; see nn/film.py): each task also has scales and shifts of its own.

    a <- gamma_t * a + b_t    after every linear layer and convolution

The setting `film` adds them to any method; here they are the default.
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.settings import TRAINING
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.evcl import EVCL
from evcl.methods.method import Method


def with_film(method: Method) -> Method:
    """The method NAME with FiLM by default, as `NAME-film`; its summary must be in METHOD_SUMMARIES."""
    name, film = f"{method.name}-film", replace(TRAINING["film"], default=True)
    return replace(method, name=name, summary=METHOD_SUMMARIES[name], settings={**method.settings, "film": film})


EVCL_FILM = with_film(EVCL)
