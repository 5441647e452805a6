"""Another network than a benchmark's own, as text: `400x400`, `800x800, dropout 0.5`, `resnet18` or `cnn`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from evcl._core.errors import EvclError

if TYPE_CHECKING:
    from torch import nn

WIDTHS = re.compile(r"\d+(x\d+)*")
OPTIONS = {  # the convolutional networks of evcl.benchmarks.networks, and the options of each
    "reduced-resnet18": ("norm",),
    "resnet18": ("norm",),
    "cnn": ("dropout",),
}
MIN_CNN_PIXELS = 10  # the cnn's images have at least this many pixels a side
WANTED = (
    "the widths of the hidden layers, such as 400x400, optionally with dropout rates below 1: "
    "'400x400, dropout 0.5, input dropout 0.2'; or reduced-resnet18 or resnet18, optionally with 'group norm'; or cnn, "
    "optionally with dropout"
)


def parsed(text: str) -> dict[str, Any]:
    """The arguments `hidden`, `dropout` and `input_dropout` of `evcl.nn.mlp`; or the `name` of a convolutional network,
    and its `norm` or `dropout`.
    """
    first, *rest = (part.strip() for part in text.split(","))
    options: dict[str, str | float] = {}
    value: str | float
    known = OPTIONS.get(first, ("dropout", "input_dropout"))
    for part in rest:
        words, _, number = part.rpartition(" ")
        name = words.strip().replace(" ", "_")
        if part in ("batch norm", "group norm"):
            name, value = "norm", part.removesuffix(" norm")
        elif re.fullmatch(r"0?\.\d+", number):
            value = float(number)
        else:
            raise _wrong(text)
        if name not in known or name in options:
            raise _wrong(text)
        options[name] = value
    if first in OPTIONS:
        return {"name": first, **options}
    if not WIDTHS.fullmatch(first):
        raise _wrong(text)
    return {"hidden": [int(width) for width in first.split("x")], **options}


def is_text(network: object) -> bool:
    """Whether the entry `network` of a result is such a text. Otherwise it names the benchmark's own network."""
    return isinstance(network, str) and (WIDTHS.match(network) is not None or network.split(",")[0] in OPTIONS)


def trunk(text: str, shape: Sequence[int]) -> nn.Module:
    """The network of this text, for examples of this shape."""
    from evcl.benchmarks import networks  # imports torch, which evcl status does not need
    from evcl.nn import mlp

    options = parsed(text)
    if "hidden" in options:
        return mlp(math.prod(shape), **options)
    name, wanted = options.pop("name"), ""
    if len(shape) != 3:
        wanted = f"images [channels, height, width], but an example has the shape {list(shape)}"
    elif name == "cnn" and (shape[1] != shape[2] or shape[1] < MIN_CNN_PIXELS):
        wanted = f"square images of at least {MIN_CNN_PIXELS} x {MIN_CNN_PIXELS} pixels, not {shape[1]} x {shape[2]}"
    if wanted:
        raise EvclError(f"network {name} needs {wanted}", setting="network")
    if name == "cnn":
        return networks.cnn(shape[0], shape[1], **options)
    make: Callable[..., nn.Module] = getattr(networks, name.replace("-", "_"))
    return make(shape[0], **options)


def _wrong(text: str) -> EvclError:
    return EvclError(f"network must be {WANTED}, not {text!r}", setting="network")
