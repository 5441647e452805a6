"""Another network than a benchmark's own, as text: `400x400`, or `800x800, dropout 0.5, input dropout 0.2`."""

from __future__ import annotations

import re
from typing import Any

from evcl._core.errors import EvclError

WIDTHS = re.compile(r"\d+(x\d+)*")
WANTED = (
    "the widths of the hidden layers, such as 400x400, optionally with dropout rates below 1: "
    "'400x400, dropout 0.5, input dropout 0.2'"
)


def parsed(text: str) -> dict[str, Any]:
    """The arguments `hidden`, `dropout` and `input_dropout` of `evcl.nn.mlp`."""
    widths, *rest = (part.strip() for part in text.split(","))
    found: dict[str, Any] = {}
    for part in rest:
        words, _, number = part.rpartition(" ")
        name = words.strip().replace(" ", "_")
        if name not in ("dropout", "input_dropout") or name in found or not re.fullmatch(r"0?\.\d+", number):
            raise _wrong(text)
        found[name] = float(number)
    if not WIDTHS.fullmatch(widths):
        raise _wrong(text)
    return {"hidden": [int(width) for width in widths.split("x")], **found}


def is_text(network: object) -> bool:
    """Whether the entry `network` of a result is such a text. Otherwise it names the benchmark's own network."""
    return isinstance(network, str) and WIDTHS.match(network) is not None


def _wrong(text: str) -> EvclError:
    return EvclError(f"network must be {WANTED}, not {text!r}", setting="network")
