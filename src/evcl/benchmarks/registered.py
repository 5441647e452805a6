"""The registered benchmarks: those of the paper, from verified data sets, those of the built-in digits, and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from evcl import data
from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose
from evcl._core.tasks import Examples, Task
from evcl.benchmarks.benchmark import Benchmark, Entry, Request, entry, parted, permuted_tasks, split_tasks

Parts = tuple[Examples, Examples]  # train, test
Load = Callable[[Path | None], Parts]
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
UNIT_RANGE, SIGNED_RANGE = (0.0, 1.0), (-1.0, 1.0)  # pixel ranges
MOST_CIFAR100 = 50  # tasks, of two classes each
MOST_PERMUTED = 2_000  # as in `Entry`


def reduced_resnet18() -> nn.Module:
    from evcl.benchmarks import networks

    return networks.reduced_resnet18()


def _examples(images: np.ndarray, labels: np.ndarray, pixels: tuple[float, float]) -> Examples:
    """Images as [N, channels, height, width]."""
    x = torch.from_numpy(images)
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)
    return Examples(x, torch.from_numpy(labels).long(), pixels=pixels)


def _parts(found: data.Dataset, pixels: tuple[float, float]) -> Parts:
    train = _examples(found.train_images, found.train_labels, pixels)
    return train, _examples(found.test_images, found.test_labels, pixels)


def _published(name: str, pixels: tuple[float, float], grey: bool = False) -> Load:
    """A loader for a data set with a published train/test split."""

    def parts(data_dir: Path | None) -> Parts:
        dataset = (data.load_grey28 if grey else data.load)(name, data_dir)
        return _parts(dataset, pixels)

    return parts


def notmnist(data_dir: Path | None) -> Parts:
    """notMNIST-small without duplicates, 80% to train and 20% to test, stratified; the split is fixed.

    Of identical images only the first is kept, and an image labelled with several letters is dropped: otherwise test
    images would also be training images.
    """
    dataset = data.load("notmnist", data_dir)
    letters: dict[bytes, set[int]] = {}
    first: dict[bytes, int] = {}
    for row, (image, label) in enumerate(zip(dataset.train_images, dataset.train_labels.tolist(), strict=True)):
        key = image.tobytes()
        letters.setdefault(key, set()).add(label)
        first.setdefault(key, row)
    rows = np.array([row for key, row in first.items() if len(letters[key]) == 1])
    whole = _examples(dataset.train_images[rows], dataset.train_labels[rows], SIGNED_RANGE)
    return parted(whole, round(0.2 * len(whole)), Purpose.NOTMNIST)


@cache
def digits(_: Path | None = None) -> Parts:
    """scikit-learn's digits, 1,400 to train and 397 to test, stratified; the split is fixed."""
    images, labels = data.digits()
    whole = Examples(torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long())
    return parted(whole, 397, Purpose.DIGITS)


def _split(
    name: str,
    load: Load,
    trunk: tuple[int, ...] | Callable[[], nn.Module],
    groups: tuple[tuple[int, ...], ...] = PAIRS,
    words: str = "",
) -> Entry:
    """A benchmark with one task, and one head, for each group of classes. `trunk`: the widths of an MLP, or a function
    that makes another network.
    """

    def build(request: Request) -> Benchmark:
        wanted = (groups if request.classes is None else request.classes)[: request.tasks]
        made = split_tasks(*load(request.data_dir), wanted, words.split() or None)
        if callable(trunk):
            return Benchmark(name, made, network=trunk, seed=request.seed)
        return Benchmark(name, made, hidden=trunk, seed=request.seed)

    return entry(name, build, len(groups))


def _split_cifar100(name: str) -> Entry:
    """CIFAR-100, with its classes in their own order, as many in every task."""

    def build(request: Request) -> Benchmark:
        groups = request.classes
        if groups is None:
            size, rest = divmod(data.CIFAR100_CLASSES, request.tasks)
            if rest:
                even = [str(n) for n in range(1, MOST_CIFAR100 + 1) if data.CIFAR100_CLASSES % n == 0]
                raise EvclError(
                    f"{name} has {data.CIFAR100_CLASSES} classes, as many in every task: tasks must be one of "
                    f"{', '.join(even)}, not {request.tasks}",
                    setting="tasks",
                )
            groups = tuple(tuple(range(k, k + size)) for k in range(0, data.CIFAR100_CLASSES, size))
        dataset = data.load_cifar100(request.data_dir)
        parts = _parts(dataset, SIGNED_RANGE)
        return Benchmark(name, split_tasks(*parts, groups), network=reduced_resnet18, seed=request.seed)

    return entry(name, build, 10, most_tasks=MOST_CIFAR100)


def _five_datasets(name: str, hidden: tuple[int, ...]) -> Entry:
    """Five data sets of ten classes each, as 28 x 28 grey images. Data set k has the labels 10 k to 10 k + 9."""
    loads = {
        "MNIST": mnist,
        "notMNIST": notmnist,
        "Fashion-MNIST": _fashion,
        "CIFAR-10": _grey_cifar10,
        "digits": _large_digits,
    }

    def build(request: Request) -> Benchmark:
        made = []
        for k, (task, load) in enumerate(list(loads.items())[: request.tasks]):
            parts = (replace(part, labels=part.labels + 10 * k, pixels=UNIT_RANGE) for part in load(request.data_dir))
            made.append(Task(task, task, tuple(range(10 * k, 10 * k + 10)), *parts))
        return Benchmark(name, made, hidden=hidden, seed=request.seed)

    return entry(name, build, len(loads), "shows all classes of a data set in its task")


def _large_digits(data_dir: Path | None) -> Parts:
    """The 8 x 8 digits, enlarged to 28 x 28 by bilinear interpolation."""

    def enlarged(part: Examples) -> Examples:
        images = part.inputs.view(-1, 1, 8, 8)
        large = F.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
        return Examples((255 * large).round().to(torch.uint8), part.labels, pixels=UNIT_RANGE)

    train, test = digits(data_dir)
    return enlarged(train), enlarged(test)


def _permuted(name: str, load: Load, hidden: tuple[int, ...]) -> Entry:
    """A benchmark with a random pixel order for each task, and one head for all."""

    def build(request: Request) -> Benchmark:
        train, test = (
            Examples(part.inputs.flatten(1), part.labels, pixels=part.pixels) for part in load(request.data_dir)
        )
        made = permuted_tasks(train, test, request.tasks, request.seed)
        return Benchmark(name, made, hidden=hidden, seed=request.seed)

    return entry(name, build, 5, "shows all classes in every task", seeded=True, most_tasks=MOST_PERMUTED)


mnist, _fashion = _published("mnist", UNIT_RANGE), _published("fashion-mnist", UNIT_RANGE)
_cifar10 = _published("cifar10", SIGNED_RANGE)
_grey_cifar10 = _published("cifar10", SIGNED_RANGE, grey=True)
FASHION = "top trouser pullover dress coat sandal shirt sneaker bag boot"
CIFAR10 = "plane car bird cat deer dog frog horse ship truck"
FOUR_LAYERS = (150, 150, 150, 150)
LETTERS = "A B C D E F G H I J"
PAIRS_OF_LETTERS = ((0, 5), (1, 6), (2, 7), (3, 8), (4, 9))

ENTRIES = (
    _permuted("permuted-mnist", mnist, (100, 100)),
    _split("split-mnist", mnist, (256, 256)),
    _split("split-notmnist", notmnist, FOUR_LAYERS, PAIRS_OF_LETTERS, LETTERS),
    _split("split-fashion-mnist", _fashion, FOUR_LAYERS, words=FASHION),
    _split("split-cifar10", _grey_cifar10, FOUR_LAYERS, words=CIFAR10),
    _split("split-cifar10-rgb", _cifar10, FOUR_LAYERS, words=CIFAR10),
    _split("split-cifar10-conv", _cifar10, reduced_resnet18, words=CIFAR10),
    _split_cifar100("split-cifar100"),
    _five_datasets("five-datasets", (256, 256)),
    _permuted("permuted-digits", digits, (100, 100)),
    _split("split-digits", digits, (100, 100)),
)
