"""Reading what a user passes in: arrays, several inputs by position or by name, data sets, batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from evcl._core.errors import EvclError
from evcl._core.forms import Form, Key, widened
from evcl._core.inputs import Label, inputs
from evcl.learner.packing import pack, ragged
from evcl.nn.inputs import Arguments, Call
from evcl.targets import CATEGORICAL, Likelihood

INFER = "infer"  # the value of `task` that infers the head for each example
LABELS = ("label", "labels")  # the columns of labels, if none is named
Several = dict[Key, object]  # inputs by position or by name, [N, ...] each


class _Packed(NamedTuple):
    x: Tensor


class Reader:
    """Turns what a user passes in into one tensor [N, ...] and labels. The first task decides the form of the inputs.

    `label` names the column of labels in data of dicts; None: `label` or `labels`.
    """

    def __init__(
        self, network: nn.Module, call: Call, dtype: torch.dtype, copied: str = "", likelihood: Likelihood = CATEGORICAL
    ) -> None:
        """`copied`: the name of the method, if it takes networks of one input only."""
        self.call, self.dtype, self.copied, self.likelihood = call, dtype, copied, likelihood
        self.arguments = Arguments.of(network)
        embeddings = [m for m in network.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        self.tokens = bool(embeddings)
        pad = getattr(getattr(network, "config", None), "pad_token_id", None)
        if pad is None and embeddings:
            pad = embeddings[0].padding_idx
        self.pad = pad if isinstance(pad, int) else 0
        self.label: str | None = None
        self.first = False  # whether the form of the inputs may be decided now

    def forked(self, label: str | None = None, first: bool = False) -> Reader:
        """A reader with a call of its own. `label` names the column of labels; a first task decides the form of the
        inputs.
        """
        made = copy.copy(self)
        made.call, made.label, made.first = copy.copy(self.call), label, first
        return made

    # --- inputs ----------------------------------------------------------------------------------------------------

    def tensor(self, x: object, device: torch.device | str) -> Tensor:
        """The inputs as one tensor [N, ...]: as they are, or packed if there are several."""
        arrays = self.several(x)
        if not isinstance(arrays, dict):
            if self.call.form is not None:
                wanted = ", ".join(one.called for one in self.call.form.inputs)
                raise EvclError(f"the network was trained with {wanted}: pass all of them, as a tuple or a dict")
            return inputs(arrays, self.dtype, device)
        pads: dict[Key, int] = {key: self.pad for key in arrays if key in (0, "input_ids", self._key(0))}
        packed, form = pack(arrays, self.call.form, self.dtype, self.arguments.masks, pads)
        if self.call.form is None:
            if not self.first:
                raise EvclError("the network has learned from one array of inputs, not from several: pass one array")
            if self.copied:
                raise EvclError(f"{self.copied} copies the network's layers, and takes networks of one input only")
            self.call.form = form
        return packed.to(device)

    def several(self, x: Any) -> object:
        """The inputs as a dictionary, by position or by name, if there are several; else x itself."""
        form, arguments = self.call.form, self.arguments
        if isinstance(x, Mapping):
            return self._named({str(key): value for key, value in x.items() if key != self.label and key not in LABELS})
        wanted = arguments.required if form is None else sum(one is not form.mask for one in form.inputs)
        if isinstance(x, (tuple, list)) and len(x) > 1 and all(map(_is_array, x)):
            together = len({len(one) for one in x}) == 1
            many = arguments.takes(len(x)) if isinstance(x, tuple) else len(x) == wanted
            if many and (together or isinstance(x, tuple)):
                return self._placed(x)
        if isinstance(x, (tuple, list)) and len(x) == wanted > 1 and not all(map(_is_number, x)):
            return self._placed(x)
        if isinstance(x, tuple) and len(x) == 1 and _is_array(x[0]):
            return self.several(x[0])
        known = self.tokens or arguments.masks or form is not None
        if ragged(x) and (known or any(len(getattr(one, "shape", ())) > 1 for one in x)):
            if form is None and not self.first and not arguments.masks:
                return pack([x], None, self.dtype, (), {0: self.pad})[0] + self.pad  # the network takes one array
            return {self._key(0): x}
        return x if form is None or _several_in(form) else {form.inputs[0].key: x}

    def _placed(self, x: Sequence[object]) -> Several:
        """Inputs by position get the names that they have in `forward`, if they have any there."""
        return {self._key(i): value for i, value in enumerate(x)}

    def _key(self, position: int) -> Key:
        names = self.arguments.names
        return names[position] if position < len(names) else position

    def _named(self, x: dict[str, object]) -> object:
        form, arguments = self.call.form, self.arguments
        if form is not None:
            known = {one.key for one in form.inputs}
            named: Several = {key: value for key, value in x.items() if key in known}
            if not named and len(x) == 1:
                named = {form.inputs[0].key: next(iter(x.values()))}
            return named or x
        numbers = {key: value for key, value in x.items() if not _is_text(value)}
        used = {key: numbers[key] for key in arguments.names if key in numbers}  # in any order, they are learned alike
        if not used and len(numbers) == 1 and arguments.required <= 1:
            return next(iter(numbers.values()))
        if not used and arguments.any_name:
            used = numbers
        names = ", ".join(arguments.names)
        if not used:
            raise EvclError(f"the inputs are called {', '.join(x) or 'nothing'}, but the network takes {names}")
        if len(used) < len(numbers) and self.first:
            others = ", ".join(key for key in numbers if key not in used)
            warnings.warn(f"the network takes no input called {others}, so it is left out ({names})", stacklevel=6)
        first = next(iter(used))
        if len(used) == 1 and first == arguments.names[0] and not (self.tokens or ragged(used[first])):
            return used[first]
        return used

    # --- examples --------------------------------------------------------------------------------------------------

    def examples(self, data: object, verb: str, device: torch.device | str) -> tuple[Tensor, object]:
        """Inputs as one tensor on this device, and labels, or targets [N, D] if they are not classes."""
        x, y = self._read(data, verb)
        packed = x.x.to(device) if isinstance(x, _Packed) else self.tensor(x, device)
        return packed, self.likelihood.read(packed, y, verb)

    def _read(self, data: Any, verb: str) -> tuple[object, object]:
        """Inputs, as `tensor` takes them or packed already, and labels; None if there are none."""
        if not self.likelihood.heads:
            return data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        if isinstance(data, Mapping):
            return data, self._labels_of(data)
        if _is_frame(data):
            y = self._labels_of({str(name): data[name] for name in data.columns})
            given = LABELS if self.label is None else [self.label]
            target = next(name for name in given if name in data.columns)
            return data[[name for name in data.columns if name != target]], y
        if (
            isinstance(data, (tuple, list))
            and len(data) == 2
            and not _is_pair(data[1])
            and not isinstance(data[1], Mapping)
        ):
            return data[0], data[1]
        if isinstance(data, (tuple, list)) and len(data) > 2 and all(map(_is_array, data)):
            x, y, task = self._parts(tuple(data), "the data")
            _check_constant(task, task)
            return x, y
        if isinstance(data, IterableDataset):
            raise EvclError("an IterableDataset yields single examples: wrap it in a DataLoader, which yields batches")
        if is_dataset(data):
            return self._dataset(data)
        if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
            came = type(data).__name__
            raise EvclError(f"{verb} takes a Task, a pair (x, y), a torch Dataset or batches (x, y), not {came}")
        return self._batches(data, verb)

    def _labels_of(self, row: Mapping[object, object]) -> object:
        """The labels of a row or a batch that is a dict."""
        for name in LABELS if self.label is None else [self.label]:
            if name in row:
                return row[name]
        wanted = "'label' or 'labels'" if self.label is None else repr(self.label)
        names = ", ".join(map(str, row))
        raise EvclError(f"there is no column {wanted} among {names}: name the column of the labels, label='...'")

    def _parts(self, item: object, what: str) -> tuple[object, object, object]:
        """Inputs, labels and, if there is one, the task of a row or a batch."""
        if isinstance(item, Mapping):
            return item, self._labels_of(item), None
        if not isinstance(item, (tuple, list)) or len(item) < 2:
            kind = type(item).__name__
            raise EvclError(f"{what} must be (x, y) with x a tensor or numeric array, or a dict, not {kind}")
        if len(item) == 2:
            return item[0], item[1], None
        second = getattr(item[1], "ndim", 0 if not hasattr(item[1], "__len__") else 1)
        if len(item) == 3 and second <= 1 and self.arguments.required < 2:
            return item[0], item[1], item[2]  # (x, y, task), of a continual learning stream
        if not self.arguments.takes(len(item) - 1):
            raise EvclError(
                f"{what} has {len(item)} parts, the inputs and the label, but the network takes "
                f"{self.arguments.required} input{'s' if self.arguments.required > 1 else ''}"
            )
        return tuple(item[:-1]), item[-1], None

    def _dataset(self, data: Any) -> tuple[object, list[object]]:
        """Read a data set of single examples. If an example is one array, it is read straight into one tensor."""
        count = len(data)
        if count == 0:
            raise EvclError("the data set is empty")
        one, y, task = torch.empty(0), list[object](), None
        columns: dict[Key, list[object]] | None = None
        rows: list[Tensor] = []  # sequences of different lengths
        for i in range(count):
            x, label, number = self._parts(data[i], f"data set item {i}")
            task = number if i == 0 else task
            _check_constant(number, task)
            several = _row(x) if columns is None or isinstance(columns, dict) else None
            if i == 0 and several is not None:
                columns = {key: [] for key in several}
            if isinstance(columns, dict):
                if several is None or several.keys() != columns.keys():
                    raise EvclError(f"data set item {i}: its inputs are not those of item 0")
                for key, value in several.items():
                    columns[key].append(value)
            else:
                one = self._into(one, x, i, count, rows)
            y.append(label.item() if isinstance(label, Tensor) and label.numel() == 1 else label)
        if columns is None:
            return rows or one, y
        if all(isinstance(key, int) for key in columns):
            return tuple(_stacked(values) for values in columns.values()), y
        return {key: values if _is_text(values) else _stacked(values) for key, values in columns.items()}, y

    def _into(self, whole: Tensor, x: object, i: int, count: int, rows: list[Tensor]) -> Tensor:
        """Write example i into the tensor of all of them, which the first one makes; or into `rows`, if the lengths of
        sequences differ.
        """
        try:
            example = torch.as_tensor(x)
        except (TypeError, ValueError, RuntimeError) as error:
            hint = "items must be (x, y) with x a tensor or numeric array; use a transform to convert images to tensors"
            raise EvclError(f"data set item {i}: {error}; {hint}") from None
        if i == 0:
            whole = torch.empty(count, *example.shape, dtype=self.dtype)
            self._kind = example.dtype
        longer = self.tokens and example.shape != whole.shape[1:] and 0 < example.dim() == whole.dim() - 1
        if rows or (longer and example.shape[1:] == whole.shape[2:]):
            rows += [] if rows else whole[:i].to(self._kind).unbind()
            rows.append(example)
            return whole
        if example.shape != whole.shape[1:]:
            shapes = tuple(example.shape), tuple(whole.shape[1:])
            raise EvclError(f"data set item {i}: x is {shapes[0]}, but in item 0 it is {shapes[1]}")
        whole[i] = example.detach()
        return whole

    def batches(self, data: Iterable[object], verb: str) -> Iterator[tuple[Tensor, list[Label]]]:
        """The batches of a loader, each as one tensor and its labels."""
        task = None
        for k, batch in enumerate(data):
            if not isinstance(batch, (tuple, list, Mapping)) or len(batch) < 2:
                came = type(batch).__name__
                raise EvclError(f"{verb} takes a pair (x, y), or batches that are such pairs, but item {k} is a {came}")
            try:
                x, y, number = self._parts(batch, "a batch")
                task = number if k == 0 else task
                _check_constant(number, task)
                piece = self.tensor(x, "cpu").clone()  # a loader may reuse its memory
                labels = self.likelihood.read(piece, y, verb)
                yield piece, labels.tolist() if isinstance(labels, Tensor) else labels
            except EvclError as error:
                raise EvclError(f"batch {k}: {error}") from None

    def _batches(self, data: Iterable[object], verb: str) -> tuple[object, list[object]]:
        """Read batches once. They are held until the last one has come; each is freed as soon as it has been copied."""
        if isinstance(data, (tuple, list)) and data and isinstance(data[0], Mapping) and self._is_row(data[0]):
            return self._dataset(data)
        pieces: list[Tensor] = []
        y: list[object] = []
        for k, (piece, some) in enumerate(self.batches(data, verb)):
            if pieces and piece.shape[1:] != pieces[0].shape[1:] and self.call.form is None:
                shapes = (", ".join(map(str, t.shape[1:])) for t in (piece, pieces[0]))
                raise EvclError("batch {}: x is [n, {}], but in batch 0 it is [n, {}]".format(k, *shapes))
            pieces.append(piece)
            y += some
        if not pieces:
            raise EvclError("there are no batches: an exhausted iterator yields none, so create it again")
        return _Packed(joined(pieces, len(y), self.dtype)), y

    def _is_row(self, item: Mapping[object, object]) -> bool:
        label = self._labels_of(item)
        return isinstance(label, str) or not getattr(label, "ndim", hasattr(label, "__len__"))


def joined(pieces: list[Tensor], count: int, dtype: torch.dtype) -> Tensor:
    """All rows of these pieces, which are removed from the list; shorter sequences are padded."""
    shape = list(pieces[0].shape[1:])
    shape[-1] = max(piece.shape[-1] for piece in pieces)
    x = torch.empty(count, *shape, dtype=dtype)  # memory is only used as it is written to
    end = count
    while pieces:
        piece = pieces.pop()
        x[end - len(piece) : end] = widened(piece, shape[-1])
        end -= len(piece)
    return x


def like(x: object) -> object:
    """The first array of some inputs: results are in its form."""
    if isinstance(x, Mapping):
        arrays = [value for value in x.values() if not _is_text(value)]
        return arrays[0] if arrays else None
    return x[0] if isinstance(x, tuple) and x and _is_array(x[0]) else x


def in_form(x: object, tensor: Tensor) -> Any:
    """A tensor if `x`, or its first input, is one; else an array."""
    x = like(x)
    return tensor.to(x.device) if isinstance(x, Tensor) else tensor.cpu().numpy()


def _several_in(form: Form) -> bool:
    return sum(one is not form.mask for one in form.inputs) > 1


def _is_frame(value: object) -> bool:
    """Whether this is a table of pandas or polars, which has columns."""
    return hasattr(value, "columns") and hasattr(value, "shape") and len(value.shape) == 2


def _is_array(value: object) -> bool:
    return getattr(value, "ndim", 0) > 0


def _is_number(value: object) -> bool:
    return not hasattr(value, "__len__") or isinstance(value, str)


def _is_text(value: object) -> bool:
    """Whether this is text, or a list of texts."""
    if isinstance(value, (list, tuple)):
        return bool(value) and _is_text(value[0])
    return isinstance(value, str) or getattr(getattr(value, "dtype", None), "kind", "") in ("U", "S")


def _is_pair(item: object) -> bool:
    """True if this is a batch (x, y), False if it is labels."""
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        return False
    return len(getattr(item[0], "shape", ())) >= 2 or isinstance(item[0], Mapping)


def is_dataset(data: object) -> bool:
    """Whether this is a data set of single examples: a torch Dataset, or another such as Hugging Face's."""
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset)
    if (
        isinstance(data, (tuple, list, str, bytes, Tensor))
        or not hasattr(data, "__getitem__")
        or not hasattr(data, "__len__")
    ):
        return False
    try:
        return len(data) > 0 and isinstance(data[0], (tuple, list, Mapping))
    except (KeyError, IndexError, TypeError, ValueError):
        return False


def _row(x: object) -> Several | None:
    """The inputs of one example, by position or by name; None if it is one array."""
    if isinstance(x, Mapping):
        return {key: value for key, value in x.items() if key not in LABELS}
    if isinstance(x, tuple) and any(_is_array(one) or isinstance(one, (list, tuple)) for one in x):
        return dict(enumerate(x))
    return None


def _stacked(values: list[object]) -> object:
    """One array of these values of single examples, if they have one shape."""
    if any(isinstance(value, Tensor) for value in values) and len({torch.as_tensor(v).shape for v in values}) == 1:
        return torch.stack([torch.as_tensor(value) for value in values])
    return values


def _check_constant(number: object, task: object) -> None:
    """Refuse items (x, y, task) of several tasks."""
    if number is None:
        return
    values = {*torch.as_tensor(number).reshape(-1).tolist(), *torch.as_tensor(task).reshape(-1).tolist()}
    if len(values) > 1:
        some = ", ".join(map(str, sorted(values)[:5]))
        raise EvclError(
            f"the third part of an item (x, y, task) is its task, but these are several ({some}): learn one at a time"
        )
