"""What the engine does with a method's memory: fields are handled as they declare, and none is known by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.nn.functional import pad

from evcl._core.errors import EvclError
from evcl._core.settings import Settings
from evcl.methods.data import TaskData
from evcl.methods.memory import HOW, Another, ByKey, KeptExamples, Model, PerWeight
from evcl.nn import Gaussian, Layout
from evcl.posterior import Extending

M = TypeVar("M")


# --- walking over values ---------------------------------------------------------------------------------------------


def mapped(
    value: Any, change: Callable[[Tensor], Tensor], gaussian: Callable[[Gaussian], Gaussian] | None = None
) -> Any:
    """The same nested structure with `change` applied to every tensor, and `gaussian`, if given, to every Gaussian."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Gaussian):
        return value.map(change, value.layout) if gaussian is None else gaussian(value)
    if isinstance(value, Mapping):
        return {key: mapped(one, change, gaussian) for key, one in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(mapped(one, change, gaussian) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        return replace(value, **{name: mapped(one, change, gaussian) for name, one in own.items()})
    return value


def narrowed(term: M, layout: Layout, part: Layout) -> M:
    """Restrict a term over all weights to the weights of `part`, by gathering its tensors of shape [R, P] and [P]."""
    if not is_dataclass(term):
        raise EvclError(
            f"a term must be a dataclass, so that it can be narrowed to the weights of a fit; {term!r} is not"
        )

    def gather(tensor: Tensor) -> Tensor:
        whole = tensor.dim() in (1, 2) and tensor.shape[-1] == layout.size
        return layout.gather(tensor, part) if whole else tensor

    restricted: M = mapped(term, gather)
    return restricted


def hows(memory: Any) -> dict[str, Any]:
    """How each field of a memory, or of a memory class, is stored; None marks a field that is itself a memory."""
    return {one.name: one.metadata.get(HOW) for one in fields(memory)}


def each(memory: M, change: Callable[[Any, Any], object]) -> M:
    """Replace every field's value v, stored as h, by change(h, v), in inner memories too."""
    changed: M = replace(  # type: ignore[type-var]
        memory,
        **{
            name: each(getattr(memory, name), change) if how is None else change(how, getattr(memory, name))
            for name, how in hows(memory).items()
        },
    )
    return changed


# --- what the engine does with a memory -------------------------------------------------------------------------------


class Fresh(NamedTuple):
    """The initial prior and posterior of untrained weights, over a whole layout."""

    prior: Gaussian
    posterior: Gaussian


def switched(cls: type, memory: Any, empty: Callable[[], Any]) -> object:
    """The memory of a method that goes on with one of class `cls`, with a memory of examples added, which wraps the
    present one and starts `empty`, or removed, or the same.
    """
    now, before = (hows(one).keys() for one in (cls, memory))
    if now == before:
        return memory
    return memory.inner if "inner" in before and "inner" not in now else replace(empty(), inner=memory)


def initial(cls: type[M], fresh: Fresh, another: Callable[[str, Any], Model]) -> M:
    """The memory before the first task. `another(field, make)` makes a second network."""
    values: dict[str, object] = {}
    for one in fields(cls):  # type: ignore[arg-type]
        how = one.metadata.get(HOW)
        if how is None:
            values[one.name] = initial(_class_of(cls, one.name), fresh, another)
        elif isinstance(how, Another):
            values[one.name] = another(one.name, how.make)
        elif isinstance(how, PerWeight):
            start = fresh.posterior if how.start == "posterior" else fresh.prior
            if how.kind in (tuple, dict):
                values[one.name] = how.kind()
            elif how.kind is Gaussian:
                values[one.name] = mapped(start, Tensor.clone)
            else:
                values[one.name] = torch.zeros_like(start.mean) if how.start == "zero" else start.mean.clone()
    return cls(**values)


def _class_of(cls: type, name: str) -> type:
    """The class of a field that is itself a memory; its annotation may be a string."""
    try:
        kind = get_type_hints(cls)[name]
    except NameError as error:
        raise EvclError(
            f"memory field {name!r}: {error}; define its class at module level, beside the memory's"
        ) from None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise EvclError(f"memory field {name!r} must declare how it is stored: per_weight(), per_layer(), ...")
    return kind


def relaid(memory: M, extended: Extending, fresh: Fresh, grown: Callable[[Model], Model]) -> M:
    """Move the memory to a layout with added weights, which start as their field declares. `extended` moves a buffer
    there (see `Layout.extending`), and `grown` a second network.
    """

    def change(how: object, value: Any) -> object:
        if isinstance(how, Another):
            return grown(value)
        if not isinstance(how, PerWeight):
            return value
        new = fresh.posterior if how.start == "posterior" else fresh.prior

        def extended_gaussian(q: Gaussian) -> Gaussian:
            log_std = None
            if q.log_std is not None and new.log_std is not None:
                log_std = extended(q.log_std, new.log_std)
            return Gaussian(extended(q.mean, new.mean), log_std)

        start = torch.zeros_like(new.mean) if how.start == "zero" else new.mean
        return mapped(value, lambda t: extended(t, start), extended_gaussian)

    return each(memory, change)


def with_inputs(memory: M, count: int) -> M:
    """The memory for a network with this many more inputs, which were 0 in all rows so far; `relaid` adds the weights.

    A memory with tensors that depend on the number of inputs has a method `with_inputs(count)`, or is refused.
    """
    if hasattr(memory, "with_inputs"):
        widened: M = memory.with_inputs(count)
        return widened
    values: dict[str, object] = {}
    for name, how in hows(memory).items():
        value = getattr(memory, name)
        if how is None:
            values[name] = with_inputs(value, count)
        elif isinstance(how, KeptExamples):
            if any(task.x.dim() != 3 for task in value):
                raise EvclError("its examples are not rows of numbers")
            values[name] = tuple(replace(task, x=pad(task.x, (0, count))) for task in value)
        elif isinstance(how, ByKey) and how.widened is not None:
            values[name] = how.widened(value, count)
        elif isinstance(how, Another) or (isinstance(how, ByKey) and how.inputs and value):
            raise EvclError(f"what it remembers as {name!r} depends on the number of inputs")
    return replace(memory, **values)  # type: ignore[type-var]


def kept_examples(memory: object) -> list[TaskData]:
    """All examples that a memory keeps, in any of its fields."""
    return [task for kept in _stored_as(KeptExamples, memory) for task in kept]


def with_models(memory: M, change: Callable[[Model], Model]) -> M:
    """The memory with its second networks changed."""
    return each(memory, lambda how, value: change(value) if isinstance(how, Another) else value)


def with_examples(memory: M, change: Callable[[TaskData], TaskData]) -> M:
    """The memory with each task's kept examples changed."""
    return each(memory, lambda how, value: tuple(map(change, value)) if isinstance(how, KeptExamples) else value)


def _declared(cls: type) -> Iterator[object]:
    """How each field of a memory of this class is stored, those of inner memories too."""
    for name, how in hows(cls).items():
        if how is None:
            yield from _declared(_class_of(cls, name))
        else:
            yield how


def keeps_examples(cls: type) -> bool:
    """Whether a memory of this class has room for examples of earlier tasks."""
    return any(isinstance(how, KeptExamples) for how in _declared(cls))


def has_models(cls: type) -> bool:
    """Whether a memory of this class has second networks."""
    return any(isinstance(how, Another) for how in _declared(cls))


def lasting(cls: type, s: Settings) -> str:
    """What a memory of this class, with these settings, cannot start anew for some of the weights; empty: nothing.

    A memory that has such a thing says so in a static method `lasting(s)`.
    """
    own = cls.lasting(s) if hasattr(cls, "lasting") else ""
    parts = (lasting(_class_of(cls, name), s) for name, how in hows(cls).items() if how is None)
    return next(filter(None, (own, *parts)), "")


def copies_network(cls: type) -> bool:
    """Whether a memory of this class has a second network that is made from the layers of the user's."""
    return any(isinstance(how, Another) and how.make is not None for how in _declared(cls))


def models(memory: object) -> list[Model]:
    """The second networks of a memory."""
    return _stored_as(Another, memory)


def _stored_as(kind: type, memory: object) -> list[Any]:
    """The values of all fields stored as `kind`, in inner memories too."""
    values: list[Any] = []
    for name, how in hows(memory).items():
        value = getattr(memory, name)
        values += _stored_as(kind, value) if how is None else [value] if isinstance(how, kind) else []
    return values


def rescaled(
    q: Gaussian, memory: M, factor: Tensor, shift: Tensor, change: Callable[[TaskData], TaskData]
) -> tuple[Gaussian, M]:
    """A posterior and a memory after each weight w, [1, P] of them, has become factor * w + shift: means and standard
    deviations follow, importances, which are squares of gradients, are divided by factor^2, and `change` does what it
    must to kept examples.
    """

    def gaussian(q: Gaussian) -> Gaussian:
        log_std = None if q.log_std is None else q.log_std + factor.log()
        return Gaussian(factor * q.mean + shift, log_std, q.layout)

    def one(how: object, value: Any) -> object:
        if isinstance(how, KeptExamples):
            return tuple(map(change, value))
        if not isinstance(how, PerWeight):
            return value
        if how.start != "zero":  # values of weights
            return mapped(value, lambda t: factor * t + shift, gaussian)
        marks = how.high == 1
        return mapped(value, lambda t: t if marks else t / factor.square(), gaussian)

    return gaussian(q), each(memory, one)
