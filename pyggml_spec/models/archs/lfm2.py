"""lfm2, lfm2moe (LFM2): short convolutions, and attention where layers have K/V heads; lfm2moe: experts after leading dense layers.

With [b | c | x] = W_in h:  W_out (c * conv(b * x)), a causal convolution per channel.
Source of the formulae: llama.cpp, src/models/lfm2.cpp, lfm2moe.cpp.
"""

from dataclasses import dataclass

from ...ggml.library import Tensor
from ..base import Recurrence, RecurrentShape
from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, LayerContext, MoE, Part, specs
from ..model import ATTENTION, EXPERT, FFN
from ..weights import VECTOR, Spec
from .deepseek import ffns


@dataclass(frozen=True)
class ShortConv(Part):
    """A gated causal convolution; ``recurrent``: of the rows that it keeps."""

    recurrent: RecurrentShape

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        conv = Spec(f"{prefix}shortconv.conv.weight", (self.recurrent.conv, f.n_embd), VECTOR)
        return [*specs(f"{prefix}shortconv.", {"in_proj": (f.n_embd, 3 * f.n_embd), "out_proj": (f.n_embd, f.n_embd)}), conv]

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g, n = c.g, self.recurrent.channels
        inputs = c.product("shortconv.in_proj", x)
        before, after, x = (g.slice(inputs, 0, i * n, n) for i in range(3))
        assert c.recurrent is not None
        return c.product("shortconv.out_proj", g.mul(after, c.recurrent(g, c.state, g.mul(before, x), c["shortconv.conv"])))


@register("lfm2", "lfm2moe")
def lfm2(f: Hparams) -> Decoder:
    size, heads = f.hybrid_head_dim, f.hybrid_heads
    taps, window = f.positive("shortconv.l_cache", limit=16), f.number("attention.sliding_window", 0) if f.arch == "lfm2" else 0
    if taps < 2:
        raise f.refuse("shortconv.l_cache is 1, but a convolution needs 2 taps or more")
    shape = RecurrentShape(sum(not kv for _, kv in heads), f.n_embd, 1, 1, taps, recurrence=Recurrence.NONE)
    rope = f.rope(size, windowed=window > 0)
    parts: list[GatedMLP | MoE] = [GatedMLP(f.ff)] * f.n_layer
    if f.arch == "lfm2moe":
        parts = ffns(f, MoE(f.experts(gating=f.gating(), biased=True)))
    layers = [
        Layer(Attention(n, kv, size, rope, norm=HEAD, sliding=window > 0) if kv else ShortConv(shape), ffn)
        for (n, kv), ffn in zip(heads, parts, strict=True)
    ]
    return Decoder(f, layers, window=window, output_norm="token_embd_norm", biased=ATTENTION, unscaled=(*FFN, *EXPERT))
