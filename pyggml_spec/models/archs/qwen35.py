"""qwen35 (Qwen3.5, Qwen3.6): three gated delta-net layers per gated full-attention layer. qwen35moe: routed plus shared experts.

    n = rms(x; post_attention_norm);  x += experts(n) + sigmoid(w_shexp . n) * SwiGLU_shared(n)
Source of the formulae: llama.cpp, src/models/qwen35.cpp, qwen35moe.cpp.
"""

from ..base import RecurrentShape
from ..decoder import Decoder, register
from ..delta_net import GatedDeltaNet
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, MoE, Part
from ..model import ATTENTION

MTP_LAYERS = "the model's own MTP layers"


@register("qwen35", "qwen35moe")
def qwen35(f: Hparams) -> Decoder:
    mixers = hybrid_mixers(f)
    ffn: Part = (
        MoE(f.experts(), GatedMLP(f.positive("expert_shared_feed_forward_length"), suffix="_shexp"), gated=True)
        if f.arch == "qwen35moe"
        else GatedMLP(f.ff)
    )
    return hybrid(f, mixers, ffn)


def hybrid(f: Hparams, mixers: tuple[list[Part], Attention], ffn: Part, **more: object) -> Decoder:
    """A decoder of ``mixers`` with the same FFN; its MTP layer has attention."""
    *layers, mtp = [Layer(mixer, ffn, ffn_norm="post_attention_norm") for mixer in (*mixers[0], mixers[1])]
    return Decoder(f, layers, mtp=[mtp], biased=ATTENTION, drafting_layers=MTP_LAYERS, **more)  # type: ignore[arg-type]


def hybrid_mixers(f: Hparams, mixer: type[GatedDeltaNet] = GatedDeltaNet, grouped: bool = False) -> tuple[list[Part], Attention]:
    """(mixers in order, the attention mixer). ``grouped``: adjacent v-heads share a head of q and k."""
    size = f.head_dim()
    inner, state = f.positive("ssm.inner_size"), f.positive("ssm.state_size", limit=1024)
    heads_v, heads_k = f.positive("ssm.time_step_rank"), f.positive("ssm.group_count")
    if inner != heads_v * state or heads_v % heads_k:
        raise f.refuse(
            f"ssm.inner_size {inner}, time_step_rank {heads_v}, group_count {heads_k} and state_size {state} contradict each other "
            "(inner = rank * state, rank a multiple of group_count)"
        )
    every, flags = f.positive("full_attention_interval", 4), f.file.array(f"{f.arch}.attention.recurrent_layers")
    recurrent = [(i + 1) % every != 0 for i in range(f.n_layer)] if flags is None else [bool(flag) for flag in flags][: f.n_layer]
    if len(recurrent) != f.n_layer or not any(recurrent):
        raise f.refuse(f"{f.n_layer} layers with {sum(recurrent)} recurrent ones is not a {f.arch} model")
    rope = f.rope(size)
    if not grouped:
        rope = f.by_axis(rope, interleaved=True)
    attention = Attention(f.heads, f.kv_heads, size, rope, norm=HEAD, gate="in q")
    delta = mixer(RecurrentShape(sum(recurrent), state, heads_k, heads_v, f.positive("ssm.conv_kernel", limit=16), grouped, state))
    return [delta if one else attention for one in recurrent], attention
