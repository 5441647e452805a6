"""CIFAR-100 in its binary version, from small files in a folder: the loader and the benchmark."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

import evcl
from evcl import data


def made(count, seed):
    """Random images, all 100 classes in turn; the coarse label is not the class."""
    source = np.random.default_rng(seed)
    return source.integers(0, 256, (count, 32, 32, 3), np.uint8), (np.arange(count) % 100).astype(np.uint8)


def binary(images, labels):
    rows = zip(images, labels, strict=True)
    return b"".join(bytes([y // 5, y]) + x.transpose(2, 0, 1).tobytes() for x, y in rows)


TRAIN, TEST = made(300, 0), made(100, 1)
FILES = {"train.bin": binary(*TRAIN), "test.bin": binary(*TEST)}


WAYS = {
    "loose": FILES,
    "in its own folder": {f"cifar-100-binary/{name}": body for name, body in FILES.items()},
    "in another folder": {f"cifar100/{name}": body for name, body in FILES.items()},
    "packed": {"cifar-100-binary.tar.gz": tiny.tar({f"cifar-100-binary/{name}": body for name, body in FILES.items()})},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_images_and_their_classes_are_read(way, tmp_path):
    found = data.load_cifar100(tiny.put(tmp_path, WAYS[way]))
    for read, wanted in zip((found.train_images, found.train_labels, found.test_images, found.test_labels),
                            (*TRAIN, *TEST), strict=True):  # fmt: skip
        assert np.array_equal(read, wanted)


def test_the_benchmark_divides_the_classes_evenly(tmp_path, monkeypatch):
    monkeypatch.setenv("EVCL_DATA", str(tiny.put(tmp_path, FILES)))
    benchmark = evcl.benchmarks.get("split-cifar100")
    assert [task.classes for task in benchmark] == [tuple(range(k, k + 10)) for k in range(0, 100, 10)]
    x, y = benchmark[3].train
    assert x.shape == (30, 3, 32, 32)
    rows = np.flatnonzero(np.isin(TRAIN[1], range(30, 40)))
    assert y.tolist() == TRAIN[1][rows].tolist()
    torch.testing.assert_close(x, torch.from_numpy(TRAIN[0][rows]).permute(0, 3, 1, 2) / 127.5 - 1)
    assert benchmark.network.__name__ == "reduced_resnet18"
    twenty = evcl.benchmarks.get("split-cifar100", tasks=20, scenario="class")
    assert [len(task.classes) for task in twenty] == list(range(5, 101, 5))
    own = evcl.benchmarks.get("split-cifar100", classes=[[7, 99], [3, 4, 5]])
    assert [task.classes for task in own] == [(7, 99), (3, 4, 5)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no files of cifar100; it needs cifar-100-binary.tar.gz (from https://www.cs.toronto.edu"),
        ({"train.bin": FILES["train.bin"]}, "test.bin missing"),
        ({**FILES, "test.bin": FILES["test.bin"][:-1]}, "test.bin holds 307399 bytes, which is not a multiple of 3074"),
        ({**FILES, "train.bin": b""}, "train.bin holds 0 bytes"),
        ({**FILES, "test.bin": binary(TEST[0], TEST[1] + 1)}, "test.bin has the label 100, but CIFAR-100 has 0 to 99"),
        ({"cifar-100-binary.tar.gz": b"no archive"}, "cifar-100-binary.tar.gz is damaged"),
        ({"cifar-100-python/train": b"\x80\x04"}, "holds no files of cifar100"),  # a pickle is never read
    ],
)
def test_what_is_no_cifar_100_is_refused_in_one_line(files, message, tmp_path):
    with pytest.raises(evcl.EvclError) as error:
        data.load_cifar100(tiny.put(tmp_path, files))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_folder_it_says_what_to_name():
    with pytest.raises(evcl.EvclError, match="CIFAR-100 is read from a folder of yours: name one with --data-dir"):
        evcl.benchmarks.get("split-cifar100")
