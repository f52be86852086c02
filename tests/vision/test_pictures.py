"""Files of pictures: right pixels of odd ones, and an error, in bounded time and memory, of hostile ones."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from sessions import fails_with

from pyggml_spec.errors import PictureError
from pyggml_spec.vision.pictures import PictureLimits, decode

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def saved(image, kind, **more):
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def noise(seed=0, size=(40, 30)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8))


def png(width, height, *chunks, bits=8, colour=2):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*c) for c in chunks) + chunk(b"IEND", b"")


def test_pixels_of_odd_pictures():
    """Rotated by EXIF, 16 bits, CMYK, palettes, transparency, animations: as a viewer shows them."""
    image = noise()
    assert np.array_equal(decode(saved(image, "PNG")), np.asarray(image))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert decode(saved(image, "PNG", exif=exif)).shape == (40, 30, 3)
    grey = Image.fromarray((np.arange(1200).reshape(30, 40) * 50).astype(np.uint16))
    assert np.array_equal(decode(saved(grey, "PNG"))[..., 0], np.asarray(grey) >> 8)
    flat = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red, _, blue = decode(saved(flat, "JPEG"))[4, 4].tolist()
    assert red > 200 and blue < 60
    assert decode(saved(Image.new("P", (8, 8), 3), "GIF")).shape == decode(saved(Image.new("1", (8, 8)), "PNG")).shape == (8, 8, 3)
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert decode(saved(clear, "PNG"))[0, 0].tolist() == [10, 20, 30]
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    assert decode(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))[0, 0].tolist() == [255, 0, 0]
    assert decode(saved(image, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")).shape == (30, 40, 3)  # damaged EXIF


def hostile():
    """200 of them."""
    rng = np.random.default_rng(5)
    whole = {kind: saved(noise(1), kind) for kind in FORMATS}
    for kind in FORMATS:
        for cut in range(12):  # truncated
            yield f"{kind} cut {cut}", whole[kind][: len(whole[kind]) * cut // 13]
        for seed in range(22):  # bytes changed
            data = bytearray(whole[kind])
            for at in rng.integers(0, len(data), 1 + seed):
                data[at] = rng.integers(256)
            yield f"{kind} changed {seed}", bytes(data)
    rows = zlib.compress(bytes(1 << 20))
    for width, height in ((100_000, 1), (1, 100_000), (1 << 31 - 1, 1 << 31 - 1), (60_000, 60_000), (0, 5), (5, 0), (20_000, 20_000)):
        yield f"{width} x {height}", png(width, height, (b"IDAT", rows))
    yield "text bomb", png(8, 8, (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 28))), (b"IDAT", zlib.compress(bytes(200))))
    yield "profile bomb", png(8, 8, (b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 28))), (b"IDAT", zlib.compress(bytes(200))))
    yield "pixels that are not there", png(5000, 5000, (b"IDAT", zlib.compress(bytes(100))))
    for name, data in {
        "empty": b"", "text": b"hello", "html": b"<html>", "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>", "pdf": b"%PDF-1.7\n", "gguf": b"GGUF" + bytes(100),
        "tiff": saved(noise(), "TIFF"), "ico": saved(noise(), "ICO"), "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "riff": b"RIFF\xff\xff\xff\xffWEBPVP8 " + bytes(30),
        "zip": b"PK\x03\x04" + bytes(60), "ppm": b"P6 99999999 99999999 255\n", "bmp head": b"BM" + bytes(60), "gif head": b"GIF89a\xff\xff\xff\xff" + bytes(20),
    }.items():  # fmt: skip
        yield name, data
    for i in range(6):
        yield f"noise {i}", rng.integers(0, 256, 200, np.uint8).tobytes()


def test_hostile_pictures():
    """Each is a picture within the limits, or a sentence; no crash, and no memory for what a header only claims."""
    files = dict(hostile())
    assert len(files) == 200
    limits, refused = PictureLimits(pixels=1 << 22), 0
    for data in files.values():
        try:
            pixels = decode(data, limits)
            assert pixels.dtype == np.uint8 and pixels.shape[2] == 3 and pixels.size <= 3 << 22
        except PictureError:
            refused += 1
    assert refused > 100
    for name in ("100000 x 1", "60000 x 60000", "tiff", "eps", "ppm", "text bomb", "profile bomb"):
        fails_with(PictureError, "pixels|cannot be read", decode, files[name], limits)


def test_limits():
    fails_with(PictureError, "file has 12 bytes, and 10 are taken", decode, bytes(12), PictureLimits(nbytes=10))
    fails_with(PictureError, "40 x 30 pixels has more than 100", decode, saved(noise(), "PNG"), PictureLimits(pixels=100))
    fails_with(PictureError, "more than 200 times as long", decode, saved(Image.new("1", (2010, 10)), "PNG"))


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind):
    assert decode(saved(noise(), kind)).shape == (30, 40, 3)
