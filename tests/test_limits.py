"""What a user can give has a bound, and one line says which."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import evcl
from evcl._core.errors import EvclError
from evcl._core.files import parsed, read_text, write_atomically
from evcl.experiments import configure, read_result
from evcl.tables.commands import open_source


def test_a_text_has_a_size(tmp_path):
    path = tmp_path / "text"
    path.write_text("12345")
    assert read_text(path, 5) == "12345"
    with pytest.raises(EvclError, match="is larger than the limit of 4 bytes"):
        read_text(path, 4)
    path.write_bytes(b"ok \xff")
    with pytest.raises(EvclError, match=r"is not UTF-8 \(byte 4\)"):
        read_text(path, 5)
    with pytest.raises(EvclError, match="cannot read"):
        read_text(tmp_path, 5)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_only_regular_files_are_read_and_replaced(tmp_path, kind):
    """A pipe would be waited at for ever, and a rename would put a file in the place of a device."""
    path = tmp_path / "it"
    {"pipe": os.mkfifo, "folder": Path.mkdir, "socket": bound, "device": null}[kind](path)
    before = path.lstat()
    with pytest.raises(EvclError, match=r"cannot read .*it: "):
        read_text(path, 5)
    with pytest.raises(EvclError, match=f"cannot write .*it: it is a {kind}, not a regular file"):
        write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.lstat() == before
    assert [found.name for found in tmp_path.iterdir()] == ["it"]


def null(path):
    """A device of the test's own: the machine's is not to be risked."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, Path(os.devnull).stat().st_rdev)
    except PermissionError:
        pytest.skip("only root can make a device")


def bound(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def test_what_a_link_leads_to_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("old", "new"):  # a file that is there, and one that is not
        (tmp_path / name).symlink_to(f"folder/{name}.txt")
    (tmp_path / "folder" / "old.txt").write_text("old")
    for name in ("old", "new"):
        write_atomically(tmp_path / name, lambda temporary: temporary.write_text("written"))
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "folder" / f"{name}.txt").read_text() == "written"
    assert len(list(tmp_path.rglob("*"))) == 5


def test_json_has_a_depth(tmp_path):
    deep = "[" * 100_000
    assert parsed('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed(deep)
    (tmp_path / "result.json").write_text(f'{{"schema": {deep}')
    with pytest.raises(EvclError, match="is not a result of evcl"):
        read_result(tmp_path / "result.json")
    save_file({}, tmp_path / "deep.safetensors", {"evcl": f'{{"format": {deep}'})
    with pytest.raises(EvclError, match="nested too deeply"):
        evcl.load(tmp_path / "deep.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("reproduce --seeds 1000000000000", "--seeds must be a number from 1 to 10000, not 1000000000000"),
        ("run permuted-digits --seeds 1000000000000", "--seeds must be a number from 1 to 10000"),
        (f"run permuted-digits --seed-list {','.join(map(str, range(10_001)))}", "must be from 1 to 10000, not 10001"),
        ("run permuted-digits --tasks 2001", "at most 2000"),
        ("run permuted-digits --epochs 1000000000", "at most 1e"),
        ("run permuted-digits --set batch_size=10000000", "at most 1e"),
        ("run permuted-digits --set lr=1e9", "at most 10"),
    ],
)
def test_numbers_of_a_command(evcl, options, message):
    status, _, err = evcl(*options.split())
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_thousand_tasks_are_possible():
    assert configure("permuted-digits", "evcl", tasks=1000).tasks == 1000


@pytest.mark.parametrize("hidden", [[1] * 101, [10**6, 10**6]])
def test_a_network_has_a_size(hidden):
    with pytest.raises(EvclError, match="limits are 100 layers and 1,000,000,000 weights"):
        evcl.nn.mlp(3, hidden)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 20_001), np.uint8), "1 to 20,000 numbers"),
        (np.zeros((3, 0), np.uint8), "1 to 20,000 numbers"),
        (np.array(["x" * 10_001] * 3), "at most 10,000 characters"),
        (np.frombuffer(np.array([0x110000] * 3, np.uint32).tobytes(), "<U1"), "it holds invalid text"),
        (np.frombuffer(np.array([0xD800] * 3, np.uint32).tobytes(), "<U1"), "it holds invalid text"),
    ],
)
def test_an_array_of_a_table_has_a_size(tmp_path, array, message):
    np.savez(tmp_path / "table.npz", x=array, y=np.arange(3))
    with pytest.raises(EvclError, match=message):
        list(open_source(tmp_path / "table.npz").pieces(["x", "y"]))


LOADING = """
import sys
import evcl
from pathlib import Path

evcl.load(sys.argv[1])
assert "torch._dynamo" not in sys.modules  # torch's compiler, which takes seconds, is for larger models
evcl.load(sys.argv[2])  # what is imported at first
Path("/proc/self/clear_refs").write_text("5")


def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


before = memory("VmRSS")
evcl.load(sys.argv[3])
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_model_is_loaded_in_twice_its_size(tmp_path):
    files = [tmp_path / f"{width}.safetensors" for width in (200, 300, 1000)]
    for path in files:
        learner = evcl.EVCL(evcl.nn.mlp(1000, [int(path.stem)]), epochs=1)
        learner.learn((torch.zeros(4, 1000), torch.arange(4) % 2))
        learner.save(path)
    command = [sys.executable, "-c", LOADING, *map(str, files)]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken < 2 * files[2].stat().st_size, f"{taken:,} bytes"
