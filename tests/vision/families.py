"""Random targets with the encoders of pictures and sounds that fit them, and files of them."""

import io
import wave
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from random_gguf.archs import WRITERS
from random_gguf.described import write_described
from random_gguf.mmproj import CONTROL, Encoder, write_mmproj
from random_gguf.model import Shape


class Family(NamedTuple):
    """``kind`` of the encoder; ``arch`` and ``keys`` of the target; ``sizes`` of two pictures, none where it encodes sounds alone."""

    kind: str
    arch: str
    encoder: Encoder
    sizes: tuple[tuple[int, int], ...] = ()
    keys: dict[str, Any] = {}


FAMILIES = {
    "qwen3vl": Family("qwen3vl_merger", "qwen3vl", Encoder(), ((96, 64), (70, 130)), {"n_deepstack_layers": 2}),
    "qwen35": Family("qwen3vl_merger", "qwen35", Encoder(deepstack=()), ((96, 64), (70, 130))),
    "gemma3": Family("gemma3", "gemma3", Encoder(), ((96, 64), (64, 64))),
    "gemma4": Family("gemma4v", "gemma4", Encoder(merge=3), ((300, 200), (100, 200))),
    "llama": Family("idefics3", "llama", Encoder(deepstack=()), ((96, 64), (200, 90))),
    "mistral3": Family("pixtral", "mistral3", Encoder(), ((96, 64), (70, 130))),
    "glm4": Family("glm4v", "glm4", Encoder(), ((96, 64), (70, 130)), {"rope.dimension_sections": np.array([8, 12, 12, 0])}),
    "muse-glimmer": Family("muse-glimmer", "muse-glimmer", Encoder(), ((96, 64), (70, 130))),
    "ultravox": Family("ultravox", "llama", Encoder()),
    "qwen2-audio": Family("qwen2a", "qwen2", Encoder()),
}
SEEING = [name for name, family in FAMILIES.items() if family.sizes]
SOUNDS = ["gemma4", "ultravox", "qwen2-audio"]


def write_family(folder, name, quant="F32", encoder=None, **shape):
    """Target and encoder of a family; ``encoder``: other sizes of it."""
    family, shape = FAMILIES[name], {"n_ff": 128, **shape}
    shape, path = Shape(control=CONTROL[family.kind], **shape), folder / "t.gguf"
    if family.arch in WRITERS and not family.keys:
        target = WRITERS[family.arch](path, shape, quant)
    else:
        target = write_described(family.arch, path, shape, quant, keys=family.keys)
    return target, write_mmproj(folder / "mmproj-t.gguf", family.kind, shape.n_embd, encoder or family.encoder, quant)


def file_of(size, seed=0, kind="PNG"):
    """Noise of ``size``, (width, height)."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)).save(out, kind)
    return out.getvalue()


def wav(seconds=1.3, rate=44100, channels=2, seed=0, width=2):
    """A sound: 440 Hz in noise."""
    rng, t = np.random.default_rng(seed), np.arange(int(seconds * rate))
    x = np.sin(t * 2 * np.pi * 440 / rate) / 2 + rng.normal(0, 0.1, t.size)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes((np.repeat(x[:, None], channels, 1) * 20000).astype(f"<i{width}").tobytes())
    return out.getvalue()
