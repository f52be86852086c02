"""mimo2 (MiMo V2 Flash, V2.5): V heads of their own size, sliding layers with sinks and more K/V heads, a scaled attention output, experts.

Source of the formulae: llama.cpp, src/models/mimo2.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import OF_SLIDING, Hparams
from ..layers import Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN
from ..moe import SIGMOID
from .ernie4_5 import UNADDED
from .qwen35 import MTP_LAYERS

BASE = 10000.0  # of sliding layers where the file has none, as in llama.cpp


@register("mimo2")
def mimo2(f: Hparams) -> Decoder:
    heads, kv_heads = f.heads_by_layer
    size, size_v = (f.positive(f"attention.{name}", f.n_embd // heads[0], 4096) for name in ("key_length", "value_length"))
    for name, own in zip((*OF_SLIDING, "rope.dimension_count_swa"), (size, size_v, f.get("rope.dimension_count", int, size)), strict=True):
        if f.get(name, int, own) != own:
            raise f.refuse(f"{name} differs from {own} of full layers, which llama.cpp does not read for mimo2")
    window, sliding = f.window(mtp=True)
    full = f.rope(size, yarn=False, windowed=True)
    local, value_scale = f.sliding_rope(full, size, BASE), f.number("attention.value_scale", 1.0)
    experts = f.experts(gating=SIGMOID, biased=any(".exp_probs_b." in name for name in f.file.tensors))
    layers = []
    for i, s in enumerate(sliding):
        attention = Attention(
            heads[i], kv_heads[i], size, local if s else full, sliding=s, sinks=f.shape(f"blk.{i}.attn_sinks.weight") is not None,
            other_v=size_v, result_scale=value_scale if value_scale != 1 else 0.0,
        )  # fmt: skip
        layers.append(Layer(attention, MoE(experts) if f.shape(f"blk.{i}.ffn_gate_inp.weight") else GatedMLP(f.ff)))
    unused = {f"blk.{i}.{name}.bias": UNADDED for i in range(f.n_layer) for name in (*ATTENTION, "attn_qkv")}
    unscaled = (*ATTENTION, "attn_qkv", *FFN, *EXPERT)
    return Decoder(
        f,
        layers[: f.n_layer],
        window=window,
        unscaled=unscaled,
        unused=unused,
        mtp=layers[f.n_layer :],
        mtp_before_norm=True,
        drafting_layers=MTP_LAYERS,
    )
