"""falcon-h1: every layer adds what attention and a Mamba-2 mixer make of the same input.

Source of the formulae: llama.cpp, src/models/falcon-h1.cpp.
"""

from dataclasses import dataclass

from ...ggml.library import Tensor
from ..base import KVShape, RecurrentShape
from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import ROPE_FREQS, Attention, GatedMLP, Layer, LayerContext, Part
from ..mamba2 import Mamba2
from ..model import ATTENTION, FFN, SCALED
from ..rope import Rope
from ..weights import Spec
from .ernie4_5 import UNADDED


@dataclass(frozen=True)
class BothMixers(Part):
    """The sum of ``attention`` and ``mamba``."""

    attention: Attention
    mamba: Mamba2
    narrow = True

    @property
    def kv(self) -> KVShape:  # type: ignore[override]
        return self.attention.kv

    @property
    def recurrent(self) -> RecurrentShape:  # type: ignore[override]
        return self.mamba.recurrent

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        return self.attention.tensors(f, prefix) + self.mamba.tensors(f, prefix)

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        return self.attention.groups(f, prefix)

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        return c.g.add(self.attention(c, x), self.mamba(c, x))


@register("falcon-h1")
def falcon_h1(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size))
    mamba = Mamba2.from_gguf(f, f.n_layer, normalised=f.shape("blk.0.ssm_norm.weight") is not None)
    layers = [Layer(BothMixers(attention, mamba), GatedMLP(f.ff))] * f.n_layer
    unused = {f"blk.{i}.attn_output.bias": UNADDED for i in range(f.n_layer)} | {
        ROPE_FREQS: "divisors that llama.cpp reads and does not apply"
    }
    return Decoder(f, layers, scaled=(*SCALED, "ssm_in"), biased=(*ATTENTION, *FFN), unscaled=FFN, unused=unused)
