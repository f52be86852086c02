"""apertus (Apertus 8B, 70B): a llama with norms of q and k per head, and an FFN without gate whose activation has numbers per layer.

Source of the formulae: llama.cpp, src/models/apertus.cpp.
"""

from dataclasses import dataclass

import numpy as np

from ...ggml.library import Tensor
from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, MAY, MLP, Attention, Layer, LayerContext
from ..model import ATTENTION, FFN

KEYS = ("alpha_n", "alpha_p", "beta", "eps")


@register("apertus")
def apertus(f: Hparams) -> Decoder:
    size, scale = f.head_dim(), f.number("attention.scale", 0.0) or None
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size), factors=True, norm=HEAD, scale=scale, out_bias=MAY)
    numbers = zip(*(_of_layers(f, f"xielu.{key}") for key in KEYS), strict=True)
    layers = [Layer(attention, XieluMLP(f.ff, "xielu", numbers=of)) for of in numbers]
    return Decoder(f, layers, long_from=f.long_from, biased=(*ATTENTION, "attn_output"), unscaled=FFN)


def _of_layers(f: Hparams, key: str) -> tuple[float, ...]:
    values = f.file.metadata.get(key)  # without the architecture's name
    numbers = [float(v) for v in values] if isinstance(values, np.ndarray) else [f.file.get(key, float)] * f.n_layer
    if len(numbers) < f.n_layer or not np.isfinite(numbers).all():
        raise f.refuse(f"{key} has {len(numbers)} numbers, but there are {f.n_layer} layers")
    return tuple(numbers[: f.n_layer])


@dataclass(frozen=True)
class XieluMLP(MLP):
    """``MLP`` with the ``numbers`` of its activation (KEYS)."""

    numbers: tuple[float, ...] = ()

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        return c.product("ffn_down", c.g.xielu(c.product("ffn_up", x), *self.numbers))
