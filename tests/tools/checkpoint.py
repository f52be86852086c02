"""Checkpoints in the z-lab layout, made from GGUF drafters."""

import json
import struct
from pathlib import Path

import numpy as np

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.tools.quants import dequantise
from pyggml_spec.tools.zlab import _CONVOLUTIONS, _LAYER, _TOP

_NAMES = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "<u2": "BF16", "|i1": "I8"}


def safetensors(tensors: dict[str, np.ndarray], **header) -> bytes:
    """A whole file; arrays of u2 are stored as BF16."""
    entries, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        entries[name] = {"dtype": _NAMES[array.dtype.str], "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps({**entries, **header}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def floats(path: str | Path) -> dict[str, np.ndarray]:
    """Every tensor of a GGUF as F32, outermost dimension first."""
    with GGUFFile(path) as file:
        return {
            name: dequantise(file.read(name), t.type, int(np.prod(t.shape))).reshape(t.shape[::-1]).copy()
            for name, t in file.tensors.items()
        }


def _source_name(name: str) -> str:
    top = {ours: theirs for theirs, ours in _TOP.items()}
    top |= {f"selector_{kind}.weight": f"candidate_selector.{kind}_codebook" for kind in ("predecessor", "successor")}
    top["selector_hidden.weight"] = "candidate_selector.hidden_projection.weight"
    if name in top:
        return top[name]
    if "_conv_" in name:
        _, layer, part = name.removesuffix(".weight").split(".")
        which, what = part.rsplit("_", 1)
        return f"layers.{layer}.{_CONVOLUTIONS[which]}.{'base_kernel' if what == 'base' else 'kernel_projection.weight'}"
    _, layer, part, _ = name.split(".")
    return f"layers.{layer}.{ {ours: theirs for theirs, ours in _LAYER.items()}[part] }.weight"


def config_of(path: str | Path) -> dict:
    """The config.json that a drafter GGUF would have come from."""
    with GGUFFile(path) as file:
        m = {key.removeprefix("dflash."): value for key, value in file.metadata.items()}
        n_vocab = len(m["tokenizer.ggml.tokens"])
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": m["block_size"],
        "dflash_config": {"mask_token_id": m["tokenizer.ggml.mask_token_id"], "target_layer_ids": [int(v) - 1 for v in m["target_layers"]]},
        "head_dim": m["attention.key_length"],
        "hidden_act": "silu",
        "hidden_size": m["embedding_length"],
        "intermediate_size": m["feed_forward_length"],
        "layer_types": ["full_attention"] * m["block_count"],
        "max_position_embeddings": m["context_length"],
        "model_type": "qwen3",
        "num_attention_heads": m["attention.head_count"],
        "num_hidden_layers": m["block_count"],
        "num_key_value_heads": m["attention.head_count_kv"],
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": m["rope.freq_base"],
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": n_vocab,
    }


def export(drafter: str | Path, folder: Path, change=lambda config, tensors: None, prefix: str = "") -> Path:
    """Writes the checkpoint of a drafter GGUF after ``change`` had its way with config and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + _source_name(name): values for name, values in floats(drafter).items()}
    config = config_of(drafter)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder
