"""Data that is read anew in every epoch, so that it may be larger than memory, and augmented anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from evcl._core.errors import EvclError
from evcl._core.forms import widened
from evcl._core.inputs import Label, positions
from evcl._core.randomness import Purpose, generator
from evcl.learner.reading import Reader, joined
from evcl.training import Reread

WINDOW_BYTES = 2**28  # of inputs that are held at a time, unless the number of examples is given
EPOCH_BEFORE_FIRST = -1  # the epoch of the pass before the first one


class Rereading:
    """A loader that is read once per epoch, and once before: to count its examples and labels, and to sample some.

    Attributes:
        x: a uniform sample of its examples, at most `window`
        y: their labels
        counts: the number of examples of each label
    """

    def __init__(self, reader: Reader, data: Any, seed: int, number: int, batch: int, window: int | None) -> None:
        self.reader, self.seed, self.number = reader, seed, number
        self.data = self._checked(data, batch)
        self.counts: Counter[Label] = Counter()
        self.x, self.y = torch.empty(0), list[Label]()
        pieces, room, shape = list[Tensor](), 0, torch.Size()  # until the sample is full
        source, total = generator(seed, Purpose.WINDOW, number), 0
        for x, y in self._batches(EPOCH_BEFORE_FIRST):
            if not total:
                room = max(batch, window or WINDOW_BYTES // max(1, x[0].numel() * x.element_size()))
                room -= room % batch  # so that all steps but the last of an epoch have whole batches
                shape = x.shape[1:]
            elif x.shape[1:] != shape and reader.call.form is None:
                raise EvclError(f"x is {tuple(x.shape[1:])} per example, but in the first batch it is {tuple(shape)}")
            some = min(len(x), room - len(self.y))
            if some:
                pieces.append(x[:some])
                self.y += y[:some]
            if some < len(x):
                self.x = widened(joined(pieces, room, reader.dtype) if pieces else self.x, x.shape[-1])
                self._sample(widened(x, self.x.shape[-1]), y, some, total, source)
            self.counts.update(y)
            total += len(x)
        if not total:
            raise EvclError("there are no batches to read")
        self.x, self.total = joined(pieces, len(self.y), reader.dtype) if pieces else self.x, total

    def _sample(self, x: Tensor, y: Sequence[Label], first: int, total: int, source: torch.Generator) -> None:
        """Let the rows from `first` on replace rows of the sample, so that every example so far is in it with the same
        probability.
        """
        for i in range(first, len(x)):
            place = int(torch.randint(total + i + 1, (1,), generator=source))
            if place < len(self.y):
                self.x[place], self.y[place] = x[i], y[i]

    @staticmethod
    def _checked(data: Any, batch: int) -> Iterable[Any]:
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            return DataLoader(data, batch_size=batch, shuffle=True)
        if not isinstance(data, (DataLoader, Iterable)) or isinstance(data, (str, bytes, Tensor, tuple, dict)):
            raise EvclError(f"reread needs a DataLoader or a torch Dataset, not {type(data).__name__}")
        if isinstance(data, Iterator):
            raise EvclError("an iterator can be read only once: pass the DataLoader itself")
        return data

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, list[Any]]]:
        seeded = _seeded(self.data, generator(self.seed, Purpose.LOADER, self.number, epoch + 1))
        return self.reader.batches(seeded, "learn")

    def task(self, classes: Sequence[Label], columns: int) -> Reread:
        """What the engine needs: labels become positions in `classes`, and packed inputs have this many columns."""

        def read(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in self._batches(epoch):
                if x.shape[-1] > columns and self.reader.call.form is not None:
                    raise EvclError("a sequence is longer than any that the loader had when it was first read")
                yield widened(x, columns) if self.reader.call.form is not None else x, positions(y, classes)

        return Reread(self.total, read)


def _seeded(data: Iterable[Any], source: torch.Generator) -> Iterator[Any]:
    """The items of `data`. What it draws from torch's global generator it draws from `source`; the global one, which
    belongs to the user, is left as it was.
    """
    own, iterator = source.get_state(), None
    while True:
        before = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            iterator = iter(data) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(before)
        yield item
