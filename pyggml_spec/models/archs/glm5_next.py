"""glm5-next (GLM 5.3 Flash): kimi-linear with hyper-connections between four residual streams, and sparse attention over pools of positions.

The residual x is four streams [n_embd, 4], at first equal. Before the mixer and before the FFN, with m = W rms(x) of all streams as one vector:
    pre = sigmoid(s_0 m_0.. + b_0..) + eps;  post = 2 sigmoid(s_1 m_4.. + b_4..);  C = sinkhorn(s_2 m_8.. + b_8..), [4, 4]
    h = sum over i of pre_i x_i;  x_i <- post_i part(rms(h)) + sum over j of C_ij x_j;  the head reads rms(mean of x)
Latent attention rotates nothing. Its indexer keeps k = norm(W_k h) and g = W_g h of each position. A pool of r positions has the key
    sum over i of softmax over i (g_i + a_i) k_i, for each value
Attention sees the top_k / r pools of the largest score (``glm_dsa``) among those that end at or before the position, and the positions after them.
Source of the formulae: llama.cpp, src/models/glm5-next.cpp.
"""

from dataclasses import dataclass, replace

import numpy as np

from ...ggml.graph import F32, I32, Graph
from ...ggml.library import Tensor, lib
from ..base import AttentionInputs, KVShape
from ..decoder import Decoder, register
from ..hparams import Hparams, inverse_root
from ..layers import GatedMLP, Layer, LayerContext, MoE, Part, any_norm, specs
from ..mla import MLA
from ..model import ATTENTION, SCALED
from ..moe import SIGMOID
from ..rope import Rope
from ..weights import VECTOR, Spec
from .deepseek import shared_moe
from .ernie4_5 import UNADDED
from .kimi_linear import delta
from .qwen4exp import mean_of_streams
from .step35 import limits

STREAMS, MIXES = 4, 24
L2_EPS = 1e-6
GATE, OFFSETS = "indexer_compressor_gate", "indexer_compressor_ape"
FAR = 1e9  # beyond F16
FEW = 16


@register("glm5-next")
def glm5_next(f: Hparams) -> Decoder:
    if (streams := f.positive("hyper_connection.count", limit=64)) != STREAMS:
        raise f.refuse(f"hyper_connection.count is {streams}; {STREAMS} streams are supported")
    kda = delta(f, bound=f.number("kda.gate_lower_bound", 0.0, -1e3, 0.0), l2_eps=L2_EPS)
    full, attention = _full(f), _attention(f)
    of_experts, shared = limits(f, "swiglu_clamp_exp"), "swiglu_clamp_shexp"
    of_shared = limits(f, shared) if f"{f.arch}.{shared}" in f.file.metadata else of_experts
    passes = any(kv and not own for (_, kv), own in zip(f.hybrid_heads, full))
    moe = shared_moe(f, gating=f.gating(SIGMOID), biased=True, normalise=f.get("expert_weights_norm", bool, False))
    dense, layers = f.leading_dense(0), []
    for i, (_, kv) in enumerate(f.hybrid_heads):
        mlp = GatedMLP(f.ff, clamps=True, limit=of_shared[i])
        routed = MoE(replace(moe.experts, clamps=True, limit=of_experts[i]), replace(moe.shared, clamps=True, limit=of_shared[i]))  # type: ignore[type-var]
        mixer = replace(attention, full=full[i]) if kv else kda
        layers.append(HyperLayer(mixer, mlp if i < dense else routed, hyper=_hyper(f), passes=passes))
    unused = {f"blk.{i}.{name}.bias": UNADDED for i in range(f.n_layer) for name in ATTENTION}
    unscaled = (*SCALED, "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "output")
    return Glm5Next(f, layers, unused=unused, unscaled=unscaled, drafting_layers="an MTP layer, for which llama.cpp has no graph")


def _hyper(f: Hparams) -> tuple[float, int]:
    """Epsilon and number of iterations of the mixing matrices."""
    return f._epsilon("hyper_connection.epsilon"), f.positive("hyper_connection.sinkhorn_iterations", limit=64)


def _full(f: Hparams) -> tuple[bool, ...]:
    """Which layers have an indexer; those without see what the last one before them chose."""
    value = f.file.metadata.get(key := f"{f.arch}.attention.indexer.types", 1)
    listed = f.file.array(key) if isinstance(value, np.ndarray) else None
    full = (bool(value),) * f.n_layer if listed is None else tuple(bool(v) for v in listed)
    if len(full) < f.n_layer:
        raise f.refuse(f"attention.indexer.types names {len(full)} of {f.n_layer} layers; convert the model again")
    first = next((i for i, (_, kv) in enumerate(f.hybrid_heads) if kv), 0)
    if not full[first]:
        raise f.refuse("attention.indexer.types gives layers an earlier one's choice, but the first layer of attention has none to see")
    return full


def _attention(f: Hparams) -> "PooledMLA":
    size, value = (f.positive(f"attention.{name}_length_mla", limit=4096) for name in ("key", "value"))
    if n_rot := f.get("rope.dimension_count", int, 0):
        raise f.refuse(f"rope.dimension_count is {n_rot}, but {f.arch} rotates nothing")
    pool, top_k = f.positive("attention.indexer.kpool", limit=256), f.positive("attention.indexer.top_k", limit=(1 << 31) - 1)
    if pool < 2 or 256 % pool or top_k % pool:
        raise f.refuse(f"attention.indexer.kpool is {pool}, but it has to be a power of two from 2 to 256 that divides top_k, {top_k}")
    if not f.get("attention.indexer.kpool_select_tail", bool, False):
        raise f.refuse("attention.indexer.kpool_select_tail is false, which leaves the first positions nothing to attend to")
    return PooledMLA(
        f.heads, f.positive("attention.q_lora_rank", limit=4096), f.positive("attention.kv_lora_rank", limit=4096), size, value, Rope(0, 1.0),
        inverse_root(size), rotated=False, index_heads=f.positive("attention.indexer.head_count", limit=1024),
        index_size=f.positive("attention.indexer.key_length", limit=4096), top_k=top_k, pool=pool,
        norm_eps=f.number("attention.layer_norm_epsilon", 0.0, 0.0, 1.0),
    )  # fmt: skip


@dataclass(frozen=True)
class PooledMLA(MLA):
    """Latent attention over ``top_k`` positions in pools of ``pool``, and those after the last whole pool; ``extra``: the mask that the last ``full``
    layer chose, or its ``_picked``."""

    index_heads: int = 0
    index_size: int = 0
    top_k: int = 0
    pool: int = 0
    full: bool = True
    norm_eps: float = 0.0
    narrow = False

    @property
    def kv(self) -> KVShape:  # type: ignore[override]
        return replace(super().kv, index=2 * self.index_size, index_heads=self.index_heads, pooled=True) if self.full else super().kv

    def _index(self, f: Hparams, prefix: str) -> list[Spec]:
        n, size = f.n_embd, self.index_size
        shapes = {"attn_k": (n, size), "attn_q_b": (self.lora_q, self.index_heads * size), "proj": (n, self.index_heads)}
        offsets = Spec(f"{prefix}{OFFSETS}.weight", (size, self.pool), VECTOR)
        norm = [Spec(f"{prefix}indexer.k_norm.{kind}", (size,), VECTOR) for kind in ("weight", "bias")]
        return [*specs(f"{prefix}indexer.", shapes), *specs(prefix, {GATE: (n, size)}), *norm, offsets]

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        return super().tensors(f, prefix) + (self._index(f, prefix) if self.full else [])

    def unused(self, f: Hparams, prefix: str) -> dict[str, str]:
        why = "the indexer of a layer that sees what another one's chose (attention.indexer.types)"
        return {} if self.full else {spec.name: why for spec in self._index(f, prefix)}

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        q, row = self.projected(c, x)
        assert c.attention is not None
        gathers = self._gathers(c.attention, x.ne[1])
        if self.full:
            self._store(c, x)
            c.extra = self._picked(c, x, q) if gathers else self._chosen(c, x, q)
        assert c.extra is not None
        return self._gathered(c, q, row, c.extra) if gathers else self.attend(c, q, row, c.extra)

    def _gathers(self, at: AttentionInputs, rows: int) -> bool:
        """Whether the selected rows are copied, as llama.cpp does for few queries over many positions."""
        return rows // at.mask.ne[3] <= FEW and at.kv_bucket > self.top_k + self.pool - 1

    def _store(self, c: LayerContext, x: Tensor) -> None:
        """Writes keys and gates."""
        g, n = c.g, self.index_size
        assert c.attention is not None and c.kv.indexer is not None
        key = g.layer_norm(c.product("indexer.attn_k", x), c["indexer.k_norm"], c.w[f"{c.prefix}indexer.k_norm.bias"], self.norm_eps)
        g.kv_write_rows(c.kv.indexer, g.heads(g.concat([key, c.product(GATE, x)]), 2 * n, 1), c.attention.kv_rows)

    def _ended(self, c: LayerContext, rows: int) -> Tensor:
        """0 for the pools whose positions are all visible, -inf for others: F16 [pools, T / slots, 1, slots]."""
        g, at, r = c.g, c.attention, self.pool
        assert at is not None
        ends = g.slice(g.reshape(at.mask, r, at.kv_bucket // r, rows), 0, r - 1, 1)
        return g.reshape(g.cont(ends), at.kv_bucket // r, *list(at.mask.ne)[1:])

    def _picked(self, c: LayerContext, x: Tensor, q: Tensor) -> Tensor:
        """The selected positions, and what is added to their scores: F32 [n, 2, T]."""
        g, r, rows, count = c.g, self.pool, x.ne[1], self.top_k // self.pool
        ended = self._ended(c, rows)
        pools, slots = ended.ne[0], ended.ne[3]
        places, values = g.top_k_unordered(g.reshape(self._scores(c, x, q, ended, pools, slots), pools, rows), count)
        order = g.top_k(g.reshape(values, count, rows), count)
        best = g.cast(g.reshape(g.rows(g.reshape(g.cast(places, F32), 1, count, rows), order), count, rows), I32)
        shown = g.rows(g.reshape(g.cast(ended, F32), 1, pools, rows), best)
        first = g.scale(g.reshape(g.cast(best, F32), 1, count, rows), r)
        at = g.reshape(g.add(g.repeat(first, r, count, rows), g.arange(0, r)), r * count, rows)
        adds = g.reshape(g.repeat(shown, r, count, rows), r * count, rows)
        position = g.reshape(g.cast(c.positions, F32), 1, rows)
        after = g.scale_bias(position, 1.0, 1.0)
        of_pools = g.scale(g.cast(g.cast(g.scale(after, 1 / r), I32), F32), r)
        back = g.repeat(g.reshape(g.arange(0, r - 1), r - 1, 1), r - 1, rows, 1)
        there = g.step(g.scale_bias(g.sub(g.repeat(g.sub(after, of_pools), r - 1, rows, 1), back), 1.0, -0.5))
        tail = g.clamp(g.sub(g.repeat(position, r - 1, rows, 1), back), 0.0, float("inf"))
        at, adds = g.concat([at, tail]), g.concat([adds, g.scale_bias(there, FAR, -FAR)])
        return g.stack([g.reshape(part, at.ne[0], 1, rows) for part in (at, adds)])

    def _gathered(self, c: LayerContext, q: Tensor, row: Tensor, picked: Tensor) -> Tensor:
        """Attention over copies of the rows of ``_picked``."""
        g, kv, n, rows = c.g, c.kv, picked.ne[0], row.ne[1]
        assert c.attention is not None
        slots = c.attention.mask.ne[3]
        plain = g.heads(c.product("attn_q_b", q), self.size, self.heads, self.size)
        absorbed = g.permute(g.matmul(c["attn_k_b"], g.permute(plain, 0, 2, 1, 3)), 0, 3, 2, 1)
        g.expand(absorbed)
        g.kv_write_rows(kv.k, self.stored(c, row), c.attention.kv_rows)
        index = g.reshape(g.cast(g.cont(g.slice(picked, 1, 0, 1)), I32), n * (rows // slots), slots)
        k = g.reshape(g.rows(g.slice(g.slice(kv.k, 1, 0, c.attention.kv_bucket), 2, 0, slots), index), self.latent, n, 1, rows)
        adds = g.reshape(g.cont(g.slice(picked, 1, 1, 1)), n, 1, 1, rows)
        shares = g.masked_softmax(g.matmul(k, absorbed), adds, self.scale)
        out = g.matmul(g.cont(g.permute(k, 1, 0, 2, 3)), shares)
        out = g.permute(g.matmul(c["attn_v_b"], out), 0, 2, 1, 3)
        return c.product("attn_output", g.reshape(g.cont(out), self.size_v * self.heads, rows))

    def _chosen(self, c: LayerContext, x: Tensor, q: Tensor) -> Tensor:
        """The mask of the selected positions."""
        g, at, r = c.g, c.attention, self.pool
        assert at is not None
        bucket, slots, rows, count = at.kv_bucket, at.mask.ne[3], x.ne[1], self.top_k // r
        if bucket <= self.top_k:
            return at.mask
        pools, ended = bucket // r, self._ended(c, rows)
        seen = g.top_k_mask(ended, self._scores(c, x, q, ended, pools, slots), count)
        # pools that have not ended are shown as far as they are there
        hidden = g.sub(*(g.clamp(g.cast(mask, F32), -1.0, 0.0) for mask in (seen, ended)))
        hidden = g.reshape(g.cast(g.scale(hidden, FAR), lib.GGML_TYPE_F16), 1, pools, rows)
        return g.add(g.reshape(g.repeat(hidden, r, pools, rows), bucket, rows // slots, 1, slots), at.mask)

    def _scores(self, c: LayerContext, x: Tensor, q: Tensor, ended: Tensor, pools: int, slots: int) -> Tensor:
        """Of each pool, F32 [pools, T / slots, 1, slots]."""
        g, n, r, cache = c.g, self.index_size, self.pool, c.kv.indexer
        assert cache is not None
        rows = g.reshape(g.cast(g.slice(g.slice(cache, 1, 0, pools * r), 2, 0, slots), F32), 2 * n, r, pools * slots)
        gates = g.permute(g.add(g.slice(rows, 0, n, n), c[OFFSETS]), 1, 0, 2, 3)
        shares = g.softmax(g.reshape(g.cont(gates), r, n * pools * slots))
        keys = g.reshape(g.cont(g.permute(g.slice(rows, 0, 0, n), 1, 0, 2, 3)), r, n * pools * slots)
        pooled = g.reshape(g.sum_rows(g.mul(shares, keys)), n, pools, slots)
        pooled = g.cast(g.cast(pooled, cache.type), F32)  # llama.cpp keeps them as it keeps keys
        queries = g.heads(c.product("indexer.attn_q_b", q), n, self.index_heads)
        weights = g.scale(c.product("indexer.proj", x), inverse_root(n * self.index_heads))
        return g.index_scores(queries, pooled, weights, ended, pools)


@dataclass(frozen=True)
class HyperLayer(Layer):
    """A layer between the streams of the residual; ``hyper``: epsilon and iterations of the mixing matrices; ``passes``: takes what an indexer chose on
    to other layers."""

    hyper: tuple[float, int] = (0.0, 1)
    passes: bool = False

    @property
    def reads_extra(self) -> bool:
        return self.passes

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        out = super().tensors(f, prefix)
        for part in ("hc_attn", "hc_ffn"):
            out += specs(prefix, {f"{part}_fn": (STREAMS * f.n_embd, MIXES)}, {f"{part}_base": MIXES, f"{part}_scale": 3})
        return out

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        assert self.ffn is not None
        x = self._part(c, x, "hc_attn", self.mixer_norm, self.mixer)
        return c.name(self._part(c, x, "hc_ffn", self.ffn_norm, self.ffn), "l_out")

    def _part(self, c: LayerContext, x: Tensor, name: str, norm: str, part: Part) -> Tensor:
        g, (eps, iterations), scale, base = c.g, self.hyper, c[f"{name}_scale"], c[f"{name}_base"]
        mixes = c.product(f"{name}_fn", g.rms_norm(g.flat(x), None, c.eps))
        pre, post = (
            g.sigmoid(
                g.add(g.mul(g.slice(mixes, 0, STREAMS * i, STREAMS), g.slice(scale, 0, i, 1)), g.slice(base, 0, STREAMS * i, STREAMS))
            )
            for i in range(2)
        )
        h = c.name(c.norm(g.streams_sum(x, g.scale_bias(pre, 1.0, eps)), norm), norm)
        return g.add_to_streams(part(c, h), x, g.scale(post, 2.0), g.mixing_matrices(mixes, scale, base, eps, iterations))


class Glm5Next(Decoder):
    """glm5-next. Drafters read the mean of the streams."""

    def widened(self, g: Graph, x: Tensor) -> Tensor:
        return g.repeat(g.reshape(x, self.n_embd, 1, x.ne[1]), self.n_embd, STREAMS, x.ne[1])

    def normed(self, g: Graph, x: Tensor, extra: Tensor | None) -> Tensor:
        return any_norm(g, self.weights, "output_norm", self.feature(g, x), self.eps, False)

    def feature(self, g: Graph, x: Tensor) -> Tensor:
        return mean_of_streams(g, x)
