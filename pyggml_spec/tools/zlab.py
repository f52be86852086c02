"""The z-lab layout of DFlash and DFlash2 drafters: what its config.json and tensors become in a GGUF.

config.json counts layers by their outputs: id k is what layer k returns. The GGUF counts by inputs, so it holds k + 1.
Sources: llama.cpp's conversion/qwen.py for keys and names; the reference implementation for what the config means.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from gguf import GGUFValueType as Kind

from ..errors import ConvertError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray, brief
from ..models.dflash import GELU

SUPPORTED = "DFlash drafters in the z-lab layout (DFlashDraftModel, DFlash2DraftModel) are supported"
ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
ARCH = "dflash"

_TOP = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_CONVOLUTIONS = {"attn_conv": "attention_conv", "ffn_conv": "mlp_conv"}


@dataclass(frozen=True)
class Layout:
    """What to write: ``metadata`` key -> (type, value), ``tensors`` GGUF name -> (source name, shape outermost first)."""

    metadata: dict[str, tuple]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    notes: list[str] = field(default_factory=list)


def refuse_other_layouts(config: dict, names) -> None:
    """Raises ConvertError naming the layout if these are not the tensors and the config of a plain DFlash drafter."""
    archs = config.get("architectures")
    archs = " ".join(str(a) for a in archs) if isinstance(archs, list) else ""
    given = config.get("dflash_config")
    dflash = given if isinstance(given, dict) else {}
    names = list(names)

    def any_name(*parts: str) -> str | None:
        return next((n for n in names if any(p in n for p in parts)), None)

    found = (
        (
            "DSpark",
            any_name("markov_", "confidence_") or ("DSpark" in archs and archs) or ("markov_head_type" in config and "markov_head_type"),
        ),
        ("EAGLE-3", any_name("midlayer.", "eagle") or ("eagle" in archs.lower() and archs)),
        ("MTP", any_name("mtp.", "nextn.", "eh_proj") or (any(a in archs.lower() for a in ("mtp", "nextn")) and archs)),
        ("speculators", "speculators_config" in config and "speculators_config"),
        ("reduced-vocabulary", any_name("d2t", "t2d")),
    )
    for layout, sign in found:
        if sign:
            raise ConvertError(f"this is a {layout} drafter (it has {brief(sign)}), which is not supported; {SUPPORTED}")
    if archs and not set(archs.split()) & {*ARCHITECTURES}:
        raise ConvertError(f"config.json names the architecture {brief(archs)}; {SUPPORTED}")
    if not archs and not dflash:
        raise ConvertError(f"config.json has neither architectures nor dflash_config; {SUPPORTED}")


class _Config:
    """config.json with its dflash_config, read with range checks."""

    def __init__(self, values: dict):
        inner = values.get("dflash_config", {})
        if not isinstance(inner, dict):
            raise ConvertError(f"config.json: dflash_config is {brief(inner)}, but it has to be an object")
        self.top, self.inner = values, inner
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        self.rope = rope if isinstance(rope, dict) else {}

    def get(self, *keys: str):
        """The first of the keys that is there and not null, in dflash_config before the top level."""
        for key in keys:
            for where in (self.inner, self.top):
                if where.get(key) is not None:
                    return where[key]
        return None

    def integer(self, *keys: str, default: int | None = None, low: int = 1, high: int = 1 << 24) -> int:
        value = self.get(*keys)
        value = default if value is None else value
        if value is None:
            raise ConvertError(f"config.json has no {keys[0]}, which a drafter needs; fetch the complete checkpoint")
        if type(value) is not int or not low <= value <= high:
            raise ConvertError(f"config.json: {keys[0]} is {brief(value)}, but it has to be a whole number between {low} and {high}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float | None:
        value = self.get(*keys)
        if value is None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or not abs(value) < 1e30:
            raise ConvertError(f"config.json: {keys[0]} is {brief(value)}, but it has to be a finite number")
        return float(value)

    def list(self, key: str) -> list | None:
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or len(value) > 1024):
            raise ConvertError(f"config.json: {key} is {brief(value)}, but it has to be a list")
        return value


def _refuse_features(c: _Config) -> None:
    """What this engine would silently compute otherwise."""
    act, rope = c.get("hidden_act", "hidden_activation") or "silu", c.rope.get("rope_type", c.rope.get("type", "default"))
    wrong = (
        (act not in ("silu", *GELU), f"the activation {brief(act)} (silu and GELU are supported)"),
        (rope not in ("default", "linear", None), f"rope scaling of the type {brief(rope)} (default and linear are supported)"),
        (
            c.get("is_causal", "causal") not in (None, False, True),
            f"the block direction {brief(c.get('is_causal', 'causal'))} (true or false)",
        ),
        (bool(c.get("attention_bias")), "attention biases"),
        (c.get("rope_is_neox_style") is False, "interleaved rope (NEOX pairing is supported)"),
    )
    for is_wrong, what in wrong:
        if is_wrong:
            raise ConvertError(f"config.json asks for {what}; {SUPPORTED} without it")


def _target_number(target: GGUFFile, key: str) -> int:
    return target.get(f"{target.get('general.architecture', str)}.{key}", int)


def _target_layers(c: _Config, target: GGUFFile) -> list[int]:
    arch = target.get("general.architecture", str)
    n_target = _target_number(target, "block_count") - target.get(f"{arch}.nextn_predict_layers", int, 0)
    claimed = c.integer("num_target_layers", default=n_target)
    if claimed != n_target:
        raise ConvertError(
            f"the drafter was made for a target of {claimed} layers, but {target.path.name} has {n_target}; "
            "name the target that it was made for"
        )
    ids = c.list("target_layer_ids")
    if not ids:
        raise ConvertError("config.json has no target_layer_ids: a drafter that does not say which hidden states it reads is unusable")
    bad = [i for i in ids if type(i) is not int or not 0 <= i < n_target]
    if bad:
        raise ConvertError(
            f"config.json: target_layer_ids holds {brief(bad[0])}, but {target.path.name} has the layers 0 to {n_target - 1}"
        )
    return [i + 1 for i in ids]


def _windows(c: _Config, n_layer: int, notes: list[str]) -> tuple[int, list[bool]]:
    """(window, per layer whether it applies); (0, []) for none.

    ``layer_types`` decides. An explicit use_sliding_window = false switches the window off, as it does in the reference.
    """
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


def _tokenizer(target: GGUFFile) -> dict[str, tuple]:
    """The target's tokenizer keys as the writer takes them."""
    out: dict[str, tuple] = {}
    numpy_kinds = {"u1": Kind.UINT8, "i1": Kind.INT8, "u2": Kind.UINT16, "i2": Kind.INT16, "u4": Kind.UINT32, "i4": Kind.INT32}
    numpy_kinds |= {"f4": Kind.FLOAT32, "u8": Kind.UINT64, "i8": Kind.INT64, "f8": Kind.FLOAT64, "b1": Kind.BOOL}
    for key, value in target.metadata.items():
        if not key.startswith("tokenizer.ggml."):
            continue  # a drafter renders no chat template
        if isinstance(value, StringArray):
            if len(value):
                out[key] = (Kind.ARRAY, [value.raw(i) for i in range(len(value))], Kind.STRING)
        elif hasattr(value, "dtype"):
            if len(value):
                out[key] = (Kind.ARRAY, value.tolist(), numpy_kinds[value.dtype.str[1:]])
        elif isinstance(value, bool):
            out[key] = (Kind.BOOL, value)
        elif isinstance(value, int):
            out[key] = (Kind.UINT32, value) if 0 <= value < 1 << 32 else (Kind.INT64, value)
        else:
            out[key] = (Kind.FLOAT32, value) if isinstance(value, float) else (Kind.STRING, value)
    return out


def _mask_token(c: _Config, target: GGUFFile, n_vocab: int) -> int:
    mask = c.integer("mask_token_id", default=target.metadata.get("tokenizer.ggml.mask_token_id"), low=0)
    if mask >= n_vocab:
        raise ConvertError(
            f"config.json: mask_token_id is {mask}, but {target.path.name} has {n_vocab} tokens; name the target that it was made for"
        )
    return mask


def _scales(c: _Config, target: GGUFFile, n_embd: int, notes: list[str]) -> dict[str, tuple]:
    """Scales and soft-cap. Gemma targets multiply their embedding by sqrt(n_embd), which configs leave unsaid."""
    arch = target.get("general.architecture", str)
    out: dict[str, tuple] = {}
    scale, cap = c.number("input_embedding_scale"), c.number("final_logit_softcapping")
    if scale is None and arch.startswith("gemma"):
        scale = math.sqrt(n_embd)
        notes.append(f"{arch} targets scale their embeddings: wrote an embedding scale of {scale:g}, which config.json does not mention")
    if cap is None:
        cap = target.get(f"{arch}.final_logit_softcapping", float, 0.0)
    named = {"embedding_scale": scale, "final_logit_softcapping": cap, "logit_scale": c.number("output_multiplier")}
    named["attention.value_scale"] = c.number("attention_value_scale")
    for key, value in named.items():
        if value is not None and value > 0:
            out[f"{ARCH}.{key}"] = (Kind.FLOAT32, value)
    return out


def read_layout(config: dict, names, target: GGUFFile) -> Layout:
    """What the drafter of ``config`` with tensors called ``names`` becomes for ``target``.

    Raises:
        ConvertError: another layout, a feature that is not supported, or a drafter that was made for another target.
    """
    refuse_other_layouts(config, names)
    c = _Config(config)
    notes: list[str] = []
    _refuse_features(c)
    n_embd, n_layer = c.integer("hidden_size"), c.integer("num_hidden_layers", high=256)
    if (theirs := _target_number(target, "embedding_length")) != n_embd:
        raise ConvertError(
            f"the drafter reads hidden states of {n_embd} values, but those of {target.path.name} have {theirs}; "
            "name the target that it was made for"
        )
    tokens = target.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not len(tokens):
        raise ConvertError(f"{target.path.name} has no token list; name a complete target")
    if (claimed := c.integer("vocab_size", default=len(tokens))) != len(tokens):
        raise ConvertError(
            f"the drafter was made for a vocabulary of {claimed}, but {target.path.name} has {len(tokens)} tokens; "
            "name the target that it was made for"
        )
    n_head = c.integer("num_attention_heads", high=4096)
    n_kv = c.integer("num_key_value_heads", default=n_head, high=4096)
    size = c.integer("head_dim", default=n_embd // n_head, high=4096)
    n_ff, layers = c.integer("intermediate_size"), _target_layers(c, target)
    arch = target.get("general.architecture", str)
    context = c.integer("max_position_embeddings", default=target.get(f"{arch}.context_length", int, 4096), high=(1 << 31) - 1)
    partial = c.rope.get("partial_rotary_factor", c.top.get("partial_rotary_factor", 1.0))
    n_rot = int(size * partial) if isinstance(partial, (int, float)) and 0 < partial <= 1 else 0
    if n_rot < 2 or n_rot % 2:
        raise ConvertError(f"config.json: partial_rotary_factor is {brief(partial)}, which rotates no whole pairs of heads of {size}")
    rope_theta: Any = c.rope.get("rope_theta", c.top.get("rope_theta", 10000.0))
    if type(rope_theta) not in (int, float) or not 0 < rope_theta < 1e30:
        raise ConvertError(f"config.json: rope_theta is {brief(rope_theta)}, but it has to be a number above 0")
    integers = {
        "context_length": context,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_kv,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": n_rot,
        "block_size": c.integer("block_size", default=16, low=2, high=1024),
    }
    meta: dict[str, tuple] = {f"{ARCH}.{key}": (Kind.UINT32, value) for key, value in integers.items()}
    meta[f"{ARCH}.rope.freq_base"] = (Kind.FLOAT32, float(rope_theta))
    meta[f"{ARCH}.attention.layer_norm_rms_epsilon"] = (Kind.FLOAT32, c.number("rms_norm_eps", default=1e-6))
    meta[f"{ARCH}.attention.causal"] = (Kind.BOOL, bool(c.get("is_causal", "causal")))
    meta[f"{ARCH}.target_layers"] = (Kind.ARRAY, layers, Kind.UINT32)
    if c.rope.get("rope_type", c.rope.get("type")) == "linear":
        factor: Any = c.rope.get("factor")
        if type(factor) not in (int, float) or not 0 < factor < 1e6:
            raise ConvertError(f"config.json: the rope scaling factor is {brief(factor)}, but it has to be a number above 0")
        meta[f"{ARCH}.rope.scaling.type"] = (Kind.STRING, "linear")
        meta[f"{ARCH}.rope.scaling.factor"] = (Kind.FLOAT32, float(factor))
    if target.array(f"{arch}.rope.dimension_sections") is not None:  # a multi-axis target: the drafter turns with the first axis, time
        meta[f"{ARCH}.rope.dimension_sections"] = (Kind.ARRAY, [n_rot // 2, 0, 0, 0], Kind.INT32)
    window, pattern = _windows(c, n_layer, notes)
    if window:
        meta[f"{ARCH}.attention.sliding_window"] = (Kind.UINT32, window)
        meta[f"{ARCH}.attention.sliding_window_pattern"] = (Kind.ARRAY, pattern, Kind.BOOL)
    meta |= _scales(c, target, n_embd, notes)
    if (act := c.get("hidden_act", "hidden_activation")) in GELU:
        meta[f"{ARCH}.hidden_activation"] = (Kind.STRING, act)
    meta |= _tokenizer(target)
    meta["tokenizer.ggml.mask_token_id"] = (Kind.UINT32, _mask_token(c, target, len(tokens)))
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (n_head * size, n_embd),
        "attn_k": (n_kv * size, n_embd),
        "attn_v": (n_kv * size, n_embd),
    }
    shapes |= {"attn_output": (n_embd, n_head * size), "ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    shapes |= {"attn_norm": (n_embd,), "ffn_norm": (n_embd,), "attn_q_norm": (size,), "attn_k_norm": (size,)}
    more, selector = _selector(c, names, n_layer, n_embd, len(tokens))
    meta |= more
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {"fc.weight": ("fc.weight", (n_embd, n_embd * len(layers)))}
    wanted |= {ours: (theirs, (n_embd,)) for theirs, ours in _TOP.items() if ours != "fc.weight"}
    for i in range(n_layer):
        wanted |= {f"blk.{i}.{ours}.weight": (f"layers.{i}.{theirs}.weight", shapes[ours]) for theirs, ours in _LAYER.items()}
    return Layout(meta, _match(wanted | selector, names, len(tokens), n_embd), notes)


def _selector(
    c: _Config, names, n_layer: int, n_embd: int, n_vocab: int
) -> tuple[dict[str, tuple], dict[str, tuple[str, tuple[int, ...]]]]:
    """Keys and tensors that a DFlash2 has besides, none for a DFlash."""
    plain = {name.removeprefix("model.") for name in names}
    if c.get("selector_rank") is None and not any(name.startswith("candidate_selector.") for name in plain):
        return {}, {}
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    taps, size, rank, top_k = (c.integer(key, high=1 << 16) for key in keys)
    if n_embd % size or n_embd < top_k * (top_k + 1):
        raise ConvertError(f"config.json: conv_group_size {size} or selector_top_k {top_k} does not fit hidden states of {n_embd} values")

    def codebook(name: str) -> str:
        return name if name in plain else f"{name}.weight"

    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "selector_predecessor.weight": (codebook("candidate_selector.predecessor_codebook"), (n_vocab, rank)),
        "selector_successor.weight": (codebook("candidate_selector.successor_codebook"), (n_vocab, rank)),
        "selector_hidden.weight": ("candidate_selector.hidden_projection.weight", (rank, n_embd)),
    }
    for i in range(n_layer):
        for ours, theirs in _CONVOLUTIONS.items():
            tensors[f"blk.{i}.{ours}_base"] = (f"layers.{i}.{theirs}.base_kernel", (2, taps, n_embd))
            tensors[f"blk.{i}.{ours}_proj.weight"] = (
                f"layers.{i}.{theirs}.kernel_projection.weight",
                (2 * taps * (n_embd // size), n_embd),
            )
    return {f"{ARCH}.{key}": (Kind.UINT32, value) for key, value in zip(keys, (taps, size, rank, top_k), strict=True)}, tensors


def _match(wanted: dict, names, n_vocab: int, n_embd: int) -> dict:
    """Each wanted tensor under the name that the checkpoint has for it; every tensor has to be used."""
    plain = {name.removeprefix("model."): name for name in names if not name.endswith("rotary_emb.inv_freq")}
    if "embed_tokens.weight" in plain and "lm_head.weight" not in plain:
        raise ConvertError(
            "the drafter has an embedding of its own (embed_tokens) but no lm_head, so it is not clear which head drafts; "
            "remove one or add the other"
        )
    wanted = dict(wanted)
    for theirs, ours in (("embed_tokens.weight", "token_embd.weight"), ("lm_head.weight", "output.weight")):
        if theirs in plain:
            wanted[ours] = (theirs, (n_vocab, n_embd))
    out = {}
    for ours, (theirs, shape) in wanted.items():
        if theirs not in plain:
            raise ConvertError(f"the checkpoint has no tensor {theirs!r}; {SUPPORTED}, so fetch the complete one")
        out[ours] = (plain.pop(theirs), shape)
    if plain:
        raise ConvertError(
            f"the checkpoint has the unknown tensor {brief(next(iter(plain.values())))}: its layout is not that of config.json; {SUPPORTED}"
        )
    return out
