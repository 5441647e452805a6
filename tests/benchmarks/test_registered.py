"""The paper's benchmarks on small stand-ins for their data, with the shapes and labels of the real ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import evcl
from evcl import data

FIVE = ["MNIST", "notMNIST", "Fashion-MNIST", "CIFAR-10", "digits"]
SHAPES = {"mnist": (28, 28), "fashion-mnist": (28, 28), "cifar10": (32, 32, 3), "notmnist": (28, 28)}


def images(name, count, seed):
    source = np.random.default_rng(seed)
    labels = np.arange(count).astype(np.uint8) % 10
    return source.integers(0, 256, (count, *SHAPES[name]), np.uint8), labels


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    def load(name, data_dir=None, offline=None):
        train, test = images(name, 200, 0), images(name, 50, 1)
        if name == "notmnist":
            x, y = train
            x[150], y[150] = x[3], y[3]  # a copy
            x[151], y[151] = x[4], y[5]  # an image with two letters
            return data.Dataset(name, x, y, x[:0], y[:0])
        return data.Dataset(name, *train, *test)

    def load_grey28(name, data_dir=None, offline=None):
        found = load(name)
        return data.Dataset(name, data.grey28(found.train_images), found.train_labels,
                            data.grey28(found.test_images), found.test_labels)  # fmt: skip

    monkeypatch.setattr(data, "load", load)
    monkeypatch.setattr(data, "load_grey28", load_grey28)


@pytest.mark.parametrize(
    ("name", "tasks", "hidden", "shape", "pixels"),
    [
        ("permuted-mnist", ["permutation 0", "permutation 1"], (100, 100), (784,), (0, 1)),
        ("split-mnist", ["0/1", "2/3", "4/5", "6/7", "8/9"], (256, 256), (1, 28, 28), (0, 1)),
        ("split-notmnist", ["A/F", "B/G", "C/H", "D/I", "E/J"], (150,) * 4, (1, 28, 28), (-1, 1)),
        ("split-fashion-mnist", ["top/trouser", "pullover/dress"], (150,) * 4, (1, 28, 28), (0, 1)),
        ("split-cifar10", ["plane/car", "bird/cat", "deer/dog"], (150,) * 4, (1, 28, 28), (-1, 1)),
        ("split-cifar10-rgb", ["plane/car", "bird/cat", "deer/dog"], (150,) * 4, (3, 32, 32), (-1, 1)),
        ("split-cifar10-conv", ["plane/car", "bird/cat", "deer/dog"], (), (3, 32, 32), (-1, 1)),
        ("five-datasets", FIVE, (256, 256), (1, 28, 28), (0, 1)),
    ],
)
def test_it_is_its_protocol(name, tasks, hidden, shape, pixels):
    benchmark = evcl.benchmarks.get(name)
    assert [task.name for task in benchmark][: len(tasks)] == tasks
    assert len(benchmark) == 5
    assert benchmark.hidden == hidden
    low, high = pixels
    for task in benchmark:
        x, y = task.train
        assert x.shape[1:] == shape
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert low <= x.min() < low + 0.2 * (high - low) < high - 0.2 * (high - low) < x.max() <= high
        assert task.train.inputs.dtype == torch.uint8
        assert set(y.tolist()) == set(task.classes) == set(task.test.y.tolist())


def test_colour_channels_come_first_and_values_are_scaled():
    benchmark = evcl.benchmarks.get("split-cifar10-rgb")
    raw, labels = images("cifar10", 200, 0)
    first = raw[labels <= 1][0]
    expected = torch.from_numpy(first).permute(2, 0, 1).float() / 127.5 - 1
    torch.testing.assert_close(benchmark[0].train.x[0], expected, rtol=0, atol=1e-6)


def test_no_notmnist_test_image_is_a_training_image():
    benchmark = evcl.benchmarks.get("split-notmnist")
    parts = [
        {x.numpy().tobytes() for t in benchmark for x in part(t).inputs}
        for part in (lambda t: t.train, lambda t: t.test)
    ]
    assert not parts[0] & parts[1]
    sizes = [sum(len(part(t)) for t in benchmark) for part in (lambda t: t.train, lambda t: t.test)]
    assert sum(sizes) == 198 - 1  # 200, less the copy, less both of the two-letter image
    assert sizes[1] == round(0.2 * sum(sizes))
    again = evcl.benchmarks.get("split-notmnist", seed=5)
    assert torch.equal(benchmark[0].train.inputs, again[0].train.inputs)


def test_classes_and_their_order_can_be_chosen():
    benchmark = evcl.benchmarks.get("split-mnist", classes=[[7, 1], [0, 2, 4]])
    assert [task.name for task in benchmark] == ["7/1", "0/2/4"]
    assert benchmark[0].classes == (7, 1)
    pairs = [[a, a + 1] for a in range(8)]
    assert len(evcl.benchmarks.get("split-mnist", classes=pairs)) == 8
    assert len(evcl.benchmarks.get("split-mnist", classes=pairs, tasks=7)) == 7
    learner = evcl.Naive(evcl.nn.mlp(784, [5]), epochs=1)
    learner.learn(benchmark[0])
    assert learner.classes() == (7, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "split-digit"}, "unknown benchmark 'split-digit'; did you mean 'split-digits'?"),
        (
            {"name": "split-digits", "tasks": 6},
            "tasks of split-digits must be a whole number of at least 1 and at most 5",
        ),
        ({"name": "permuted-digits", "tasks": 0}, "at least 1"),
        ({"name": "permuted-digits", "seed": -1}, "seed must be"),
        ({"name": "permuted-digits", "validation": 1.0}, "validation must be"),
        ({"name": "permuted-digits", "validation": float("nan")}, "validation must be"),
        ({"name": "split-mnist", "classes": [[0]]}, "at least two different classes, not [0]"),
        ({"name": "split-mnist", "classes": [[0, 0]]}, "at least two different classes"),
        ({"name": "split-mnist", "classes": [[0, 12]]}, "but not [12]"),
        ({"name": "split-mnist", "classes": []}, "there are none"),
        ({"name": "split-mnist", "classes": [[0, 1], [0, 1]]}, "must differ"),
        ({"name": "permuted-mnist", "classes": [[0, 1]]}, "leave classes out"),
        ({"name": "split-mnist", "classes": [0, 1]}, "groups of whole numbers like [[0, 1], [2, 3]], not [0, 1]"),
        ({"name": "split-mnist", "classes": [[0, 1], [2, 3]], "tasks": 3}, "at most 2"),
        ({"name": "five-datasets", "classes": [[0, 1]]}, "leave classes out"),
        ({"name": "five-datasets", "tasks": 6}, "at most 5"),
        ({"name": "split-cifar100", "tasks": 7}, "tasks must be one of 1, 2, 4, 5, 10, 20, 25, 50, not 7"),
        ({"name": "split-cifar100", "tasks": 100}, "at most 50"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(evcl.EvclError) as error:
        evcl.benchmarks.get(**arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hundred_permuted_tasks_are_a_hundred_permutations_of_one_copy():
    for benchmark in (evcl.benchmarks.get("permuted-mnist", tasks=100, validation=part) for part in (0, 0.1)):
        assert len(benchmark) == 100
        assert len({t.train.inputs.data_ptr() for t in benchmark}) == 1
        assert len({tuple(t.train.permutation.tolist()) for t in benchmark}) == 100
        assert benchmark[0].train.inputs.dtype == torch.uint8
    last = evcl.benchmarks.get("permuted-mnist", tasks=100)[99].train
    assert torch.equal(
        last.x, evcl.benchmarks.get("split-mnist", classes=[range(10)])[0].train.x.flatten(1)[:, last.permutation]
    )
    assert last.x.data_ptr() != last.x.data_ptr()  # made at each access


def test_the_five_data_sets_have_labels_of_their_own_in_every_scenario():
    benchmark = evcl.benchmarks.get("five-datasets")
    assert [task.classes for task in benchmark] == [tuple(range(k, k + 10)) for k in range(0, 50, 10)]
    assert [task.head for task in benchmark] == [task.name for task in benchmark]
    assert len(benchmark.in_scenario("class")[4].classes) == 50
    assert {task.classes for task in benchmark.in_scenario("domain")} == {tuple(range(10))}
    assert len(evcl.benchmarks.get("five-datasets", tasks=2)) == 2
    again = evcl.benchmarks.get("five-datasets", seed=3)
    assert all(torch.equal(a.train.inputs, b.train.inputs) for a, b in zip(benchmark, again, strict=True))


def test_small_digits_are_enlarged_in_place():
    benchmark, small = evcl.benchmarks.get("five-datasets"), evcl.benchmarks.get("split-digits", classes=[range(10)])
    large = benchmark[4].train
    assert len(large) == len(small[0].train) == 1400
    assert torch.equal(large.labels - 40, small[0].train.labels)
    back = torch.nn.functional.interpolate(large.x, size=(8, 8), mode="bilinear", align_corners=False)
    before = small[0].train.x.view(-1, 1, 8, 8)
    assert torch.corrcoef(torch.stack([back.flatten(), before.flatten()]))[0, 1] > 0.97
