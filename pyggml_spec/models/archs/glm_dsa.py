"""glm-dsa (GLM 5, 5.1, 5.2), deepseek32 (DeepSeek V3.2): deepseek2 with an indexer that selects the rows for attention (sparse attention).

With a = rms(W_qa h; attn_q_a_norm) and n_H heads of D values:
    key = norm(W_ik h; k_norm), one for all heads, stored per position;  u = W_iq a, [D, n_H];  the first values of both are rotated
    key and u are multiplied by an orthonormal Hadamard matrix (which changes no product, but how rows are quantised)
    score_j = sum over heads of (W_p h)_i / sqrt(D n_H) * max(u_i . key_j, 0);  attention sees the top_k visible positions of the largest score
Where a KV bucket has no more rows than top_k, all of them are chosen, and no score is computed. Layers that are not full have no indexer: they
see what the last full layer before them chose (GLM 5.2). deepseek32's indexer rotates NEOX pairs. Source of the formulae: llama.cpp, src/models/glm-dsa.cpp, deepseek32.cpp.
"""

from dataclasses import dataclass, replace

import numpy as np

from ...ggml.library import Tensor
from ..base import KVShape
from ..decoder import Decoder, register
from ..hparams import Hparams, inverse_root
from ..layers import Layer, LayerContext
from ..mla import MLA
from ..model import ATTENTION, SCALED
from ..moe import SIGMOID
from ..rope import Rope
from ..weights import VECTOR, Spec
from .deepseek2 import ffns, latent_attention, multiplier
from .qwen35 import MTP_LAYERS

NORM_EPS = {"glm-dsa": 0.0, "deepseek32": 1e-6}  # as in llama.cpp
SIZES = (64, 128, 256, 512)  # row sizes of llama.cpp's Hadamard matrices
LONG = 1 << 20  # context length from which a file without a list of full layers is GLM 5.2
LAYERS_52 = 78


@register("glm-dsa", "deepseek32")
def glm_dsa(f: Hparams) -> Decoder:
    glm = f.arch == "glm-dsa"  # for which llama.cpp does not read yarn's multiplier
    attention = latent_attention(f, f.positive("attention.q_lora_rank"), 0.0 if glm else multiplier(f))
    size = f.positive("attention.indexer.key_length", limit=4096)
    if size not in SIZES or size < attention.rope.n_rot:
        raise f.refuse(
            f"attention.indexer.key_length is {size}, but it has to be one of {', '.join(map(str, SIZES))}, "
            f"and no less than the {attention.rope.n_rot} values that are rotated (rope.dimension_count)"
        )
    index_heads, top_k = f.positive("attention.indexer.head_count", limit=1024), f.positive("attention.indexer.top_k", limit=(1 << 31) - 1)
    full = _full(f) if glm else (True,) * f.n_layer
    mixers = {
        one: IndexedMLA(
            **vars(attention), index_heads=index_heads, index_size=size, top_k=top_k, full=one,
            index_rope=replace(attention.rope, neox=not glm), norm_eps=NORM_EPS[f.arch],
        )
        for one in {*full}
    }  # fmt: skip
    layers = [Layer(mixers[one], ffn) for one, ffn in zip(full, ffns(f, SIGMOID if glm else None), strict=True)]
    # an indexer's attn_k has no scale
    scaled, mtp = tuple(name for name in SCALED if name not in ATTENTION), [Layer(attention, layers[-1].ffn)]
    return Decoder(f, layers, scaled=scaled, unscaled=("output",), mtp=mtp, drafting_layers=MTP_LAYERS)


def _full(f: Hparams) -> tuple[bool, ...]:
    """Which layers have an indexer."""
    key = f"{f.arch}.attention.indexer.types"
    if isinstance(f.file.metadata.get(key), np.ndarray):
        listed = f.file.array(key)
        assert listed is not None
        full = tuple(bool(v) for v in listed)
    elif key in f.file.metadata:
        full = (bool(f.file.get(key, int)),) * f.n_layer
    elif f.context_length < LONG:
        full = (True,) * f.n_layer
    else:
        full = tuple(i < 2 or (i < LAYERS_52 and i % 4 == 2) for i in range(f.n_layer))
    if len(full) != f.n_layer:
        raise f.refuse(f"attention.indexer.types names {len(full)} of {f.n_layer} layers; convert the model again")
    if not full[0]:
        raise f.refuse("attention.indexer.types gives layers an earlier one's choice, but the first layer has none to see")
    return full


@dataclass(frozen=True)
class IndexedMLA(MLA):
    """Latent attention over ``top_k`` positions; ``extra``: the mask selected by the last ``full`` layer, None for all rows."""

    index_heads: int = 0
    index_size: int = 0
    top_k: int = 0
    full: bool = True
    index_rope: Rope | None = None
    norm_eps: float = 0.0
    narrow = False

    @property
    def kv(self) -> KVShape:  # type: ignore[override]
        return replace(super().kv, index=self.index_size, index_heads=self.index_heads) if self.full else super().kv

    @property
    def reads_extra(self) -> bool:  # type: ignore[override]
        return not self.full

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        out, b = super().tensors(f, prefix), f"{prefix}indexer."
        if not self.full:
            return out
        shapes = {
            "attn_k": (f.n_embd, self.index_size),
            "attn_q_b": (self.lora_q, self.index_heads * self.index_size),
            "proj": (f.n_embd, self.index_heads),
        }
        out += [Spec(f"{b}{name}.weight", shape) for name, shape in shapes.items()]
        return out + [Spec(f"{b}k_norm.{kind}", (self.index_size,), VECTOR) for kind in ("weight", "bias")]

    def unused(self, f: Hparams, prefix: str) -> dict[str, str]:
        own = [] if self.full else [name for name in f.file.tensors if name.startswith(f"{prefix}indexer.")]
        return dict.fromkeys(own, "the indexer of a layer that sees what another one's chose (attention.indexer.types)")

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        assert c.attention is not None
        q, row = self.projected(c, x)
        if self.full:
            c.extra = self._chosen(c, x, q)
        return self.attend(c, q, row, c.attention.mask if c.extra is None else c.extra)

    def _chosen(self, c: LayerContext, x: Tensor, q: Tensor) -> Tensor | None:
        """Stores the indexer's keys; returns the mask of the selected positions, None if those are the whole bucket."""
        g, w, b, kv, attention = c.g, c.w, f"{c.prefix}indexer.", c.kv, c.attention
        rope = self.index_rope
        assert attention is not None and kv.indexer is not None and kv.rotation_indexer is not None and rope is not None
        key = c.product("indexer.attn_k", x)
        key = g.layer_norm(key, w[f"{b}k_norm.weight"], w[f"{b}k_norm.bias"], self.norm_eps)
        key = g.hadamard_product(rope(g, g.heads(key, self.index_size, 1), c.positions), kv.rotation_indexer)
        g.kv_write_rows(kv.indexer, key, attention.kv_rows)
        if attention.kv_bucket <= self.top_k:
            return None
        queries = g.heads(c.product("indexer.attn_q_b", q), self.index_size, self.index_heads)
        queries = g.hadamard_product(rope(g, queries, c.positions), kv.rotation_indexer)
        weights = g.scale(c.product("indexer.proj", x), inverse_root(self.index_size * self.index_heads))
        return g.top_k_mask(attention.mask, g.index_scores(queries, kv.indexer, weights, attention.mask, attention.kv_bucket), self.top_k)
