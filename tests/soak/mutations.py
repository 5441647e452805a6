"""Random changes to a file: single bytes, pieces, numbers, and what is inside of a container, so that checksums fit."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np

MARK = Path(tempfile.gettempdir()) / f"evcl-code-ran-{os.getpid()}"  # made by code of a file, if any runs


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
