"""granite, granitemoe, granitehybrid, minicpm: embedding, scores, residual stream and logits are scaled by numbers of the file; granitemoe has routed experts.

granitehybrid has Mamba-2 layers; minicpm has defaults for the scales; granite_swa has sinks, and lists of sliding and of rotated layers.
Source of the formulae: llama.cpp, src/models/granite.cpp, granite-moe.cpp, granite-hybrid.cpp, granite-swa.cpp, minicpm.cpp.
"""

import numpy as np

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import MAY, Attention, GatedMLP, Layer, MoE, Part
from ..mamba2 import Mamba2
from ..model import ATTENTION, EXPERT, FFN, SCALED, SHARED


@register("granite", "granitemoe", "granitehybrid", "minicpm")
def granite(f: Hparams) -> Decoder:
    own, hybrid = f.arch == "minicpm", f.arch == "granitehybrid"
    size = f.hybrid_head_dim if hybrid else f.head_dim()
    rope = f.rope(size, neox=False)
    rotated = f.arch in ("granitemoe", "minicpm") or f.get("rope.scaling.finetuned", bool, True)
    residual = float(np.float32(1.4) / np.sqrt(np.float32(f.n_layer))) if own else 0.0
    scale = (0.0 if own else f.number("attention.scale", 0.0)) or None
    heads = f.hybrid_heads if hybrid else ((f.heads, f.kv_heads),) * f.n_layer
    n_recurrent = sum(not kv for _, kv in heads)
    mamba = Mamba2.from_gguf(f, n_recurrent) if n_recurrent else None
    if mamba and mamba.inner != 2 * f.n_embd:
        raise f.refuse(f"ssm.inner_size is {mamba.inner}, but {f.arch} models have twice the embedding, {2 * f.n_embd}")
    if not hybrid:
        f.whole_heads(rope, size)
    n_shared = 0 if own else f.number("expert_shared_feed_forward_length", 0)
    shared = GatedMLP(n_shared, suffix="_shexp") if n_shared else None
    ffn = MoE(f.experts(f.ff, own_size=False), shared) if f.number("expert_count", 0) else GatedMLP(f.ff)
    mixers: list[Part] = [
        Attention(n, kv, size, rope if rotated else None, factors=True, out_bias=MAY, scale=scale) if kv or not mamba else mamba
        for n, kv in heads
    ]
    return Decoder(
        f,
        [Layer(mixer, ffn, residual=f.number("residual_scale", residual)) for mixer in mixers],
        embedding_scale=f.number("embedding_scale", 12.0 if own else 0.0) or 1.0,
        logit_scale=float(1 / np.float32(f.get("logit_scale", float, 256 / f.n_embd if own else None))),
        long_from=f.long_from,
        biased=(*ATTENTION, "attn_output", *FFN),
        scaled=(*SCALED, "ssm_in"),
        unscaled=(*FFN, *EXPERT, *SHARED),
    )


@register("granite_swa")
def granite_swa(f: Hparams) -> Decoder:
    mapping = f.file.array(f"{f.arch}.deepstack_mapping")
    if mapping is not None and (mapping >= 0).any():
        raise f.refuse("it has deepstack_mapping, inputs of several layers from pictures, which are not supported")
    size = f.head_dim()
    window, sliding = f.window()
    rope, pattern = f.rope(size, neox=False, windowed=True), f.file.metadata.get(f"{f.arch}.attention.rope_pattern", True)
    turned = [bool(v) for v in pattern[: f.n_layer]] if isinstance(pattern, np.ndarray) else [bool(pattern)] * f.n_layer
    if len(turned) != f.n_layer:
        raise f.refuse(f"attention.rope_pattern names {len(turned)} of {f.n_layer} layers")
    n_shared, scale = f.number("expert_shared_feed_forward_length", 0), f.number("attention.scale", 0.0) or None
    shared = GatedMLP(n_shared, suffix="_shexp", packed=True) if n_shared else None
    ffn = MoE(f.experts(f.ff, own_size=False), shared) if f.number("expert_count", 0) else GatedMLP(f.ff)
    residual, layers = f.number("residual_scale", 0.0), []
    for s, own in zip(sliding, turned, strict=True):
        attention = Attention(
            f.heads, f.kv_heads, size, rope if own else None, factors=True, out_bias=MAY, scale=scale, sliding=s, sinks=True
        )
        layers.append(Layer(attention, ffn, residual=residual))
    return Decoder(
        f, layers, window=window, embedding_scale=f.number("embedding_scale", 0.0) or 1.0, long_from=f.long_from,
        logit_scale=float(1 / np.float32(f.get("logit_scale", float))), biased=(*ATTENTION, "attn_output", *FFN), unscaled=(*FFN, *EXPERT, *SHARED),
    )  # fmt: skip
