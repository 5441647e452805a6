"""Image folders, with one subfolder per class; to predict, images may also be outside any subfolder. Needs Pillow."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from evcl._core.bounds import MOST_PIXELS, rows_a_piece
from evcl._core.errors import EvclError, extra
from evcl._core.files import check_regular
from evcl._core.shown import shown
from evcl.data.formats import quiet
from evcl.tables.source import Piece, Source, Values, bad, listed, plural

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM", "TIFF")
ENDINGS = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff")
PIXELS, FOLDER = "pixels", "folder"  # the names of its columns
LARGEST_SIDE = 64  # default longest side of the inputs, in pixels
IMAGES_A_PIECE = 256


class ImageFolder(Source):
    """`size` is the size to read images in: (height, width, 1 or 3 channels). None takes the first image's size, scaled
    down to at most `side` pixels per side.
    """

    images = True

    def __init__(self, path: Path, size: tuple[int, int, int] | None = None, side: int = LARGEST_SIDE) -> None:
        super().__init__(path)
        try:
            files = [(one.name, one) for one in sorted(path.iterdir()) if one.is_file() and not _hidden(one)]
            for folder in sorted(one for one in path.iterdir() if one.is_dir() and not _hidden(one)):
                files += [(folder.name, one) for one in sorted(folder.iterdir()) if not _hidden(one)]
        except OSError as error:
            raise EvclError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
        self._others = {one for _, one in files if one.suffix.lower() not in ENDINGS and not _image(one)}
        files = [(folder, one) for folder, one in files if one not in self._others]
        if not files:
            bad(path, "the folder holds no images")
        for name, one in files:
            if one.parent != path and not _is_utf8(name):
                bad(path, f"the name of the folder {shown(name)} is not UTF-8, and so cannot be a class; rename it")
        self._unlike = [0, 0]  # images that had another size, and another colour, in the last pass
        self.files = [(None if one.parent == path else folder, one) for folder, one in files]
        self.size = self._first_size(side) if size is None else size
        self.shapes = {PIXELS: self.size}

    def _first_size(self, side: int) -> tuple[int, int, int]:
        array = self._image(self.files[0][1], None)
        height, width = array.shape[:2]
        scale = min(1.0, side / max(height, width))
        return max(1, round(height * scale)), max(1, round(width * scale)), array.shape[2]

    @property
    def told(self) -> str | None:
        (sizes, colours), (height, width, channels) = self._unlike, self.size
        unlike = [f"{plural(n, 'image')} of another {what}" for n, what in ((sizes, "size"), (colours, "colour")) if n]
        form = f"{height} x {width}, {'grey' if channels == 1 else 'RGB'}"
        parts = [f"{' and '.join(unlike)} as {form}"] if unlike else []
        if self._others:
            names = listed(sorted(str(one.relative_to(self.path)) for one in self._others))
            parts.append(f"without {plural(len(self._others), 'other file')}: {names}")
        return f"read {'; '.join(parts)}" if parts else None

    def pieces(self, names: Collection[str]) -> Iterator[Piece]:
        self._unlike = [0, 0]
        count = min(IMAGES_A_PIECE, rows_a_piece(math.prod(self.size)))
        for start in range(0, len(self.files), count):
            part = self.files[start : start + count]
            folders = np.empty(len(part), dtype=object)
            folders[:] = [folder for folder, _ in part]
            pixels = np.empty((len(part), *self.size), dtype=np.uint8)
            for row, (_, file) in zip(pixels, part, strict=True):
                row[:] = self._image(file, self.size)
            names = [_spelt(str(file.relative_to(self.path))) for _, file in part]
            yield Piece({PIXELS: pixels, FOLDER: folders}, names.__getitem__, len(part))

    def _image(self, file: Path, size: tuple[int, int, int] | None) -> Values:
        """One image [height, width, channels]: grey if `size` says so or, without a size, if the image itself is."""
        with extra("tables", f"{self.path}: images need Pillow"):
            from PIL import Image
        try:
            check_regular(file)
            with quiet(), Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    bad(file, f"{image.width} x {image.height} pixels, but the maximum is {MOST_PIXELS:,} in all")
                if image.mode in ("I", "F"):
                    bad(file, "its pixels have 32 bits, with no known range; save it with 8 or 16 bits")
                wide = image.mode.startswith("I;16")  # convert would clip these at 255
                own = wide or image.mode in ("1", "L", "LA")
                grey = own if size is None else size[2] == 1
                self._unlike[1] += own != grey
                eight = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if wide else image
                plain = eight.convert("L" if grey else "RGB")
                if size is not None and (plain.height, plain.width) != size[:2]:
                    self._unlike[0] += 1
                    plain = plain.resize((size[1], size[0]), Image.Resampling.BILINEAR)
                array = np.asarray(plain)
        except EvclError:
            raise
        except (OSError, ValueError, SyntaxError, TypeError, ArithmeticError, EOFError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or (str(error).splitlines() or ["damaged"])[0]
            bad(file, f"it is not a readable image ({why})")
        except Image.DecompressionBombError:
            bad(file, f"it has more pixels than the maximum of {MOST_PIXELS:,}")
        return array[..., None] if grey else array


def _image(file: Path) -> bool:
    """Whether a file is an image, whatever its name; notes among them are none."""
    with extra("tables", f"{file.parent}: images need Pillow"):
        from PIL import Image
    try:
        check_regular(file)
        with quiet(), Image.open(file, formats=FORMATS):
            return True
    except (EvclError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False


def _is_utf8(name: str) -> bool:
    """Whether a name of a file is text: Python stands odd bytes for by halves of surrogate pairs."""
    return not any("\ud800" <= letter < "\ue000" for letter in name)


def _spelt(name: str) -> str:
    """The name of a file, with bytes that are no text as \\xff."""
    return name if _is_utf8(name) else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name == "Thumbs.db"
