"""Pictures in a result: what a generative model generates, and episodes of an agent."""

from __future__ import annotations

import base64
import binascii
import contextlib
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST_CHARACTERS = 2**23  # of a picture in a result
GAP_PIXELS = 2  # between tasks, and between pictures of a film
MAX_HEIGHT = 96  # pixels of a picture of a film, at most
Bytes = NDArray[np.uint8]


def picture(samples: Bytes) -> str:
    """Images [after task, of task, n, channels, height, width] as a PNG in base64: a row after each task, and n columns
    of each task. What was not learned yet is grey, and so is a row without samples, which are all 0.
    """
    channels, height, width = samples.shape[3:]
    tasks, n = samples.shape[1], samples.shape[2]
    down, across = height + GAP_PIXELS, n * width + GAP_PIXELS
    whole = np.full((channels, len(samples) * down, tasks * across), 128, np.uint8)
    for t, row in enumerate(samples):
        if not row.any():
            continue
        for k, some in enumerate(row[: t + 1]):
            images = some.reshape(n, channels, height, width).transpose(1, 2, 0, 3).reshape(channels, height, n * width)
            whole[:, t * down : t * down + height, k * across : k * across + n * width] = images
    return base64.b64encode(png(whole)).decode()


def film_strips(films: Sequence[Sequence[Bytes]]) -> str:
    """Pictures [height, width, 3] of some episodes as a PNG in base64: a row for each episode. Large pictures are
    thinned out.
    """
    step = -(-max(picture.shape[0] for film in films for picture in film) // MAX_HEIGHT)
    small = [[picture[::step, ::step] for picture in film] for film in films]
    height, width = small[0][0].shape[:2]
    down, across = height + GAP_PIXELS, width + GAP_PIXELS
    whole = np.full((len(small) * down, max(map(len, small)) * across, 3), 255, np.uint8)
    for i, film in enumerate(small):
        for j, picture in enumerate(film):
            whole[i * down : i * down + height, j * across : j * across + width] = picture
    return base64.b64encode(png(whole.transpose(2, 0, 1))).decode()


def png(image: Bytes) -> bytes:
    """The bytes of a PNG file with this image [1 or 3, height, width], uint8."""
    channels, height, width = image.shape
    rows = image.transpose(1, 2, 0).reshape(height, -1)
    lines = np.pad(rows, ((0, 0), (1, 0))).tobytes()  # each row begins with its filter, none
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = (b"IHDR" + head, b"IDAT" + zlib.compress(lines, 9), b"IEND")
    return SIGNATURE + b"".join(struct.pack(">I", len(p) - 4) + p + struct.pack(">I", zlib.crc32(p)) for p in parts)


def decoded(text: str) -> bytes:
    """The bytes of a picture. Raises ValueError if it is no PNG."""
    with contextlib.suppress(binascii.Error):
        png = base64.b64decode(text, validate=True)
        if png.startswith(SIGNATURE):
            return png
    raise ValueError("samples should be a PNG in base64")
