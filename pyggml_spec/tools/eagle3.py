"""Layout of EAGLE-3 drafters (source: llama.cpp, conversion/llama.py).

One layer, `midlayer` or `layers.0`; `d2t` holds target id minus drafter id. Hidden-state ids are layer inputs, as in the GGUF; the defaults
are the paper's: 2, the middle one, and the third from the end. The checkpoint rotates halves of a head, the GGUF adjacent pairs: rows of q
and k are permuted.
"""

import math

import numpy as np
from gguf import GGUFValueType as Kind

from ..errors import ConvertError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief
from .checkpoint import (
    SUPPORTED,
    TOKENS,
    Config,
    Files,
    Layout,
    Meta,
    Source,
    architectures,
    check_hidden,
    draft_vocabulary,
    match,
    plain_names,
    sizes,
    target_layers,
    tokenizer,
    vocabulary,
)

ARCH = "eagle3"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
PLAIN = "LlamaForCausalLM"  # variants with a draft_vocab_size
_LAYERS = ("midlayer.", "layers.0.")
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPES = ("default", "linear", "yarn", "llama3", None)
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


def is_eagle3(config: dict, files: Files) -> bool:
    """Recognised by name, or by its single layer."""
    named = {*architectures(config)}
    layer = any(name.startswith(_LAYERS[0]) for name in plain_names(files))
    return (
        bool(named & {*ARCHITECTURES})
        or layer
        or (PLAIN in named and "draft_vocab_size" in config and config.get("num_hidden_layers") == 1)
    )


def _refuse_features(c: Config) -> None:
    act, layers = c.get("hidden_act") or "silu", c.integer("num_hidden_layers", default=1)
    wrong = (
        (layers != 1, f"{layers} layers (one is supported)"),
        (act != "silu", f"the activation {brief(act)} (silu is supported)"),
        (c.rope_type not in _ROPES, f"rope scaling of the type {brief(c.rope_type)} (default, linear, yarn and llama3 are supported)"),
        (bool(c.get("attention_bias")) or bool(c.get("mlp_bias")), "biases"),
        (c.get("use_aux_hidden_state") is False, "one hidden state of the target (use_aux_hidden_state false; three are supported)"),
        (c.rope.get("partial_rotary_factor", c.top.get("partial_rotary_factor")) not in (None, 1, 1.0), "a partial_rotary_factor"),
        (bool(c.get("parallel_drafting")), "all drafts in one pass (parallel_drafting)"),
    )
    for is_wrong, what in wrong:
        if is_wrong:
            raise ConvertError(f"config.json asks for {what}; {SUPPORTED} without it")


def _captured(c: Config, target: GGUFFile) -> list[int]:
    n_target = target_layers(target)
    ids = c.list("eagle_aux_hidden_state_layer_ids") or [2, n_target // 2, n_target - 3]
    bad = [i for i in ids if type(i) is not int or not 0 <= i <= n_target]
    if bad or len(ids) != 3:
        wrong = f"holds {brief(bad[0])}" if bad else f"has {len(ids)} entries"
        raise ConvertError(
            f"config.json: eagle_aux_hidden_state_layer_ids {wrong}; three inputs of the layers 0 to {n_target} of {target.path.name} are read"
        )
    return ids


def _yarn(c: Config) -> Meta:
    prefix = f"{ARCH}.rope.scaling"
    original = c.of_rope("original_max_position_embeddings")
    if original != int(original) or original >= 1 << 31:
        raise ConvertError(
            f"config.json: original_max_position_embeddings is {original:g}, but it has to be a whole number below {1 << 31}"
        )
    meta: Meta = {
        f"{prefix}.type": (Kind.STRING, "yarn"),
        f"{prefix}.factor": (Kind.FLOAT32, c.of_rope("factor")),
        f"{prefix}.original_context_length": (Kind.UINT32, int(original)),
    }
    return meta | {
        f"{prefix}.{ours}": (Kind.FLOAT32, c.of_rope(theirs)) for theirs, ours in _YARN.items() if c.rope.get(theirs) is not None
    }


def _llama3_factors(c: Config, base: float, size: int) -> np.ndarray:
    """Frequency divisors of Llama 3.1's rope scaling, F32 [size / 2]."""
    factor, original = c.of_rope("factor", 8.0), c.of_rope("original_max_position_embeddings", 8192.0)
    low, high = c.of_rope("low_freq_factor", 1.0), c.of_rope("high_freq_factor", 4.0)
    if low == high:
        raise ConvertError(f"config.json: low_freq_factor and high_freq_factor are both {low:g}; the second has to be larger")
    waves = 2 * math.pi * np.float32(base) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
    smooth = (original / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < original / high, 1, np.where(waves > original / low, factor, between)).astype(np.float32)


def read_layout(config: dict, files: Files, target: GGUFFile) -> Layout:
    """The GGUF for ``target`` from ``config`` and the tensors of ``files``. Raises ConvertError: an unsupported feature, or a drafter for
    another target."""
    c = Config(config, "eagle_config")
    _refuse_features(c)
    n_embd, theirs = c.integer("hidden_size"), target.get(f"{target.get('general.architecture', str)}.embedding_length", int)
    wide = c.integer("target_hidden_size", default=theirs)
    check_hidden(wide, target)
    n_vocab = vocabulary(c, target)
    count, made = draft_vocabulary(c, files, n_vocab)
    meta, shapes = sizes(c, ARCH, target, 1)
    size = meta[f"{ARCH}.attention.key_length"][1]
    before_fc = c.flag("norm_before_fc", False)
    meta[f"{ARCH}.target_layers"] = (Kind.ARRAY, _captured(c, target), Kind.UINT32)
    meta[f"{ARCH}.target_hidden_size"] = (Kind.UINT32, wide)
    meta[f"{ARCH}.norm_before_residual"] = (Kind.BOOL, c.flag("norm_before_residual", False))
    meta[f"{ARCH}.norm_before_fc"] = (Kind.BOOL, before_fc)
    if c.rope_type == "yarn":
        meta |= _yarn(c)
    if c.rope_type == "llama3":
        made["rope_freqs.weight"] = _llama3_factors(c, meta[f"{ARCH}.rope.freq_base"][1], size)
    meta |= tokenizer(target)
    shapes |= {name: (shapes[name][0], 2 * n_embd) for name in ("attn_q", "attn_k", "attn_v")} | {"attn_norm_2": (n_embd,)}
    wanted = {"fc.weight": Source("fc.weight", (n_embd, 3 * wide)), "output_norm.weight": Source("norm.weight", (n_embd,))}
    if before_fc:
        wanted["enc.output_norm.weight"] = Source("input_norm.weight", (3 * wide,))
    plain = plain_names(files)
    layer = _LAYERS[0] if any(name.startswith(_LAYERS[0]) for name in plain) else _LAYERS[1]
    for name, ours in LAYER_TENSORS.items():
        wanted[f"blk.0.{ours}.weight"] = Source(f"{layer}{name}.weight", shapes[ours], size if ours in ("attn_q", "attn_k") else 0)
    needed = {"embed_tokens.weight": n_embd != theirs, "lm_head.weight": n_embd != theirs or count < n_vocab}
    rows = {"embed_tokens.weight": ("token_embd.weight", n_vocab), "lm_head.weight": ("output.weight", count)}
    wanted |= {ours: Source(name, (n, n_embd)) for name, (ours, n) in rows.items() if name in plain or needed[name]}
    return Layout(ARCH, meta, match(wanted, files, (TOKENS, "t2d")), made)
