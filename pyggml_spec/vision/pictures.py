"""Pictures from files: Pillow checks and decodes them before any other code reads their bytes.

Of animations the first frame counts; orientation by EXIF is applied; transparency is dropped, as by llama.cpp.
"""

import io
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PictureError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_RATIO = 200  # of the longer side to the shorter one
_RATHER = "use a PNG, JPEG, WebP, GIF or BMP file"


@dataclass(frozen=True)
class PictureLimits:
    """Of one prompt: ``count`` pictures and sounds; of each ``nbytes`` of its file, ``pixels`` or ``seconds``, and ``rows`` of the prompt."""

    count: int = 16
    nbytes: int = 20 << 20
    pixels: int = 1 << 25
    seconds: float = 1800
    rows: int = 1 << 16


LIMITS = PictureLimits()


def decode(data: bytes, limits: PictureLimits = LIMITS) -> np.ndarray:
    """The pixels of a picture's file, U8 [height, width, 3], red first.

    Raises:
        PictureError: it is no picture, damaged, or larger than ``limits``.
    """
    if len(data) > limits.nbytes:
        raise PictureError(f"a picture's file has {len(data)} bytes, and {limits.nbytes} are taken; send a smaller one")
    pillow, ops = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes that are limited here
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
            _check_size(image.width, image.height, limits)
            image.load()
            with suppress(Exception):  # damaged EXIF data: the picture stays as it lies
                image = ops.exif_transpose(image)
            return _rgb(image)
    except PictureError:
        raise
    except Exception as error:  # damaged files make Pillow raise many kinds
        raise PictureError(f"the picture cannot be read ({type(error).__name__}); {_RATHER}") from None


def picture_file(path: Path, limits: PictureLimits = LIMITS) -> bytes:
    """The bytes of a file. Raises PictureError: it cannot be read, or has more than ``limits``."""
    try:
        with path.open("rb") as file:
            return file.read(limits.nbytes + 1)
    except OSError as error:
        raise PictureError(f"the picture {path} cannot be read: {error.strerror}; name another file") from None


def _check_size(width: int, height: int, limits: PictureLimits) -> None:
    if min(width, height) < 1 or width * height > limits.pixels:
        raise PictureError(f"a picture of {width} x {height} pixels has more than {limits.pixels} pixels, or none; send a smaller one")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise PictureError(f"a picture of {width} x {height} pixels is more than {MOST_RATIO} times as long as wide; crop it")


def _rgb(image: Any) -> np.ndarray:
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits of grey, of which the upper ones count
        grey = np.asarray(image).astype(np.int64)
        shift = 8 if grey.size and grey.max() > 255 else 0
        return np.repeat(np.clip(grey >> shift, 0, 255).astype(np.uint8)[..., None], 3, -1)
    return np.asarray(image.convert("RGB"), np.uint8)


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise PictureError("pictures need the package Pillow; run: pip install pillow") from None
    return Image, ImageOps
