"""hy_v3 (Hunyuan 3): norms of q and k per head before RoPE; dense layers, then routed experts with a bias for their choice and a shared one.

Source of the formulae: llama.cpp, src/models/hy-v3.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, FFN
from ..moe import SIGMOID
from .qwen35 import MTP_LAYERS


@register("hy_v3")
def hy_v3(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size), norm=HEAD)
    experts = f.experts(
        gating=f.gating(SIGMOID), normalise=f.get("expert_weights_norm", bool, False),
        scale=f.number("expert_weights_scale", 0.0), biased=any(".exp_probs_b" in name for name in f.file.tensors),
    )  # fmt: skip
    moe = MoE(experts, GatedMLP(f.number("expert_shared_feed_forward_length", 0) or experts.n_ff, suffix="_shexp"))
    layers = [Layer(attention, moe if f.shape(f"blk.{i}.ffn_gate_inp.weight") else GatedMLP(f.ff)) for i in range(f.n_block)]
    routed = [i for i, layer in enumerate(layers[: f.n_layer]) if layer.ffn is moe]
    names = [f"{name}.{end}" for name in FFN for end in ("weight", "scale", "input_scale")]
    unused = {f"blk.{i}.{name}": "a dense FFN beside the layer's experts, which llama.cpp does not use" for i in routed for name in names}
    return Decoder(f, layers[: f.n_layer], biased=ATTENTION, unused=unused, mtp=layers[f.n_layer :], drafting_layers=MTP_LAYERS)
