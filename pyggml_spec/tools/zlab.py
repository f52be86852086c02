"""The z-lab layout of DFlash, DFlash2 and DSpark drafters (sources: llama.cpp's conversion/qwen.py; the reference implementation).

config.json counts layers by output, the GGUF by input: id k becomes k + 1. Drafters of the speculators library nest their sizes and count
by input (`aux_hidden_state_layer_ids`); the first row of their blocks drafts nothing.
"""

import math
from typing import Any

import numpy as np

from ..drafters.dflash import GELU
from ..errors import ConvertError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief
from . import checkpoint
from .checkpoint import HEADS, TOKENS, Config, Files, Layout, Source

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel", "LingDSparkModel")
ARCH = "dflash"

_TOP = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight"}
LAYER_TENSORS = checkpoint.LAYER_TENSORS | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_CONVOLUTIONS = {"attn_conv": "attention_conv", "ffn_conv": "mlp_conv"}
_MARKOV, _CONFIDENCE = "markov_head.", "confidence_head."


def _refuse_features(c: Config) -> None:
    """Refuses features that would be computed wrongly."""
    act, rope, causal = c.get("hidden_act", "hidden_activation") or "silu", c.rope_type, c.get("is_causal", "causal")
    features = (
        (act not in ("silu", *GELU), f"the activation {brief(act)} (silu and GELU are supported)"),
        (rope not in ("default", "linear", None), f"rope scaling of the type {brief(rope)} (default and linear are supported)"),
        (causal not in (None, False, True), f"the block direction {brief(causal)} (true or false)"),
        (bool(c.get("attention_bias")), "attention biases"),
        (c.get("rope_is_neox_style") is False, "interleaved rope (NEOX pairing is supported)"),
    )
    checkpoint.refuse(features)


def _target_layers(c: Config, target: GGUFFile) -> list[int]:
    n_target = checkpoint.target_layers(target)
    claimed = c.integer("num_target_layers", default=n_target)
    if claimed != n_target:
        there = f"{target.path.name} has {n_target}; {checkpoint.OTHER_TARGET}"
        raise ConvertError(f"the drafter was made for a target of {claimed} layers, but {there}")
    inputs = c.list("aux_hidden_state_layer_ids")
    ids = [i - 1 if type(i) is int else i for i in inputs] if inputs else c.list("target_layer_ids")
    if not ids:
        unknown = "the hidden states that the drafter reads are unknown"
        raise ConvertError(f"config.json has no target_layer_ids, so {unknown}; fetch the complete checkpoint")
    bad = [i for i in ids if type(i) is not int or not 0 <= i < n_target]
    if bad:
        there = f"{target.path.name} has the layers 0 to {n_target - 1}"
        raise ConvertError(f"config.json: target_layer_ids holds {brief(bad[0])}, but {there}")
    return [i + 1 for i in ids]


def _windows(c: Config, n_layer: int, notes: list[str]) -> tuple[int, list[bool]]:
    """(window, whether it applies per layer); (0, []) for none. ``layer_types`` decides; use_sliding_window = false disables it, as in the
    reference."""
    if c.get("use_swa") is True:
        return c.integer("swa_window_size", "sliding_window", high=(1 << 31) - 1), [True] * n_layer
    types = c.list("layer_types")
    if types is None:
        first = c.integer("max_window_layers", default=0, low=0) if c.get("use_sliding_window") is True else n_layer
        pattern = [i >= first for i in range(n_layer)]
    else:
        bad = [t for t in types if t not in ("full_attention", "sliding_attention")]
        if bad or len(types) != n_layer:
            wrong = f"holds {brief(bad[0])}" if bad else f"has {len(types)} entries for {n_layer} layers"
            raise ConvertError(f"config.json: layer_types {wrong}; full_attention and sliding_attention, one per layer, are supported")
        pattern = [t == "sliding_attention" for t in types]
    if not any(pattern):
        return 0, []
    if c.get("use_sliding_window") is False:
        notes.append("layer_types has sliding layers, but use_sliding_window is false: all layers see everything")
        return 0, []
    return c.integer("swa_window_size", "sliding_window", high=(1 << 31) - 1), pattern


def _scales(c: Config, target: GGUFFile, n_embd: int, notes: list[str]) -> dict[str, Any]:
    """Scales and soft-cap. Gemma targets scale embeddings by sqrt(n_embd), which configs omit."""
    arch = target.get("general.architecture", str)
    scale, cap = c.number("input_embedding_scale"), c.number("final_logit_softcapping")
    if scale is None and arch.startswith("gemma"):
        scale = math.sqrt(n_embd)
        notes.append(f"{arch} targets scale their embeddings: wrote an embedding scale of {scale:g}, which config.json does not mention")
    if cap is None:
        cap = target.get(f"{arch}.final_logit_softcapping", float, 0.0)
    named = {"embedding_scale": scale, "final_logit_softcapping": cap, "logit_scale": c.number("output_multiplier")}
    named["attention.value_scale"] = c.number("attention_value_scale")
    return {key: value for key, value in named.items() if value is not None and value > 0}


def read_layout(config: dict, files: Files, target: GGUFFile) -> Layout:
    """The GGUF for ``target`` from ``config`` and the tensors of ``files``. Raises ConvertError: an unsupported feature, or a drafter for
    another target."""
    c = Config(config, "dflash_config")
    notes: list[str] = []
    _refuse_features(c)
    n_embd, n_layer = c.integer("hidden_size"), c.integer("num_hidden_layers", high=256)
    checkpoint.check_hidden(n_embd, target)
    n_vocab, layers = checkpoint.vocabulary(c, target), _target_layers(c, target)
    partial = c.rope.get("partial_rotary_factor", c.top.get("partial_rotary_factor", 1.0))
    share = partial if isinstance(partial, (int, float)) and 0 < partial <= 1 else 0
    meta, shapes = checkpoint.sizes(c, target, n_layer, share)
    shapes |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (meta["attention.key_length"],))
    meta["block_size"] = c.integer("block_size", default=16, low=2, high=1024)
    meta["attention.causal"] = bool(c.get("is_causal", "causal"))
    meta["target_layers"] = np.array(layers, np.uint32)
    if target.array(f"{target.get('general.architecture', str)}.rope.dimension_sections") is not None:
        # multi-axis rope: the drafter uses the first axis (time)
        meta["rope.dimension_sections"] = np.array([meta["rope.dimension_count"] // 2, 0, 0, 0], np.int32)
    window, pattern = _windows(c, n_layer, notes)
    if window:
        meta |= {"attention.sliding_window": window, "attention.sliding_window_pattern": np.array(pattern)}
    meta |= _scales(c, target, n_embd, notes)
    if (act := c.get("hidden_act", "hidden_activation")) in GELU:
        meta["hidden_activation"] = act
    mask = c.integer("mask_token_id", default=target.metadata.get("tokenizer.ggml.mask_token_id"), low=0)
    if mask >= n_vocab:
        there = f"{target.path.name} has {n_vocab} tokens; {checkpoint.OTHER_TARGET}"
        raise ConvertError(f"config.json: mask_token_id is {mask}, but {there}")
    meta |= checkpoint.tokenizer(target) | {"tokenizer.ggml.mask_token_id": mask}
    wanted = {"fc.weight": Source("fc.weight", (n_embd, n_embd * len(layers)))}
    wanted |= {ours: Source(theirs, (n_embd,)) for theirs, ours in _TOP.items() if ours != "fc.weight"}
    for i in range(n_layer):
        wanted |= {f"blk.{i}.{ours}.weight": Source(f"layers.{i}.{theirs}.weight", shapes[ours]) for theirs, ours in LAYER_TENSORS.items()}
    _add_selector(c, files, meta, wanted, n_vocab)
    count, made, dspark = n_vocab, dict[str, np.ndarray](), is_dspark(config, files)
    if dspark:
        count, made = checkpoint.draft_vocabulary(c, files, n_vocab)
        _add_dspark(c, files, meta, wanted, n_vocab, count)
    wanted |= _ends(files, n_embd, n_vocab, count)
    return Layout(ARCH, meta, checkpoint.match(wanted, files, (TOKENS, "t2d") if dspark else ()), made, notes)


def is_dspark(config: dict, files: Files) -> bool:
    """Recognised by name, or by its heads."""
    heads = any(name.startswith((_MARKOV, _CONFIDENCE)) for name in checkpoint.plain_names(files))
    return heads or bool({*checkpoint.architectures(config)} & {*DSPARK})


def _ends(files: Files, n_embd: int, n_vocab: int, count: int) -> dict[str, Source]:
    """Embedding and head, if not the target's."""
    there, (embedding, head) = checkpoint.plain_names(files), HEADS
    if head not in there:
        if embedding in there:
            why = "an embedding of its own (embed_tokens) but no lm_head, so its head is ambiguous"
            raise ConvertError(f"the drafter has {why}; remove one or add the other")
        if count < n_vocab:
            known = f"its head knows {count} of the target's {n_vocab} tokens"
            raise ConvertError(f"the checkpoint has no tensor {head!r}, and {known}; fetch the complete one")
    rows = {embedding: n_vocab, head: count}
    return {ours: Source(theirs, (rows[theirs], n_embd)) for theirs, ours in HEADS.items() if theirs in there}


def _add_dspark(c: Config, files: Files, meta: dict[str, Any], wanted: dict[str, Source], n_vocab: int, count: int) -> None:
    """Keys and tensors specific to DSpark; ``count``: size of its vocabulary."""
    if (kind := c.get("markov_head_type") or "vanilla") != "vanilla":
        raise ConvertError(f"config.json: markov_head_type is {brief(kind)}; Markov heads of the type vanilla are supported")
    nested = "transformer_layer_config" in c.top or "aux_hidden_state_layer_ids" in c.top
    plain, first = checkpoint.plain_names(files), f"{_MARKOV}markov_w1.weight"
    stored = files[plain[first]].tensors[plain[first]].shape if first in plain else ()
    rank = c.integer("markov_rank", default=stored[-1] if stored else 1, high=1 << 16)
    wanted["markov_w1.weight"] = Source(first, (n_vocab, rank))
    wanted["markov_w2.weight"] = Source(f"{_MARKOV}markov_w2.weight", (count, rank))
    for part, shape in (("weight", (1, meta["embedding_length"] + rank)), ("bias", (1,))):
        if f"{_CONFIDENCE}proj.{part}" in plain:
            wanted[f"conf_proj.{part}"] = Source(f"{_CONFIDENCE}proj.{part}", shape)
    meta |= {"sample_from_anchor": c.flag("sample_from_anchor", not nested), "has_confidence_head": "conf_proj.weight" in wanted}


def _add_selector(c: Config, files: Files, meta: dict[str, Any], wanted: dict[str, Source], n_vocab: int) -> None:
    """Keys and tensors specific to DFlash2; none for DFlash."""
    plain, n_embd = checkpoint.plain_names(files), meta["embedding_length"]
    if c.get("selector_rank") is None and not any(name.startswith("candidate_selector.") for name in plain):
        return
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    taps, size, rank, top_k = numbers = [c.integer(key, high=1 << 16) for key in keys]
    if n_embd % size or n_embd < top_k * (top_k + 1):
        raise ConvertError(f"config.json: conv_group_size {size} or selector_top_k {top_k} does not fit hidden states of {n_embd} values")
    for kind in ("predecessor", "successor"):
        name = f"candidate_selector.{kind}_codebook"
        wanted[f"selector_{kind}.weight"] = Source(name if name in plain else f"{name}.weight", (n_vocab, rank))
    wanted["selector_hidden.weight"] = Source("candidate_selector.hidden_projection.weight", (rank, n_embd))
    for i in range(meta["block_count"]):
        for ours, theirs in _CONVOLUTIONS.items():
            projected = (2 * taps * (n_embd // size), n_embd)
            wanted[f"blk.{i}.{ours}_base"] = Source(f"layers.{i}.{theirs}.base_kernel", (2, taps, n_embd))
            wanted[f"blk.{i}.{ours}_proj.weight"] = Source(f"layers.{i}.{theirs}.kernel_projection.weight", projected)
    meta |= zip(keys, numbers)
