"""Callbacks that write each epoch to a file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import run_of

import evcl
from evcl.benchmarks import Benchmark, Examples, Task
from evcl.callbacks import Epoch
from evcl.callbacks.logs import LOG_COLUMNS, CsvLog, Log
from evcl.training import learn_stream
from evcl.training.observer import History

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 2


def read(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(text):
    return None if text == "" else float(text)


def assert_same(row, epoch):
    assert tuple(row) == LOG_COLUMNS
    assert (row["task"], row["stage"], int(row["epoch"])) == (epoch.task, epoch.stage, epoch.epoch)
    for name in ("loss", "nll", "lr", "validation_nll", "validation_accuracy"):
        assert number(row[name]) == getattr(epoch, name), name  # to the last digit
    terms = dict(term.split("=") for term in row["terms"].split())
    assert {name: float(value) for name, value in terms.items()} == pytest.approx(dict(epoch.terms), rel=1e-5)


def test_a_line_per_epoch_reads_back(tmp_path):
    path = tmp_path / "new" / "epochs.csv"
    log = CsvLog(path)
    learner = evcl.EVCL(evcl.nn.mlp(4, [8]), epochs=3, coreset="random", coreset_size=10)
    learner.learn((X, Y), task='a, "b"\nc', callbacks=[log])
    rows = read(path)  # a task's end is on the disk
    learner.learn((X, Y), task="second", callbacks=[log], validation=0.2)
    log.close()
    assert read(path)[:6] == rows
    rows = read(path)
    epochs = [epoch for task in learner.tasks for epoch in learner.history[task]]
    assert len(rows) == len(epochs) == 12  # three of the task and three on coresets, twice
    for row, epoch in zip(rows, epochs, strict=True):
        assert_same(row, epoch)
    assert [row["stage"] for row in rows] == 2 * (3 * ["task"] + 3 * ["coreset"])
    assert rows[0]["terms"].startswith("kl=")
    assert "other=" not in rows[0]["terms"]
    assert rows[0]["validation_nll"] == ""
    assert 0 <= float(rows[6]["validation_accuracy"]) <= 1


def test_a_second_log_goes_on_in_the_file(tmp_path):
    for task in ("a", "b"):
        log = CsvLog(tmp_path / "log.csv")
        evcl.Naive(evcl.nn.mlp(4, [8]), epochs=2).learn((X, Y), task=task, callbacks=[log])
        log.close()
    rows = read(tmp_path / "log.csv")
    assert [row["task"] for row in rows] == ["a", "a", "b", "b"]
    assert {row["terms"] for row in rows} == {""}


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "log.csv"):
        with pytest.raises(evcl.EvclError, match=r"^cannot write .*: ") as error:
            CsvLog(path)
        assert "\n" not in str(error.value)
    with pytest.raises(evcl.EvclError, match="--log must be csv or tensorboard, not 'x'"):
        Log.checked("x", tmp_path)


def test_a_run_logs_each_of_its_seeds(evcl):
    command = ["run", "split-digits", "--method", "ewc", "--tasks", 2, "--epochs", 2, "--seed-list", "3,5"]
    status, _, err = evcl(*command, "--log", "csv", "--out", "r")
    assert (status, err) == (0, "")
    result = json.loads(Path("r/result.json").read_text())
    assert result["seeds"] == [3, 5]
    logs = sorted(Path("r").rglob("*.csv"))
    assert [path.name for path in logs] == ["seed-3.csv", "seed-5.csv"]
    found = [read(path) for path in logs]
    for rows in found:
        assert [(row["task"], row["epoch"]) for row in rows] == [
            ("0/1", "1"), ("0/1", "2"), ("2/3", "1"), ("2/3", "2")
        ]  # fmt: skip
        assert all(row["terms"].startswith("elastic=") for row in rows)
    assert found[0][0]["nll"] != found[1][0]["nll"]


@pytest.mark.full
def test_a_run_made_anew_replaces_its_own_log_and_no_other_file(evcl):
    command = ["run", "split-digits", "--method", "naive", "--tasks", 1, "--epochs", 2, "--out", "out", "--log", "csv"]
    assert evcl(*command)[0] == 0
    (log,) = Path("out").rglob("seed-0.csv")
    own = [log.parent / "notes.txt", log.parent / "mine.csv"]
    for path in own:
        path.write_text("mine")
    log.write_text(log.read_text() + "of an earlier run,task,9,,,,,,\n")
    assert evcl(*command, "--overwrite")[0] == 0
    assert [path.read_text() for path in own] == ["mine", "mine"]
    assert [(row["task"], row["epoch"]) for row in read(log)] == [("0/1", "1"), ("0/1", "2")]


def told(log, task, first, last, nll=0.5):
    log.begin_task(task, 9)
    for number in range(first, last + 1):
        log.begin_epoch(task, number)
        log.end_epoch(Epoch(task, number, 9, nll, {}, 0.1))


@pytest.mark.parametrize("another", [True, False])
@pytest.mark.parametrize("task", ["b", "task"])  # also as a column is called
def test_after_a_resume_each_epoch_has_one_line(tmp_path, task, another):
    log = CsvLog(tmp_path / "log.csv")
    told(log, "a", 1, 2)
    told(log, task, 1, 5)
    if another:
        log.close()
        log = CsvLog(tmp_path / "log.csv")
    told(log, task, 4, 6, nll=0.25)
    log.close()
    rows = read(tmp_path / "log.csv")
    assert [(row["task"], int(row["epoch"])) for row in rows] == [
        ("a", 1), ("a", 2), *((task, number) for number in range(1, 7))
    ]  # fmt: skip
    assert [float(row["nll"]) for row in rows] == [0.5] * 5 + [0.25] * 3


def test_a_log_goes_on_after_a_line_that_was_cut_off(tmp_path):
    log = CsvLog(tmp_path / "log.csv")
    told(log, "a", 1, 2)
    with log.path.open("a") as file:
        file.write("a,ta\n")
    told(log, "a", 2, 3)
    log.close()
    assert [row["epoch"] for row in read(log.path) if row["loss"]] == ["1", "2", "3"]


def test_the_callbacks_of_a_stream_hear_where_each_task_begins_and_ends():
    heard = []

    class Heard(evcl.Callback):
        def begin_task(self, task, epochs):
            heard.append(f"begin {task}, {epochs} epochs")

        def begin_epoch(self, task, epoch):
            heard.append(f"begin {task} {epoch}")

        def end_epoch(self, epoch):
            heard.append(f"end {epoch.task} {epoch.epoch}")

        def end_task(self, task, history):
            heard.append(f"end {task}, {len(history)} epochs")

    part = Examples(torch.tensor(X), torch.tensor(Y))
    stream = Benchmark("small", [Task(name, name, (0, 1), part, part) for name in "ab"], hidden=[4])
    run = run_of("naive", evcl.nn.mlp(4, [4]), {"epochs": 2})
    learn_stream(run, [stream], make_observer=lambda k, name: History(name, [Heard()]))
    told = "begin {0}, 2 epochs|begin {0} 1|end {0} 1|begin {0} 2|end {0} 2|end {0}, 2 epochs"
    assert heard == [one for task in "ab" for one in told.format(task).split("|")]
