"""Published drafter checkpoints: config.json with range checks, keys of the target, and the description of the GGUF to write."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConvertError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray, TensorInfo, brief
from ..gguf_io.safetensors import SafetensorsFile

SUPPORTED = "DFlash, DFlash2, DSpark, JetSpec, EAGLE-3 and P-EAGLE drafters in the layouts of their makers and of the speculators library are supported"
OTHER_TARGET = "name the target that it was made for"
AGAIN = "fetch the checkpoint again"
TOKENS = "d2t"  # for reduced vocabularies: the target's id of each entry minus its index
Files = Mapping[str, SafetensorsFile]
_SLAB = 512  # rows of a matrix that are read at once


class Source(NamedTuple):
    """Source of a tensor: its ``name`` in the checkpoint, its ``shape`` (outermost first). ``head``: rows per head whose halves are
    interleaved; 0 for none. ``first``: of its rows, where the checkpoint's tensor holds ``total`` rows of several; 0 for all."""

    name: str
    shape: tuple[int, ...]
    head: int = 0
    first: int = 0
    total: int = 0

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return (self.total or self.shape[0], *self.shape[1:])


@dataclass(frozen=True)
class Layout:
    """A GGUF of ``arch`` to write: ``metadata`` by key without the architecture, ``tensors`` by GGUF name, ``made`` tensors, F32 or I64, and tensors
    ``copied`` from another file as they are.

    Lists in ``metadata`` are numpy arrays of the stored type, or StringArrays; int stands for u32 if it fits, float for f32."""

    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, Source]
    made: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    copied: dict[str, tuple[GGUFFile, TensorInfo]] = field(default_factory=dict)


# keys of transformers and of training that say nothing of what is computed
WITHOUT_EFFECT = {
    "_name_or_path", "_attn_implementation", "_attn_implementation_internal", "_commit_hash", "architectures", "auto_map",
    "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "dtype", "eos_token_id",
    "has_no_defaults_at_init", "id2label", "initializer_range", "is_decoder", "label2id", "layer_norm_epsilon", "model_type",
    "num_anchors", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "sep_token_id", "speculators_config", "speculators_model_type", "speculators_version", "tie_word_embeddings", "torch_dtype",
    "torchscript", "transformers_version", "unk_token_id", "use_bfloat16", "use_cache", "confidence_head_alpha",
    "draft_num_hidden_layers", "embed_requires_grad", "kd_temperature", "loss_decay_gamma", "projector_type", "step_loss_decay",
    "target_model_name_or_path", "target_model_type", "target_text_model_type", "ttt_length",
}  # fmt: skip
# of a target's config, copied into its drafter's, whose layers do not read them
WITHOUT_EFFECT |= {
    "attn_output_gate", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_value_head_dim", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
# other values of these would change what is computed
NEUTRAL: dict[str, tuple] = {
    "attention_bias": (False,), "mlp_bias": (False,), "add_cross_attention": (False,), "tie_encoder_decoder": (False,), "pruned_heads": ({},),
    "is_encoder_decoder": (False,), "use_aux_hidden_state": (True,), "markov_head_type": ("vanilla",), "rope_is_neox_style": (True,),
    "is_neox_style": (True,), "attention_mode": ("gqa",), "logit_scale": (1, 1.0), "parallel_drafting": (False,),
    "quantization_config": ({},), "attention_sink_bias": (False,), "add_swa_attention_sink_bias": (False,),
}  # fmt: skip
_SIZES = {
    "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta", "vocab_size",
    "transformer_layer_config",
}  # fmt: skip
_ROPE = {  # keys of rope_parameters by type
    None: {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved"},
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"},
}


class Config:
    """config.json; keys of the nested object ``own`` take precedence. Values are range-checked.

    ``kind``: of the layers whose rope parameters count, where there are several."""

    def __init__(self, values: dict, own: str, kind: str = "full_attention") -> None:
        inner, nested = values.get(own, {}), values.get("transformer_layer_config", {})
        for name, value in ((own, inner), ("transformer_layer_config", nested)):
            if value is not None and not isinstance(value, dict):
                raise ConvertError(f"config.json: {name} is {brief(value)}, but it has to be an object")
        self.top, self.inner, self.own = {**values, **(nested or {})}, inner or {}, own
        rope = self.top.get("rope_parameters") or self.top.get("rope_scaling") or {}
        rope = rope if isinstance(rope, dict) else {}
        several = isinstance(rope.get(kind), dict)
        self.rope: dict = rope[kind] if several else rope

    def refuse_unknown(self, read: Iterable[str], neutral: Mapping[str, tuple] | None = None) -> None:
        """Raises ConvertError for a key that is neither in ``read`` nor known to be without effect: what it asks for would be left out.

        ``neutral``: more keys that have to have one of these values, if any."""
        known, fixed = {*read, *WITHOUT_EFFECT, *_SIZES, self.own}, NEUTRAL | (dict(neutral) if neutral else {})
        for where, values in (("", self.top), (f" in {self.own}", self.inner)):
            for key, value in values.items():
                if value is not None and key in fixed and not any(value == one for one in fixed[key]):
                    usual = f"{' or '.join(map(repr, fixed[key]))} is supported"
                    raise ConvertError(f"config.json: {key}{where} is {brief(value)}, but only {usual}; {SUPPORTED}")
                if value is not None and key not in known and key not in fixed:
                    self._refuse(key, where)
        kind = self.rope_type if self.rope_type in _ROPE else None
        for key in self.rope:
            if self.rope[key] is not None and key not in _ROPE[None] | _ROPE[kind]:
                self._refuse(key, " in its rope parameters")

    @staticmethod
    def _refuse(key: str, where: str) -> None:
        remedy = "remove it if it does not change what the drafter computes, and else say which drafter has it"
        raise ConvertError(f"config.json has the key {brief(key)}{where}, which is not known here and would be ignored; {remedy}")

    def get(self, *keys: str):
        """The first key that is present and not null, nested object first."""
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
        return default if value is None else finite(value, keys[0])

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise ConvertError(f"config.json: {key} is {brief(value)}, but it has to be true or false")
        return default if value is None else value

    def list(self, key: str) -> list | None:
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or len(value) > 1024):
            raise ConvertError(f"config.json: {key} is {brief(value)}, but it has to be a list")
        return value

    @property
    def rope_type(self) -> Any:
        return self.rope.get("rope_type", self.rope.get("type", "default"))

    def of_rope(self, key: str, default: float | None = None, low: float = 0.0) -> float:
        """A rope parameter above ``low``."""
        value = self.rope.get(key, default)
        if value is None:
            of = brief(self.rope_type)
            raise ConvertError(f"config.json has no {key} for its rope scaling of the type {of}; fetch the complete checkpoint")
        number = finite(value, f"the rope scaling {key}")
        if number <= low:
            raise ConvertError(f"config.json: the rope scaling {key} is {brief(value)}, but it has to be a number above {low:g}")
        return number


def finite(value: Any, what: str) -> float:
    """A number that fits a GGUF."""
    if type(value) not in (int, float) or not math.isfinite(value) or not abs(value) < 1e30:
        raise ConvertError(f"config.json: {what} is {brief(value)}, but it has to be a finite number")
    return float(value)


def architectures(config: dict) -> list[str]:
    """The "architectures" of config.json."""
    named = config.get("architectures")
    return [str(one) for one in named] if isinstance(named, list) else []


def refuse(features: Iterable[tuple[bool, str]]) -> None:
    """Raises ConvertError for the first feature that is there: it would be computed wrongly."""
    for is_there, what in features:
        if is_there:
            raise ConvertError(f"config.json asks for {what}; {SUPPORTED} without it")


def sizes(c: Config, target: GGUFFile, n_layer: int, share: float = 1.0) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Metadata and tensor shapes of ``n_layer`` layers of attention and gated FFN; ``share``: fraction of a head that is rotated."""
    n_embd, n_head = c.integer("hidden_size"), c.integer("num_attention_heads", high=4096)
    n_kv = c.integer("num_key_value_heads", default=n_head, high=4096)
    size = c.integer("head_dim", default=n_embd // n_head, high=4096)
    n_ff, rotated = c.integer("intermediate_size"), int(size * share)
    if rotated < 2 or rotated % 2:
        part = f"{rotated} of the {size} values of a head (head_dim) would be rotated, which are no whole pairs"
        raise ConvertError(f"config.json: {part}; partial_rotary_factor is above 0, and at most 1")
    theta: Any = c.rope.get("rope_theta", c.top.get("rope_theta", 10000.0))
    if type(theta) not in (int, float) or not 0 < theta < 1e30:
        raise ConvertError(f"config.json: rope_theta is {brief(theta)}, but it has to be a number above 0")
    meta: dict[str, Any] = {
        "context_length": c.integer("max_position_embeddings", default=of_target(target, "context_length", 4096), high=(1 << 31) - 1),
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_kv,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": rotated,
        "rope.freq_base": float(theta),
        "attention.layer_norm_rms_epsilon": c.number("rms_norm_eps", default=1e-6),
    }
    if c.rope_type == "linear":
        meta |= {"rope.scaling.type": "linear", "rope.scaling.factor": c.of_rope("factor")}
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (n_head * size, n_embd),
        "attn_k": (n_kv * size, n_embd),
        "attn_v": (n_kv * size, n_embd),
        "attn_output": (n_embd, n_head * size),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
        "attn_norm": (n_embd,),
        "ffn_norm": (n_embd,),
    }
    return meta, shapes


# -- target


def of_target(target: GGUFFile, key: str, default: int | None = None) -> int:
    """A number of the target's architecture."""
    return target.get(f"{target.get('general.architecture', str)}.{key}", int, default)


def target_layers(target: GGUFFile) -> int:
    """Number of layers, without MTP layers."""
    return of_target(target, "block_count") - of_target(target, "nextn_predict_layers", 0)


def vocabulary(c: Config, target: GGUFFile) -> int:
    """Number of tokens, checked against the drafter's."""
    tokens = target.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not len(tokens):
        raise ConvertError(f"{target.path.name} has no token list; name a complete target")
    if (claimed := c.integer("vocab_size", default=len(tokens))) != len(tokens):
        there = f"{target.path.name} has {len(tokens)} tokens; {OTHER_TARGET}"
        raise ConvertError(f"the drafter was made for a vocabulary of {claimed}, but {there}")
    return len(tokens)


def check_hidden(size: int, target: GGUFFile) -> None:
    """Raises ConvertError unless the target's hidden states have ``size`` values."""
    if (theirs := of_target(target, "embedding_length")) != size:
        there = f"those of {target.path.name} have {theirs}; {OTHER_TARGET}"
        raise ConvertError(f"the drafter reads hidden states of {size} values, but {there}")


def tokenizer(target: GGUFFile) -> dict[str, Any]:
    """The target's tokenizer keys; drafters use no chat template."""
    keys = {key: value for key, value in target.metadata.items() if key.startswith("tokenizer.ggml.")}
    return {key: value for key, value in keys.items() if isinstance(value, str) or not hasattr(value, "__len__") or len(value)}


# -- tensors

LAYER_TENSORS = {  # of a layer in every layout
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}


def plain_names(files: Files) -> dict[str, str]:
    """The checkpoint's tensor names by name without the model prefix, without unused tensors. Raises ConvertError: a tensor exists with and
    without prefix."""
    out: dict[str, str] = {}
    for name in files:
        if name.endswith("rotary_emb.inv_freq"):
            continue
        plain = name.removeprefix("model.")
        if plain in out:
            both = f"{brief(out[plain])} and {brief(name)}"
            raise ConvertError(f"the checkpoint has the tensors {both}, which are the same one; remove one of them")
        out[plain] = name
    return out


def match(wanted: dict[str, Source], files: Files, unread: tuple[str, ...] = ()) -> dict[str, Source]:
    """The wanted tensors under their checkpoint names; all others must be in ``unread``."""
    plain = plain_names(files)
    out = {}
    for ours, source in wanted.items():
        if source.name not in plain:
            raise ConvertError(f"the checkpoint has no tensor {source.name!r}; {SUPPORTED}, so fetch the complete one")
        out[ours] = source._replace(name=plain[source.name])
    known = {*unread, *(source.name for source in wanted.values())}
    if unknown := [stored for name, stored in plain.items() if name not in known]:
        raise ConvertError(f"the checkpoint has the unknown tensor {brief(unknown[0])}: its layout is not that of config.json; {SUPPORTED}")
    return out


def vector(files: Files, plain: Mapping[str, str], name: str, size: int) -> np.ndarray:
    """A tensor F32 [size] by its name without the prefix; dimensions of 1 may stand before. Raises ConvertError: it is missing, of another shape, or
    not finite."""
    file = _checked(files, plain, name, (size,))
    values = file.rows(plain[name], 0, 1)[0]
    if not np.isfinite(values).all():
        raise ConvertError(f"{file.path.name}: the tensor {name!r} holds NaN or Inf; {AGAIN}")
    return values


def times(files: Files, plain: Mapping[str, str], name: str, rows: int, x: np.ndarray) -> np.ndarray:
    """A tensor [rows, x.size] times ``x``, F32 [rows]. Raises ConvertError: it is missing, or of another shape."""
    file = _checked(files, plain, name, (rows, x.size))
    return np.concatenate([file.rows(plain[name], i, min(_SLAB, rows - i)) @ x for i in range(0, rows, _SLAB)])


def _checked(files: Files, plain: Mapping[str, str], name: str, wanted: tuple[int, ...]) -> SafetensorsFile:
    """The file of a tensor of this shape."""
    if name not in plain:
        raise ConvertError(f"the checkpoint has no tensor {name!r}; {SUPPORTED}, so fetch the complete one")
    file = files[plain[name]]
    shape = file.tensors[plain[name]].shape
    if shape[-len(wanted) :] != wanted or math.prod(shape) != math.prod(wanted):
        raise ConvertError(f"the tensor {name!r} has the shape {list(shape)}, but config.json calls for {list(wanted)}; {AGAIN}")
    return file


def draft_vocabulary(c: Config, files: Files, n_vocab: int) -> tuple[int, dict[str, np.ndarray]]:
    """Size of the drafter's vocabulary, and its d2t tensor (I64) unless it is the target's. Raises ConvertError: token ids that are
    missing, repeated or outside the target's vocabulary."""
    count = c.integer("draft_vocab_size", default=n_vocab)
    if count > n_vocab:
        raise ConvertError(f"config.json: draft_vocab_size is {count}, but the target has {n_vocab} tokens; {OTHER_TARGET}")
    name = plain_names(files).get(TOKENS)
    if name is None:
        if count < n_vocab:
            maps = f"maps the {count} tokens of its head to the target's {n_vocab}"
            raise ConvertError(f"the checkpoint has no tensor {TOKENS!r}, which {maps}; fetch the complete one")
        return count, {}
    offsets = files[name].integers(name)
    if offsets.shape != (count,):
        raise ConvertError(f"the tensor {TOKENS!r} has the shape {list(offsets.shape)}, but config.json calls for {[count]}; {AGAIN}")
    ids = np.clip(offsets, -n_vocab - 1, n_vocab) + np.arange(count, dtype=np.int64)  # avoids overflow
    wrong = ids[(ids < 0) | (ids >= n_vocab)]
    if wrong.size:
        raise ConvertError(f"the tensor {TOKENS!r} names the token {wrong[0]}, but the target has {n_vocab}; {OTHER_TARGET}")
    if np.unique(ids).size != count:
        raise ConvertError(f"the tensor {TOKENS!r} names a token twice; fetch the checkpoint again")
    return count, {TOKENS: ids}
