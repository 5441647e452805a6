"""Commands on a table that is written for them."""

from __future__ import annotations

import pytest


def learned(evcl, frame, name, *options):
    """What is printed when a table is learned as a file of this name."""
    frame.to_csv(f"{name}.csv", index=False)
    return evcl.done("learn", "--model", "m", "--data", f"{name}.csv", *options)


def predicted(evcl, frame, name, *options):
    """What is printed when a table is predicted, into p.csv."""
    frame.to_csv(f"{name}.csv", index=False)
    return evcl.done("predict", "--model", "m", "--data", f"{name}.csv", "--out", "p.csv", *options)


def model_of(table, name, *options):
    """A fixture: the command, in a folder with a model that has learned this table."""

    @pytest.fixture
    def model(evcl, made_once):
        made_once(lambda: learned(evcl, table(), name, *options))
        return evcl

    return model
