"""Callbacks that write each epoch to a file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import evcl
from evcl.logs import COLUMNS, CsvLog, Log

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 2


def read(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(text):
    return None if text == "" else float(text)


def assert_same(row, epoch):
    assert tuple(row) == COLUMNS
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
    assert "elastic=" in rows[0]["terms"]
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
        Log("x", tmp_path).callback(0)


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
