"""Small files that cost much, and where each is read: the attacks of `test_entering.py` and the fuzzer's corpus."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import evcl


def small() -> evcl.Learner:
    learner = evcl.Naive(evcl.nn.mlp(1, [1]), epochs=1)
    learner.learn(np.array([[0.0], [1.0]], "f"), np.array([0, 1]))
    return learner


def with_heads(path: Path, heads: int) -> Path:
    """A model with this many heads of two classes, on a trunk of two weights."""
    description, tensors = small().described()
    names = [str(i) for i in range(heads)]
    description |= {"heads": [[name, [0, 1]] for name in names], "tasks": [[name, name] for name in names]}
    description |= {"rounds": heads}
    wide = {k: torch.full((*v.shape[:-1], 2 + 4 * heads), float(k.endswith("used"))) for k, v in tensors.items()}
    wide |= {k: v for k, v in tensors.items() if k.startswith("density.")}
    save_file(wide, path, {"evcl": json.dumps(description)})
    return path


def with_more_tensors(path: Path, count: int) -> Path:
    """A good model, and empty tensors that nothing explains. Written by hand: safetensors would take minutes."""
    description, tensors = small().described()
    header, data = {"__metadata__": {"evcl": json.dumps(description)}}, b""
    for name, tensor in sorted(tensors.items()):
        body = tensor.contiguous().numpy().tobytes()
        kind = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL"}[tensor.dtype]
        place = [len(data), len(data) + len(body)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": place}
        data += body
    more = {f"more {i}": {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]} for i in range(count)}
    text = json.dumps({**header, **more}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def described(path: Path, text: str) -> Path:
    """A model whose description is this text."""
    save_file({}, path, {"evcl": text})
    return path


def wide_npz(path: Path, arrays: int, width: int = 20_000, rows: int = 500) -> Path:
    """Many arrays of zeros, each within its limit."""
    one = io.BytesIO()
    np.save(one, np.zeros((rows, width), np.uint8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(arrays):
            archive.writestr(f"x{i}.npy", one.getvalue())
        labels = io.BytesIO()
        np.save(labels, np.arange(rows) % 2)
        archive.writestr("y.npy", labels.getvalue())
    return path


def npz_header(path: Path, header: str) -> Path:
    """An NPZ file with one array whose header says this, and labels."""
    head = header.encode("latin-1") + b" " * (63 - (len(header) + 10) % 64) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(400))
        labels = io.BytesIO()
        np.save(labels, np.arange(20) % 2)
        archive.writestr("y.npy", labels.getvalue())
    return path


def long_texts(path: Path, letters: int, rows: int = 4096, label: bool = False) -> Path:
    """A Parquet file of two texts, each as long as this, stored once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.array(["a" * letters, "b" * letters])
    column = pa.DictionaryArray.from_arrays(pa.array(np.arange(rows) % 2, pa.int32()), texts)
    column = column.cast(pa.string()) if rows * letters < 2**30 else column
    short = pa.array(np.arange(rows) % 2)
    columns = {"word": short, "y": column} if label else {"word": column, "y": short}
    pq.write_table(pa.table(columns), path, compression="zstd", use_dictionary=True)
    return path


def table(path: Path, **columns: object) -> Path:
    """Write these columns in the format that the name of the file ends in."""
    import pandas
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import feather

    write: dict[str, Callable[[], object]] = {
        ".csv": lambda: pandas.DataFrame(columns).to_csv(path, index=False),
        ".gz": lambda: pandas.DataFrame(columns).to_csv(path, index=False),
        ".xlsx": lambda: pandas.DataFrame(columns).to_excel(path, index=False),
        ".feather": lambda: feather.write_feather(pa.table(columns), path, "uncompressed"),
        ".parquet": lambda: pq.write_table(pa.table(columns), path),
        ".npz": lambda: np.savez(path, **columns),
        ".npy": lambda: np.save(path, np.rec.fromarrays([*map(np.asarray, columns.values())], names=[*columns])),
    }
    write[path.suffix]()
    return path


def images(folder: Path, count: int, side: int) -> Path:
    from PIL import Image

    for name in "ab":
        (folder / name).mkdir(parents=True)
        for i in range(count // 2):
            Image.new("RGB", (side, side), (i, 0, 0)).save(folder / name / f"{i}.png")
    return folder
