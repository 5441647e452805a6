"""What a user hands us, checked: inputs become a tensor, labels a list of classes, class weights numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from evcl._core.errors import EvclError

Label = int | str  # and bool, which is an int


def inputs(x: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Inputs [N, ...] as a tensor of `dtype`; NaN, infinity, text and an empty array are refused."""
    if not isinstance(x, Tensor):
        x = torch.from_numpy(_numbers(x))
    if x.is_complex():
        raise EvclError(f"inputs must be real numbers, not {x.dtype}")
    if x.dim() < 2:
        raise EvclError(f"inputs must be [examples, ...], not of shape {tuple(x.shape)}; one example is x[None]")
    if x.numel() == 0:
        raise EvclError(f"the inputs are empty: shape {tuple(x.shape)}")
    found: Tensor = x.detach().to(device=device, dtype=dtype)
    if not bool(found.isfinite().all()):
        row = int((~found.isfinite()).flatten(1).any(1).nonzero()[0])
        raise EvclError(f"the inputs hold NaN or infinity (first in example {row}): remove or replace them")
    return found


def _numbers(x: Any) -> np.ndarray:
    """An array that torch can share: of numbers, in this machine's byte order, writable."""
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise EvclError(f"inputs must be an array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise EvclError(f"inputs must be numbers, not {array.dtype}: encode text and categories first")
    kind = np.dtype(np.float64) if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    return np.require(array, kind, ["C", "W"])


def labels(y: Any, examples: int) -> list[Label]:
    """Labels as a list of integers, of booleans or of strings, one an example."""
    if isinstance(y, Tensor):
        y = y.detach().cpu().numpy()
    if isinstance(y, (list, tuple)) and len({type(v) for v in y}) > 1:  # numpy would make one kind of them
        y = np.fromiter(y, dtype=object, count=len(y))
    try:
        array = np.asarray(y)
    except ValueError as error:
        raise EvclError(f"labels must be an array: {error}") from None
    if array.ndim != 1:
        raise EvclError(f"labels must be [examples], one class each, not of shape {array.shape}")
    if len(array) != examples:
        raise EvclError(f"there are {examples} inputs but {len(array)} labels")
    if array.dtype.kind == "f":
        raise EvclError(
            f"labels are {array.dtype}, but classes are integers or strings: "
            "regression is not supported, and if these are classes use y.astype(int)"
        )
    values = array.tolist()
    for kind in (str, bool, Integral):
        if all(isinstance(v, kind) for v in values):
            found: list[Label] = [int(v) if kind is Integral else v for v in values]
            if kind is Integral and not all(-(2**63) <= int(v) < 2**63 for v in values):
                break
            return found
    raise EvclError(f"labels must be integers of 64 bits or strings, all of one kind, not {array.dtype}")


def pair(data: Any, dtype: torch.dtype, verb: str) -> tuple[Any, Any]:
    """Inputs and labels: of a pair (x, y) as they are; of a data set, or of batches, one tensor of `dtype` and a list.

    A data set is read example by example into its place: there is one copy of the inputs, and nothing beside it.
    Batches are read once and kept until the last; each is let go as it is copied to its place.
    """
    if isinstance(data, (tuple, list)) and len(data) == 2 and not _is_pair(data[1]):
        return data[0], data[1]
    if isinstance(data, IterableDataset):
        raise EvclError("an IterableDataset gives one example after the other: wrap it in a DataLoader, for batches")
    if isinstance(data, Dataset):
        return _read_dataset(data, dtype)
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes, Mapping)):
        came = type(data).__name__
        raise EvclError(f"{verb} takes a Task, a pair (x, y), a torch Dataset or batches (x, y), not {came}")
    return _read_batches(data, dtype, verb)


def _is_pair(item: Any) -> bool:
    """Whether this is a batch (x, y), and not labels."""
    return isinstance(item, (tuple, list)) and len(item) == 2 and len(getattr(item[0], "shape", ())) >= 2


def _read_dataset(data: Any, dtype: torch.dtype) -> tuple[Tensor, list[Any]]:
    count = len(data)
    if count == 0:
        raise EvclError("the data set is empty")
    x, y = torch.empty(0), []
    for i in range(count):
        item = data[i]
        try:
            one, label = item
            example = torch.as_tensor(one)
        except (TypeError, ValueError, RuntimeError) as error:
            hint = "its items must be (x, y), x a tensor or an array of numbers; a transform makes one of an image"
            raise EvclError(f"the data set, item {i}: {error}; {hint}") from None
        if i == 0:
            x = torch.empty(count, *example.shape, dtype=dtype)
        if example.shape != x.shape[1:]:
            raise EvclError(f"the data set, item {i}: x is {tuple(example.shape)}, and item 0's {tuple(x.shape[1:])}")
        x[i] = example.detach()
        y.append(label.item() if isinstance(label, Tensor) and label.dim() == 0 else label)
    return x, y


def _read_batches(data: Iterable[Any], dtype: torch.dtype, verb: str) -> tuple[Tensor, list[Any]]:
    pieces: list[Tensor] = []
    y: list[Any] = []
    for k, batch in enumerate(data):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            came = type(batch).__name__
            raise EvclError(f"{verb} takes a pair (x, y), or batches that are such pairs, and item {k} is a {came}")
        try:
            piece = inputs(batch[0], dtype, "cpu").clone()  # a loader may use its memory again
            y += labels(batch[1], len(piece))
            if pieces and piece.shape[1:] != pieces[0].shape[1:]:
                raise EvclError(f"x is [n, {_sizes(piece)}], and that of batch 0 [n, {_sizes(pieces[0])}]")
        except EvclError as error:
            raise EvclError(f"batch {k}: {error}") from None
        pieces.append(piece)
    if not pieces:
        raise EvclError("there is no batch: an iterator that has been used up gives none, so make it anew")
    x = torch.empty(len(y), *pieces[0].shape[1:], dtype=dtype)  # takes memory only as it is written to
    end = len(y)
    while pieces:
        piece = pieces.pop()
        x[end - len(piece) : end] = piece
        end -= len(piece)
    return x, y


def _sizes(x: Tensor) -> str:
    return ", ".join(map(str, x.shape[1:]))


def class_weights(given: Any, classes: Sequence[Label], y: Tensor) -> Tensor:
    """[N]: what each example counts for, by its class, scaled so that they are 1 on average.

    `given` is a mapping {label: weight}, 1 for a label it does not have; or "balanced": n / (classes seen * examples of
    the class), so that every class counts the same. `y` [N] are positions among the classes.
    """
    weights = torch.ones(len(classes), dtype=torch.float64)
    if isinstance(given, str) and given == "balanced":
        counts = torch.bincount(y, minlength=len(classes)).double().cpu()
        weights = torch.where(counts > 0, len(y) / (counts.clamp_min(1) * (counts > 0).sum()), weights)
    elif isinstance(given, Mapping):
        for label, weight in given.items():
            if label not in classes:
                raise EvclError(f"class_weight: {label!r} is not among the classes {list(classes)}")
            if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < float(weight) < math.inf:
                raise EvclError(f"class_weight: the weight of {label!r} must be a number above 0, not {weight!r}")
            weights[classes.index(label)] = float(weight)
    else:
        raise EvclError(f"class_weight must be 'balanced' or a mapping {{label: weight}}, not {given!r}")
    found = weights.to(y.device)[y]
    return found / found.mean()


def positions(y: Sequence[Label], classes: Sequence[Label]) -> Tensor:
    """Where each label stands among the classes."""
    place = {label: i for i, label in enumerate(classes)}
    try:
        return torch.tensor([place[label] for label in y])
    except KeyError as error:
        raise EvclError(f"label {error} is not among the classes {list(classes)}") from None
