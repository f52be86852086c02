"""Layout of EAGLE-3 drafters.

`midlayer` or `layers.0` is the layer of pairs, further ones follow it; `d2t` holds target id minus drafter id. Hidden-state ids are layer inputs, as in the GGUF; the defaults
are the paper's: 2, the middle one, and the third from the end. The checkpoint rotates halves of a head, the GGUF adjacent pairs: rows of q
and k, and their norms, are permuted. Layers of the speculators library may be a Qwen3's, with norms of q and k; `fc_norm` norms each hidden
state of the target, and `norm_output` hands the next draft the state after the last norm. P-EAGLE has a `mask_hidden` in place of the target's
hidden states in the rows of masks, which is normed and projected here as those are. DeepSpec's read five of the target's layers and count them as
outputs. llama.cpp loads none with these norms, masks, further layers or more than three hidden states.

Sources: llama.cpp (conversion/llama.py), deepseek-ai/DeepSpec (modeling/eagle3/qwen3), vllm-project/speculators (models/eagle3, models/peagle), sgl-project/SpecForge
(modeling/draft/llama3_eagle.py), vLLM (v1/spec_decode/llm_base_proposer.py: `ptd_token_id`, `mask_hidden`; models/llama_eagle3.py).
"""

import math
from typing import Any

import numpy as np

from ..drafters.dflash import FEATURE_NORMS
from ..drafters.eagle3 import MASK_HIDDEN
from ..errors import ConvertError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief
from . import checkpoint
from .checkpoint import HEADS, TOKENS, Config, Files, Layout, Source

ARCH = "eagle3"
PARALLEL = ("PEagleSpeculator", "PEagleDraftModel")
DEEPSPEC = "Qwen3Eagle3Model"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", DEEPSPEC, *PARALLEL)
_READ = {
    "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm",
    "norm_output", "hidden_act", "max_window_layers", "sliding_window",
}  # fmt: skip
_OUTPUTS = "target_layer_ids"  # of DeepSpec: the target's layers whose outputs are read
_MASKS = ("mask_token_id", "ptd_token_id")  # of the speculators library, of vLLM
_MASK = "mask_hidden"
PLAIN = "LlamaForCausalLM"  # variants with a draft_vocab_size
_LAYERS = ("midlayer.", "layers.0.")
_HEAD_NORMS = {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
LAYER_TENSORS = checkpoint.LAYER_TENSORS | {"hidden_norm": "attn_norm_2"}
_ROPES = ("default", "linear", "yarn", "llama3", None)
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


def is_eagle3(config: dict, files: Files) -> bool:
    """Recognised by name, or by its single layer."""
    named = {*checkpoint.architectures(config)}
    if named & {*ARCHITECTURES} or any(name.startswith(_LAYERS[0]) for name in checkpoint.plain_names(files)):
        return True
    return PLAIN in named and "draft_vocab_size" in config and config.get("num_hidden_layers") == 1


def _refuse_features(c: Config) -> None:
    act = c.get("hidden_act") or "silu"
    features = (
        (act != "silu", f"the activation {brief(act)} (silu is supported)"),
        (c.rope_type not in _ROPES, f"rope scaling of the type {brief(c.rope_type)} (default, linear, yarn and llama3 are supported)"),
        (bool(c.get("attention_bias")) or bool(c.get("mlp_bias")), "biases"),
        (c.get("use_aux_hidden_state") is False, "one hidden state of the target (use_aux_hidden_state false; three are supported)"),
        (c.rope.get("partial_rotary_factor", c.top.get("partial_rotary_factor")) not in (None, 1, 1.0), "a partial_rotary_factor"),
        (bool(c.get("fc_norm")) and bool(c.get("norm_before_fc")), "both fc_norm and norm_before_fc"),
    )
    checkpoint.refuse(features)


def _captured(c: Config, target: GGUFFile, outputs: bool) -> list[int]:
    """The target's layers whose inputs are read."""
    n_target = checkpoint.target_layers(target)
    name, first, last = (_OUTPUTS, 0, n_target - 1) if outputs else ("eagle_aux_hidden_state_layer_ids", 0, n_target)
    ids = c.list(name) or ([] if outputs else [2, n_target // 2, n_target - 3])
    bad = [i for i in ids if type(i) is not int or not first <= i <= last]
    if bad or (not ids if outputs else len(ids) != 3):
        wrong = f"holds {brief(bad[0])}" if bad else f"has {len(ids)} entries"
        read = f"{'outputs' if outputs else 'three inputs'} of the layers {first} to {last} of {target.path.name} are read"
        raise ConvertError(f"config.json: {name} {wrong}; {read}")
    return [i + outputs for i in ids]


def _yarn(c: Config) -> dict[str, Any]:
    original = c.of_rope("original_max_position_embeddings")
    if original != int(original) or original >= 1 << 31:
        wanted = f"it has to be a whole number below {1 << 31}"
        raise ConvertError(f"config.json: original_max_position_embeddings is {original:g}, but {wanted}")
    meta = {"type": "yarn", "factor": c.of_rope("factor"), "original_context_length": int(original)}
    meta |= {ours: c.of_rope(theirs) for theirs, ours in _YARN.items() if c.rope.get(theirs) is not None}
    return {f"rope.scaling.{key}": value for key, value in meta.items()}


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


def _masked(c: Config, files: Files, plain: dict[str, str], norms: np.ndarray | None, n_embd: int, wide: int) -> np.ndarray:
    """What the rows of masks have in place of the target's hidden states, F32 [n_embd]: `mask_hidden`, normed and projected as those are."""
    eps = c.number("rms_norm_eps") or 1e-6
    hidden = checkpoint.vector(files, plain, _MASK, wide)
    if norms is not None:
        parts = hidden.reshape(len(norms), -1)
        hidden = (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps) * norms).ravel()
    if c.flag("norm_before_fc", False):
        hidden = hidden / np.sqrt((hidden**2).mean() + eps) * checkpoint.vector(files, plain, "input_norm.weight", wide)
    return checkpoint.times(files, plain, "fc.weight", n_embd, hidden).astype(np.float32)


def read_layout(config: dict, files: Files, target: GGUFFile) -> Layout:
    """The GGUF for ``target`` from ``config`` and the tensors of ``files``. Raises ConvertError: an unsupported feature, or a drafter for
    another target."""
    c = Config(config, "eagle_config")
    _refuse_features(c)
    nested, layers = "transformer_layer_config" in config, c.integer("num_hidden_layers", default=1, high=64)
    fixed: dict[str, tuple] = {
        "use_sliding_window": (False,),
        "layer_types": (["full_attention"] * layers,),
        "parallel_drafting": (True, False),
    }
    parallel = c.flag("parallel_drafting", bool({*checkpoint.architectures(config)} & {*PARALLEL}))
    # elsewhere it says that the head reads the state after the norm, as it does here
    deepspec = DEEPSPEC in checkpoint.architectures(config)
    more = {*(_MASKS if parallel else ()), *((_OUTPUTS, "num_target_layers") if deepspec else ())}
    c.refuse_unknown(_READ | more, fixed if nested else fixed | {"norm_output": (True,)})
    made_for = c.integer("num_target_layers", default=checkpoint.target_layers(target))
    if made_for != checkpoint.target_layers(target):
        there = f"{target.path.name} has {checkpoint.target_layers(target)}; {checkpoint.OTHER_TARGET}"
        raise ConvertError(f"the drafter was made for a target of {made_for} layers, but {there}")
    if deepspec and layers > 1:  # its further layers read pairs, too
        raise ConvertError(f"config.json asks for {layers} layers, and a {DEEPSPEC} has one here; {checkpoint.SUPPORTED} without it")
    n_embd, theirs = c.integer("hidden_size"), checkpoint.of_target(target, "embedding_length")
    wide = c.integer("target_hidden_size", default=theirs)
    checkpoint.check_hidden(wide, target)
    n_vocab = checkpoint.vocabulary(c, target)
    count, made = checkpoint.draft_vocabulary(c, files, n_vocab)
    meta, shapes = checkpoint.sizes(c, target, layers)
    size = meta["attention.key_length"]
    captured = _captured(c, target, deepspec)
    meta |= {"target_layers": np.array(captured, np.uint32), "target_hidden_size": wide}
    features = len(captured) * wide
    meta |= {key: c.flag(key, False) for key in ("norm_before_residual", "norm_before_fc")}
    if nested and c.flag("norm_output", False):
        meta["norm_output"] = True
    if c.rope_type == "yarn":
        meta |= _yarn(c)
    if c.rope_type == "llama3":
        made["rope_freqs.weight"] = _llama3_factors(c, meta["rope.freq_base"], size)
    pairs = shapes | {name: (shapes[name][0], 2 * n_embd) for name in ("attn_q", "attn_k", "attn_v")} | {"attn_norm_2": (n_embd,)}
    wanted = {"fc.weight": Source("fc.weight", (n_embd, features)), "output_norm.weight": Source("norm.weight", (n_embd,))}
    if meta["norm_before_fc"]:
        wanted["enc.output_norm.weight"] = Source("input_norm.weight", (features,))
    plain = checkpoint.plain_names(files)
    unread, first = [TOKENS, "t2d"], _LAYERS[0] if any(name.startswith(_LAYERS[0]) for name in plain) else _LAYERS[1]
    for i in range(layers):
        layer, of_layer = (f"layers.{i}.", shapes) if i else (first, pairs)
        for name, ours in LAYER_TENSORS.items():
            if ours in of_layer:
                head = size if ours in ("attn_q", "attn_k") else 0
                wanted[f"blk.{i}.{ours}.weight"] = Source(f"{layer}{name}.weight", of_layer[ours], head)
        for ours, name in _HEAD_NORMS.items():
            if (name := f"{layer}self_attn.{name}.weight") in plain:
                made[f"blk.{i}.{ours}.weight"] = checkpoint.vector(files, plain, name, size).reshape(2, size // 2).T.ravel().copy()
                unread.append(name)
    if len([name for name in made if "attn_" in name]) % (2 * layers):
        raise ConvertError(f"the checkpoint has no norm of q or k of some layers; {checkpoint.AGAIN}")
    if c.flag("fc_norm", False):
        names = [f"fc_norm.{i}.weight" for i in range(len(captured))]
        made[FEATURE_NORMS] = np.stack([checkpoint.vector(files, plain, name, wide) for name in names])
        unread += names
    if parallel:
        meta |= {"parallel_drafting": True, "mask_token_id": c.integer(*_MASKS, low=0, high=n_vocab - 1)}
        made[MASK_HIDDEN] = _masked(c, files, plain, made.get(FEATURE_NORMS), n_embd, features)
        unread.append(_MASK)
    rows = {"embed_tokens.weight": (n_vocab, n_embd != theirs), "lm_head.weight": (count, n_embd != theirs or count < n_vocab)}
    for name, (n, needed) in rows.items():
        if name in plain or needed:
            wanted[HEADS[name]] = Source(name, (n, n_embd))
    return Layout(ARCH, meta | checkpoint.tokenizer(target), checkpoint.match(wanted, files, tuple(unread)), made)
