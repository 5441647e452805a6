"""The example that compares the methods on real architectures: its streams, its files, and a whole small run of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evcl import EvclError, benchmarks, data, experiments
from evcl.experiments import configure, execute
from evcl.experiments.engines import Inline

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "architectures"
METHODS = ("evcl", "ewc", "naive", "joint")


@pytest.fixture
def example(monkeypatch):
    """The modules of the example, for one test: (architectures, compare)."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delenv("ARCHITECTURES_DATA", raising=False)
    import architectures
    import compare

    yield architectures, compare
    for name in architectures.NAMES:
        benchmarks.BENCHMARKS.remove(name)
    for name in ("architectures", "compare"):
        del sys.modules[name]


@pytest.fixture
def subset(tmp_path):
    """A file as --export writes it, of random images."""
    source = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 100), ("test", 40)):
        arrays[f"{part}_x"] = source.integers(0, 256, (count, 3, 32, 32), np.uint8)
        arrays[f"{part}_y"] = np.arange(count).astype(np.uint8) % 10
    np.savez(tmp_path / "subset.npz", **arrays)
    return tmp_path / "subset.npz"


@pytest.fixture
def _one_by_one(monkeypatch):
    """Runs follow each other in this process: to start others takes longer than all of them."""

    def inline(device, precision, on_event, workers, allow_divergence):
        return Inline(on_event, allow_divergence)

    monkeypatch.setattr("evcl.experiments.engines.local", inline)


@pytest.mark.full
@pytest.mark.usefixtures("_one_by_one")
def test_a_small_run_of_all_of_it(example, subset, tmp_path, monkeypatch, capsys):
    """From the search to the table; a second run finds everything there."""
    words = ["resnet-cifar10", "--quick", "--seeds", "1", "--device", "cpu"]
    words += ["--data", str(subset), "--out", str(tmp_path / "out")]
    monkeypatch.setenv("ARCHITECTURES_DATA", "")  # main sets it: to be undone
    example[1].main(words)
    first = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "search" / "resnet-cifar10.json").read_text())
    assert {method: len(tried) for method, tried in found["tried"].items()} == dict.fromkeys(METHODS, 2)
    for method in METHODS:
        result = json.loads((tmp_path / "out" / "resnet-cifar10" / method / "result.json").read_text())
        assert result["config"]["network"] == "ResNet"
        assert result["config"]["validation"] == 0
        best = found["tried"][method][0]["settings"]
        assert {name: result["config"][name] for name in best} == best
        assert len(result["accuracy"][0]) == 2
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.json")}
    example[1].main(words)
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.json")}
    assert capsys.readouterr().out.splitlines()[1:] == first.splitlines()[1:]  # but for the time it took

    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "experiments" / "paper" / "make_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    tables.RESULTS = tmp_path
    lines = tables.filled("<!-- table: architectures out -->\n<!-- end -->").splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[4:-2]] == [
        "EVCL", "EWC", "naive", "joint", "EVCL minus EWC", "EVCL minus naive",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["vit-cifar10", "transformer-languages"])
def test_the_other_networks_learn_too(name, example, subset, monkeypatch):
    monkeypatch.setenv("ARCHITECTURES_DATA", str(subset))
    given = {"epochs": 1, "batch_size": 500, "fisher_examples": 4, "predict_samples": 1, "init_std": 1e-3}
    result = execute(configure(name, "evcl", seeds=[0], tasks=1, given=given))
    assert result.average_accuracy.mean > 0


def test_the_subset_is_written_and_read(example, tmp_path, monkeypatch, capsys):
    compare = example[1]
    source = np.random.default_rng(1)
    x, y = source.integers(0, 256, (300, 32, 32, 3), np.uint8), (np.arange(300) % 10).astype(np.uint8)
    monkeypatch.setattr(data, "load", lambda name, data_dir=None: data.Dataset(name, x, y, x[100:], y[100:]))
    path = tmp_path / "subset.npz"
    compare.main(["--export", str(path), "--images", "20", "--test-images", "8"])
    assert "MB" in capsys.readouterr().out
    monkeypatch.setenv("ARCHITECTURES_DATA", str(path))
    stream = benchmarks.get("vit-cifar10")
    whole = benchmarks.get("split-cifar10-rgb")
    assert [task.name for task in stream] == [task.name for task in whole]
    for task, other in zip(stream, whole, strict=True):
        for part, usual, count in ((task.train, other.train, 20), (task.test, other.test, 8)):
            assert part.y.bincount()[list(task.classes)].tolist() == [count // 2] * 2
            for c in task.classes:  # the first ones of each class
                assert torch.equal(part.x[part.y == c], usual.x[usual.y == c][: count // 2])


@pytest.mark.parametrize("damage", ["text", "missing", "shape", "cut"])
def test_a_file_that_is_no_subset_is_named(damage, example, subset, monkeypatch):
    if damage == "text":
        subset.write_text("no arrays")
    elif damage == "cut":
        subset.write_bytes(subset.read_bytes()[:5000])
    elif damage == "missing":
        np.savez(subset, train_x=np.zeros((2, 3, 32, 32), np.uint8))
    else:
        np.savez(subset, train_x=np.zeros((2, 32, 32), np.uint8), train_y=np.zeros(2))
    monkeypatch.setenv("ARCHITECTURES_DATA", str(subset))
    with pytest.raises(EvclError, match=r"subset.npz is not a file that compare.py --export wrote"):
        benchmarks.get("resnet-cifar10")


def test_a_search_can_be_made_shorter(example):
    """For all methods alike."""
    compare = example[1]
    whole = experiments.read_search(FOLDER / "search.toml")
    words = ["--out", "x", "--trials", "5", "--trial-seeds", "1", "--epochs", "3"]
    short = compare.shortened(whole, compare.arguments(words))
    assert (short.trials, short.seeds) == (5, whole.seeds[:1])
    assert {space["epochs"] for (space,) in short.spaces.values()} == {3}
    same = compare.shortened(whole, compare.arguments(["--out", "x"]))
    assert (same.trials, same.seeds, same.spaces) == (whole.trials, whole.seeds, whole.spaces)


def rule(letters):
    """The two places that say most about the next letter, and how often what they say is right."""
    found = {}
    for near in range(1, 5):
        for far in range(near + 1, 5):
            counts = torch.zeros(8, 8, 8)
            at = torch.arange(4, len(letters))
            places = (letters[at - near], letters[at - far], letters[at])
            counts.index_put_(places, torch.ones(len(at)), accumulate=True)
            found[near, far] = float(counts.amax(2).sum() / len(at))
    best = max(found, key=found.get)
    return best, found[best]


def test_a_language_is_a_rule_that_is_followed_nine_times_in_ten(example):
    texts = [example[0].text(seed, k, 3000) for seed in (0, 1) for k in range(4)]
    assert all(0.88 < rule(text)[1] < 0.95 for text in texts)
    assert len({rule(text)[0] for text in texts}) > 2
    assert torch.equal(texts[0], example[0].text(0, 0, 3000))


def test_no_context_of_a_test_is_trained_on(example):
    """Train and test are two parts of a text, and no letter is in both."""
    task = benchmarks.get("transformer-languages", seed=3, tasks=2)[1]
    text = example[0].text(3, 1, 5024)
    assert torch.equal(task.train.x[-1].long(), text[3999:4011])
    assert task.train.y[-1] == text[4011]
    assert torch.equal(task.test.x[0].long(), text[4012:4024])
    assert (len(task.train), len(task.test)) == (4000, 1000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of --out and --export is needed"),
        (["lenet", "--out", "x"], "there is no network lenet"),
        (["--export", "x", "--images", "1"], "--images must be at least 2"),
        (["--out", "x", "--trials", "0"], "--trials must be at least 1"),
    ],
)
def test_what_cannot_be_asked_for(words, message, example, capsys):
    with pytest.raises(SystemExit):
        example[1].main(words)
    assert message in capsys.readouterr().err
