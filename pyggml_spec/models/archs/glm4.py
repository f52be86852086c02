"""glm4 (GLM-4, GLM-Z1): norms of what both parts read and give, gate and up in one tensor. glm4moe (GLM-4.5): dense layers, then experts.
Files of image models (GLM-4.1V, 4.5V, 4.6V) have sections of positions by axis.

chatglm (ChatGLM 3, GLM-4-9B): glm4 with norms of inputs only. Source of the formulae: llama.cpp, src/models/glm4.cpp, glm4-moe.cpp, chatglm.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, QKV, Attention, GatedMLP, Layer, MoE, post_normed
from ..model import ATTENTION, EXPERT, FFN, SHARED
from ..moe import SIGMOID
from .qwen35 import MTP_LAYERS


@register("glm4")
def glm4(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.seeing(f.rope(size, neox=False), size))
    layer = post_normed(attention, GatedMLP(f.ff, packed=True))
    return Decoder(f, [layer] * f.n_layer, biased=ATTENTION, unscaled=FFN)


@register("chatglm")
def chatglm(f: Hparams) -> Decoder:
    size = f.head_dim()
    layer = Layer(Attention(f.heads, f.kv_heads, size, f.rope(size, neox=False)), GatedMLP(f.ff, packed=True))
    return Decoder(f, [layer] * f.n_layer, biased=(*ATTENTION, QKV), unscaled=FFN)


@register("glm4moe")
def glm4moe(f: Hparams) -> Decoder:
    size = f.head_dim()
    norm = HEAD if f.shape("blk.0.attn_q_norm.weight") else ""
    attention = Attention(f.heads, f.kv_heads, size, f.seeing(f.rope(size), size), norm=norm)
    experts = f.experts(
        gating=f.gating(SIGMOID),
        biased=True,
        normalise=f.get("expert_weights_norm", bool, False),
        scale=f.number("expert_weights_scale", 0.0),
    )
    n_shared = experts.n_ff * f.number("expert_shared_count", 0)
    moe = MoE(experts, GatedMLP(n_shared, suffix="_shexp") if n_shared else None)
    dense = f.leading_dense(0)
    layers = [Layer(attention, GatedMLP(f.ff) if i < dense else moe, ffn_norm="post_attention_norm") for i in range(f.n_layer)]
    mtp = [Layer(attention, moe, ffn_norm="post_attention_norm")]
    return Decoder(f, layers, biased=ATTENTION, unscaled=(*FFN, *EXPERT, *SHARED), mtp=mtp, drafting_layers=MTP_LAYERS)
