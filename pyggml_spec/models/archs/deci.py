"""deci (Llama Nemotron Super and Ultra, DeciLM): a llama whose layers differ in size; some have no attention, or one matrix in its place.

Source of the formulae: llama.cpp, src/models/deci.cpp.
"""

from dataclasses import dataclass

from ...ggml.library import Tensor
from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import Attention, GatedMLP, Layer, LayerContext, Part, specs
from ..model import ATTENTION, FFN
from ..weights import Spec


@dataclass(frozen=True)
class Linear(Part):
    """A matrix in place of attention."""

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        return specs(prefix, {"attn_output": (f.n_embd, f.n_embd)})

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        return c.product("attn_output", x)


@register("deci")
def deci(f: Hparams) -> Decoder:
    heads, ff = f.hybrid_heads, f.per_layer("feed_forward_length", least=0)
    size, scale = f.hybrid_head_dim, f.number("attention.scale", 0.0) or None
    rope, layers = f.whole_heads(f.rope(size, neox=False), size), []
    for i, ((n, n_kv), n_ff) in enumerate(zip(heads, ff, strict=True)):
        if not n_ff:
            raise f.refuse(f"layer {i} has no FFN (feed_forward_length), and llama.cpp leaves such layers out as a whole")
        attention = Attention(n, n_kv, size, rope, factors=True, scale=scale) if n_kv else Linear()
        layers.append(Layer(attention, GatedMLP(n_ff)) if n else Layer(GatedMLP(n_ff), None, mixer_norm="ffn_norm"))
    return Decoder(f, layers, long_from=f.long_from, biased=(*ATTENTION, *FFN), unscaled=FFN)
