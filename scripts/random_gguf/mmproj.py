"""Random encoders of pictures and sounds (`mmproj`) for libmtmd: qwen3vl with deepstack, gemma3, gemma4v (with gemma4ua), idefics3 (SmolVLM), pixtral (Mistral 3),
glm4v, muse-glimmer, ultravox and qwen2a.

python scripts/random_gguf/mmproj.py KIND FILE N_EMBD [TYPE]     N_EMBD: of the target
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from random_gguf.model import Writer

CONTROL = {  # tokens around pictures that the target's vocabulary has to have
    "qwen3vl_merger": ("<|vision_start|>", "<|vision_end|>"), "gemma3": ("<start_of_image>", "<end_of_image>"), "gemma4v": ("<|image>", "<image|>", "<|audio>", "<audio|>"), "pixtral": ("[IMG_END]",), "glm4v": ("<|begin_of_image|>", "<|end_of_image|>"), "ultravox": (),
    "muse-glimmer": ("<|image_start|>", "<|image_end|>"),
    "qwen2a": ("<|audio_bos|>", "<|audio_eos|>"),
    "idefics3": ("<fake_token_around_image>", "<global-img>", "\u010a\u010a", *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5))),
}  # fmt: skip


@dataclass(frozen=True)
class Encoder:
    """Sizes of an encoder."""

    n_embd: int = 64
    n_head: int = 4
    n_layer: int = 3
    n_ff: int = 128
    image_size: int = 64
    patch: int = 8
    merge: int = 2
    deepstack: tuple[int, ...] = (0, 2)
    longest: int = 128
    n_mel: int = 40


SMOLVLM = Encoder(768, 12, 12, 3072, 512, 16, 4, (), 2048)  # SmolVLM-256M
QWEN3VL = Encoder(1024, 16, 24, 4096, 768, 16, 2, (5, 11, 17))  # Qwen3-VL-4B
QWEN35 = replace(QWEN3VL, deepstack=())  # Qwen3.5-4B


def write_mmproj(path: str | Path, kind: str, n_text: int, e: Encoder = Encoder(), quant: str = "F32", seed: int = 3) -> Path:
    """Writes an encoder of ``kind`` for a target whose rows have ``n_text`` values."""
    w, n = Writer(Path(path), "clip", quant, seed), e.n_embd
    out = w.out
    out.add_bool("clip.use_silu" if kind in ("pixtral", "glm4v") else "clip.use_gelu", True)
    if kind in SOUNDS:
        _sound_keys(w, kind, e, n_text)
        _whisper(w, kind, e, n_text)
        w.close()
        return Path(path)
    out.add_bool("clip.has_vision_encoder", True)
    out.add_string("clip.vision.projector_type", kind)
    if kind == "gemma4v":  # its sounds have no encoder, but a projection
        _sound_keys(w, "gemma4ua", e, n_text)
        _linear(w, "mm.a.input_projection", 640, n_text, bias=False)
    for key, value in {
        "embedding_length": n, "feed_forward_length": e.n_ff, "block_count": e.n_layer, "projection_dim": n_text, "attention.head_count": e.n_head,
        "image_size": e.image_size, "patch_size": e.patch, "projector.scale_factor": e.merge, "spatial_merge_size": e.merge,
        "preproc_image_size": e.longest,
    }.items():  # fmt: skip
        out.add_uint32(f"clip.vision.{key}", value)
    out.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        out.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    _KINDS[kind](w, e, n_text)
    w.close()
    return Path(path)


def _f32(w: Writer, name: str, *shape: int, gain: float = 1.0) -> None:
    w.out.add_tensor(name, (w.rng.standard_normal(shape) * gain / shape[-1] ** 0.5).astype(np.float32))


def _linear(w: Writer, name: str, n_in: int, n_out: int, bias: bool = True) -> None:
    w.matrix(f"{name}.weight", n_in, n_out)
    if bias:
        w.vector(f"{name}.bias", n_out, -0.1, 0.1)


def _norm(w: Writer, name: str, n: int, bias: bool = True) -> None:
    w.vector(f"{name}.weight", n, 0.5, 1.5)
    if bias:
        w.vector(f"{name}.bias", n, -0.1, 0.1)


def _patches(w: Writer, e: Encoder, more: bool = False) -> None:
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1")[: 1 + more]:
        w.out.add_tensor(name, (w.rng.standard_normal((e.n_embd, 3, e.patch, e.patch)) * (3 * e.patch**2) ** -0.5).astype(np.float32))
    w.vector("v.patch_embd.bias", e.n_embd, -0.1, 0.1)
    _f32(w, "v.position_embd.weight", (e.image_size // e.patch) ** 2, e.n_embd, gain=4.0)


def _layers(w: Writer, e: Encoder, joined: bool, prefix: str = "v") -> None:
    n = e.n_embd
    for i in range(e.n_layer):
        b = f"{prefix}.blk.{i}."
        _norm(w, b + "ln1", n)
        _norm(w, b + "ln2", n)
        for name, size in (("attn_qkv", 3 * n),) if joined else (("attn_q", n), ("attn_k", n), ("attn_v", n)):
            _linear(w, b + name, n, size, bias=prefix == "v" or name != "attn_k")
        _linear(w, b + "attn_out", n, n)
        _linear(w, b + "ffn_up", n, e.n_ff)
        _linear(w, b + "ffn_down", e.n_ff, n)
    _norm(w, f"{prefix}.post_ln", n)


def _qwen3vl(w: Writer, e: Encoder, n_text: int) -> None:
    w.out.add_array("clip.vision.is_deepstack_layers", [i in e.deepstack for i in range(e.n_layer)])
    _patches(w, e, more=True)
    _layers(w, e, joined=True)
    wide = 4 * e.n_embd
    for i in e.deepstack:
        _norm(w, f"v.deepstack.{i}.norm", wide)
        _linear(w, f"v.deepstack.{i}.fc1", wide, wide)
        _linear(w, f"v.deepstack.{i}.fc2", wide, n_text)
    _linear(w, "mm.0", wide, wide)
    _linear(w, "mm.2", wide, n_text)


def _gemma3(w: Writer, e: Encoder, n_text: int) -> None:
    _patches(w, e)
    _layers(w, e, joined=False)
    _f32(w, "mm.input_projection.weight", e.n_embd, n_text, gain=n_text**0.5 / e.n_embd**0.5)
    w.vector("mm.soft_emb_norm.weight", e.n_embd, 0.5, 1.5)


def _gemma4v(w: Writer, e: Encoder, n_text: int) -> None:
    n, size = e.n_embd, e.n_embd // e.n_head
    w.out.add_tensor("v.patch_embd.weight", (w.rng.standard_normal((n, 3, e.patch, e.patch)) * (3 * e.patch**2) ** -0.5).astype(np.float32))
    _f32(w, "v.position_embd.weight", 2, 10240, n, gain=4.0)
    for i in range(e.n_layer):
        b = f"v.blk.{i}."
        for name in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
            _norm(w, b + name, n, bias=False)
        for name in ("attn_q_norm", "attn_k_norm"):
            _norm(w, b + name, size, bias=False)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            _linear(w, b + name, n, n, bias=False)
        for name, n_in, n_out in (("ffn_gate", n, e.n_ff), ("ffn_up", n, e.n_ff), ("ffn_down", e.n_ff, n)):
            _linear(w, b + name, n_in, n_out, bias=False)
    _linear(w, "mm.input_projection", n, n_text, bias=False)


def _idefics3(w: Writer, e: Encoder, n_text: int) -> None:
    _patches(w, e)
    _layers(w, e, joined=False)
    _linear(w, "mm.model.fc", e.n_embd * e.merge**2, n_text, bias=False)


def _gated_layers(w: Writer, e: Encoder) -> None:
    """With RMS norms and gates."""
    n = e.n_embd
    for i in range(e.n_layer):
        b = f"v.blk.{i}."
        for name in ("ln1", "ln2"):
            _norm(w, b + name, n, bias=False)
        for name, n_in, n_out in (
            *((f"attn_{part}", n, n) for part in ("q", "k", "v", "out")),
            ("ffn_gate", n, e.n_ff),
            ("ffn_up", n, e.n_ff),
            ("ffn_down", e.n_ff, n),
        ):
            _linear(w, b + name, n_in, n_out, bias=False)


def _pixtral(w: Writer, e: Encoder, n_text: int) -> None:
    _patches(w, e)
    _norm(w, "v.pre_ln", e.n_embd, bias=False)
    _gated_layers(w, e)
    _norm(w, "mm.input_norm", e.n_embd, bias=False)
    _linear(w, "mm.patch_merger", e.n_embd * e.merge**2, e.n_embd, bias=False)
    _linear(w, "mm.1", e.n_embd, n_text, bias=False)
    _linear(w, "mm.2", n_text, n_text, bias=False)
    w.vector("v.token_embd.img_break", n_text, -1.0, 1.0)


def _glm4v(w: Writer, e: Encoder, n_text: int) -> None:
    n = e.n_embd
    _patches(w, e, more=True)
    _norm(w, "v.norm_embd", n, bias=False)
    _gated_layers(w, e)
    _norm(w, "v.post_ln", n, bias=False)
    w.out.add_tensor(
        "mm.patch_merger.weight", (w.rng.standard_normal((n_text, n, e.merge, e.merge)) / (n * e.merge**2) ** 0.5).astype(np.float32)
    )
    w.vector("mm.patch_merger.bias", n_text, -0.1, 0.1)
    _linear(w, "mm.model.fc", n_text, n_text, bias=False)
    _norm(w, "mm.post_norm", n_text)
    for name, n_in, n_out in (("mm.up", n_text, e.n_ff), ("mm.gate", n_text, e.n_ff), ("mm.down", e.n_ff, n_text)):
        _linear(w, name, n_in, n_out, bias=False)


def _muse_glimmer(w: Writer, e: Encoder, n_text: int) -> None:
    _patches(w, e)
    _norm(w, "v.pre_ln", e.n_embd)
    _layers(w, e, joined=False)
    for i, (n_in, n_out) in enumerate(((e.n_embd * e.merge**2, e.n_ff), (e.n_ff, e.n_ff), (e.n_ff, n_text))):
        _linear(w, f"mm.{i}", n_in, n_out, bias=False)


SOUNDS = "ultravox", "qwen2a"


def _sound_keys(w: Writer, kind: str, e: Encoder, n_text: int) -> None:
    w.out.add_bool("clip.has_audio_encoder", True)
    w.out.add_string("clip.audio.projector_type", kind)
    for key, value in {
        "embedding_length": e.n_embd, "feed_forward_length": e.n_ff, "block_count": e.n_layer if kind in SOUNDS else 0, "projection_dim": n_text,
        "attention.head_count": e.n_head, "num_mel_bins": e.n_mel, "projector.stack_factor": 4,
    }.items():  # fmt: skip
        w.out.add_uint32(f"clip.audio.{key}", value)
    w.out.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)


def _whisper(w: Writer, kind: str, e: Encoder, n_text: int) -> None:
    n = e.n_embd
    for i, n_in in ((1, e.n_mel), (2, n)):
        values = w.rng.standard_normal((n, n_in, 3)) * (3 * n_in) ** -0.5
        w.out.add_tensor(f"a.conv1d.{i}.weight", values.astype(np.float16))  # ggml convolves with no other type
        w.out.add_tensor(f"a.conv1d.{i}.bias", (w.rng.standard_normal((n, 1)) / 10).astype(np.float32))
    _f32(w, "a.position_embd.weight", 1500, n, gain=4.0)
    _layers(w, e, joined=False, prefix="a")
    if kind == "ultravox":
        _norm(w, "mm.a.norm_pre", 4 * n, bias=False)
        _norm(w, "mm.a.norm_mid", n, bias=False)
        _linear(w, "mm.a.mlp.1", 4 * n, 2 * n, bias=False)
        _linear(w, "mm.a.mlp.2", n, n_text, bias=False)
    else:
        _linear(w, "mm.a.fc", n, n_text)


_KINDS: dict[str, Callable[[Writer, Encoder, int], None]] = {
    "qwen3vl_merger": _qwen3vl, "gemma3": _gemma3, "gemma4v": _gemma4v, "idefics3": _idefics3, "pixtral": _pixtral, "glm4v": _glm4v, "muse-glimmer": _muse_glimmer,
}  # fmt: skip

if __name__ == "__main__":
    if len(sys.argv) not in (4, 5) or sys.argv[1] not in (*_KINDS, *SOUNDS):
        sys.exit(f"usage: python scripts/random_gguf/mmproj.py KIND FILE N_EMBD [TYPE]; KIND is one of {', '.join((*_KINDS, *SOUNDS))}")
    print(write_mmproj(sys.argv[2], sys.argv[1], int(sys.argv[3]), quant=(sys.argv[4:] or ["F32"])[0]))
