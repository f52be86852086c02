"""Sounds through libmtmd's encoders: rows, logits and greedy text against llama.cpp's own path, and an error of hostile files in bounded memory."""

import struct

import numpy as np
import pytest
from sessions import fails_with
from vision.families import FAMILIES, SOUNDS, file_of, wav, write_family

import pyggml_spec as ps
from pyggml_spec.errors import ModelError, PictureError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.tools.compare import nmse
from pyggml_spec.vision.encoder import check_encoder, encoder_kinds
from pyggml_spec.vision.pictures import PictureLimits
from pyggml_spec.vision.sounds import decode_sound, is_sound

pytest.importorskip("pyggml_spec._mtmd")
pytest.importorskip("miniaudio")
from vision.mtmd_oracle import MARKER, after_pictures


@pytest.mark.parametrize("family", SOUNDS)
def test_text_after_sounds_equals_llama_cpp(tmp_path, family):
    """Two sounds; and, where the encoder has both, a picture between them."""
    target, mmproj = write_family(tmp_path, family)
    files = [wav(rate=16000), wav(2.5, 16000, 1, 1)]
    if FAMILIES[family].sizes:
        files.insert(1, file_of(FAMILIES[family].sizes[0]))
    texts = "Listen: ", *[" and "] * (len(files) - 1), ". Say it."
    logits, ids, rows = after_pictures(target, mmproj, MARKER.join(texts), files)
    with ps.load(target, mmproj=mmproj, device="CPU", threads=1, kernels="ggml", n_ctx=2048, spec=["none"]) as session:
        prompt = session.picture_prompt(*(part for pair in zip(texts, [*files, ""], strict=True) for part in pair), special=True)
        assert len(prompt.pictures) == len(rows) >= 2
        assert all(np.array_equal(p.embeddings, theirs) for (_, p), theirs in zip(prompt.pictures, rows, strict=True))
        assert nmse(session.runner.logits(prompt)[-1], logits) < 1e-10
        assert [t for event in session.steps(prompt, 9, ignore_end=True) for t in event.tokens][:8] == ids
        encoded = session.encoder.encoded
        session.picture_prompt("Again: ", files[0])
        assert session.encoder.encoded == encoded
        other = session.picture_prompt(texts[0], wav(rate=16000, seed=5), special=True)
        first = session.picture_prompt(texts[0], files[0], special=True)
        assert len(other) == len(first) and other != first  # for the prefix cache, too


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 48000])
def test_rates(rate):
    samples = decode_sound(wav(2, rate), 16000)
    assert samples.size == 32000 and np.abs(np.fft.rfft(samples)).argmax() == 880  # 440 Hz of 2 s


def hostile():
    whole, rng = wav(), np.random.default_rng(3)
    yield from ((f"cut {n}", whole[:n]) for n in (12, 20, 40, 44, 60, 500))
    for name, at, value in (
        ("data", 40, 0xFFFFFFF0),
        ("rate 0", 24, 0),
        ("rate", 24, 0xFFFFFFFF),
        ("channels", 22, 0xFFFF),
        ("width", 34, 0),
        ("format", 20, 0x99),
    ):
        data = bytearray(whole)
        struct.pack_into("<I" if at in (40, 24) else "<H", data, at, value)
        yield name, bytes(data)
    for head in (b"RIFF\xff\xff\xff\xffWAVE", b"ID3\x04\0\0\x7f\x7f\x7f\x7f", b"\xff\xfb\x90\x00", b"fLaC\x00\x00\x00\x22" + b"\xff" * 34):
        for n in (0, 10, 4000):
            yield f"{head[:4]!r} {n}", head + rng.integers(0, 256, n, np.uint8).tobytes()
    for seed in range(30):
        data = bytearray(whole[:4000])
        for at in rng.integers(0, 60, 1 + seed % 6):
            data[at] = rng.integers(256)
        yield f"changed {seed}", bytes(data)


def test_hostile_sounds():
    """Each is a sound within the limits, or a sentence."""
    refused = 0
    for data in dict(hostile()).values():
        try:
            samples = decode_sound(data, 16000, PictureLimits(seconds=10))
            assert samples.dtype == np.float32 and 1600 <= samples.size <= 16 * 16000 and np.isfinite(samples).all()
        except PictureError:
            refused += 1
    assert refused > 20
    floats = bytearray(wav(0.5, 16000, 1, width=4))
    struct.pack_into("<H", floats, 20, 3)  # samples that are floats
    struct.pack_into("<f", floats, 100, np.nan)
    fails_with(PictureError, "NaN or Inf", decode_sound, bytes(floats), 16000)
    hour = wav(1, 8000, 1)[:44] + bytes(8000 * 2 * 3600)
    hour = hour[:40] + struct.pack("<I", len(hour) - 44) + hour[44:]
    fails_with(PictureError, "file has .* bytes", decode_sound, hour, 16000)
    fails_with(PictureError, "longer than 1800 s", decode_sound, hour, 16000, PictureLimits(nbytes=1 << 30))
    fails_with(PictureError, "has 0.05 s, or its file is cut off", decode_sound, wav(0.05), 16000)
    assert not is_sound(file_of((8, 8), kind="JPEG")) and not is_sound(file_of((8, 8))) and not is_sound(b"")


def test_shortest_sounds(tmp_path):
    """Encoders that do not pad, with the least that is taken."""
    target, mmproj = write_family(tmp_path, "gemma4")
    with ps.load(target, mmproj=mmproj, device="CPU", threads=1, n_ctx=512) as session:
        assert len(session.picture_prompt("x", wav(0.1, 16000, 1))) > 3
        fails_with(PictureError, "a sound of 30.0 s takes .* rows", session.picture_prompt, "x", wav(30, 16000, 1))


def test_what_is_refused(tmp_path):
    target, mmproj = write_family(tmp_path, "llama")
    with ps.load(target, mmproj=mmproj, device="CPU", threads=1, n_ctx=512) as session:
        fails_with(PictureError, "encodes pictures, and no sounds", session.picture_prompt, "x", wav())
    target, mmproj = write_family(tmp_path, "ultravox")
    with GGUFFile(mmproj) as file:
        assert encoder_kinds(file) == {"audio": "ultravox"}
        file.metadata["clip.audio.projector_type"] = "voxtral"
        fails_with(ModelError, "joins 4 frames of 750", check_encoder, file)
        file.tensors.pop("a.position_embd.weight")
        fails_with(ModelError, "fewer than 1500 frames", check_encoder, file)
    with ps.load(target, mmproj=mmproj, device="CPU", threads=1, n_ctx=512) as session:
        fails_with(PictureError, "encodes sounds, and no pictures", session.picture_prompt, "x", file_of((8, 8)))
