"""Section 7: each of these had the type of a Python error in its message, or no file."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import attacks
import made_up
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from evcl._core.errors import EvclError
from evcl.experiments import read_result, read_sweep
from evcl.tables import learn
from evcl.tables.commands import open_source


def line(err):
    """The one line of a message, without the name of the command."""
    assert err.count("\n") == 1, err
    assert "--debug" not in err, err
    assert len(err) < 1000
    return err.removeprefix("evcl: ").strip()


@pytest.mark.parametrize(
    "shape", ["(20, -1, -1)", "(20, True)", "(20, " + "1, " * 70 + ")", "(20, " + "9" * 4000 + ")", "(20, 1.5)", "20"]
)
def test_the_shape_of_an_array(tmp_path, shape):
    path = attacks.npz_header(tmp_path / "t.npz", f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}")
    with pytest.raises(EvclError) as refused:
        list(open_source(path).pieces(["x", "y"]))
    assert str(refused.value).startswith(f"{path}: ")
    assert "'x'" in str(refused.value)
    assert len(str(refused.value)) < 400 + len(str(path))


@pytest.mark.parametrize("kind", ["<U0", "|S0", "<U99999999", "|O", "|V8", "<c16"])
def test_the_type_of_an_array(tmp_path, kind):
    path = attacks.npz_header(tmp_path / "t.npz", f"{{'descr': '{kind}', 'fortran_order': False, 'shape': (20,), }}")
    with pytest.raises(EvclError, match="'x'"):
        list(open_source(path).pieces(["x", "y"]))


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_text_that_is_no_utf8(tmp_path, kind):
    import pyarrow as pa

    offsets = pa.py_buffer(np.array([0, 1, 2, 3, 4], np.int32).tobytes())
    column = pa.Array.from_buffers(pa.string(), 4, [None, offsets, pa.py_buffer(b"a\xff\xfeb")])
    path = attacks.table(tmp_path / f"t.{kind}", x=column, y=pa.array([0, 1, 0, 1]))
    with pytest.raises(EvclError, match=r"row 2, column 'x': .*UTF-8"):
        list(open_source(path).pieces(["x", "y"]))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("preset = []", "preset"),
        ("preset = {}", "preset"),
        ("preset = 1", "preset"),
        (f"[settings]\nlr = {{low = 1, high = 1{'0' * 400}}}", "lr"),
        (f"[settings]\nlr = 1{'0' * 400}", "lr"),
        (f"[settings]\nepochs = {'9' * 4000}", "epochs"),
        ("[settings]\nlr = {low = true, high = 1}", "lr"),
    ],
)
def test_a_sweep(tmp_path, text, key):
    path = tmp_path / "s.toml"
    path.write_text(f'benchmarks = ["split-digits"]\nseeds = 1\ndraws = 1\n{text}\n[methods.evcl]\n')
    with pytest.raises(EvclError, match=key) as refused:
        read_sweep(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert len(str(refused.value)) < 600 + len(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"nll": {"mean": 0.5, "std": None, "per_seed": [None, None, None]}},
        {"nll": {"mean": 1e200, "std": None, "per_seed": [0.5, 0.5, 0.5]}},
        {"average_accuracy": {"mean": 0.5, "std": 0.1, "per_seed": [None, 0.5, 0.5]}},
        {"seconds": int("9" * 400)},
        {"memory_bytes": int("9" * 400)},
        {"method": "a\ud800"},
        {"config": {"tasks": 5, "a\ud800": 1}},
        {"config": {"tasks": 10**30}},
        {"seeds": [10**400, 1, 2]},
    ],
    ids=str,
)
def test_a_result(evcl, tmp_path, change):
    made_up.write(tmp_path / "runs", made_up.result())
    path = tmp_path / "runs" / "0" / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(EvclError, match=r"is not a result of evcl"):
        read_result(path)
    status, _, err = evcl("report", "runs")
    assert status == 1
    assert line(err).startswith("runs/0/result.json is not a result of evcl")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The tensors and the metadata of a model of a table."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "t.csv").write_text("x,y\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(40)))
    learn(folder / "m", folder / "t.csv", "y", epochs=1, hidden=(2,))
    with safe_open(folder / "m", framework="pt") as file:
        return load_file(folder / "m"), file.metadata()


@pytest.mark.parametrize("name", ["accuracy", "nll", "entropy", "epistemic", "seconds", "examples", "held_out", "ece"])
@pytest.mark.parametrize("value", ["x", "0.5", None, True, [], 1e400])
def test_the_history_of_a_model(evcl, tmp_path, kept, name, value):
    path, (tensors, metadata) = tmp_path / "m.safetensors", kept
    note = json.loads(metadata["evcl.tables"])
    note["history"][0][name] = value
    save_file(tensors, path, {**metadata, "evcl.tables": json.dumps(note)})
    status, _, err = evcl("inspect", path.name)
    if status or err:
        assert status == 1
        assert line(err).startswith("cannot load m.safetensors: ")


def test_a_long_name_to_write(evcl, tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n1,a\n2,b\n3,a\n")
    assert evcl("learn", "--model", "m.safetensors", "--data", "t.csv", "--target", "y", "--epochs", 1)[0] == 0
    for letters in (250, 304, 5000):
        words = ("--data", "t.csv", "--out", "x" * letters + ".csv")
        status, _, err = evcl("predict", "--model", "m.safetensors", *words)
        if letters == 250:  # as long as a name can be, and its temporary file's is no longer
            assert (status, err) == (0, "")
        else:
            assert status == 1
            assert line(err).endswith("File name too long")


LITTLE = """
import resource, sys
import evcl.cli, evcl.tables, evcl.learner, torch
now = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + 2**29, now + 2**29))
sys.argv = ["evcl", *sys.argv[1:]]
evcl.cli.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited through /proc")
def test_too_little_memory(tmp_path):
    """400,000,000 weights gave the text of torch's allocator, with a line of C++."""
    assert resource.RLIMIT_AS
    (tmp_path / "t.csv").write_text("x,y\n1,a\n2,b\n3,a\n")
    words = ["learn", "--model", "m", "--data", "t.csv", "--target", "y", "--hidden", "20000,20000"]
    ended = subprocess.run(
        [sys.executable, "-c", LITTLE, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert ended.returncode == 1, ended.stderr
    assert "too little memory" in line(ended.stderr)
    assert "smaller" in line(ended.stderr)


def test_names_that_are_no_utf8(evcl, tmp_path):
    """learn took such a class, and then predict could write nothing."""
    import os

    from PIL import Image

    odd = tmp_path / "imgs" / os.fsdecode(b"b\xff")
    for folder in (tmp_path / "imgs" / "a", odd):
        folder.mkdir(parents=True)
        for i in range(4):
            Image.new("L", (3, 3), 60 * i).save(folder / f"{i}.png")
    status, _, err = evcl("learn", "--model", "m.safetensors", "--data", "imgs", "--epochs", 1)
    assert status == 1
    assert "UTF-8" in line(err)
    odd.rename(tmp_path / "imgs" / "b")
    assert evcl("learn", "--model", "m.safetensors", "--data", "imgs", "--epochs", 1)[0] == 0
    (tmp_path / "imgs" / "b" / "0.png").rename(tmp_path / "imgs" / "b" / os.fsdecode(b"\xff.png"))
    assert evcl("predict", "--model", "m.safetensors", "--data", "imgs", "--out", "p.csv")[0] == 0
    assert "\\xff.png" in (tmp_path / "p.csv").read_text("utf-8")


def test_a_zero_in_a_cell(tmp_path):
    """The message blamed the next line."""
    (tmp_path / "t.csv").write_bytes(b"x,y\n1,a\n1\0,b\n2,a\n3,b\n")
    with pytest.raises(EvclError, match=r"line 3.*NUL"):
        learn(tmp_path / "m.safetensors", tmp_path / "t.csv", "y", epochs=1)


@pytest.mark.full
def test_long_names_are_drawn_without_a_warning(evcl, tmp_path):
    made_up.write(tmp_path / "runs", *(made_up.result(letter * 200) for letter in "abc"))
    status, _, err = evcl("report", "runs")
    assert (status, err) == (0, "")


@pytest.mark.parametrize("text", ["1_0", "\uff11\uff10", " 10", "1e1_0"])
def test_numbers_are_written_as_in_a_file(evcl, text):
    words = ("run", "split-digits", "--method", "naive", "--tasks", 1, "--seeds", 1)
    status, _, err = evcl(*words, "--set", f"epochs={text}")
    assert status == 2
    assert "epochs" in line(err)
