"""step35 (Step 3.5): sliding and full layers with heads and ropes of their own, a sigmoid gate per head, limited SwiGLU, experts with a shared one.

Full layers rotate half of the values, with divisors of the file. Source of the formulae: llama.cpp, src/models/step35.cpp.
"""

from dataclasses import replace

import numpy as np

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN, SHARED
from ..moe import SIGMOID
from .qwen35 import MTP_LAYERS

EPS = 1e-6  # limits below are none


@register("step35")
def step35(f: Hparams) -> Decoder:
    heads, kv_heads = f.heads_by_layer
    size = f.head_dim(default=f.n_embd // heads[0])
    window, sliding = f.window(mtp=True)
    rope = f.rope(size, yarn=False, windowed=True)
    local, full = f.sliding_rope(rope, size), replace(rope, n_rot=rope.n_rot // 2)
    if full.n_rot % 2:
        raise f.refuse(f"rope.dimension_count is {rope.n_rot}, but full layers rotate pairs among half of them")
    ff, shared = f.per_layer("feed_forward_length")[0], f.positive("expert_shared_feed_forward_length")
    of_experts, of_shared = limits(f, "swiglu_clamp_exp"), limits(f, "swiglu_clamp_shexp")
    experts = f.experts(
        gating=f.gating(SIGMOID), normalise=f.get("expert_weights_norm", bool, False), scale=f.number("expert_weights_scale", 0.0),
        biased=any(".exp_probs_b." in name for name in f.file.tensors),
    )  # fmt: skip
    layers = []
    for i, s in enumerate(sliding):
        norm = HEAD if f.shape(f"blk.{i}.attn_q_norm.weight") else ""
        gate = "sigmoid of heads" if f.shape(f"blk.{i}.attn_gate.weight") else ""
        attention = Attention(heads[i], kv_heads[i], size, local if s else full, factors=not s, norm=norm, sliding=s, gate=gate)
        moe = MoE(replace(experts, limit=of_experts[i]), GatedMLP(shared, suffix="_shexp", limit=of_shared[i]))
        layers.append(Layer(attention, moe if f.shape(f"blk.{i}.ffn_gate_inp.weight") else GatedMLP(ff, limit=of_shared[i])))
    unscaled, mtp = ("attn_gate", *FFN, *EXPERT, *SHARED), () if f.long_from else layers[f.n_layer :]
    return Decoder(
        f, layers[: f.n_layer], window=window, long_from=f.long_from, biased=ATTENTION, unscaled=unscaled, mtp=mtp, mtp_before_norm=True,
        drafting_layers=MTP_LAYERS,
    )  # fmt: skip


def limits(f: Hparams, key: str) -> tuple[float, ...]:
    """The limit of each layer, MTP layers included, 0 for none."""
    values = f.file.metadata.get(f"{f.arch}.{key}")
    if values is None:
        return (0.0,) * f.n_block
    found = [float(v) for v in (values if isinstance(values, np.ndarray) else [f.number(key, 0.0)] * f.n_block)]
    if len(found) < f.n_block or not all(0 <= v < 1 << 31 for v in found):
        raise f.refuse(f"{key} is {found[:4]}, but it has to be {f.n_block} numbers of 0 or more")
    return tuple(v if v > EPS else 0.0 for v in found[: f.n_block])
