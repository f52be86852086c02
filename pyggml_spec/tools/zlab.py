"""Layouts of drafters that are DFlash underneath: z-lab's DFlash and DFlash2, JetSpec, DSpark, Laguna's, and those of the speculators library.

config.json counts layers by output, the GGUF by input: id k becomes k + 1. Drafters of the speculators library nest their sizes and count
by input (`aux_hidden_state_layer_ids`); the first row of their blocks drafts nothing.
Which layers are causal: as `is_causal` or `causal` says, JetSpec's `causal_head`, the speculators library's `sliding_window_non_causal`; where
nothing does, the sliding layers are and the others are not.

Sources: the reference implementations z-lab/dflash (dflash/model.py), hao-ai-lab/JetSpec (jetspec/models/draft_head.py),
vllm-project/speculators (models/dflash, models/dspark), deepseek-ai/DeepSpec (modeling/dspark); vLLM (models/qwen3_dflash.py,
models/laguna_dflash.py); llama.cpp (conversion/qwen.py, conversion/gemma.py).
"""

import math
from typing import Any

import numpy as np

from ..drafters.dflash import FEATURE_NORMS, GELU
from ..errors import ConvertError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief
from . import checkpoint
from .checkpoint import AGAIN, HEADS, TOKENS, Config, Files, Layout, Source

LAGUNA, GEMMA = "DFlashLagunaForCausalLM", "Gemma4DSparkModel"
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel", "LingDSparkModel", GEMMA)
ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DFlashDraftModel", "DFlashSpeculator", LAGUNA)
ARCH = "dflash"

_TOP = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight"}
LAYER_TENSORS = checkpoint.LAYER_TENSORS | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA_TENSORS = {
    theirs: ours for theirs, ours in LAYER_TENSORS.items() if theirs not in ("self_attn.v_proj", "post_attention_layernorm")
} | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_CONVOLUTIONS = {"attn_conv": "attention_conv", "ffn_conv": "mlp_conv"}
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_MARKOV, _CONFIDENCE = "markov_head.", "confidence_head."
_CAUSAL = ("is_causal", "causal", "causal_head")
_READ = {
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "target_hidden_size", "hidden_act", "hidden_activation",
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "use_swa", "swa_window_size", "input_embedding_scale",
    "final_logit_softcapping", "output_multiplier", "attention_value_scale", "draft_vocab_size",
}  # fmt: skip
_OF_DSPARK = {"markov_rank", "sample_from_anchor", "enable_confidence_head"}
_OF_SPECULATORS = {"aux_hidden_state_layer_ids", "sliding_window_non_causal", "sample_from_anchor"}
_OF_LAGUNA = {"gating", "sliding_windows", "eagle_aux_hidden_state_layer_ids", "swa_rope_parameters"}
_OF_GEMMA = {"global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input", "top_k_experts", "use_bidirectional_attention"}
_GEMMA_FIXED: dict[str, tuple] = {
    "attention_k_eq_v": (True,), "enable_moe_block": (False,), "hidden_size_per_layer_input": (0,), "num_kv_shared_layers": (0,),
    "use_double_wide_mlp": (False,),
}  # fmt: skip


def _refuse_features(c: Config) -> None:
    """Refuses features that would be computed wrongly."""
    act, rope = c.get("hidden_act", "hidden_activation") or "silu", c.rope_type
    ropes = ("default", "linear", "proportional", None) if GEMMA in checkpoint.architectures(c.top) else ("default", "linear", None)
    features = (
        (act not in ("silu", *GELU), f"the activation {brief(act)} (silu and GELU are supported)"),
        (rope not in ropes, f"rope scaling of the type {brief(rope)} (default and linear are supported)"),
        (bool(c.get("attention_bias")), "attention biases"),
        (c.get("rope_is_neox_style") is False, "interleaved rope (NEOX pairing is supported)"),
    )
    checkpoint.refuse(features)


def _refuse_unknown(c: Config, config: dict, dspark: bool) -> None:
    """Refuses keys that say something which is not read."""
    archs, read, fixed = checkpoint.architectures(config), _READ | {*_CAUSAL}, dict[str, tuple]()
    if any(c.get(key) is not None for key in _SELECTOR):
        read |= {*_SELECTOR}
    if dspark:
        read |= _OF_DSPARK
        fixed["confidence_head_with_markov"] = (True,) if c.get("enable_confidence_head") else (True, False)
    if _is_nested(config):
        read |= _OF_SPECULATORS
    if LAGUNA in archs:
        read |= _OF_LAGUNA
    if GEMMA in archs:
        read, fixed = read | _OF_GEMMA, fixed | _GEMMA_FIXED
    c.refuse_unknown(read, fixed)


def _is_nested(config: dict) -> bool:
    """Whether it is a drafter of the speculators library."""
    return "transformer_layer_config" in config or "aux_hidden_state_layer_ids" in config


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
    bad = [i for i in ids if type(i) is not int or not -1 <= i < n_target]
    if bad:
        there = f"{target.path.name} has the layers 0 to {n_target - 1}"
        raise ConvertError(f"config.json: target_layer_ids holds {brief(bad[0])}, but {there}")
    also = c.list("eagle_aux_hidden_state_layer_ids")
    if also is not None and also != [i + 1 for i in ids]:
        raise ConvertError(f"config.json: eagle_aux_hidden_state_layer_ids {also} are not the inputs after the layers {ids}; {AGAIN}")
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
    window = c.integer("swa_window_size", "sliding_window", high=(1 << 31) - 1)
    each = c.list("sliding_windows")
    if each is not None and each != [window] * n_layer:
        raise ConvertError(f"config.json: sliding_windows is {brief(each)}, but only {window} in every layer is supported")
    return window, pattern


def _causal(c: Config, pattern: list[bool]) -> bool | None:
    """Whether all layers are causal; None where the sliding ones alone are, which the GGUF says by having no such key.

    ``pattern``: the sliding layers."""
    said = {key: c.get(key) for key in _CAUSAL if c.get(key) is not None}
    for key, value in said.items():
        if type(value) is not bool:
            raise ConvertError(f"config.json: {key} asks for the block direction {brief(value)}, but it has to be true or false")
    if len({*said.values()}) > 1:
        raise ConvertError(f"config.json: {' and '.join(f'{key} {value}' for key, value in said.items())} exclude each other; {AGAIN}")
    if said:
        return next(iter(said.values()))
    if c.get("use_swa") is True or c.flag("sliding_window_non_causal", False):
        return False
    return None if len({*pattern}) > 1 else any(pattern)


def _scales(c: Config, target: GGUFFile, n_embd: int, nested: bool, notes: list[str]) -> dict[str, Any]:
    """Scales and soft-cap. Gemma targets scale embeddings by sqrt(n_embd), which configs omit; the speculators library does not scale them."""
    arch = target.get("general.architecture", str)
    scale, cap = c.number("input_embedding_scale"), c.number("final_logit_softcapping")
    if scale is None and arch.startswith("gemma"):
        scale = 1.0 if nested else math.sqrt(n_embd)
        if not nested:
            notes.append(
                f"{arch} targets scale their embeddings: wrote an embedding scale of {scale:g}, which config.json does not mention"
            )
    if cap is None and not nested:
        cap = target.get(f"{arch}.final_logit_softcapping", float, 0.0)
    named = {"embedding_scale": scale, "final_logit_softcapping": cap, "logit_scale": c.number("output_multiplier")}
    named["attention.value_scale"] = c.number("attention_value_scale")
    return {key: value for key, value in named.items() if value is not None and value > 0}


def _of_gemma(config: dict) -> dict:
    """The layers are those of a Gemma's full ones; transformers leaves rope parameters out that are a Gemma's usual ones."""
    usual = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    heads = {"head_dim": config.get("global_head_dim", 512), "num_key_value_heads": config.get("num_global_key_value_heads")}
    return config | heads | {"rope_parameters": config.get("rope_parameters") or usual}


def read_layout(config: dict, files: Files, target: GGUFFile) -> Layout:
    """The GGUF for ``target`` from ``config`` and the tensors of ``files``. Raises ConvertError: an unsupported feature, or a drafter for
    another target."""
    archs, dspark, nested = checkpoint.architectures(config), is_dspark(config, files), _is_nested(config)
    laguna, gemma = LAGUNA in archs, GEMMA in archs
    c = Config(_of_gemma(config) if gemma else config, "dflash_config", "sliding_attention" if laguna else "full_attention")
    if laguna and c.get("swa_rope_parameters") is not None:
        c.rope = c.get("swa_rope_parameters")
    notes: list[str] = []
    _refuse_features(c)
    n_embd, n_layer = c.integer("hidden_size"), c.integer("num_hidden_layers", high=256)
    checkpoint.check_hidden(n_embd, target)
    checkpoint.check_hidden(c.integer("target_hidden_size", default=n_embd), target)
    n_vocab, layers = checkpoint.vocabulary(c, target), _target_layers(c, target)
    partial = c.rope.get("partial_rotary_factor", c.top.get("partial_rotary_factor", 1.0))
    share = partial if isinstance(partial, (int, float)) and 0 < partial <= 1 else 0
    meta, shapes = checkpoint.sizes(c, target, n_layer, 1.0 if gemma else share)
    shapes |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (meta["attention.key_length"],))
    meta["block_size"] = c.integer("block_size", default=16, low=2, high=1024)
    meta["target_layers"] = np.array(layers, np.uint32)
    if target.array(f"{target.get('general.architecture', str)}.rope.dimension_sections") is not None:
        # multi-axis rope: the drafter uses the first axis (time)
        meta["rope.dimension_sections"] = np.array([meta["rope.dimension_count"] // 2, 0, 0, 0], np.int32)
    window, pattern = _windows(c, n_layer, notes)
    if window:
        meta |= {"attention.sliding_window": window, "attention.sliding_window_pattern": np.array(pattern)}
    if (causal := _causal(c, pattern)) is not None:
        meta["attention.causal"] = causal
    meta |= _scales(c, target, n_embd, nested, notes)
    if dspark and c.get("final_logit_softcapping") is None:
        meta.pop("final_logit_softcapping", None)  # it is added to: a cap would change which is largest
    if (act := c.get("hidden_act", "hidden_activation")) in GELU:
        meta["hidden_activation"] = act
    mask = c.integer("mask_token_id", default=target.metadata.get("tokenizer.ggml.mask_token_id"), low=0)
    if mask >= n_vocab:
        there = f"{target.path.name} has {n_vocab} tokens; {checkpoint.OTHER_TARGET}"
        raise ConvertError(f"config.json: mask_token_id is {mask}, but {there}")
    meta |= checkpoint.tokenizer(target) | {"tokenizer.ggml.mask_token_id": mask}
    wanted = {"fc.weight": Source("fc.weight", (n_embd, n_embd * len(layers)))}
    wanted |= {ours: Source(theirs, (n_embd,)) for theirs, ours in _TOP.items() if ours != "fc.weight"}
    made, unread = dict[str, np.ndarray](), [TOKENS, "t2d"] if dspark or nested else []
    for i in range(n_layer):
        for theirs, ours in (GEMMA_TENSORS if gemma else LAYER_TENSORS).items():
            wanted[f"blk.{i}.{ours}.weight"] = Source(f"layers.{i}.{theirs}.weight", shapes.get(ours, (n_embd,)))
    if laguna:
        made |= _add_laguna(c, files, meta, wanted, unread)
    if gemma:
        made |= _add_gemma(meta, c, share, wanted)
    _add_selector(c, files, meta, wanted, n_vocab)
    count = n_vocab
    if dspark or nested:
        count, tokens = checkpoint.draft_vocabulary(c, files, n_vocab)
        made |= tokens
    elif c.integer("draft_vocab_size", default=n_vocab) != n_vocab:
        raise ConvertError(f"config.json: draft_vocab_size is {c.get('draft_vocab_size')}, but the target has {n_vocab} tokens; {AGAIN}")
    if dspark:
        _add_dspark(c, files, meta, wanted, n_vocab, count, nested)
    elif nested and c.flag("sample_from_anchor", False):
        raise ConvertError(
            f"config.json: a DFlash whose last token's row drafts (sample_from_anchor) is not supported; {checkpoint.SUPPORTED}"
        )
    wanted |= _ends(files, n_embd, n_vocab, count)
    _refuse_unknown(c, config, dspark)
    return Layout(ARCH, meta, checkpoint.match(wanted, files, tuple(unread)), made, notes)


def _add_laguna(c: Config, files: Files, meta: dict[str, Any], wanted: dict[str, Source], unread: list[str]) -> dict[str, np.ndarray]:
    """Tensors specific to Laguna's: q, k and v are one matrix, a gate per head or per output, a norm per hidden state of the target. Returns
    the norms as one tensor."""
    n_embd, count, plain = meta["embedding_length"], len(meta["target_layers"]), checkpoint.plain_names(files)
    for i in range(meta["block_count"]):
        parts = [wanted[f"blk.{i}.attn_{name}.weight"] for name in "qkv"]
        total, first = sum(part.shape[0] for part in parts), 0
        for name, part in zip("qkv", parts):
            wanted[f"blk.{i}.attn_{name}.weight"] = Source(f"layers.{i}.self_attn.qkv_proj.weight", part.shape, 0, first, total)
            first += part.shape[0]
        kind = {True: "per-head", None: "per-head", False: "disabled"}.get(c.get("gating"), c.get("gating"))
        rows = {"per-head": meta["attention.head_count"], "per-element": parts[0].shape[0], "disabled": 0}.get(kind)
        if rows is None:
            raise ConvertError(f"config.json: gating is {brief(kind)}; per-head, per-element and disabled are supported")
        if rows:
            wanted[f"blk.{i}.attn_gate.weight"] = Source(f"layers.{i}.self_attn.g_proj.weight", (rows, n_embd))
    norms = []
    for k in range(count):
        name = f"aux_hidden_norms.{k}.weight"
        norms.append(checkpoint.vector(files, plain, name, n_embd))
        unread.append(name)
    return {FEATURE_NORMS: np.stack(norms)}


def _add_gemma(meta: dict[str, Any], c: Config, share: float, wanted: dict[str, Source]) -> dict[str, np.ndarray]:
    """Keys and tensors specific to the DSpark of Gemma 4: K is V, norms after attention and FFN, a scale per layer. Returns the frequency
    divisors: of ``share`` of a head's pairs 1, of the others infinite in effect."""
    meta |= {"attention.scale": 1.0, "hidden_activation": "gelu_pytorch_tanh"}
    for i in range(meta["block_count"]):
        wanted[f"blk.{i}.layer_output_scale.weight"] = Source(f"layers.{i}.layer_scalar", (1,))
    if c.rope_type != "proportional":
        return {}
    pairs = meta["attention.key_length"] // 2
    turned = share * pairs
    if turned != int(turned) or not turned:
        raise ConvertError(f"config.json: partial_rotary_factor {share:g} of {pairs} pairs of a head is no whole number of them")
    return {"rope_freqs.weight": np.where(np.arange(pairs) < turned, 1, 1e30).astype(np.float32)}


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


def _add_dspark(c: Config, files: Files, meta: dict[str, Any], wanted: dict[str, Source], n_vocab: int, count: int, nested: bool) -> None:
    """Keys and tensors specific to DSpark; ``count``: size of its vocabulary. A rank of 0 is none of its heads."""
    if (kind := c.get("markov_head_type") or "vanilla") != "vanilla":
        raise ConvertError(f"config.json: markov_head_type is {brief(kind)}; Markov heads of the type vanilla are supported")
    plain, first = checkpoint.plain_names(files), f"{_MARKOV}markov_w1.weight"
    stored = files[plain[first]].tensors[plain[first]].shape if first in plain else ()
    rank = c.integer("markov_rank", default=stored[-1] if stored else 1, low=0, high=1 << 16)
    if rank:
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
    taps, size, rank, top_k = numbers = [c.integer(key, high=1 << 16) for key in _SELECTOR]
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
    meta |= zip(_SELECTOR, numbers)
