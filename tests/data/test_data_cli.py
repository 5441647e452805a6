"""`evcl data`: what it prints, and its exit status."""

from __future__ import annotations

import pytest
import tiny


@pytest.fixture
def mine(add, tmp_path):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files))
    return tiny.put(tmp_path / "mine", files)


def test_fetch_list_verify(evcl, mine, cache):
    status, out, _ = evcl("data", "list")
    assert status == 0
    assert "not fetched" in out
    assert "mnist" in out
    status, out, _ = evcl("data", "verify")
    assert (status, out) == (0, "nothing has been fetched yet; see evcl data fetch\n")
    status, out, _ = evcl("data", "fetch", "tiny", "--data-dir", mine)
    assert (status, out) == (0, f"tiny: verified, 0.0 MB in {cache / 'tiny'}, from folder {mine}\n")
    status, out, _ = evcl("data", "list")
    assert f"0.0 MB in {cache / 'tiny'}, from folder {mine}" in out
    status, out, _ = evcl("data", "verify")
    expected = f"tiny: intact, 0.0 MB, from folder {mine}; 0 of 6 test images are also training images\n"
    assert (status, out) == (0, expected)


def test_a_damaged_file_is_status_1(evcl, mine, cache):
    evcl("data", "fetch", "tiny", "--data-dir", mine)
    (cache / "tiny" / "train_labels.npy").write_bytes(b"")
    for command in (("verify",), ("verify", "tiny")):
        status, out, err = evcl("data", *command)
        assert (status, out) == (1, "")
        assert "train_labels.npy is damaged; run evcl data fetch tiny" in err
    status, out, _ = evcl("data", "list")
    assert status == 0
    assert "train_labels.npy is damaged; run evcl data fetch tiny" in out


def test_one_that_fails_does_not_stop_the_others(evcl, mine, add, cache):
    add(tiny.entry(tiny.arrays(seed=1), {"other.gz": b"x"}, name="other"))
    status, out, err = evcl("data", "fetch", "other", "tiny", "--offline", "--data-dir", mine)
    assert status == 1
    assert "tiny: verified" in out
    assert "evcl: no source gave the data set other:" in err
    assert f"other.gz  1 bytes  sha256 {tiny.sha256(b'x')}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["fetch", "verify"])
def test_an_unknown_name_is_status_2_with_the_nearest(command, evcl):
    status, out, err = evcl("data", command, "fashion-mnst")
    assert (status, out) == (2, "")
    assert "unknown data set 'fashion-mnst'; did you mean 'fashion-mnist'?" in err


def test_a_folder_that_is_not_there_is_status_2(evcl, mine):
    status, _, err = evcl("data", "fetch", "tiny", "--data-dir", mine / "nowhere")
    assert status == 2
    assert "--data-dir: there is no folder" in err


def test_verify_of_what_was_not_fetched_is_status_1(evcl, mine):
    status, _, err = evcl("data", "verify", "tiny")
    assert (status, err) == (1, "evcl: tiny: not there; run evcl data fetch tiny\n")


def test_no_published_split_is_said(evcl, add, tmp_path):
    wanted = tiny.arrays("letters")
    add(tiny.entry(wanted))
    evcl("data", "fetch", "tiny", "--data-dir", tiny.put(tmp_path / "letters", tiny.letters(wanted)))
    _, out, _ = evcl("data", "verify", "tiny")
    assert "no published train/test split; 0 images are duplicates" in out
