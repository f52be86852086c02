"""gemma3n (Gemma 3n E2B, E4B): four streams of the residual, of which layers compute the first and correct all (AltUp); per-layer embeddings.

    predictions p_j = x_j + sum over i of (W_p m)_{ij} x_i;  m = tanh(W_r rms(x_0; router) / n_embd)
    h = rms(p_0);  a = (p_0 + rms(attention(h)) + h + rms(W_lr W_ll h)) / sqrt(2);  y = a + rms(FFN(rms(a)))
    x_j = p_j + (1 + (W_c m')_j) (y - p_0), m' of y;  x_1 to x_3 gain a term of the layer's embeddings and x_0
The gate of the first SPARSE layers is max(g - mean - SPARSITY deviation, 0). Layers from SHARED_FROM on read the K/V of the last layer of their kind
before it. The numbers are those that llama.cpp has for every file. Source of the formulae: llama.cpp, src/models/gemma3n.cpp.
"""

from dataclasses import dataclass

import numpy as np

from ...ggml.graph import Graph
from ...ggml.library import Tensor
from ..decoder import Decoder, register
from ..hparams import Hparams, inverse_root
from ..layers import GatedMLP, LayerContext, any_norm, specs
from ..model import FFN
from ..weights import HEADS, ROWS, VECTOR, Spec
from .gemma4 import Gemma4, GemmaLayer, SharedAttention

STREAMS, RANK, PER_LAYER, SHARED_FROM, SPARSE, SPARSITY = 4, 64, 256, 20, 10, 1.6448533535003662
SOFTCAP = 30.0


@register("gemma3n")
def gemma3n(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(5, full_last=True)
    rope = f.rope(size, windowed=True)
    local = f.sliding_rope(rope, size, 10000.0)
    if f.number("embedding_length_per_layer_input", PER_LAYER) != PER_LAYER or f.number("altup.num_inputs", STREAMS) != STREAMS:
        raise f.refuse(
            f"it has other sizes than the {PER_LAYER} values per layer and {STREAMS} streams that llama.cpp has for every gemma3n file"
        )
    ff, layers = f.per_layer("feed_forward_length"), []
    for i, s in enumerate(sliding):
        owner = i if i < SHARED_FROM else SHARED_FROM - (2 if s else 1)
        if sliding[owner] != s:
            raise f.refuse(f"layer {i} would read the K/V of layer {owner}, which is of another kind (attention.sliding_window_pattern)")
        mixer = SharedAttention(f.heads, f.kv_heads, size, local if s else rope, sliding=s, owner=owner, owns=owner == i)
        layers.append(AltUp(mixer, SparseMLP(ff[i], "gelu", sparse=i < SPARSE)))
    return Gemma3n(
        f,
        layers,
        PER_LAYER,
        window=window,
        embedding_scale=f.root_embd,
        softcap=SOFTCAP,
        unscaled=FFN,
        no_pictures="its streams over rows of pictures were not compared with llama.cpp",
    )


@dataclass(frozen=True)
class SparseMLP(GatedMLP):
    """``GatedMLP``, with few gates above 0 where ``sparse``."""

    sparse: bool = False

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g = c.g
        gate, up = (part if g.view_source(part) == part else g.cont(part) for part in c.project("ffn", x))
        if self.sparse:
            mean = g.mean(gate)
            variance = g.scale(g.sum_rows(g.sqr(g.sub(gate, mean))), float(np.float32(1) / np.float32(gate.ne[0] - 1)))
            gate = g.clamp(g.sub(gate, g.add(mean, g.scale(g.sqrt(variance), SPARSITY))), 0.0, float("inf"))
        return c.product("ffn_down", g.mul(up, g.gelu(gate)))


@dataclass(frozen=True)
class AltUp(GemmaLayer):
    """A layer between streams F32 [n_embd, T, STREAMS]."""

    n_per_layer: int = PER_LAYER

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        n, out = f.n_embd, super().tensors(f, prefix)
        matrices = {
            "laurel_l": (n, RANK),
            "laurel_r": (RANK, n),
            "altup_router": (n, STREAMS),
            "altup_correct_coef": (STREAMS, STREAMS),
            "altup_predict_coef": (STREAMS, STREAMS**2),
        }
        return out + specs(prefix, matrices, dict.fromkeys(("laurel_post_norm", "altup_router_norm", "altup_correct_scale"), n))

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g, ffn = c.g, self.ffn
        assert ffn is not None and c.extra is not None
        predictions = self._predicted(c, x)
        active = g.pick(predictions, 2, 0)
        h = c.rms_norm(active, self.mixer_norm)
        laurel = g.add(c.rms_norm(c.product("laurel_r", c.product("laurel_l", h)), "laurel_post_norm"), h)
        a = g.add(self._residual(c, self.mixer(c, h), self.post_mixer), active)
        a = g.scale(g.add(a, laurel), inverse_root(2))
        y = g.add(self._residual(c, ffn(c, c.rms_norm(a, self.ffn_norm)), self.post_ffn), a)
        corrected = self._corrected(c, predictions, active, y)
        first = c.product("inp_gate", g.mul(g.pick(corrected, 2, 0), c["altup_correct_scale"]))
        inner = c.rms_norm(c.product("proj", g.mul(g.gelu(first), g.pick(c.extra, 2, c.i))), "post_norm")
        return g.pile(g.slice(corrected, 2, 0, 1), g.add(g.slice(corrected, 2, 1, STREAMS - 1), inner))

    def _modalities(self, c: LayerContext, x: Tensor) -> Tensor:
        """F32 [STREAMS, T]."""
        seen = c.g.scale(c.rms_norm(x, "altup_router_norm"), float(np.float32(1) / np.float32(x.ne[0])))
        return c.g.tanh(c.product("altup_router", seen))

    def _predicted(self, c: LayerContext, x: Tensor) -> Tensor:
        g, rows = c.g, x.ne[1]
        weights = g.reshape(c.product("altup_predict_coef", self._modalities(c, g.pick(x, 2, 0))), STREAMS, STREAMS, rows)
        mixed = g.matmul(g.cont(g.permute(x, 1, 2, 0, 3)), weights)
        return g.add(g.cont(g.permute(mixed, 0, 2, 1, 3)), x)

    def _corrected(self, c: LayerContext, predictions: Tensor, active: Tensor, y: Tensor) -> Tensor:
        g, (n, rows) = c.g, list(y.ne)[:2]
        weights = g.scale_bias(c.product("altup_correct_coef", self._modalities(c, y)), 1.0, 1.0)
        weights = g.reshape(g.cont(g.permute(weights, 1, 0, 2, 3)), 1, rows, STREAMS)
        return g.add(g.mul(g.repeat(g.sub(y, active), n, rows, STREAMS), weights), predictions)


class Gemma3n(Gemma4):
    """gemma3n. Drafters read the first stream."""

    def tensors(self) -> list[Spec]:
        n, wide = self.n_embd, PER_LAYER * self.n_layer
        out = [*Decoder.tensors(self), Spec("per_layer_token_embd.weight", (wide, self.n_vocab), ROWS)]
        out += [Spec("per_layer_model_proj.weight", (n, wide)), Spec("per_layer_proj_norm.weight", (PER_LAYER,), VECTOR)]
        return out + [Spec(f"{name}.weight", (n, n, STREAMS - 1), HEADS) for name in ("altup_proj", "altup_unembd_proj")]

    def widened(self, g: Graph, x: Tensor) -> Tensor:
        n, rows = list(x.ne)[:2]
        others = self._as_long_as(g, g.matmul(self.weights["altup_proj.weight"], g.repeat(x, n, rows, STREAMS - 1)), x)
        return g.pile(g.reshape(x, n, rows, 1), others)

    def normed(self, g: Graph, x: Tensor, extra: Tensor | None) -> Tensor:
        first = g.pick(x, 2, 0)
        others = self._as_long_as(g, g.matmul(self.weights["altup_unembd_proj.weight"], g.slice(x, 2, 1, STREAMS - 1)), first)
        for i in range(STREAMS - 1):
            first = g.add(first, g.pick(others, 2, i))
        return any_norm(g, self.weights, "output_norm", g.scale(first, 1 / STREAMS), self.eps, False)

    def feature(self, g: Graph, x: Tensor) -> Tensor:
        return g.pick(x, 2, 0)

    def _as_long_as(self, g: Graph, x: Tensor, first: Tensor) -> Tensor:
        """Each row of x F32 [n, T, H] with the length of that of ``first``, F32 [n, T]."""
        length, own = (g.sqrt(g.sum_rows(g.sqr(of))) for of in (first, x))
        return g.div(g.mul(x, length), own)
