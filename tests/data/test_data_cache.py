"""The cache maps what was verified, finds what is damaged, and is never half-written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny

from evcl import data
from evcl._core.errors import EvclError
from evcl._core.files import cache_folder
from evcl.data import cache as store


@pytest.fixture
def filled(add, tmp_path, cache):
    """The arrays of a data set that is in the cache, and the folder that it came from."""
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files))
    folder = tiny.put(tmp_path / "mine", files)
    data.fetch("tiny", folder)
    return wanted, folder


def _damage(path: Path, how: str) -> None:
    body = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "shorter":
        path.write_bytes(body[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other type":
        np.save(path, np.zeros(3))
    elif how == "header":
        path.write_bytes(body.replace(b"}", b" ", 1))
    elif how == "zip":
        with path.open("wb") as out:
            np.savez(out, body=np.zeros(3))
    else:  # one bit
        path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))


def test_arrays_are_mapped_not_read(filled, cache):
    wanted, _ = filled
    found = data.load("tiny", offline=True)
    for name, array in wanted.items():
        mapped = getattr(found, name)
        assert isinstance(mapped, np.memmap)
        np.testing.assert_array_equal(mapped, array)
        mapped[:1] += 1  # torch wants writable memory; the file stays as it is
        np.testing.assert_array_equal(getattr(data.load("tiny", offline=True), name), array)
    names = {f"{name}.npy" for name in wanted} | {"source.json", ".lock"}
    assert {path.name for path in (cache / "tiny").iterdir()} == names


@pytest.mark.parametrize("name", list(data.CATALOG))
def test_loading_takes_under_half_a_second_and_next_to_no_memory(name, cache):
    """On files of the real size, with holes for bytes."""
    entry = data.CATALOG[name]
    (cache / name).mkdir(parents=True)
    for key, array in entry.arrays.items():
        np.lib.format.open_memmap(cache / name / f"{key}.npy", "w+", np.uint8, array.shape)
    store.write_json(cache / name / "source.json", {"source": "nowhere"})
    data.status(name)  # warm
    start = time.perf_counter()
    tracemalloc.start()
    found = data.load_arrays(name, offline=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - start < 0.5
    assert peak < 2**20
    assert {key: array.shape for key, array in found.items()} == {k: array.shape for k, array in entry.arrays.items()}
    if entry.images:
        assert data.load(name, offline=True).train_images.shape == entry.arrays["train_images"].shape
    else:
        with pytest.raises(EvclError, match=f"{name} has no images"):
            data.load(name, offline=True)


def test_the_source_is_noted(filled, cache):
    _, folder = filled
    assert json.loads((cache / "tiny" / "source.json").read_text())["source"] == f"folder {folder}"
    here = data.status("tiny")
    assert (here.fetched, here.problem, here.source) == (True, "", f"folder {folder}")
    assert here.bytes == sum(path.stat().st_size for path in (cache / "tiny").glob("*.npy"))


@pytest.mark.parametrize("how", ["missing", "shorter", "empty", "other type", "header", "zip"])
def test_a_damaged_file_is_named_or_fetched_again(how, filled, cache):
    wanted, folder = filled
    path = cache / "tiny" / "test_labels.npy"
    _damage(path, how)
    assert str(path) in data.status("tiny").problem
    with pytest.raises(EvclError, match=r"test_labels.npy is (damaged|missing).*; run evcl data fetch tiny"):
        data.verify("tiny")
    with pytest.raises(EvclError, match=rf"cache {cache / 'tiny'}: {path} is (damaged|missing)"):
        data.load("tiny", offline=True)
    found = data.load("tiny", folder, offline=True)
    np.testing.assert_array_equal(found.test_labels, wanted["test_labels"])


def test_one_wrong_bit_is_found_by_verify_and_put_right_by_fetch(filled, cache):
    wanted, folder = filled
    path = cache / "tiny" / "train_images.npy"
    _damage(path, "one bit")
    with pytest.raises(EvclError, match=r"train_images.npy is damaged: its checksum is not that of tiny"):
        data.verify("tiny")
    data.fetch("tiny", folder)
    data.verify("tiny")
    np.testing.assert_array_equal(data.load("tiny").train_images, wanted["train_images"])


@pytest.mark.parametrize("body", ["", "[]", "{", None])
def test_a_folder_without_its_note_is_not_complete(body, filled, cache):
    note = cache / "tiny" / "source.json"
    note.unlink() if body is None else note.write_text(body)
    with pytest.raises(EvclError, match=r"source.json is damaged|not there"):
        data.load("tiny", offline=True)
    data.load("tiny", filled[1], offline=True)


def test_intact_data_is_not_fetched_again(filled, cache):
    before = {path: path.stat().st_mtime_ns for path in (cache / "tiny").glob("*.npy")}
    data.fetch("tiny", offline=True)
    assert {path: path.stat().st_mtime_ns for path in (cache / "tiny").glob("*.npy")} == before


def test_a_complete_cache_that_cannot_be_written_to_is_enough(filled, monkeypatch):
    def refuse(_):
        raise EvclError("read-only")

    monkeypatch.setattr(store, "locked", refuse)
    assert data.fetch("tiny").problem == ""


def test_a_full_disk_leaves_nothing_half_written(add, tmp_path, cache, monkeypatch):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files))
    folder = tiny.put(tmp_path / "mine", files)
    real = Path.open

    class Full:
        """Takes a header, and then has no room for the array."""

        def __init__(self, stream):
            self.stream, self.writes = stream, 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.stream.close()

        def write(self, body):
            self.writes += 1
            if self.writes > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.stream.write(body)

    def full(self, mode="r", *rest, **named):
        stream = real(self, mode, *rest, **named)
        return Full(stream) if mode == "wb" else stream

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(EvclError, match=r"cannot write .*train_images.npy: No space left on device"):
            data.fetch("tiny", folder)
    assert [path.name for path in (cache / "tiny").iterdir()] == [".lock"]
    data.load("tiny", folder)


def test_what_a_killed_process_was_writing_is_swept_up(add, tmp_path, cache):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files))
    tiny.put(cache / "tiny", {".train_images.npy.1.tmp": b"half"})
    data.fetch("tiny", tiny.put(tmp_path / "mine", files))
    assert not list((cache / "tiny").glob(".*.tmp"))


def test_a_cache_that_cannot_be_made_is_an_error_that_says_so(add, tmp_path, monkeypatch):
    add(tiny.entry(tiny.arrays()))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVCL_CACHE", str(tmp_path / "file"))
    with pytest.raises(EvclError, match=r"cannot write to the cache .*choose another folder with EVCL_CACHE"):
        data.fetch("tiny")


@pytest.mark.parametrize("xdg", [None, "/var/tmp/caches"])
def test_without_the_variable_it_is_the_platforms_folder(monkeypatch, xdg):
    import platformdirs

    monkeypatch.delenv("EVCL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache_folder() == Path(platformdirs.user_cache_dir("evcl"))


def test_without_a_home_folder_it_says_what_to_set(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("EVCL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(EvclError, match="no home folder for the cache: name a folder with EVCL_CACHE"):
        cache_folder()


def test_verify_counts_images_that_occur_twice(add, tmp_path):
    found = tiny.arrays()
    found["test_images"][:2] = found["train_images"][:2]
    found["train_images"][5] = found["train_images"][4]
    add(tiny.entry(found))
    data.fetch("tiny", tiny.put(tmp_path, tiny.idx(found)))
    seen = data.verify("tiny")
    assert (seen.test_images, seen.shared, seen.copies) == (6, 2, 1)


def test_grey_images_are_made_once_and_again_when_damaged(add, tmp_path, cache):
    wanted = tiny.arrays("cifar")
    add(tiny.entry(wanted))
    folder = tiny.put(tmp_path / "mine", tiny.cifar(wanted))
    grey = data.load_grey28("tiny", folder)
    path = cache / "tiny" / "train_images_grey28.npy"
    made = path.stat().st_mtime_ns
    np.testing.assert_array_equal(grey.train_images, data.grey28(wanted["train_images"]))
    np.testing.assert_array_equal(grey.test_images, data.grey28(wanted["test_images"]))
    np.testing.assert_array_equal(grey.test_labels, wanted["test_labels"])
    assert isinstance(data.load_grey28("tiny", offline=True).train_images, np.memmap)
    data.fetch("tiny")
    assert path.stat().st_mtime_ns == made
    _damage(path, "one bit")
    with pytest.raises(EvclError, match=r"train_images_grey28.npy is damaged"):
        data.verify("tiny")
    data.fetch("tiny", offline=True)  # the colour images are intact
    again = data.load_grey28("tiny", offline=True)
    np.testing.assert_array_equal(again.train_images, data.grey28(wanted["train_images"]))
    data.verify("tiny")


def test_two_that_want_grey_images_at_once_make_them_once(add, tmp_path, monkeypatch):
    wanted = tiny.arrays("cifar")
    add(tiny.entry(wanted))
    data.fetch("tiny", tiny.put(tmp_path / "mine", tiny.cifar(wanted)))
    both_have_looked, made = threading.Barrier(2), []

    def grey28(images):
        made.append(images)
        return data.grey28(images)

    def fetch(*_):
        both_have_looked.wait(60)  # and found none

    monkeypatch.setattr("evcl.data.datasets.grey28", grey28)
    monkeypatch.setattr("evcl.data.datasets.fetch", fetch)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(data.load_grey28, ["tiny"] * 2)
    np.testing.assert_array_equal(one.train_images, two.train_images)
    assert len(made) == 2  # the training images and the test images


def test_grey_images_are_not_made_of_damaged_ones(add, tmp_path, cache):
    wanted = tiny.arrays("cifar")
    add(tiny.entry(wanted))
    folder = tiny.put(tmp_path / "mine", tiny.cifar(wanted))
    data.fetch("tiny", folder)
    _damage(cache / "tiny" / "train_images.npy", "one bit")
    grey = data.load_grey28("tiny", folder)
    np.testing.assert_array_equal(grey.train_images, data.grey28(wanted["train_images"]))


def test_the_catalogue_is_complete():
    for name, entry in data.CATALOG.items():
        assert entry.name == name
        assert entry.licence
        assert entry.citation
        assert entry.mirrors or entry.packages
        assert all(mirror.startswith("http") and mirror.endswith("/") for mirror in entry.mirrors)
        assert all(len(thing.sha256) == 64 for thing in (*entry.files, *entry.arrays.values()))
        assert entry.bytes < entry.most_bytes
        assert all(
            form.kind in ("idx", "cifar", "sheets", "letters", "npz", "raw", "texts", "years") for form in entry.forms
        )
    with pytest.raises(EvclError, match="unknown data set 'notmist'; did you mean 'notmnist'"):
        data.load("notmist")


def test_import_evcl_loads_nothing_that_downloads_or_decodes():
    heavy = ("PIL", "sklearn", "filelock", "rich")
    code = f"import evcl, evcl.data, sys; print([m for m in {heavy} if m in sys.modules])"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert alone.strip() == "[]"
