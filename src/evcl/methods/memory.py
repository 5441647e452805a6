"""What a method remembers between tasks: a frozen dataclass whose fields say how they live.

    @dataclass(frozen=True)
    class Memory:
        prior: Gaussian = per_weight(Gaussian, "prior")    # [R, P]: grows with the network
        importance: Tensor = per_weight(low=0)
        factors: dict[str, Tensor] = per_layer()           # weight name -> [R, ...]
        masks: dict[int, Tensor] = per_task()              # task -> [R, ...]
        kept: tuple[TaskData, ...] = examples()            # rows of earlier tasks
        teacher: Model = model()                           # another network

The first axis of every tensor is the replicas'. A field may hold None, a tensor, a `Gaussian`, or tuples and dicts of
these. The functions below do everything that the rest of the library does with a memory: no other file knows a field by
its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import torch
from torch import Tensor, nn

from evcl.errors import EvclError
from evcl.methods.data import TaskData
from evcl.nn import BayesianNetwork, Gaussian, Layout

M = TypeVar("M")
Start = Literal["zero", "prior", "posterior"]
HOW = "evcl"  # the key of a field's metadata


@dataclass(frozen=True)
class Nothing:
    """The memory of a method that keeps none."""


@dataclass(frozen=True)
class Model:
    """Another network beside the learner's own: how it computes, which is not saved, and its weights, which are."""

    network: BayesianNetwork
    posterior: Gaussian
    statistics: Mapping[str, Tensor]


class PerWeight(NamedTuple):
    kind: type
    start: Start
    low: float
    high: float


class Rows(NamedTuple):
    """Tensors [R, ...] of any other shape."""


class Kept(NamedTuple):
    """Examples."""


class Another(NamedTuple):
    make: Callable[[nn.Module], nn.Module] | None


def per_weight(kind: type = Tensor, start: Start = "zero", low: float = -math.inf, high: float = math.inf) -> Any:
    """[R, P], a number for each weight: a tensor, a Gaussian, or a tuple or dict of them, which starts empty.

    `start` is what a new weight has: 0, its first prior, or what its posterior starts from. Values outside of
    [low, high] are refused when a file is loaded.
    """
    return field(default=None, metadata={HOW: PerWeight(kind, start, low, high)})


def per_layer() -> Any:
    """A dict: the name of a weight -> a tensor [R, ...], such as a factor of its curvature."""
    return field(default_factory=dict, metadata={HOW: Rows()})


def per_task() -> Any:
    """A dict: the number of a task -> a tensor [R, ...], such as the mask of its units."""
    return field(default_factory=dict, metadata={HOW: Rows()})


def examples() -> Any:
    """A tuple of `TaskData` with an axis of replicas, [R, N, ...]: rows of earlier tasks."""
    return field(default=(), metadata={HOW: Kept()})


def model(make: Callable[[nn.Module], nn.Module] | None = None) -> Any:
    """A second network with the same heads, drawn from seeds of its own.

    `make(network)` returns its trunk, given a copy of the learner's; by default it is that copy.
    """
    return field(default=None, metadata={HOW: Another(make)})


# --- walking over values ---------------------------------------------------------------------------------------------


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Gaussian):
        return value.map(change, value.layout)
    if isinstance(value, Mapping):
        return {key: mapped(one, change) for key, one in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(mapped(one, change) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        return replace(value, **{name: mapped(one, change) for name, one in own.items()})
    return value


def narrowed(term: M, layout: Layout, part: Layout) -> M:
    """A term over all weights as one over those of `part`: its tensors [R, P] are gathered."""
    if not is_dataclass(term):
        raise EvclError(f"a term must be a dataclass, so that it can be narrowed to a fit's weights: {term!r} is not")

    def gather(tensor: Tensor) -> Tensor:
        whole = tensor.dim() == 2 and tensor.shape[1] == layout.size
        return layout.gather(tensor, part) if whole else tensor

    found: M = mapped(term, gather)
    return found


def _how(memory: Any) -> dict[str, Any]:
    """Each field of a memory, or of its class, and how it lives. A field that is a memory itself is None."""
    return {one.name: one.metadata.get(HOW) for one in fields(memory)}


def each(memory: M, change: Callable[[Any, Any], Any]) -> M:
    """The memory with every field's value v, living as h, replaced by change(h, v); inner memories too."""
    found: M = replace(  # type: ignore[type-var]
        memory,
        **{
            name: each(getattr(memory, name), change) if how is None else change(how, getattr(memory, name))
            for name, how in _how(memory).items()
        },
    )
    return found


# --- what the engine does with a memory -------------------------------------------------------------------------------


class Fresh(NamedTuple):
    """What weights that have not learned anything start from, over a whole layout."""

    prior: Gaussian
    posterior: Gaussian

    def of(self, start: Start, kind: type) -> Any:
        """The same as a Gaussian, or as a tensor."""
        gaussian = self.posterior if start == "posterior" else self.prior
        if kind is Gaussian:
            return gaussian
        return torch.zeros_like(gaussian.mean) if start == "zero" else gaussian.mean


def initial(cls: type[M], fresh: Fresh, another: Callable[[str, Any], Model]) -> M:
    """A memory of nothing. `another(field, make)` makes a second network."""
    values: dict[str, Any] = {}
    for one in fields(cls):  # type: ignore[arg-type]
        how = one.metadata.get(HOW)
        if how is None:
            values[one.name] = initial(_class_of(one), fresh, another)
        elif isinstance(how, Another):
            values[one.name] = another(one.name, how.make)
        elif isinstance(how, PerWeight):
            several = how.kind in (tuple, dict)
            values[one.name] = how.kind() if several else mapped(fresh.of(how.start, how.kind), Tensor.clone)
    return cls(**values)


def _class_of(one: Any) -> Any:
    if not isinstance(one.type, type):
        raise EvclError(f"the memory's field {one.name!r} needs to say how it lives: per_weight(), per_layer(), ...")
    return one.type


def relaid(memory: M, old: Layout, new: Layout, fresh: Fresh, grown: Callable[[Model], Model]) -> M:
    """The memory in a layout where weights were added; those start as their field says. `grown`: second networks."""

    def fill(flat: Tensor, start: Tensor) -> Tensor:
        return old.extended(flat, new, start)

    def change(how: Any, value: Any) -> Any:
        if isinstance(how, Another):
            return grown(value)
        return _weights(how, value, fresh, fill) if isinstance(how, PerWeight) else value

    return each(memory, change)


def _weights(how: PerWeight, value: Any, fresh: Fresh, fill: Callable[[Tensor, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return fill(value, fresh.of(how.start, Tensor))
    if isinstance(value, Gaussian):
        start = fresh.of(how.start, Gaussian)
        log_std = None if value.log_std is None else fill(value.log_std, start.log_std)
        return Gaussian(fill(value.mean, start.mean), log_std)
    if isinstance(value, Mapping):
        return {key: _weights(how, one, fresh, fill) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_weights(how, one, fresh, fill) for one in value)
    return value


def check_finite(memory: Any) -> None:
    """Refuse what is remembered if some of it is not a number."""
    for name, tensor in tensors(memory).items():
        if tensor.is_floating_point() and not finite(tensor):
            raise EvclError(f"the {name.split('/')[0]} of some weights is not finite: the run is left as it was")


def check_size(name: str, tensor: Tensor) -> None:
    """Refuse means and log standard deviations of a file that are so large that predictions would not be finite."""
    most = 50.0 if name.endswith("log_std") else 1e18
    if tensor.numel() and float(tensor.abs().max()) >= most:
        raise EvclError(f"{name} should be below {most:g} in size")


def finite(tensor: Tensor) -> bool:
    """Whether all of it is; without the copies that `isfinite` makes, which may be as large as a file."""
    return tensor.numel() == 0 or all(math.isfinite(float(end)) for end in tensor.aminmax())


# --- saving -----------------------------------------------------------------------------------------------------------


def tensors(memory: Any) -> dict[str, Tensor]:
    """Every tensor of a memory, by name."""
    found: dict[str, Tensor] = {}
    _packed(memory, [], found)
    return found


def outline(memory: Any) -> Any:
    """What JSON has to say of a memory, so that `from_tensors` finds its tensors."""
    return _packed(memory, [], {})


def _packed(value: Any, path: list[str], out: dict[str, Tensor]) -> Any:
    def inside(key: object, one: Any) -> Any:
        return _packed(one, [*path, quote(str(key), safe=" ")], out)

    if isinstance(value, Tensor):
        out["/".join(path)] = value
        return "tensor"
    if isinstance(value, Gaussian):
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
    raise EvclError(f"the memory's {'/'.join(path)} holds a {type(value).__name__}, which cannot be saved")


class Fits(NamedTuple):
    """What the tensors of a file must fit: a tensor [R, P], and the number of classes of each head."""

    like: Tensor
    classes: Callable[[int], int]


def from_tensors(memory: M, told: Any, given: Mapping[str, Tensor], fits: Fits) -> M:
    """A memory like this one, of what `outline` and `tensors` gave.

    Whatever does not fit is an EvclError: files come from anywhere.
    """
    try:
        return _unpacked(memory, told, [], given, fits)
    except EvclError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise EvclError(f"what it remembers is damaged ({type(error).__name__} {error})") from error


def _unpacked(memory: M, told: Any, path: list[str], given: Mapping[str, Tensor], fits: Fits) -> M:
    told = told["fields"]
    hows, values = _how(memory), {}
    if told.keys() != hows.keys():
        raise EvclError(f"it remembers {sorted(told)}, and this method remembers {sorted(hows)}")
    for name, how in hows.items():
        own, at = getattr(memory, name), [*path, name]
        if how is None:
            values[name] = _unpacked(own, told[name], at, given, fits)
        else:
            values[name] = _value(told[name], at, given, own)
            _check(how, values[name], own, "/".join(at), fits)
    found: M = replace(memory, **values)  # type: ignore[type-var]
    return found


def _value(told: Any, path: list[str], given: Mapping[str, Tensor], own: Any) -> Any:
    def inside(key: object, one: Any) -> Any:
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
            raise ValueError("head and task should be whole numbers")
        return TaskData(x, y, content["head"], weights, content["task"])
    if kind == "model":
        return Model(own.network, inside("posterior", content[0]), inside("statistics", content[1]))
    if kind == "dict":
        if any(type(key) not in (int, str) for key, _ in content):
            raise ValueError("a key should be a text or a whole number")
        return {key: inside(key, one) for key, one in content}
    raise ValueError(f"kind {kind!r}")


def _check(how: Any, value: Any, own: Any, name: str, fits: Fits) -> None:
    """Refuse a value that a field living as `how`, whose value was `own`, could not have."""
    if isinstance(how, PerWeight):
        _check_weights(how, value, name, fits.like)
    elif isinstance(how, Another):
        _check_model(value, own, name)
    elif isinstance(how, Kept):
        for i, one in enumerate(value):
            _check_examples(one, f"{name}/{i}", fits)
    else:
        for key, tensor in tensors({"": value}).items():
            if tensor.shape[:1] != fits.like.shape[:1] or (tensor.is_floating_point() and not finite(tensor)):
                raise EvclError(f"{name}{key} should have an axis of replicas first, and be finite")


def _check_weights(how: PerWeight, value: Any, name: str, like: Tensor) -> None:
    if not isinstance(value, how.kind):
        raise EvclError(f"{name} should be a {how.kind.__name__}")
    if isinstance(value, Gaussian) and not isinstance(value.mean, Tensor):
        raise EvclError(f"{name} should have means")
    for key, tensor in tensors({"": value}).items():
        if tensor.shape != like.shape or tensor.dtype != like.dtype or not finite(tensor):
            raise EvclError(f"{name}{key} should be {like.dtype} {tuple(like.shape)}, all of it finite")
        check_size(f"{name}{key}", tensor)
        if not key.endswith("log_std") and tensor.numel():
            least, most = (float(end) for end in tensor.aminmax())
            if least < how.low or most > how.high:
                raise EvclError(f"{name} should be at least {how.low:g} and at most {how.high:g}")


def _check_model(value: Any, own: Model, name: str) -> None:
    wanted, found = (tensors({"": one}) for one in (own, value))
    if wanted.keys() != found.keys():
        raise EvclError(f"{name}: its network is another")
    for key, tensor in found.items():
        like = wanted[key]
        if tensor.shape != like.shape or tensor.dtype != like.dtype or not finite(tensor):
            raise EvclError(f"{name}{key} should be {like.dtype} {tuple(like.shape)}, all of it finite")


def _check_examples(one: Any, name: str, fits: Fits) -> None:
    if not isinstance(one, TaskData) or one.x.dtype != fits.like.dtype or not finite(one.x):
        raise EvclError(f"the inputs of {name} should be {fits.like.dtype}, all of it finite")
    right = one.y.dtype == torch.long and one.y.shape == one.x.shape[:2] and len(one.y) == len(fits.like)
    if not right or not bool(((one.y >= 0) & (one.y < fits.classes(one.head))).all()):
        raise EvclError(f"the labels of {name} do not fit its inputs or its head")
    if one.weights is not None and (one.weights.shape != one.y.shape or not finite(one.weights)):
        raise EvclError(f"the weights of {name} do not fit its inputs")


def kept_examples(memory: Any) -> list[TaskData]:
    """All examples that a memory keeps, wherever they stand in it."""
    found: list[TaskData] = []
    for name, how in _how(memory).items():
        value = getattr(memory, name)
        if how is None:
            found += kept_examples(value)
        elif isinstance(how, Kept):
            found += value
    return found


def models(memory: Any) -> list[Model]:
    """The second networks of a memory."""
    found: list[Model] = []
    for name, how in _how(memory).items():
        value = getattr(memory, name)
        if how is None:
            found += models(value)
        elif isinstance(how, Another):
            found.append(value)
    return found

