"""CIFAR-100 from a folder of the user's: it is not fetched, and its arrays have no published hash."""

from __future__ import annotations

from pathlib import Path

from evcl._core.errors import EvclError
from evcl.data.catalog import ENTRIES
from evcl.data.datasets import Dataset
from evcl.data.formats import SourceFailed
from evcl.data.sources import from_folder, user_folder

CIFAR100_CLASSES = 100
WEB = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
ENTRY = ENTRIES["cifar100"]


def load_cifar100(data_dir: Path | None = None) -> Dataset:
    """CIFAR-100 in its binary version, with the 100 classes as labels, from `data_dir` or else EVCL_DATA.

    The files are train.bin and test.bin, or the archive that holds them. The version for Python is a pickle, which is
    never read.
    """
    place = user_folder(data_dir)
    wanted = f"cifar-100-binary.tar.gz (from {WEB}), or train.bin and test.bin from it"
    if place is None:
        raise EvclError(f"CIFAR-100 is read from a folder of yours: name one with --data-dir that has {wanted}")
    try:
        arrays = from_folder(ENTRY, place)
    except SourceFailed as error:
        raise EvclError(f"folder {place}: {error}; it needs {wanted}") from error
    for part in ("train", "test"):
        most = int(arrays[f"{part}_labels"].max())
        if most >= CIFAR100_CLASSES:
            raise EvclError(
                f"folder {place}: {part}.bin has the label {most}, but CIFAR-100 has 0 to {CIFAR100_CLASSES - 1}"
            )
    return Dataset(ENTRY.name, **{name: array.copy() for name, array in arrays.items()})  # torch needs writable memory
