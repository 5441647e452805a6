"""Convert a memory to named tensors and a JSON outline, and back. Files are not trusted, so everything is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import torch
from torch import Tensor

from evcl import posterior
from evcl._core.bounds import LARGEST_LOG_STD, LARGEST_MEAN
from evcl._core.errors import EvclError
from evcl.methods.data import TaskData
from evcl.methods.memories import hows
from evcl.methods.memory import Another, KeptExamples, Model, PerWeight
from evcl.nn import Gaussian

M = TypeVar("M")


def tensors(memory: object) -> dict[str, Tensor]:
    """Every tensor of a memory, by name."""
    by_name: dict[str, Tensor] = {}
    _packed(memory, [], by_name)
    return by_name


def outline(memory: object) -> object:
    """The structure of a memory as JSON, from which `from_tensors` finds its tensors."""
    return _packed(memory, [], {})


def _packed(value: object, path: list[str], out: dict[str, Tensor]) -> object:
    def inside(key: object, one: object) -> object:
        return _packed(one, [*path, quote(str(key), safe=" ")], out)

    if isinstance(value, Tensor):
        out["/".join(path)] = value
        return "tensor"
    if isinstance(value, posterior.Gaussian):
        return {"gaussian": [inside("mean", value.mean), inside("log_std", value.log_std)]}
    if isinstance(value, TaskData):
        parts = {key: inside(key, getattr(value, key)) for key in ("x", "y", "weights")}
        return {"examples": {**parts, "head": value.head, "task": value.task}}
    if isinstance(value, Model):
        return {"model": [inside("posterior", value.posterior), inside("statistics", value.statistics)]}
    if isinstance(value, Mapping):
        return {"dict": [[key, inside(key, one)] for key, one in value.items()]}
    if isinstance(value, (tuple, list)):
        return [inside(i, one) for i, one in enumerate(value)]
    if is_dataclass(value):
        return {"fields": {one.name: inside(one.name, getattr(value, one.name)) for one in fields(value)}}
    if value is None:
        return None
    raise EvclError(f"{'/'.join(path)} in the memory is a {type(value).__name__}, which cannot be saved")


class Fits(NamedTuple):
    """What the tensors of a file are checked against: a tensor [R, P], whether weights have a standard deviation, the
    number of classes of each head, and the number of tasks learned.
    """

    like: Tensor
    bayesian: bool
    classes: Callable[[int], int]
    tasks: int
    labelled: bool = True  # False: a network without heads, whose targets are of any kind


def from_tensors(memory: M, told: object, given: Mapping[str, Tensor], fits: Fits) -> M:
    """Rebuild a memory like this one from the results of `outline` and `tensors`.

    Files are not trusted: anything that does not fit raises an EvclError.
    """
    if not isinstance(told, dict) or "fields" not in told:
        raise EvclError("its memory is not that of this method")
    try:
        return _unpacked(memory, told, [], given, fits)
    except EvclError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise EvclError(f"its memory is damaged ({type(error).__name__} {error})") from error


def _unpacked(memory: M, told: Any, path: list[str], given: Mapping[str, Tensor], fits: Fits) -> M:
    told = dict(told["fields"])
    known, values = hows(memory), {}
    for name, how in known.items():
        if how is None and name not in told and not tensors(getattr(memory, name)):
            told[name] = outline(getattr(memory, name))  # the file was written before there was such an inner memory
    if told.keys() != known.keys():
        raise EvclError(f"its memory has the fields {sorted(told)}, but this method's has {sorted(known)}")
    for name, how in known.items():
        own, at = getattr(memory, name), [*path, name]
        if how is None:
            values[name] = _unpacked(own, told[name], at, given, fits)
        else:
            values[name] = _value(told[name], at, given, own)
            _check(how, values[name], own, "/".join(at), fits)
    unpacked: M = replace(memory, **values)  # type: ignore[type-var]
    return unpacked


def _value(told: Any, path: list[str], given: Mapping[str, Tensor], own: Any) -> Any:
    def inside(key: object, one: object) -> Any:
        return _value(one, [*path, quote(str(key), safe=" ")], given, None)

    if told is None:
        return None
    if told == "tensor":
        return given["/".join(path)]
    if isinstance(told, list):
        return tuple(inside(i, one) for i, one in enumerate(told))
    ((kind, content),) = told.items()
    if kind == "gaussian":
        return Gaussian(inside("mean", content[0]), inside("log_std", content[1]))
    if kind == "examples":
        x, y, weights = (inside(key, content[key]) for key in ("x", "y", "weights"))
        if type(content["head"]) is not int or type(content["task"]) is not int:
            raise ValueError("head and task must be whole numbers")
        return TaskData(x, y, content["head"], weights, content["task"])
    if kind == "model":
        return replace(own, posterior=inside("posterior", content[0]), statistics=inside("statistics", content[1]))
    if kind == "dict":
        if any(type(key) not in (int, str) for key, _ in content) or len({key for key, _ in content}) < len(content):
            raise ValueError("keys must be strings or whole numbers, without duplicates")
        return {key: inside(key, one) for key, one in content}
    raise ValueError(f"kind {kind!r}")


def _check(how: Any, value: object, own: Any, name: str, fits: Fits) -> None:
    """Refuse a value that is invalid for a field stored as `how`; `own` is the field's present value."""
    if isinstance(how, PerWeight):
        _check_weights(how, value, name, fits)
    elif isinstance(how, Another):
        _check_model(value, own, name)
    elif isinstance(how, KeptExamples):
        if not isinstance(value, tuple):
            raise EvclError(f"{name} must be a tuple of examples")
        for i, one in enumerate(value):
            _check_examples(one, f"{name}/{i}", fits)
    else:
        if not isinstance(value, dict) or any(type(key) is not how.key for key in value):
            raise EvclError(f"{name} must be a dict with {how.key.__name__} keys")
        if not all(tensors({"": one}) for one in value.values()):
            raise EvclError(f"{name} must contain tensors")
        for key, tensor in tensors({"": value}).items():
            if tensor.shape[:1] != fits.like.shape[:1] or (tensor.is_floating_point() and not finite(tensor)):
                raise EvclError(f"{name}{key} must be finite and have the replica axis first")


def _check_weights(how: PerWeight, value: object, name: str, fits: Fits) -> None:
    like = fits.like
    if not isinstance(value, how.kind):
        raise EvclError(f"{name} must be a {how.kind.__name__}")
    each = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    if not all(_is_of_weights(one, fits.bayesian) for one in each):
        raise EvclError(
            f"{name} must be tensors, or Gaussians that have a standard deviation exactly if the method is Bayesian"
        )
    for key, tensor in tensors({"": value}).items():
        if tensor.shape != like.shape or tensor.dtype != like.dtype or not finite(tensor):
            came = f"but is {tensor.dtype} {tuple(tensor.shape)}"
            raise EvclError(f"{name}{key} must be {like.dtype} {tuple(like.shape)} and finite, {came}")
        check_size(f"{name}{key}", tensor)
        if not key.endswith("log_std") and tensor.numel():
            least, most = (float(end) for end in tensor.aminmax())
            if least < how.low or most > how.high:
                raise EvclError(f"{name} must be at least {how.low:g} and at most {how.high:g}")


def _is_of_weights(value: object, bayesian: bool) -> bool:
    if not isinstance(value, posterior.Gaussian):
        return isinstance(value, Tensor)
    return isinstance(value.mean, Tensor) and (isinstance(value.log_std, Tensor) if bayesian else value.log_std is None)


def _check_model(value: object, own: Model, name: str) -> None:
    wanted, given = (tensors({"": one}) for one in (own, value))
    if wanted.keys() != given.keys():
        raise EvclError(f"{name} is of a different network")
    for key, tensor in given.items():
        like = wanted[key]
        if tensor.shape != like.shape or tensor.dtype != like.dtype or not finite(tensor):
            raise EvclError(f"{name}{key} must be {like.dtype} {tuple(like.shape)} and finite")
        if "/posterior/" in key:
            check_size(f"{name}{key}", tensor)


def _check_examples(one: object, name: str, fits: Fits) -> None:
    if not isinstance(one, TaskData) or one.x.dtype != fits.like.dtype or not finite(one.x):
        raise EvclError(f"the inputs of {name} must be {fits.like.dtype} and finite")
    right = one.y.shape[:2] == one.x.shape[:2] and len(one.y) == len(fits.like)
    if right and not fits.labelled:
        right = finite(one.y)
    elif right and one.y.is_floating_point():  # targets that are not classes
        right = one.y.dtype == fits.like.dtype and one.y.shape[2:] == (fits.classes(one.head),) and finite(one.y)
    elif right:
        right = one.y.dtype == torch.long and one.y.dim() == 2
        right = right and bool(((one.y >= 0) & (one.y < fits.classes(one.head))).all())
    if not right:
        raise EvclError(f"the labels of {name} do not fit its inputs or its head")
    if not 0 <= one.task < fits.tasks:
        raise EvclError(f"{name} belongs to task {one.task}, but only {fits.tasks} tasks were learned")
    if one.weights is not None and (one.weights.shape != one.y.shape[:2] or not finite(one.weights)):
        raise EvclError(f"the weights of {name} do not fit its inputs")


def check_learned(memory: object, before: object, fits: Fits) -> None:
    """Refuse a new memory that could not be loaded again from a file; `before` is the previous memory."""
    for name, how in hows(memory).items():
        value, own = getattr(memory, name), getattr(before, name)
        if how is None:
            check_learned(value, own, fits)
            continue
        if isinstance(how, Another) and value.network is not own.network:
            raise EvclError(f"{name} in the memory must keep its own network: use replace({name}, posterior=...)")
        if isinstance(value, dict) and isinstance(own, dict):  # what was there before has been checked before
            value = {key: one for key, one in value.items() if own.get(key) is not one}
        if any(t.is_floating_point() and not finite(t) for t in tensors({name: value}).values()):
            raise EvclError(f"{name} is not finite for some weights; the run has not been changed")
        _check(how, value, own, f"the memory's {name}", fits)


def check_size(name: str, tensor: Tensor) -> None:
    """Refuse means and log standard deviations so large that predictions would not be finite."""
    most = float(LARGEST_LOG_STD if name.endswith("log_std") else LARGEST_MEAN)
    if tensor.numel() and float(tensor.abs().max()) >= most:
        raise EvclError(f"{name} must be below {most:g} in absolute value")


def finite(tensor: Tensor) -> bool:
    """True if all values are finite. `isfinite` would make copies, which could be as large as the file."""
    return tensor.numel() == 0 or all(math.isfinite(float(end)) for end in tensor.aminmax())
