"""A film strip: pictures of an episode, side by side in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evcl._core.errors import EvclError, extra
from evcl._core.files import write_atomically


def film_strip(frames: Sequence[NDArray[np.uint8]], path: str | Path, title: str = "") -> Path:
    """Draw pictures [height, width, 3] side by side, such as those of `evcl.rl.frames`, into a .png, .svg or .pdf."""
    if not len(frames):
        raise EvclError("a film strip needs at least one picture")
    with extra("report", "figures need matplotlib"):
        from matplotlib.figure import Figure

    height, width = frames[0].shape[:2]
    figure = Figure(figsize=(2 * len(frames), 2 * height / width + 0.4 * bool(title)), layout="constrained")
    for axis, frame in zip(figure.subplots(1, len(frames), squeeze=False)[0], frames, strict=True):
        axis.imshow(frame)
        axis.set_axis_off()
    figure.suptitle(title)
    file = Path(path)

    def write(temporary: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, format=file.suffix.lstrip(".") or "png", dpi=100)

    write_atomically(file, write)
    return file
