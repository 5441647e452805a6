"""The format of a learner's file, and the upgrade from earlier formats. All names of old formats are in this file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.files import save_tensors
from evcl._core.settings import Settings
from evcl.methods import for_settings
from evcl.methods import get as get_method

FORMAT = 2


def write(
    path: str | os.PathLike[str], described: tuple[dict[str, Any], dict[str, Tensor]], notes: Mapping[str, str]
) -> None:
    """Write what `Learner.described` returned. `notes` are further texts for the file's metadata."""
    description, tensors = described
    save_tensors(path, tensors, {**notes, "evcl": json.dumps(description)})


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Inside this context, whatever is wrong with a learner's file is reported in one line."""
    try:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError
    except (OSError, TypeError, ValueError):
        raise EvclError(f"there is no file {path}") from None
    try:
        yield path
    except SafetensorError as error:
        raise EvclError(f"cannot load {path}: it is cut short or not a safetensors file ({error})") from error
    except OSError as error:
        raise EvclError(f"cannot read {path}: {error.strerror or error}") from error
    except EvclError as error:
        raise EvclError(f"cannot load {path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise EvclError(f"cannot load {path}: it is damaged ({type(error).__name__} {error})") from error


def upgraded(saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A file's description and tensors, in the current format."""
    if saved["format"] == FORMAT:
        return dict(saved), dict(tensors)
    if saved["format"] != 1:
        raise EvclError(f"the file has format {saved['format']!r}, but this version of evcl reads only 1 and {FORMAT}")
    settings = dict(saved["settings"])
    method = get_method(saved["method"])
    if "fisher_spread" in method.known_settings:
        settings.setdefault("fisher_spread", 0.0)  # before this setting existed, nothing was spread
    if "distill" in method.known_settings:
        settings.setdefault("distill", 0.0)
    found = {name: t for name, t in tensors.items() if name.startswith(("posterior.", "statistics.", "kept."))}
    told = _from_1(for_settings(method, Settings(settings)).memory, "memory/", saved, tensors, found)
    return {**saved, "format": FORMAT, "settings": settings, "memory": [told]}, found


def _from_1(
    memory: type, path: str, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], found: dict[str, Tensor]
) -> dict[str, Any]:
    """Convert format 1 (evcl 0.1): each run stored a prior, an importance and `used`, and separately its coresets and
    a copy of the weights tuned on them.
    """
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
        elif one.name in ("rows", "beta", "factors"):  # format 1 had none, and beta was constant
            told[one.name] = {"dict": {}}
        elif one.name in ("importance", "used"):
            told[one.name], found[at] = "tensor", tensors[one.name].expand_as(tensors["posterior.mean"]).clone()
        elif one.name != "classes":  # format 1 had none
            told[one.name] = _coresets(at, saved, tensors, found)
    return {"fields": told}


def _coresets(at: str, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], found: dict[str, Tensor]) -> list[Any]:
    """The coreset of each task."""
    heads = [name for name, _ in saved["heads"]]
    told = []
    for i, (_, head) in enumerate(saved["tasks"]):
        found |= {f"{at}/{i}/{part}": tensors[f"coreset {i}.{part}"] for part in ("x", "y")}
        about = {"x": "tensor", "y": "tensor", "weights": None, "head": heads.index(head), "task": i}
        told.append({"examples": about})
    return told
