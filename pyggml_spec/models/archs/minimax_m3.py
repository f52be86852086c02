"""minimax-m3: minimax-m2 with a dense start, a shared expert, gpt-oss's activation, and sparse attention over blocks of positions.

Each group of query heads with a K/V head sees the ``top_k`` blocks of r positions of the largest score, the last ``local`` ones among them:
    score = the largest q . k_j of the block's visible positions;  q = rope(rms(W_iq h)), a head for each group;  k = rope(rms(W_ik h)), one for all
ggml's kernels gather the blocks of a single token, in the order of their scores, as llama.cpp does. Source of the formulae: llama.cpp, src/models/minimax-m3.cpp.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...ggml.graph import F32, I32
from ...ggml.library import Tensor, lib
from ..base import KVShape
from ..decoder import Decoder, register
from ..hparams import Hparams, inverse_root
from ..layers import HEAD, Attention, GatedMLP, Layer, LayerContext, MoE, specs, write_kv
from ..model import ATTENTION, EXPERT, FFN, SHARED
from ..weights import Spec

F16 = lib.GGML_TYPE_F16
FORCED = 1e30  # more than any score


@register("minimax-m3")
def minimax_m3(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size), norm=HEAD)
    index_size, top_k, block, local = (
        f.positive(f"attention.indexer.{key}", limit=(1 << 31) - 1) for key in ("key_length", "top_k", "block_size", "local_blocks")
    )
    if 256 % block:
        raise f.refuse(f"attention.indexer.block_size is {block}; powers of two up to 256 are supported")
    if f.positive("attention.indexer.head_count") != f.kv_heads:
        raise f.refuse(f"attention.indexer.head_count is not the {f.kv_heads} of attention.head_count_kv, as every minimax-m3 model has it")
    assert attention.rope is not None
    if not attention.rope.n_rot <= index_size <= 4096:
        raise f.refuse(
            f"attention.indexer.key_length is {index_size}, but it has to be between the {attention.rope.n_rot} that are rotated and 4096"
        )
    sparse, dense = BlockAttention(**vars(attention), index_size=index_size, top_k=top_k, block=block, local=local), f.leading_dense(0)
    experts = f.experts(
        gating=f.gating(), normalise=f.get("expert_weights_norm", bool, False), scale=f.number("expert_weights_scale", 0.0), biased=True,
        glu="swiglu_oai",
    )  # fmt: skip
    moe = MoE(experts, GatedMLP(experts.n_ff * f.positive("expert_shared_count", limit=64), "oai", "_shexp"))
    layers = [Layer(attention, GatedMLP(f.ff, "oai")) if i < dense else Layer(sparse, moe) for i in range(f.n_layer)]
    return Decoder(f, layers, biased=ATTENTION, unscaled=(*FFN, *EXPERT, *SHARED))


@dataclass(frozen=True)
class BlockAttention(Attention):
    """Attention of each group of heads over ``top_k`` blocks of ``block`` positions, the last ``local`` ones among them."""

    index_size: int = 0
    top_k: int = 0
    block: int = 0
    local: int = 0
    narrow = False

    @property
    def kv(self) -> KVShape:  # type: ignore[override]
        return replace(super().kv, index=self.index_size, index_heads=self.kv_heads, multiplied=True)

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        n, size = f.n_embd, self.index_size
        matrices = {"indexer.q_proj": (n, self.kv_heads * size), "indexer.k_proj": (n, size)}
        return super().tensors(f, prefix) + specs(prefix, matrices, {"indexer.q_norm": size, "indexer.k_norm": size})

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g, at, kv, rows = c.g, c.attention, c.kv, x.ne[1]
        assert at is not None
        scores = self._scores(c, x)
        if scores is None:
            return super().__call__(c, x)
        q, k, v = c.project("mixer", x)
        q = g.hadamard(c.name(self._rotated(c, q, self.heads, "attn_q_norm"), "Qcur"), kv.rotation_k)
        g.expand(q)
        write_kv(g, *self.keys_values(c, k, v), kv, at.kv_rows)
        # native kernels have the same bits at every width with the mask
        seen = self._gathered if rows == 1 and g.backend.level is None else self._masked
        group, size, out = self.heads // self.kv_heads, self.size, []
        for head, (own_k, own_v, mask) in enumerate(seen(c, scores)):
            out.append(g.flash_attention(g.slice(q, 1, head * group, group), own_k, own_v, mask, 1, mask.ne[0], inverse_root(size)))
        joined = g.hadamard(g.concat(out), kv.rotation_v)
        return c.product("attn_output", g.reshape(joined, self.heads * size, rows))

    def _scores(self, c: LayerContext, x: Tensor) -> Tensor | None:
        """Stores the indexer's keys; returns the scores F32 [blocks, kv_heads, T], None where every block is chosen."""
        g, at, n, r, heads, rope = c.g, c.attention, self.index_size, self.block, self.kv_heads, self.rope
        assert at is not None and c.kv.indexer is not None and rope is not None
        key = rope(g, c.rms_norm(g.heads(c.product("indexer.k_proj", x), n, 1), "indexer.k_norm"), c.positions)
        g.kv_write_rows(c.kv.indexer, key, at.kv_rows)
        bucket, slots, rows = at.kv_bucket, at.mask.ne[3], x.ne[1]
        blocks = bucket // r
        if blocks <= self.top_k:
            return None
        q = rope(g, c.rms_norm(g.heads(c.product("indexer.q_proj", x), n, heads), "indexer.q_norm"), c.positions)
        keys = g.cast(g.slice(c.kv.indexer, 1, 0, bucket), F32)
        score = g.reshape(g.matmul(keys, g.reshape(q, n, heads * (rows // slots), slots)), bucket, heads, rows)
        score = g.add(score, g.reshape(g.cast(at.mask, F32), bucket, 1, rows))
        minus = g.reshape(g.scale(g.cast(c.positions, F32), -1.0), 1, 1, rows)

        def beyond(first: float) -> Tensor:
            """first + b r - p, of each block b and position p."""
            return g.add(g.repeat(g.arange(first, first + bucket, r), blocks, 1, rows), minus)

        near = g.mul(g.step(beyond(self.local * r)), g.step(g.scale(beyond(-0.5), -1.0)))  # b r <= p < (b + local) r
        return g.add(g.block_max(score, r), g.scale(near, FORCED))

    def _masked(self, c: LayerContext, scores: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """K, V and mask of each K/V head: all rows."""
        g, kv, at = c.g, c.kv, c.attention
        assert at is not None
        shown, mask = g.block_mask(scores, self.top_k, self.block), g.cast(at.mask, F32)
        for head in range(self.kv_heads):
            own = g.reshape(g.cont(g.pick(shown, 1, head)), *at.mask.ne)
            yield g.of_head(kv.k, self.size, head), g.of_head(kv.v, self.size, head), g.cast(g.add(own, mask), F16)

    def _gathered(self, c: LayerContext, scores: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The rows of the chosen blocks, best first, as llama.cpp has them for a single token."""
        g, kv, at, r, count = c.g, c.kv, c.attention, self.block, self.top_k
        assert at is not None
        chosen, mask = g.cast(g.top_blocks(scores, count), F32), g.reshape(g.cast(at.mask, F32), 1, at.kv_bucket)
        for head in range(self.kv_heads):
            firsts = g.repeat(g.reshape(g.scale(g.cont(g.pick(chosen, 1, head)), r), 1, count), r, count, 1)
            ids = g.cast(g.reshape(g.add(firsts, g.arange(0, r)), r * count), I32)
            rows = [g.rows(g.of_head(cache, self.size, head), ids) for cache in (kv.k, kv.v)]
            kinds = [F16 if lib.ggml_is_quantized(cache.type) else cache.type for cache in (kv.k, kv.v)]
            own_k, own_v = (row if kind == F32 else g.cast(row, kind) for row, kind in zip(rows, kinds, strict=True))
            yield own_k, own_v, g.cast(g.reshape(g.rows(mask, ids), r * count, 1, 1, 1), F16)
