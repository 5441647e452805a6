"""Bounds where data enter: a small file takes little time and little memory, whatever it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import attacks
import made_up
import pytest
from cost import measured

import evcl as library
from evcl._core.bounds import MOST_NUMBERS
from evcl._core.errors import EvclError
from evcl.experiments import read_result, read_sweep
from evcl.tables import Learning, learn
from evcl.tables.commands import open_source
from evcl.tables.creating import create

ALLOWED = 200  # MB, and twice what a file states


# --- time: section 2 -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_ten_thousand_heads_load_in_five_seconds(tmp_path):
    with measured() as cost:
        found = library.load(attacks.with_heads(tmp_path / "m.safetensors", 10_000))
    assert len(found.heads) == 10_000
    assert cost.seconds < 5
    with pytest.raises(EvclError, match="10,001 heads"):
        library.load(attacks.with_heads(tmp_path / "m.safetensors", 10_001))


@contextmanager
def refused_cheaply(match, seconds=1.0, megabytes=ALLOWED):
    with measured() as cost, pytest.raises(EvclError, match=match):
        yield
    assert cost.seconds < seconds
    assert cost.megabytes < megabytes


@pytest.mark.parametrize("part", ['"!"', "'.'", '"a b"', '"\\""', "a", '"é"'])
@pytest.mark.parametrize("form", ["{} = 1", "[{}]", "settings = {{ {} = 1 }}"])
def test_keys_of_many_parts(tmp_path, part, form):
    """2.5: the guard saw neither quotes with spaces nor letters beyond ASCII."""
    (tmp_path / "s.toml").write_text(form.format(".".join([part] * 8_000)) + "\n")
    with refused_cheaply("a key has more than 20 parts"):
        read_sweep(tmp_path / "s.toml")


def test_dots_in_values_are_no_keys(tmp_path):
    """Numbers, dates, comments and texts have dots, and some texts many."""
    text = "a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.q.r.s.t.u.v.w.x.y.z"
    (tmp_path / "s.toml").write_text(
        f'# {text}\nbenchmarks = ["split-digits:2"]  # {text}\nseeds = 1\npreset = "tuned"\n[settings]\nepochs = 1\n'
        f"lr = [{', '.join(['0.01'] * 30)}]\n[methods.naive]\n"
    )
    assert len(read_sweep(tmp_path / "s.toml")) > 0
    for quote in ('"', "'", '"""', "'''"):
        (tmp_path / "s.toml").write_text(f"preset = {quote}{text}{quote}\nbenchmarks = []\n[methods.naive]\n")
        with pytest.raises(EvclError) as refused:
            read_sweep(tmp_path / "s.toml")
        assert "parts" not in str(refused.value)


def test_long_names_in_a_result(tmp_path):
    """2.6: a name of 100,000 letters took 76 s to draw."""
    made_up.write(tmp_path, made_up.result())
    path = tmp_path / "0" / "result.json"
    good = json.loads(path.read_text())
    for key in ("benchmark", "method", "preset"):
        path.write_text(json.dumps({**good, key: "x" * 100_000}))
        with pytest.raises(EvclError, match="200"):
            read_result(path)


@pytest.mark.parametrize("count", [1, 20_000])
def test_tensors_that_nothing_explains(tmp_path, count):
    """2.7: a million empty tensors were accepted, after 39 s."""
    assert library.load(attacks.with_more_tensors(tmp_path / "m.safetensors", 0)).tasks
    path = attacks.with_more_tensors(tmp_path / "m.safetensors", count)
    with refused_cheaply("more 0|tensors", 2):
        library.load(path)


# --- memory: section 3 ---------------------------------------------------------------------------------------------


def use(path, **options):
    source = open_source(path, **options)
    made, rows = create(source, Learning(None if source.images else "y", hidden=(2,)))
    made.examples(source, rows, rows.targets(sorted(rows.names)), Learning())


def test_arrays_are_added_up_before_they_are_read(tmp_path):
    """3.1: 0.4 MB took 3.5 GB."""
    path = attacks.wide_npz(tmp_path / "t.npz", 40)
    with refused_cheaply(r"800,00[01] (numbers|inputs).*20,000", 2, 100):
        use(path)


def test_wide_arrays_come_in_small_pieces(tmp_path):
    source = open_source(attacks.wide_npz(tmp_path / "t.npz", 2, 9_000, 4096))
    with measured() as cost:
        for piece in source.pieces(["x0", "x1", "y"]):
            assert piece.rows * 18_001 * 8 <= ALLOWED * 1e6
    assert cost.megabytes < ALLOWED


def test_images_have_a_number_of_pixels(tmp_path):
    """3.2: --image-side 1000 took 2.7 GB before it was refused."""
    folder = attacks.images(tmp_path / "imgs", 32, 200)
    with refused_cheaply("--image-side", 5, 100):
        use(folder, side=1000)


@pytest.mark.parametrize("label", [False, True], ids=["column", "label"])
@pytest.mark.parametrize("letters", [100_000, 400_000])
def test_texts_have_a_length(tmp_path, label, letters):
    """3.3, 3.4: 884 bytes took 3.5 GB."""
    path = attacks.long_texts(tmp_path / "t.parquet", letters, label=label)
    assert path.stat().st_size < 20_000
    with refused_cheaply(r"text .*10,000 characters", 5, ALLOWED + 2 * letters / 1e6):
        learn(tmp_path / "m.safetensors", path, "y", epochs=1, hidden=(2,))


@pytest.mark.parametrize("kind", ["csv", "feather", "npy", "xlsx"])
def test_texts_have_a_length_in_every_format(tmp_path, kind):
    path = attacks.table(tmp_path / f"t.{kind}", word=["a" * 10_001, "b"] * 4, y=[0, 1] * 4)
    with pytest.raises(EvclError, match=r"10,000 characters"):
        use(path)


@pytest.mark.parametrize("inner", ["[]", "{}", "0"])
def test_a_description_has_a_length(tmp_path, inner):
    """3.5: 45 MB of brackets took 1.6 GB."""
    path = attacks.described(tmp_path / "m.safetensors", f"[{f'{inner},' * 3_000_000}0]")
    with refused_cheaply("description", 1, ALLOWED + 2 * path.stat().st_size / 1e6):
        library.load(path)


@pytest.mark.parametrize(
    "text", ["[{},]", '{{"schema": 1, "accuracy": [{}]}}', '{{"schema": 1, "config": {{"a": [{}]}}}}']
)
def test_results_of_brackets(tmp_path, text):
    """3.6: 30 MB took 1 GB and 7 s."""
    (tmp_path / "result.json").write_text(text.format(",".join(["[]"] * 5_000_000)))
    with refused_cheaply(None, 2, ALLOWED + 2 * 15):
        read_result(tmp_path / "result.json")


READING = """
import sys
from pathlib import Path
sys.path.append(sys.argv[2])
from cost import measured
from evcl import EvclError
from evcl.experiments import read_result
with measured() as cost:
    try:
        read_result(Path(sys.argv[1]))
    except EvclError as error:
        print(error)
print(cost.megabytes, cost.seconds)
"""


@pytest.mark.parametrize("more", [1, 2])
def test_results_of_short_numbers(tmp_path, more):
    """Each takes 46 bytes: with as many as are allowed the file is read, and refused for another reason. In a process
    of its own, because one that has run for long needs up to twice as much for the same lists.
    """
    made_up.write(tmp_path, made_up.result())
    path = tmp_path / "0" / "result.json"
    begun, found, rest = "".join(path.read_text().split()).partition('"accuracy":[[[')
    path.write_text(begun + found + "1," * (more * MOST_NUMBERS) + rest)
    ran = subprocess.run(
        [sys.executable, "-c", READING, path, Path(__file__).parent], capture_output=True, text=True, check=True
    )
    refusal, numbers = ran.stdout.splitlines()
    assert ("more numbers" in refusal) == (more > 1)
    megabytes, seconds = map(float, numbers.split())
    assert megabytes < ALLOWED + 2 * path.stat().st_size / 1e6
    assert seconds < 5


def test_pieces_of_a_wide_table_have_fewer_rows(tmp_path):
    """3.7: 5,000 columns of 4,096 rows took 2.1 GB."""
    header = ",".join([*(f"c{i}" for i in range(4_999)), "y"])
    row = ",".join(["12"] * 4_999 + ["a"])
    (tmp_path / "t.csv").write_text(f"{header}\n{f'{row}{chr(10)}' * 300}")
    source = open_source(tmp_path / "t.csv")
    with measured() as cost:
        rows = [piece.rows for piece in source.cells([f"c{i}" for i in range(4_999)])]
    assert sum(rows) == 300
    assert max(rows) * 5_000 <= 1_000_000
    assert cost.megabytes < ALLOWED + 2 * 15


# --- regular files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "predict --model pipe --data t.csv --out p.csv",
        "inspect pipe",
        "merge pipe pipe.npz --base pipe.npy --out m.safetensors",
        "export pipe m.pt2",
        "tune pipe.toml --out t",
        "learn --model pipe --data t.csv --target y",
        "learn --model m --target y --data pipe.parquet",
        "learn --model m --target y --data pipe.npz",
        "learn --model m --target y --data pipe.npy",
        "learn --model m --target y --data pipe.xlsx",
        "learn --model m --target y --data pipe.csv.gz",
        "learn --model m --target y --data pipe.duckdb",
        "learn --model m --target y --data pipe.feather",
        "status store",
        "run split-digits --plugin pipe.py",
        "report runs",
        "sweep pipe.toml --out s",
        "learn --model m --target y --data pipe.csv",
        "learn --model m --data imgs",
    ],
)
def test_a_pipe_is_refused(evcl, tmp_path, words):
    """2.3, 2.4: whoever opened a pipe waited for ever."""
    endings = ("", ".toml", ".parquet", ".npz", ".npy", ".xlsx", ".csv", ".csv.gz", ".duckdb", ".feather", ".py")
    for name in (*(f"pipe{end}" for end in endings), "store/sweeps/a.json", "runs/a/result.json", "imgs/cat/pipe.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / "t.csv").write_text("x,y\n1,a\n2,b\n")

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        status, _, err = evcl(*words.split())
    finally:
        signal.alarm(0)
    assert status in (1, 2)
    assert err.count("\n") == 1
    assert "it is a pipe" in err or "there is no file pipe" in err
    assert "--debug" not in err
