"""Data sets: fetched from several sources, verified by checksum, and returned as uint8 arrays.

In: a name of the catalogue. Out: arrays whose hash is the catalogue's, memory-mapped from the cache.
To change: sources and formats. Fixed: the hashes in the catalogue. No pickle is read, and no archive is unpacked to
disk.
"""

from evcl.data.catalog import CATALOG
from evcl.data.cifar100 import CIFAR100_CLASSES, load_cifar100
from evcl.data.datasets import Dataset, fetch, load, load_arrays, load_grey28, load_texts, status, verify
from evcl.data.embedded import digits
from evcl.data.formats import grey28

__all__ = [
    "CATALOG",
    "CIFAR100_CLASSES",
    "Dataset",
    "digits",
    "fetch",
    "grey28",
    "load",
    "load_arrays",
    "load_cifar100",
    "load_grey28",
    "load_texts",
    "status",
    "verify",
]
