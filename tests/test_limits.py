"""What a user can give has a bound, and one line says which."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import evcl
from evcl.errors import EvclError
from evcl.experiments import configure, read_result
from evcl.files import parsed, read_text
from evcl.tables.work import open_source


def test_a_text_has_a_size(tmp_path):
    path = tmp_path / "text"
    path.write_text("12345")
    assert read_text(path, 5) == "12345"
    with pytest.raises(EvclError, match="more than the 4 bytes that it may have"):
        read_text(path, 4)
    path.write_bytes(b"ok \xff")
    with pytest.raises(EvclError, match=r"is not UTF-8 \(byte 4\)"):
        read_text(path, 5)
    with pytest.raises(EvclError, match="cannot read"):
        read_text(tmp_path, 5)


def test_json_has_a_depth():
    assert parsed('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed("[" * 100_000)


def test_a_deep_result_is_no_result(tmp_path):
    (tmp_path / "result.json").write_text('{"schema": ' + "[" * 100_000)
    with pytest.raises(EvclError, match="is not a result of evcl"):
        read_result(tmp_path / "result.json")


def test_a_model_that_nests_is_damaged(tmp_path):
    from safetensors.torch import save_file

    save_file({}, tmp_path / "deep.safetensors", {"evcl": '{"format": ' + "[" * 100_000})
    with pytest.raises(EvclError, match="nested too deeply"):
        evcl.load(tmp_path / "deep.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seeds", 10**12), "--seeds must be a number from 1 to 10000"),
        (("--seed-list", ",".join(map(str, range(10_001)))), "the number of seeds must be from 1 to 10000, not 10001"),
        (("--tasks", 2001), "at most 2000"),
        (("--epochs", 10**9), "at most 1e"),
        (("--set", "batch_size=10000000"), "at most 1e"),
        (("--set", "lr=1e9"), "at most 10"),
    ],
)
def test_numbers_of_a_run(evcl, options, message):
    status, _, err = evcl("run", "permuted-digits", *options)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_numbers_of_a_reproduction(evcl):
    status, _, err = evcl("reproduce", "--seeds", 10**12)
    assert (status, err) == (2, f"evcl: --seeds must be a number from 1 to 10000, not {10**12}\n")


def test_a_thousand_tasks_are_possible():
    assert configure("permuted-digits", "evcl", tasks=1000).tasks == 1000


@pytest.mark.parametrize("hidden", [[1] * 101, [10**6, 10**6]])
def test_a_network_has_a_size(hidden):
    with pytest.raises(EvclError, match="100 layers and 1,000,000,000 weights are the most"):
        evcl.nn.mlp(3, hidden)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 20_001), np.uint8), "1 to 20,000 numbers"),
        (np.zeros((3, 0), np.uint8), "1 to 20,000 numbers"),
        (np.array(["x" * 10_001] * 3), "at most 10,000 letters"),
        (np.frombuffer(np.array([0x110000] * 3, np.uint32).tobytes(), "<U1"), "what is no text"),
        (np.frombuffer(np.array([0xD800] * 3, np.uint32).tobytes(), "<U1"), "what is no text"),
    ],
)
def test_an_array_of_a_table_has_a_size(tmp_path, array, message):
    np.savez(tmp_path / "table.npz", x=array, y=np.arange(3))
    with pytest.raises(EvclError, match=message):
        list(open_source(tmp_path / "table.npz").pieces(["x", "y"]))


def test_numbers_of_a_result_have_ranges(tmp_path, evcl):
    assert evcl("run", "split-digits", "--tasks", 2, "--epochs", 1, "--seeds", 1, "--out", tmp_path)[0] == 0
    result = json.loads((tmp_path / "result.json").read_text())
    result["nll"]["mean"] = 1e200
    (tmp_path / "result.json").write_text(json.dumps(result))
    status, _, err = evcl("report", tmp_path)
    assert status == 1
    assert "nll should hold a number per seed, from 0 to 1e+06" in err


LOADING = """
import sys
import evcl
from pathlib import Path

evcl.load(sys.argv[1])  # what is imported at first
Path("/proc/self/clear_refs").write_text("5")


def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


before = memory("VmRSS")
evcl.load(sys.argv[2])
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_model_is_loaded_in_twice_its_size(tmp_path):
    files = [tmp_path / f"{width}.safetensors" for width in (5, 1500)]
    for path in files:
        learner = evcl.EVCL(evcl.nn.mlp(1000, [int(path.stem)]), epochs=1)
        learner.learn((torch.zeros(4, 1000), torch.arange(4) % 2))
        learner.save(path)
    command = [sys.executable, "-c", LOADING, *map(str, files)]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken < 2 * files[1].stat().st_size, f"{taken:,} bytes"
