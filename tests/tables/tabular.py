"""Commands on a table that is written for them."""

from __future__ import annotations


def learned(evcl, frame, name, *options):
    """What is printed when a table is learned as a file of this name."""
    frame.to_csv(f"{name}.csv", index=False)
    return evcl.done("learn", "--model", "m", "--data", f"{name}.csv", *options)


def predicted(evcl, frame, name, *options):
    """What is printed when a table is predicted, into p.csv."""
    frame.to_csv(f"{name}.csv", index=False)
    return evcl.done("predict", "--model", "m", "--data", f"{name}.csv", "--out", "p.csv", *options)
