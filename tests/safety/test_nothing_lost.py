"""No finished work is lost: claims, links, modes, and what killed writers leave behind."""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path

import made_up
import numpy as np
import pytest
import torch
from calls import counted
from forked import Calls, forked, waited

import evcl as library
from evcl._core.errors import EvclError
from evcl._core.files import locked, save_tensors, write_atomically
from evcl.experiments import Store, configure, execute, write_result
from evcl.experiments.folder import LOCK, claimed, open_folder
from evcl.tables import learn, load_model

MONTH = "x,y\n" + "".join(f"{i % 7},{'ab'[i % 2]}\n" for i in range(20))


@pytest.fixture
def month(tmp_path):
    (tmp_path / "january.csv").write_text(MONTH)
    (tmp_path / "february.csv").write_text(MONTH)
    return tmp_path


def made(folder: Path, name: str = "m.safetensors") -> Path:
    learn(folder / name, folder / "january.csv", "y", epochs=1, hidden=(3,))
    return folder / name


# --- claims: 1.1 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("run", "split-digits", "--epochs", 1, "--tasks", 1, "--seeds", 1, "--out", "out"),
        ("demo", "--epochs", 1, "--out", "out"),
        ("learn", "--model", "out/m.safetensors", "--data", "january.csv", "--target", "y"),
        ("report", "out"),
    ],
    ids=lambda words: words[0],
)
def test_a_second_command_says_who_has_the_place(evcl, month, command):
    """1.1: two runs into one folder both ended well, and one result was gone."""
    folder = month / "out" / {"demo": "permuted-digits/evcl"}.get(command[0], ".")
    folder.mkdir(parents=True)
    if command[0] == "report":
        made_up.write(folder, made_up.result())
    lock = folder / {"learn": ".m.safetensors.lock", "report": ".evcl-report.lock"}.get(command[0], LOCK)
    with locked(lock, "the test"):
        status, _, err = evcl(*command)
    assert status == 1
    assert re.fullmatch(rf"evcl: .*another evcl.* \(process {os.getpid()} on .*\); wait for it to end\n", err), err
    assert len(list(month.rglob("result.json"))) == (command[0] == "report")
    assert not list(month.rglob("*.safetensors"))


def test_a_result_that_was_not_there_is_not_replaced(tmp_path):
    """1.1: whatever file system has no locks."""
    one, other = (configure("split-digits", m, seeds=[0], tasks=1, given={"epochs": 1}) for m in ("naive", "ewc"))
    with claimed(tmp_path):
        assert open_folder(tmp_path, one) is None
        write_result(tmp_path, execute(other))
        before = (tmp_path / "result.json").read_bytes()
        with pytest.raises(EvclError, match="is the result of another run"):
            write_result(tmp_path, execute(one))
    assert (tmp_path / "result.json").read_bytes() == before


# --- links: 1.3 ----------------------------------------------------------------------------------------------------


def test_a_model_behind_a_link_is_one_model(month):
    real = made(month)
    (month / "link.safetensors").symlink_to(real.name)
    learn(month / "link.safetensors", month / "february.csv")
    assert (month / "link.safetensors").is_symlink()
    assert load_model(real).learner.tasks == ("january", "february")
    with (
        locked(month / ".m.safetensors.lock", "the test"),
        pytest.raises(EvclError, match="another evcl learn is at work"),
    ):
        learn(month / "link.safetensors", month / "february.csv", task="third")


# --- modes: 5.4 ----------------------------------------------------------------------------------------------------


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_a_new_file_follows_the_umask_and_an_old_one_keeps_its_mode(month):
    path = made(month)
    assert mode(path) == 0o640
    path.chmod(0o664)
    learn(path, month / "february.csv")
    assert mode(path) == 0o664
    save_tensors(month / "t.safetensors", {"a": torch.zeros(2)}, {})
    assert mode(month / "t.safetensors") == 0o640
    write_atomically(month / "text", lambda temporary: temporary.write_text("new"))
    assert mode(month / "text") == 0o640


# --- on disk before the name: 6.3 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["a learner", "a text"])
def test_files_and_their_folders_are_synced(tmp_path, write):
    """6.3: first the bytes of the file, then the rename, then the folder."""
    learner = library.Naive(library.nn.mlp(2, [2]), epochs=1)
    learner.learn(np.zeros((4, 2), "f"), np.arange(4) % 2)
    with counted() as calls:
        if write == "a learner":
            learner.save(tmp_path / "m.safetensors")
        else:
            write_atomically(tmp_path / "text", lambda temporary: temporary.write_text("new"))
    wanted = ["fsync", "replace", "sync_folder"]
    assert [name for name in calls if name in wanted] == wanted
    assert (calls["fsync"], calls["replace"]) == (2, 1)


# --- leftovers: 6.1, 6.2 -------------------------------------------------------------------------------------------


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*") if path.name.endswith(".tmp") or "tmp" in path.name[:5])


def test_a_killed_writer_leaves_one_kind_of_file(tmp_path):
    """6.1: safetensors had temporary files of its own, which nothing removed."""

    def dying():
        with Calls("replace"):
            save_tensors(tmp_path / "t.safetensors", {"a": torch.zeros(2)}, {})

    assert waited(forked(dying)) == -signal.SIGKILL
    assert [re.sub(r"\d+-[0-9a-f]+", "X", name) for name in left(tmp_path)] == [".t.safetensors.X.tmp"]


def test_the_next_learn_removes_what_a_killed_one_left(month):
    path = made(month)
    (month / ".m.safetensors.123-00ff00ff.tmp").write_bytes(b"half")
    (month / ".other.safetensors.123-00ff00ff.tmp").write_bytes(b"of another model, which may be at work")
    learn(path, month / "february.csv")
    assert left(month) == [".other.safetensors.123-00ff00ff.tmp"]


def test_the_next_run_and_the_next_report_remove_it_too(evcl, tmp_path):
    words = ("run", "split-digits", "--method", "naive", "--epochs", 1, "--tasks", 2, "--seeds", 1, "--out", "out")
    (tmp_path / "out" / "figures").mkdir(parents=True)
    for name in ("result.json", "index.html", "tables.md", "figures/split-digits-2-tasks.svg"):
        path = tmp_path / "out" / name
        path.with_name(f".{path.name}.123-00ff00ff.tmp").write_bytes(b"half")
    assert evcl(*words)[0] == 0
    assert evcl("report", "out")[0] == 0
    assert left(tmp_path) == []


def test_checkpoints_of_any_number_are_removed(tmp_path):
    """6.2: after 99999999 the names had nine digits, which the pattern did not match."""
    from evcl.training.checkpoint import Checkpoints, files

    folder = tmp_path / "checkpoint" / "seed-0"
    folder.mkdir(parents=True)
    for name in ("00000001", "99999999", "100000000"):
        (folder / f"{name}.safetensors").write_bytes(b"")
    (folder / ".100000000.safetensors.1-ff.tmp").write_bytes(b"")
    assert [path.stem for path in files(folder)] == ["100000000", "99999999", "00000001"]
    Checkpoints(tmp_path / "checkpoint").remove()
    assert list(tmp_path.iterdir()) == []


# --- owners: 6.4 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beat", ["NaN", "-1", "0", "1e9", "Infinity", "true"])
def test_an_owner_has_a_beat(tmp_path, beat):
    """6.4: with the beat NaN, a claim was never stale."""
    cell = configure("split-digits", "naive", seeds=[0], tasks=1, given={"epochs": 1})
    with Store(tmp_path) as first, Store(tmp_path) as second:
        assert first.take(cell) is not None
        (owner,) = (tmp_path / "owners").iterdir()
        owner.write_text(re.sub(r'"beat": ?[^,}]+', f'"beat": {beat}', owner.read_text()))
        with pytest.raises(EvclError, match="beat"):
            second.take(cell)
