"""Checkpoints in the layouts that drafters are published in, made from GGUF drafters."""

import json
import struct
from pathlib import Path

import numpy as np

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.tools import eagle3
from pyggml_spec.tools.checkpoint import HEADS
from pyggml_spec.tools.quants import dequantise
from pyggml_spec.tools.zlab import _CONVOLUTIONS, _TOP, LAYER_TENSORS

_NAMES = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "<u2": "BF16", "|i1": "I8", "<i8": "I64", "|b1": "BOOL"}


def safetensors(tensors: dict[str, np.ndarray], **header) -> bytes:
    """A whole file; arrays of u2 are stored as BF16."""
    entries, data = {"__metadata__": {"format": "pt"}}, bytearray()
    for name, array in tensors.items():
        entries[name] = {
            "dtype": _NAMES[array.dtype.str],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += np.ascontiguousarray(array).data
    text = json.dumps({**entries, **header}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def floats(path: str | Path) -> dict[str, np.ndarray]:
    """Every tensor of a GGUF as F32, outermost dimension first."""
    with GGUFFile(path) as file:
        tensors = {name: t for name, t in file.tensors.items() if t.type_name != "i64"}
        rows = {name: dequantise(file.read(name), t.type, int(np.prod(t.shape))) for name, t in tensors.items()}
        return {name: rows[name].reshape(t.shape[::-1]).copy() for name, t in tensors.items()}


def _source_name(name: str) -> str:
    top = {ours: theirs for theirs, ours in (_TOP | HEADS).items()}
    top |= {f"markov_w{i}.weight": f"markov_head.markov_w{i}.weight" for i in (1, 2)}
    top |= {f"conf_proj.{part}": f"confidence_head.proj.{part}" for part in ("weight", "bias")}
    top |= {f"selector_{kind}.weight": f"candidate_selector.{kind}_codebook" for kind in ("predecessor", "successor")}
    top["selector_hidden.weight"] = "candidate_selector.hidden_projection.weight"
    if name in top:
        return top[name]
    if "_conv_" in name:
        _, layer, part = name.removesuffix(".weight").split(".")
        which, what = part.rsplit("_", 1)
        return f"layers.{layer}.{_CONVOLUTIONS[which]}.{'base_kernel' if what == 'base' else 'kernel_projection.weight'}"
    _, layer, part, _ = name.split(".")
    return f"layers.{layer}.{ {ours: theirs for theirs, ours in LAYER_TENSORS.items()}[part] }.weight"


def config_of(path: str | Path) -> dict:
    """The config.json that a drafter GGUF would have come from."""
    with GGUFFile(path) as file:
        m = {key.removeprefix("dflash."): value for key, value in file.metadata.items()}
        n_vocab = len(m["tokenizer.ggml.tokens"])
    layers = [int(v) - 1 for v in m["target_layers"]]
    return {
        **_sizes(m), "architectures": ["DFlashDraftModel"], "block_size": m["block_size"], "layer_types": ["full_attention"] * m["block_count"],
        "dflash_config": {"mask_token_id": m["tokenizer.ggml.mask_token_id"], "target_layer_ids": layers}, "model_type": "qwen3",
        "num_hidden_layers": m["block_count"], "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "vocab_size": n_vocab,
    }  # fmt: skip


def _sizes(m) -> dict:
    """What configs of every drafter say of its layers."""
    named = {
        "head_dim": "attention.key_length", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length", "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv", "rope_theta": "rope.freq_base",
    }  # fmt: skip
    return {**{name: m[key] for name, key in named.items()}, "hidden_act": "silu", "rms_norm_eps": 1e-6}


def export(drafter: str | Path, folder: Path, change=lambda config, tensors: None, prefix: str = "") -> Path:
    """Writes the checkpoint of a drafter GGUF after ``change`` had its way with config and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + _source_name(name): values for name, values in floats(drafter).items()}
    config = config_of(drafter)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def vocabulary_of(drafter: str | Path) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """d2t and t2d of a head that knows fewer tokens than the target, as they are published, and the keys that say so."""
    with GGUFFile(drafter) as file:
        n_vocab = len(file.metadata["tokenizer.ggml.tokens"])
        if "d2t" not in file.tensors:
            return {}, {"draft_vocab_size": n_vocab}
        ids = np.frombuffer(file.read("d2t"), np.int64).copy()
    known = np.zeros(n_vocab, bool)
    known[ids] = True
    return {"d2t": ids - np.arange(ids.size), "t2d": known}, {"draft_vocab_size": ids.size}


def as_dspark(drafter: str | Path, nested: bool):
    """For ``export``: the config of a DFlash becomes that of a DSpark, one object, or with sizes nested and layers counted by their inputs."""
    more, keys = vocabulary_of(drafter)

    def change(config, tensors):
        tensors.update(more)
        inner = config.pop("dflash_config")
        config |= {"architectures": ["Qwen3DSparkModel"], **keys, **inner}
        if nested:
            ids = config.pop("target_layer_ids")
            sizes = {key: config.pop(key) for key in [*config] if key not in (*keys, "mask_token_id", "block_size", "vocab_size")}
            config |= {
                "architectures": ["DSparkSpeculator"],
                "aux_hidden_state_layer_ids": [i + 1 for i in ids],
                "transformer_layer_config": sizes,
            }

    return change


def as_dflash2(drafter: str | Path):
    """For ``export``: the config of a DFlash becomes that of a DFlash2."""
    with GGUFFile(drafter) as file:
        numbers = {
            key: file.get(f"dflash.{key}", int) for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        }

    def change(config, tensors):
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= numbers

    return change


def apart(rows: np.ndarray, size: int) -> np.ndarray:
    """Rows of heads of ``size`` whose pairs are neighbours, with the pairs' halves apart."""
    return rows.reshape(-1, size // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def export_eagle3(drafter: str | Path, folder: Path, change=lambda config, tensors: None, layer: str = "midlayer") -> Path:
    """The same of an EAGLE-3 drafter. ``layer``: what its layer is called; "layers.0" nests the sizes, as the speculators library does."""
    folder.mkdir(parents=True, exist_ok=True)
    with GGUFFile(drafter) as file:
        m = {key.removeprefix("eagle3."): value for key, value in file.metadata.items()}
    top = {"fc.weight": "fc.weight", "output_norm.weight": "norm.weight", "enc.output_norm.weight": "input_norm.weight"}
    top |= {ours: theirs for theirs, ours in HEADS.items()}
    in_layer = {f"blk.0.{ours}.weight": f"{layer}.{theirs}.weight" for theirs, ours in eagle3.LAYER_TENSORS.items()}
    tensors, sizes = vocabulary_of(drafter)
    for name, values in floats(drafter).items():
        if name != "rope_freqs.weight":
            paired = name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight")
            tensors[(top | in_layer)[name]] = apart(values, m["attention.key_length"]) if paired else values
    inner = {**_sizes(m), "num_hidden_layers": 1, "vocab_size": len(m["tokenizer.ggml.tokens"])}
    said = {name: m[name] for name in ("norm_before_residual", "norm_before_fc", "target_hidden_size")}
    layers = [int(v) for v in m["target_layers"]]
    config = {"architectures": ["LlamaForCausalLMEagle3"], **sizes, "eagle_aux_hidden_state_layer_ids": layers, **said}
    if layer == "midlayer":
        config |= inner
    else:
        config |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": inner, "speculators_config": {"algorithm": "eagle3"}}
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder
