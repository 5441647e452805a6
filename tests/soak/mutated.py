"""Mutated files to everything that reads one: `python mutated.py COUNT SEED [TARGET...]`, a line of JSON a defect.

A reader may refuse a file with an EvclError, or take it. A defect is another exception, a warning, more than SECONDS,
more memory than twice what the file may hold (and ALLOWANCE, which is Python's own), or code that ran. One reader more
is a line in TARGETS: what writes a good file into a folder, and what reads it and uses what it found.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("data", "report")]
import made_up  # noqa: E402
import tiny  # noqa: E402

import evcl  # noqa: E402
from evcl._core.bounds import MOST_PIXELS  # noqa: E402
from evcl._core.errors import EvclError  # noqa: E402
from evcl.data import cache, formats  # noqa: E402
from evcl.experiments import (  # noqa: E402
    Checkpoints,
    Event,
    Store,
    configure,
    execute,
    read_result,
    read_search,
    read_sweep,
    standing,
)
from evcl.experiments.search import read_found  # noqa: E402
from evcl.experiments.store import Claim  # noqa: E402
from evcl.report import by_benchmark, find_results, tables_markdown  # noqa: E402
from evcl.report.page import page  # noqa: E402
from evcl.tables.commands import open_source  # noqa: E402
from evcl.tables.creating import create  # noqa: E402
from evcl.tables.model import load_model  # noqa: E402
from evcl.training.checkpoint import DESCRIPTION, DIGEST  # noqa: E402
from evcl.training.checkpoint import _digest as digest  # noqa: E402

SECONDS, ALLOWANCE = 5.0, 48 * 2**20  # of the processor: the machine may be busy
MARK = Path(tempfile.gettempdir()) / f"evcl-code-ran-{os.getpid()}"
Make, Read = Callable[[Path], Path], Callable[[Path], object]


# --- good files ----------------------------------------------------------------------------------------------------


def numbers(seed: int = 0, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, 3))
    return x, np.arange(rows) % 2


def learner(folder: Path) -> Path:
    found = evcl.EVCL(evcl.nn.mlp(3, [4]), epochs=1, coreset="random", coreset_size=3)
    for task in range(2):
        found.learn(numbers(task))
    found.save(folder / "model.safetensors")
    return folder / "model.safetensors"


def use_learner(path: Path) -> None:
    found = evcl.load(path)
    if found.tasks:
        found.predictions(numbers()[0], 0)
        found.described()


def table_model(folder: Path) -> Path:
    from evcl.tables import learn

    learn(folder / "table.safetensors", table(folder), "class", epochs=1, hidden=(4,))
    (folder / "table.csv").unlink()
    return folder / "table.safetensors"


def table(folder: Path) -> Path:
    x, y = numbers()
    lines = [f'{a:.3f},{"" if i % 7 == 0 else f"{b:.3f}"},"{"red" if c > 0 else "gr, een"}",{k}'
             for i, ((a, b, c), k) in enumerate(zip(x, y, strict=True))]  # fmt: skip
    (folder / "table.csv").write_text("\n".join(["one,two,colour,class", *lines]) + "\n", "utf-8")
    return folder / "table.csv"


def npz_table(folder: Path) -> Path:
    x, y = numbers()
    np.savez(folder / "table.npz", pixels=np.zeros((len(x), 2, 2), np.uint8), x=x, word=np.array(["a", "b"])[y], y=y)
    return folder / "table.npz"


def parquet_table(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    x, y = numbers()
    columns = {"one": x[:, 0], "word": ["a" if k else None for k in y], "class": y}
    pq.write_table(pa.table(columns), folder / "table.parquet")
    return folder / "table.parquet"


def use_table(path: Path) -> None:
    source = open_source(path)
    target = next((name for name in ("class", "y") if name in source.shapes), None)
    made, rows = create(source, target, hidden=(4,))
    made.inputs(source, rows.numbers(sorted(rows.names)), 0.1)


def use_images(path: Path) -> None:
    use_table(path.parents[1])


def image(kind: str) -> Make:
    def make(folder: Path) -> Path:
        from PIL import Image

        for place in "ab":
            (folder / place).mkdir()
            pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / place / f"one.{kind}")
        return folder / "a" / f"one.{kind}"

    return make


def result(folder: Path) -> Path:
    made_up.write(folder, made_up.result(), made_up.result("vcl"))
    return folder / "0" / "result.json"


def use_result(path: Path) -> None:
    read_result(path)
    groups = by_benchmark(find_results(path.parents[1]))
    tables_markdown(groups.values(), "fuzz")
    page(groups, "fuzz")


SEARCH = """benchmarks = ["split-digits", "permuted-digits:3"]
validation = 0.1
seeds = [100, 101]
trials = 4
refine = 2
preset = "paper"
confirm = 1
confirm_seeds = [7]

[methods.evcl]
strength = {low = 1.0, high = 1e5}
epochs = {choices = [2, 5]}
std_update = "natural"

[[methods.other]]
method = "vcl"
lr = 1e-3
"""


def search(folder: Path) -> Path:
    (folder / "search.toml").write_text(SEARCH, "utf-8")
    return folder / "search.toml"


def found(folder: Path) -> Path:
    from evcl.experiments.search import _asked

    asked = _asked(read_search(search(folder)))
    (folder / "found.json").write_text(json.dumps({"benchmark": "split-digits", "tried": {}, **asked}, indent=1))
    return folder / "found.json"


def data_set(kind: str, packed: bool = False) -> tuple[Make, Read]:
    arrays = tiny.arrays(kind)
    form, entry = tiny.FORMS[kind], tiny.entry(arrays)

    def make(folder: Path) -> Path:
        files = getattr(tiny, kind)(arrays)
        if packed:
            return tiny.put(folder, {"tiny.tgz": tiny.tar(files)}) / "tiny.tgz"
        files = tiny.gzipped(files) if kind == "idx" else files
        return tiny.put(folder, files) / next(iter(files))

    def read(path: Path) -> None:
        place = path if packed else path.parents[1] if kind == "letters" else path.parent
        found = formats.read(place, form, entry)
        if found is not None:
            cache.check(entry, found)

    return make, read


def cached(folder: Path) -> Path:
    np.save(folder / "train_images.npy", np.zeros((5, 4), np.uint8))
    return folder / "train_images.npy"


def cached_source(folder: Path) -> Path:
    (folder / "source.json").write_text('{"data set": "tiny", "source": "somewhere"}')
    return folder / "source.json"


def sweep(folder: Path) -> Path:
    text = 'benchmarks = ["split-digits:2"]\nseeds = 2\ndraws = 2\n[settings]\nepochs = 1\n'
    text += "[methods.evcl]\nstrength = [1, 10]\nlr = {low = 1e-4, high = 1e-2}\n[methods.naive]\n"
    (folder / "sweep.toml").write_text(text)
    return folder / "sweep.toml"


CELL = configure("split-digits", "evcl", "paper", [0], 2, {"epochs": 1, "fisher_examples": 20, "predict_samples": 1})


def store(kind: str) -> Make:
    """A store with one cell that is claimed; one of its files."""

    def make(folder: Path) -> Path:
        made = Store(folder)
        made.declare([CELL])
        assert isinstance(made.take(CELL), Claim)
        return next(folder.glob(kind))

    return make


def use_store(path: Path) -> None:
    folder = next(place for place in path.parents if (place / "sweeps").is_dir())
    for later in folder.glob("cells/*/claim-2.json"):  # of the last time
        later.unlink()
    standing(folder)
    Store(folder).take(CELL)


def checkpoint(folder: Path) -> Path:
    def stop(event: Event) -> None:
        if event.task == 1:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        execute(CELL, stop, checkpoints=Checkpoints(folder))
    oldest, *more = sorted(folder.rglob("*.safetensors"), reverse=True)
    for path in more:
        path.unlink()
    return oldest


def use_checkpoint(path: Path) -> None:
    """With a digest that fits, as whoever means harm would make it."""
    for other in path.parent.glob("*.safetensors"):  # of the last time
        if other != path:
            other.unlink()
    with contextlib.suppress(Exception), safe_open(path, framework="pt") as file:
        tensors, text = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()[DESCRIPTION]  # noqa: SIM118
        save_file(tensors, path, {DESCRIPTION: text, DIGEST: digest(text, tensors)})
    execute(CELL, checkpoints=Checkpoints(path.parents[1], resume=True))


@dataclass(frozen=True)
class Target:
    make: Make
    read: Read
    most: int = 0  # bytes that the reader lets a file unpack to, where those are more than the file's


TARGETS: dict[str, Target] = {
    "model": Target(learner, use_learner),
    "table model": Target(table_model, load_model),
    "result": Target(result, use_result),
    "search": Target(search, read_search),
    "found": Target(found, lambda path: read_found(path, read_search(path.with_name("search.toml")))),
    "sweep": Target(sweep, read_sweep),
    "claim": Target(store("cells/*/claim-1.json"), use_store),
    "owner": Target(store("owners/*.json"), use_store),
    "cells": Target(store("sweeps/*.json"), use_store),
    "checkpoint": Target(checkpoint, use_checkpoint),
    "csv": Target(table, use_table),
    "npz": Target(npz_table, use_table),
    "parquet": Target(parquet_table, use_table),
    **{kind: Target(image(kind), use_images, 3 * MOST_PIXELS) for kind in ("png", "jpeg", "bmp", "gif", "webp")},
    **{f"data set, {kind}": Target(*data_set(kind), 2**20) for kind in ("idx", "cifar", "sheets", "letters", "npz")},
    "archive": Target(*data_set("letters", packed=True), 2**20),
    "cached array": Target(cached, lambda path: cache.load(path, (5, 4))),
    "cached source": Target(cached_source, cache.read_json),
}  # fmt: skip


# --- mutations -----------------------------------------------------------------------------------------------------


class Poison:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(MARK),)


def poison() -> bytes:
    """What runs code if it is read by pickle: bare, as torch saves it, or as an array of objects."""
    array = io.BytesIO()
    np.save(array, np.array([Poison()], dtype=object), allow_pickle=True)
    return array.getvalue()


POISON = poison()
NUMBERS = [b"0", b"-1", b"1e309", b"NaN", b"null", b"true", b"9" * 25, b"9" * 5000]  # fmt: skip
NUMBERS += [b"2147483648", b"1e-320", b'"x"', b"{}", b"[]"]
DEEP = [b"[" * 100_000, b'{"a":' * 50_000, b"a." * 50_000]
HUGE = [2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1, 10**9, 0]


def bytes_changed(body: bytes, source: random.Random) -> bytes:
    """One change: a bit, some bytes, a piece taken away, doubled, moved or put in, a number made another."""
    changed, size = bytearray(body), max(1, len(body))
    at = source.randrange(size)
    end = min(len(body), at + source.choice([1, 1, 2, 4, 8, 64, 1000]))
    kind = source.randrange(12)
    if kind == 0 and body:
        changed[at] ^= 1 << source.randrange(8)
    elif kind == 1:
        changed[at:end] = bytes(
            source.choice([0, 255, 127, 128, 10, 34, source.randrange(256)]) for _ in range(at, end)
        )
    elif kind == 2:
        del changed[at:end]
    elif kind == 3:
        changed[at:at] = body[at:end] * source.choice([1, 2, 50])
    elif kind == 4:
        changed[at:at] = source.randbytes(source.choice([1, 4, 100]))
    elif kind == 5:
        del changed[at:]
    elif kind == 6:
        width, order = source.choice([(2, "little"), (4, "little"), (8, "little"), (2, "big"), (4, "big"), (8, "big")])
        changed[at : at + width] = (source.choice(HUGE) % 2 ** (8 * width)).to_bytes(width, order)
    elif kind in (7, 8, 9):
        words = list(re.finditer(rb"-?\d[\d.e+-]*" if kind < 9 else rb'"[^"]*"|\w+', body))
        if words:
            word = source.choice(words)
            changed[word.start() : word.end()] = source.choice([*NUMBERS, source.choice(words).group(), b""])
    elif kind == 10 and source.random() < 0.2:
        changed[at:end] = source.choice(DEEP)
    elif kind == 11 and source.random() < 0.2:
        return POISON
    return bytes(changed)


def mutated(body: bytes, source: random.Random) -> bytes:
    """A few changes, half of the time to what a container holds, so that its checksums fit."""
    for _ in range(source.choice([1, 1, 1, 2, 5])):
        changed = None
        if source.random() < 0.5:
            try:
                changed = inside(body, source)
            except Exception:  # it is no longer a container
                changed = None
        body = bytes_changed(body, source) if changed is None else changed
    return body


def inside(body: bytes, source: random.Random) -> bytes | None:
    """A change inside a safetensors file's description, a zip, gzip or PNG file; None: it is nothing of these."""
    if body[:2] == b"\x1f\x8b":
        return gzip.compress(bytes_changed(gzip.decompress(body), source), 1)
    if body[:2] == b"PK":
        return zip_changed(body, source)
    if body[:4] == b"\x89PNG":
        return png_changed(body, source)
    if len(body) > 9 and body[8:9] == b"{":
        (size,) = struct.unpack("<Q", body[:8])
        text = bytes_changed(body[8 : 8 + size], source)
        if source.random() < 0.5:  # our own text inside it
            names = json.loads(body[8 : 8 + size])
            key = source.choice(sorted(names["__metadata__"]))
            changed = bytes_changed(names["__metadata__"][key].encode(), source)
            names["__metadata__"][key] = changed.decode("utf-8", "replace")
            text = json.dumps(names).encode()
        return struct.pack("<Q", len(text)) + text + body[8 + size :]
    return None


def zip_changed(body: bytes, source: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = source.choice(sorted(members))
    members[name] = POISON if source.random() < 0.1 else bytes_changed(members[name], source)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", source.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for key, content in members.items():
            archive.writestr(key, content)
        if source.random() < 0.1:
            archive.writestr("more.npy", b"\x93NUMPY\x01\x00" + source.randbytes(40))
    return out.getvalue()


def png_changed(body: bytes, source: random.Random) -> bytes:
    at, chunks = 8, []
    while at + 8 <= len(body):
        (size,) = struct.unpack(">I", body[at : at + 4])
        chunks.append((body[at + 4 : at + 8], body[at + 8 : at + 8 + size]))
        at += 12 + size
    k = source.randrange(len(chunks))
    kind, content = chunks[k]
    if kind == b"IDAT" and source.random() < 0.5:
        content = zlib.compress(bytes_changed(zlib.decompress(content), source))
    else:
        content = bytes_changed(content, source)
    chunks[k] = kind, content
    packed = (struct.pack(">I", len(c)) + t + c + struct.pack(">I", zlib.crc32(t + c)) for t, c in chunks)
    return body[:8] + b"".join(packed)


# --- trying them ---------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    pass


def stop(*_: object) -> None:
    raise TooLong


FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
ran: list[str] = []
watching = False


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if watching and event in FORBIDDEN:
        ran.append(event)


def memory(key: str) -> int:
    """VmRSS, or VmHWM: its peak since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def attempt(target: Target, path: Path) -> str | None:
    """Read a file; what is wrong with how that went, or None."""
    global watching  # noqa: PLW0603
    wrong, stated = None, max(path.stat().st_size, target.most)
    forget()
    before, started, watching = memory("VmRSS"), time.process_time(), True
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.read(path)
    except EvclError as error:
        if len(str(error).splitlines()) != 1:
            wrong = f"not one line: {error}"
    except TooLong:
        wrong = "too long"
    except BaseException as error:
        wrong = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        watching = False
    if wrong is None and (grown := memory("VmHWM") - before) > 2 * stated + ALLOWANCE:
        wrong = f"{grown / 2**20:.0f} MB of memory for {stated / 2**20:.1f} MB"
    if ran or MARK.exists():
        wrong = f"code ran: {ran}"
        ran.clear()
    if wrong is None and time.process_time() - started > SECONDS:
        wrong = "too long"
    return wrong


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(count: int, seed: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, stop)
    sys.addaudithook(watch)
    chosen = {name: TARGETS[name] for name in names or TARGETS}
    taken = 0
    for i, (name, target) in enumerate(chosen.items()):
        with tempfile.TemporaryDirectory() as folder:
            path = target.make(Path(folder))
            good = path.read_bytes()
            for _ in range(2):  # what is imported or compiled at first is not the file's
                target.read(path)
            for k in range(count // len(chosen) + (i < count % len(chosen))):
                body = mutated(good, random.Random(f"{seed} {name} {k}"))
                path.write_bytes(body)
                wrong = attempt(target, path)
                taken += 1
                if wrong is not None:
                    say(target=name, case=k, wrong=wrong[:300])
    say(tried=taken)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
