"""Ways to break the embedded pair, one at a time. Each is (what the doctor has to name, a function of the drafter's taken-apart file)."""

from collections.abc import Callable

import numpy as np
from gguf_io.build import ARR, BOOL, F32, I32, STR, U32, Model

from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.quants import dequantise, quantise, type_id

Q8_0 = type_id("q8_0")


def values(model: Model, name: str) -> np.ndarray:
    """The tensor as F32 [rows, n]."""
    shape, kind, data = model.tensors[name]
    return dequantise(data, kind, int(np.prod(shape))).reshape(-1, shape[0]).copy()


def store(model: Model, name: str, new: np.ndarray, kind: int = Q8_0) -> None:
    shape = model.tensors[name][0] if name in model.tensors else new.shape[::-1]
    model.tensors[name] = [shape, kind, (new.astype(np.float32) if kind == 0 else quantise(new, kind)).tobytes()]


def _key(name: str, kind: int, value) -> Callable[[Model], None]:
    return lambda model: model.keys.__setitem__(name, (kind, value))


def _swapped_tokens(model: Model) -> None:
    tokens = model.keys["tokenizer.ggml.tokens"][1][1]
    tokens[300], tokens[301] = tokens[301], tokens[300]


def _other_merges(model: Model) -> None:
    merges = model.keys["tokenizer.ggml.merges"][1][1]
    merges[100], merges[101] = merges[101], merges[100]


def _own_embedding(model: Model) -> None:
    model.tensors["token_embd.weight"] = list(Model(DEMO_TARGET).tensors["token_embd.weight"])


def _nan_mask_embedding(model: Model) -> None:
    _own_embedding(model)
    (_width, _), _kind, data = model.tensors["token_embd.weight"]
    row, broken = len(data) // 4096, bytearray(data)
    broken[4095 * row : 4095 * row + 2] = np.float16(np.nan).tobytes()  # the first block's scale
    model.tensors["token_embd.weight"][2] = bytes(broken)


def _zero_norm(model: Model) -> None:
    store(model, "blk.1.attn_norm.weight", np.zeros((1, 512), np.float32), 0)
    model.tensors["blk.1.attn_norm.weight"][0] = (512,)


def _nan_weight(model: Model) -> None:
    norm = values(model, "blk.0.ffn_norm.weight")
    norm[0, 7] = np.nan
    store(model, "blk.0.ffn_norm.weight", norm, 0)


def _coarse(model: Model) -> None:
    """Twice through three bits and less: what a careless re-quantisation leaves."""
    for name, (_shape, kind, _) in list(model.tensors.items()):
        if kind == Q8_0:
            store(model, name, values(model, name), type_id("q2_K"))


def _rotated_features(model: Model) -> None:
    """The drafter of a target whose residual stream has another basis, as every other training run's has."""
    rng, fc = np.random.default_rng(3), values(model, "fc.weight")
    for i in range(4):
        turn, _ = np.linalg.qr(rng.standard_normal((512, 512)))
        fc[:, 512 * i : 512 * (i + 1)] = fc[:, 512 * i : 512 * (i + 1)] @ turn
    store(model, "fc.weight", fc)


BROKEN: dict[str, tuple[str, Callable[[Model], None]]] = {
    "mask token is another token": ("mask token", _key("tokenizer.ggml.mask_token_id", U32, 4094)),
    "block of 4": ("block size", _key("dflash.block_size", U32, 4)),
    "block of 32": ("block size", _key("dflash.block_size", U32, 32)),
    "layer ids + 1": ("target layers", _key("dflash.target_layers", ARR, (I32, [2, 5, 7, 8]))),
    "layer ids - 1": ("target layers", _key("dflash.target_layers", ARR, (I32, [0, 3, 5, 6]))),
    "layer id outside the target": ("target layers", _key("dflash.target_layers", ARR, (I32, [2, 5, 7, 9]))),
    "rope base of another model": ("rope base", _key("dflash.rope.freq_base", F32, 1e6)),
    "half of each head rotated": ("rope sections", _key("dflash.rope.dimension_count", U32, 32)),
    "attention scale 1": ("attention scale", _key("dflash.attention.scale", F32, 1.0)),
    "another activation": ("activation", _key("dflash.hidden_activation", STR, "gelu")),
    "sliding window of 16": ("sliding window", lambda m: (_key("dflash.attention.sliding_window", U32, 16)(m),
                                                          _key("dflash.attention.sliding_window_pattern", ARR, (BOOL, [True, True]))(m))),
    "two-bit weights": ("drafter quantisation", _coarse),
    "drafter of another target": ("fit to this target", _rotated_features),
}  # fmt: skip
AT_A_GLANCE: dict[str, tuple[str, Callable[[Model], None]]] = {
    "tokens swapped": ("tokenizer", _swapped_tokens),
    "mask token outside the vocabulary": ("mask token", _key("tokenizer.ggml.mask_token_id", U32, 5000)),
    "mask embedding is NaN": ("mask embedding", _nan_mask_embedding),
    "rope sections leave pairs out": ("rope sections", _key("dflash.rope.dimension_sections", ARR, (I32, [8, 8, 8, 8]))),
    "embeddings scaled": ("embedding scale", _key("dflash.embedding_scale", F32, 512**0.5)),
    "tight soft-cap": ("soft-cap", _key("dflash.final_logit_softcapping", F32, 0.25)),
    "a norm zeroed": ("drafter weights", _zero_norm),
    "merges of another tokenizer": ("tokenizer", _other_merges),
    "a weight is NaN": ("drafter weights", _nan_weight),
    "an activation that nobody has": ("activation", _key("dflash.hidden_activation", STR, "relu")),
    "window without its pattern": ("sliding window", _key("dflash.attention.sliding_window", U32, 512)),
    "no mask token": ("mask token", lambda m: m.keys.pop("tokenizer.ggml.mask_token_id")),
    "no target layers": ("target layers", lambda m: m.keys.pop("dflash.target_layers")),
    "block of 1": ("block size", _key("dflash.block_size", U32, 1)),
}
"""What the files alone or four blocks give away."""


def write_loud_target(path, factor: float) -> None:
    """The embedded target with a residual stream ``factor`` (a power of two) times as large: same text, larger hidden states."""
    model = Model(DEMO_TARGET)
    for name, tensor in model.tensors.items():
        if name.split(".")[-2] in ("token_embd", "attn_output", "ssm_out", "ffn_down"):
            blocks = np.frombuffer(tensor[2], np.uint8).reshape(-1, 34).copy()
            scales = blocks[:, :2].copy().view(np.float16) * np.float16(factor)
            blocks[:, :2] = scales.astype(np.float16).view(np.uint8)
            tensor[2] = blocks.tobytes()
    model.write(path)


def write_own_embedding(path) -> None:
    """The embedded drafter with a copy of the embedding, for a target whose own is another."""
    model = Model(DEMO_DRAFTER)
    _own_embedding(model)
    model.write(path)


def write(name: str, path) -> str:
    """Writes the broken drafter ``name``; returns the check that has to fail."""
    cause, change = {**BROKEN, **AT_A_GLANCE}[name]
    model = Model(DEMO_DRAFTER)
    change(model)
    model.write(path)
    return cause
