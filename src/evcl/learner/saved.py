"""The format of a learner's file, and how files of earlier releases are brought to it. All old names stand here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import Settings
from evcl.methods import for_settings
from evcl.methods import get as get_method

FORMAT = 2


def upgraded(saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A file's description and tensors in today's format."""
    if saved["format"] == FORMAT:
        return dict(saved), dict(tensors)
    if saved["format"] != 1:
        raise EvclError(f"the file has format {saved['format']!r}, and this version of evcl reads 1 and {FORMAT}")
    settings = dict(saved["settings"])
    method = get_method(saved["method"])
    if "fisher_spread" in method.known_settings:
        settings.setdefault("fisher_spread", 0.0)  # there was no such setting at first, and nothing was spread
    if "distill" in method.known_settings:
        settings.setdefault("distill", 0.0)
    found = {name: t for name, t in tensors.items() if name.startswith(("posterior.", "statistics.", "kept."))}
    told = _from_1(for_settings(method, Settings(settings)).memory, "memory/", saved, tensors, found)
    return {**saved, "format": FORMAT, "settings": settings, "memory": [told]}, found


def _from_1(
    memory: type, path: str, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], found: dict[str, Tensor]
) -> dict[str, Any]:
    """Version 0.1: every run had a prior, an importance and `used`; coresets lay beside it, with a tuned copy."""
    told: dict[str, Any] = {}
    for one in fields(memory):
        at = f"{path}{one.name}"
        if one.name == "inner":
            told["inner"] = _from_1(one.type, f"{at}/", saved, tensors, found)  # type: ignore[arg-type]
        elif one.name in ("prior", "tuned"):
            source = "posterior" if f"{one.name}.mean" not in tensors else one.name
            parts = [tensors.get(f"{source}.{part}") for part in ("mean", "log_std")]
            told[one.name] = {"gaussian": [None if part is None else "tensor" for part in parts]}
            pairs = zip(("mean", "log_std"), parts, strict=True)
            found |= {f"{at}/{part}": tensor for part, tensor in pairs if tensor is not None}
        elif one.name in ("rows", "beta"):  # nobody counted them, and beta did not change
            told[one.name] = {"dict": {}}
        elif one.name in ("importance", "used"):
            told[one.name], found[at] = "tensor", tensors[one.name].expand_as(tensors["posterior.mean"]).clone()
        else:
            told[one.name] = _kept(at, saved, tensors, found)
    return {"fields": told}


def _kept(at: str, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], found: dict[str, Tensor]) -> list[Any]:
    """The coreset of each task."""
    heads = [name for name, _ in saved["heads"]]
    told = []
    for i, (_, head) in enumerate(saved["tasks"]):
        found |= {f"{at}/{i}/{part}": tensors[f"coreset {i}.{part}"] for part in ("x", "y")}
        about = {"x": "tensor", "y": "tensor", "weights": None, "head": heads.index(head), "task": i}
        told.append({"examples": about})
    return told
