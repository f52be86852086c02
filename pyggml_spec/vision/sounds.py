"""Sounds from files: decoded to samples by miniaudio, which libmtmd decodes them by too, piece by piece, so that a limit holds for what a file is, and not for
what its header claims."""

from contextlib import closing
from typing import Any

import numpy as np

from ..errors import PictureError
from .pictures import LIMITS, PictureLimits

SHORTEST = 0.1  # seconds; encoders compute windows, and some end the process over less than one
PIECE = 16384  # samples


def is_sound(data: bytes) -> bool:
    """Whether a file begins as WAV, MP3 or FLAC, by llama.cpp's rule."""
    riff = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    return riff or data[:4] == b"fLaC" or data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")


def decode_sound(data: bytes, rate: int, limits: PictureLimits = LIMITS) -> np.ndarray:
    """The samples of a file, F32 [n], of one channel at ``rate`` per second.

    Raises:
        PictureError: it is damaged, shorter than SHORTEST, or larger than ``limits``.
    """
    if len(data) > limits.nbytes:
        raise PictureError(f"a sound's file has {len(data)} bytes, and {limits.nbytes} are taken; send a shorter one")
    miniaudio, parts, n = _miniaudio(), list[np.ndarray](), 0
    try:
        with closing(miniaudio.stream_memory(data, miniaudio.SampleFormat.FLOAT32, 1, rate, PIECE)) as pieces:
            for piece in pieces:
                parts.append(np.frombuffer(piece, np.float32))
                n += len(parts[-1])
                if n > limits.seconds * rate:
                    raise PictureError(f"a sound is longer than {limits.seconds:g} s; send parts of it")
    except miniaudio.MiniaudioError:
        raise PictureError("the sound cannot be read; use a WAV, MP3 or FLAC file") from None
    if n < SHORTEST * rate:
        raise PictureError(f"a sound has {n / rate:.3g} s, or its file is cut off; send {SHORTEST} s or more")
    samples = np.concatenate(parts)
    if not np.isfinite(samples).all():
        raise PictureError("a sound has samples that are NaN or Inf; convert its file to 16 bits")
    return samples


def _miniaudio() -> Any:
    try:
        import miniaudio
    except ImportError:
        raise PictureError("sounds need the package miniaudio; run: pip install miniaudio") from None
    return miniaudio
