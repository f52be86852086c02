"""qwen4exp (Qwen3.8-Flash-Next): qwen35moe with hyper-connections, sparse attention over blocks, and hashed n-gram embeddings in one layer.

The residual x is H streams [n_embd, H], at first equal. Instead of norms, before the mixer and before the experts:
    n = rms(x; norm), of each stream;  h = mean over streams of n sigmoid(W_up silu(W_down n / H));  i = W_inject n
    x += 2 sigmoid(i / H) * part(h), a factor per stream;  the head reads another such h
Attention sees the tail that fills no block of r positions, and of the blocks before it those of the largest score, top_k positions in all:
    score = sum over heads of max(q . k, 0);  k = rope(rms(mean of the block's W_ik h)), at the block's first position;  q = rope(rms(W_iq h))
One recurrent layer adds, before its mixer, from e, the table's rows of the n-grams that end at the token:
    g = sigmoid(s(key . query / sqrt(n_embd)));  s(a) = sign(a) sqrt(|a|);  key = rms(W_k e), query = rms(x), of each stream;  v = g W_v e
    x += v + silu(sum over k of w_k rms(v)_{p - (K - 1 - k) N}), N the longest n-gram
Rows of rms(v) and token ids are kept in a ring, by position: rejected drafts leave nothing. Source of the formulae: llama.cpp, src/models/qwen4exp.cpp.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ...errors import DeviceError
from ...ggml.graph import F32, I32, Graph
from ...ggml.library import Tensor, ffi
from ..base import KVShape
from ..decoder import Decoder, register
from ..delta_net import GatedDeltaNet
from ..hparams import Hparams
from ..layers import Attention, GatedMLP, Layer, LayerContext, MoE, Part, product, specs
from ..model import ATTENTION
from ..weights import ROWS, VECTOR, Spec
from .ernie4_5 import UNADDED
from .qwen35 import hybrid_mixers

TABLE, MANY = "per_layer_token_embd.weight", 1e9  # a score above all others
NORMS, LEAST = ("ple_norm_key", "ple_norm_query", "ple_norm_conv"), 1e-6


@register("qwen4exp")
def qwen4exp(f: Hparams) -> Decoder:
    streams, rank = f.positive("hyper_connection.count", limit=64), f.positive("hyper_connection.low_rank")
    if streams < 2:
        raise f.refuse("hyper_connection.count is 1, and one stream has nothing to mix")
    mixers, attention = hybrid_mixers(f, SigmoidDeltaNet)
    moe = MoE(f.experts(f.ff_of_used_experts()), GatedMLP(_shared(f), suffix="_shexp"), gated=True)
    sparse, ngrams = _sparse(f, attention), NGrams.from_gguf(f, streams)
    layers: list[Layer] = []
    for i, mixer in enumerate(mixers):
        one: Part = sparse[i] if mixer == attention else mixer
        own = ngrams if ngrams is not None and i == ngrams.layer else None
        if own is not None:
            if not isinstance(one, SigmoidDeltaNet):
                raise f.refuse(f"ple.layers names layer {i}, which has attention; n-gram embeddings go with recurrent layers")
            one = replace(one, ngrams=own.kv)
        layers.append(Streams(one, moe, "", "", streams=streams, rank=rank, ngrams=own, passes=ngrams is not None and i <= ngrams.layer))
    unused = {f"blk.{i}.{name}.bias": UNADDED for i in range(f.n_layer) for name in ATTENTION}
    why = "its indexer counts rows, of which a picture has more than positions"
    return Qwen4Exp(f, layers, streams, rank, no_pictures=why, unused=unused, window=ngrams.reach if ngrams is not None else 0)


def _shared(f: Hparams) -> int:
    return f.number("expert_shared_feed_forward_length", 0) or f.ff


def _sparse(f: Hparams, attention: Attention) -> list["SparseAttention"]:
    """Attention of each layer."""
    size, top_k = f.positive("attention.indexer.key_length", limit=4096), f.positive("attention.indexer.top_k", limit=(1 << 31) - 1)
    heads, key = f.positive("attention.indexer.head_count", limit=1024), "attention.compress_ratios"
    assert attention.rope is not None
    if size < attention.rope.n_rot:
        raise f.refuse(f"attention.indexer.key_length is {size}, less than the {attention.rope.n_rot} values that are rotated")
    ratios = f.per_layer(key, limit=256, least=0) if f"{f.arch}.{key}" in f.file.metadata else (0,) * f.n_layer
    if any(256 % ratio for ratio in ratios if ratio):
        raise f.refuse(f"{key} is {sorted(set(ratios))}; blocks of powers of two up to 256 positions are supported")
    return [SparseAttention(**vars(attention), index_heads=heads, index_size=size, top_k=top_k, ratio=ratio) for ratio in ratios]


@dataclass(frozen=True)
class SparseAttention(Attention):
    """Attention over the tail and ``top_k`` positions in blocks of ``ratio``, 0 for all positions."""

    index_heads: int = 0
    index_size: int = 0
    top_k: int = 0
    ratio: int = 0
    narrow = False

    @property
    def kv(self) -> KVShape:  # type: ignore[override]
        return replace(super().kv, index=self.index_size, index_heads=self.index_heads, multiplied=True) if self.ratio else super().kv

    def _index(self, f: Hparams, prefix: str) -> list[Spec]:
        n, size = f.n_embd, self.index_size
        vectors = {"indexer.q_norm": size, "indexer.k_norm": size}
        return specs(prefix, {"indexer.q_proj": (n, self.index_heads * size), "indexer.k_proj": (n, size)}, vectors)

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        return super().tensors(f, prefix) + (self._index(f, prefix) if self.ratio else [])

    def unused(self, f: Hparams, prefix: str) -> dict[str, str]:
        why = "the indexer of a layer that attends to all positions (attention.compress_ratios)"
        return {} if self.ratio else {spec.name: why for spec in self._index(f, prefix)}

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        assert c.attention is not None
        return super().__call__(replace(c, attention=replace(c.attention, mask=self._chosen(c, x))) if self.ratio else c, x)

    def _chosen(self, c: LayerContext, x: Tensor) -> Tensor:
        """Stores the indexer's keys; returns the mask of the selected positions."""
        g, at, n, r, rope = c.g, c.attention, self.index_size, self.ratio, self.rope
        assert at is not None and c.kv.indexer is not None and rope is not None
        g.kv_write_rows(c.kv.indexer, g.heads(c.product("indexer.k_proj", x), n, 1), at.kv_rows)
        width, bucket, slots, rows = self.top_k + r - 1, at.kv_bucket, at.mask.ne[3], x.ne[1]
        if bucket <= width:
            return at.mask
        blocks = bucket // r
        keys = g.reshape(g.cast(g.slice(c.kv.indexer, 1, 0, bucket), F32), n, bucket * slots)
        pooled = g.cont(g.every_nth(keys, r, 0))
        for i in range(1, r):
            pooled = g.add(pooled, g.cont(g.every_nth(keys, r, i)))
        pooled = c.rms_norm(g.scale(pooled, float(np.float32(1) / np.float32(r))), "indexer.k_norm")
        firsts = g.repeat(g.arange(0, bucket, r), blocks, slots, 1)
        pooled = rope(g, g.heads(pooled, n, 1), g.cast(g.reshape(firsts, blocks * slots), I32))
        q = c.rms_norm(g.heads(c.product("indexer.q_proj", x), n, self.index_heads), "indexer.q_norm")
        q = g.reshape(rope(g, q, c.positions), n, self.index_heads * (rows // slots), slots)
        by_head = g.reshape(g.matmul(g.reshape(pooled, n, blocks, slots), q), blocks, self.index_heads, rows)
        by_head = g.clamp(by_head, 0.0, float("inf"))
        score = g.cont(g.pick(by_head, 1, 0))
        for i in range(1, self.index_heads):
            score = g.add(score, g.pick(by_head, 1, i))
        # the tail begins with the first block whose last position is not reached
        ends = g.repeat(g.arange(r - 1, bucket, r), blocks, rows, 1)
        beyond = g.add(ends, g.reshape(g.scale(g.cast(c.positions, F32), -1.0), 1, rows))
        score = g.add(score, g.scale(g.step(beyond), MANY))
        score = g.reshape(g.repeat(g.reshape(score, 1, blocks, rows), r, blocks, rows), bucket, rows // slots, 1, slots)
        return g.top_k_mask(at.mask, g.add(score, g.cast(at.mask, F32)), width)


@dataclass(frozen=True)
class SigmoidDeltaNet(GatedDeltaNet):
    """A delta-net whose output is gated by a sigmoid; ``ngrams``: rows that the layer keeps of n-gram embeddings."""

    ngrams: KVShape | None = None

    @property
    def kv(self) -> KVShape | None:  # type: ignore[override]
        return self.ngrams

    @property
    def sliding(self) -> bool:  # type: ignore[override]
        return self.ngrams is not None

    def gated(self, c: LayerContext, out: Tensor, z: Tensor) -> Tensor:
        g, d = c.g, self.recurrent
        z = z if g.view_source(z) == z else g.cont(z)
        return g.flat(g.mul(c.rms_norm(out, "ssm_norm"), g.heads(g.sigmoid(z), d.head_size, d.n_head_v)))


@dataclass(frozen=True)
class NGrams:
    """N-gram embeddings of one ``layer``: rows of ``size`` values, ``taps`` of a convolution over every ``longest``-th position."""

    layer: int
    streams: int
    n_embd: int
    longest: int
    heads: int
    size: int
    taps: int
    rows: int
    end: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def from_gguf(cls, f: Hparams, streams: int) -> "NGrams | None":
        named = f.file.array(f"{f.arch}.ple.layers", "iu")
        if named is None or not len(named):
            return None
        if len(named) != 1 or not 0 <= int(named[0]) < f.n_layer:
            raise f.refuse(f"ple.layers is {named.tolist()[:4]}; one layer of {f.n_layer} may have n-gram embeddings")
        longest, heads = f.positive("ple.ngram_size", limit=8), f.positive("ple.heads_per_ngram", limit=64)
        size, count = f.positive("embedding_length_per_layer_input"), (longest - 1) * heads
        if longest < 2 or count * size != f.n_embd:
            raise f.refuse(f"{count} n-gram embeddings of {size} values are not the {f.n_embd} of embedding_length")
        lists = []
        for name, least in (("layer_multipliers", longest), ("head_vocab_sizes", count), ("head_offsets", count)):
            values = f.file.array(f"{f.arch}.ple.{name}", "iu")
            if values is None or len(values) < least:
                raise f.refuse(f"ple.{name} has {0 if values is None else len(values)} numbers, but {least} are needed")
            lists.append(tuple(int(v) % (1 << 64) for v in values[:least]))
        needed = max((n + first for n, first in zip(lists[1], lists[2], strict=True)), default=0)
        if min(lists[1]) < 1 or needed > (1 << 31) - 1:
            raise f.refuse("ple.head_vocab_sizes and ple.head_offsets name rows that are no 32-bit numbers")
        rows = (f.shape(TABLE) or (size, needed))[-1]
        if rows < needed:
            raise f.refuse(f"{TABLE} has {rows} rows, but ple.head_offsets and ple.head_vocab_sizes name {needed}")
        taps, end = f.positive("ple.conv_kernel", limit=16), f.number("ple.eos_token_id", 0)
        return cls(int(named[0]), streams, f.n_embd, longest, heads, size, taps, rows, end, *lists)

    @property
    def reach(self) -> int:
        """Positions that are read, the current one included."""
        return max((self.taps - 1) * self.longest, self.longest - 1) + 1

    @property
    def kv(self) -> KVShape:
        return KVShape(1, self.streams * self.n_embd, sliding=True, other_v=1, exact=True)

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        n, wide = self.n_embd, self.streams * self.n_embd
        out = specs(prefix, {"ple_key": (n, wide), "ple_value": (n, n)})
        out.append(Spec(f"{prefix}ple_conv1d.weight", (self.taps, wide), VECTOR))
        return out + [_norm(f, f"{prefix}{name}", self.streams) for name in NORMS]

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        """x F32 [n_embd, H, T] with the n-gram embeddings of ``c.extra``, token ids F32 [1, T]."""
        g, n, h, rows, kv, at = c.g, self.n_embd, self.streams, x.ne[2], c.kv, c.attention
        assert at is not None and c.extra is not None
        if g.backend.device.kind != "cpu":
            raise DeviceError(
                f"n-gram embeddings (qwen4exp) are hashed on CPUs only; load the model on one instead of {g.backend.device.name}"
            )
        g.kv_write_rows(kv.v, g.reshape(c.extra, 1, 1, rows), at.kv_rows)
        index = g.ngram_rows(g.slice(kv.v, 1, 0, at.kv_bucket), c.positions, _hashes(self)[0])
        e = g.reshape(g.rows(c.w[TABLE], g.reshape(index, index.ne[0] * rows)), n, rows)
        key, value = self._normed(c, g.reshape(c.product("ple_key", e), n, h, rows), "ple_norm_key"), c.product("ple_value", e)
        alike = g.scale(g.sum_rows(g.mul(key, self._normed(c, x, "ple_norm_query"))), float(np.float32(1) / np.sqrt(np.float32(n))))
        size = g.sqrt(g.clamp(g.abs(alike), LEAST, float("inf")))
        gate = g.sigmoid(g.mul(g.sgn(alike), size))
        gated = g.mul(g.repeat(g.reshape(value, n, 1, rows), n, h, rows), gate)
        normed = g.flat(self._normed(c, gated, "ple_norm_conv"))
        g.kv_write_rows(kv.k, g.reshape(normed, n * h, 1, rows), at.kv_rows)
        kept, conv, weights = g.slice(kv.k, 1, 0, at.kv_bucket), None, c["ple_conv1d"]
        for k in range(self.taps):
            back = (self.taps - 1 - k) * self.longest
            tap = g.reshape(g.cont(g.slice(weights, 0, k, 1)), n * h)
            term = g.mul(g.rows_before(kept, c.positions, back) if back else normed, tap)
            conv = term if conv is None else g.add(conv, term)
        assert conv is not None
        return g.add(x, g.add(gated, g.reshape(g.silu(conv), n, h, rows)))

    def _normed(self, c: LayerContext, x: Tensor, name: str) -> Tensor:
        return _rms(c.g, x, c[name], c.eps)


@cache
def _hashes(of: NGrams) -> tuple[Any, Any]:
    """``pgs_ngrams`` and what it points to, for as long as graphs may run."""
    arrays = [np.array(values, np.uint64) for values in (of.multipliers, of.sizes, of.offsets)]
    pointers = [ffi.cast("uint64_t *", ffi.from_buffer(values)) for values in arrays]
    return ffi.new("pgs_ngrams *", [of.longest, of.heads, of.end, *pointers]), arrays


def _norm(f: Hparams, name: str, streams: int) -> Spec:
    """A weight per stream, which files have as one row, too."""
    flat = f.shape(f"{name}.weight") == (streams * f.n_embd,)
    return Spec(f"{name}.weight", (streams * f.n_embd,) if flat else (f.n_embd, streams), VECTOR)


def _rms(g: Graph, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x F32 [n, H, T], normalised by stream, times weight."""
    return g.mul(g.rms_norm(x, None, eps), g.reshape(weight, x.ne[0], x.ne[1]))


@dataclass(frozen=True)
class Streams(Layer):
    """A layer between ``streams`` of the residual; ``ngrams``: its n-gram embeddings; ``passes``: takes token ids on to them."""

    streams: int = 0
    rank: int = 0
    ngrams: NGrams | None = None
    passes: bool = False

    @property
    def reads_extra(self) -> bool:
        return self.passes

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        wide, out = self.streams * f.n_embd, super().tensors(f, prefix)
        for part in ("hc_attn", "hc_ffn"):
            shapes = {f"{part}_down": (wide, self.rank), f"{part}_up": (self.rank, wide), f"{part}_inject": (wide, self.streams)}
            out += [*specs(prefix, shapes), _norm(f, f"{prefix}{part}_norm", self.streams)]
        return out + (self.ngrams.tensors(f, prefix) if self.ngrams is not None else [])

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        if self.ngrams is not None:
            x = self.ngrams(c, x)
        x = self._part(c, x, "hc_attn", self.mixer)
        assert self.ffn is not None
        return c.name(self._part(c, x, "hc_ffn", self.ffn), "l_last")

    def _part(self, c: LayerContext, x: Tensor, name: str, part: Part) -> Tensor:
        g, h = c.g, self.streams
        n = g.flat(_rms(g, x, c[f"{name}_norm"], c.eps))
        gate = gates(g, h, n, c.matrix(f"{name}_down"), c.matrix(f"{name}_up"))
        mixed = g.streams_mean(g.reshape(n, *list(x.ne)[:3]), g.reshape(gate, *list(x.ne)[:3]))
        inject = g.scale(g.sigmoid(g.scale(c.product(f"{name}_inject", n), float(np.float32(1) / np.float32(h)))), 2.0)
        return g.add_to_streams(part(c, mixed), x, inject)


def gates(g: Graph, streams: int, n: Tensor, down: Any, up: Any) -> Tensor:
    low = g.silu(g.scale(product(g, down, n), float(np.float32(1) / np.float32(streams))))
    return product(g, up, low)


class Qwen4Exp(Decoder):
    """A target whose residual has ``streams``. Drafters read their mean."""

    def __init__(self, f: Hparams, layers: list[Layer], streams: int, rank: int, **more: Any) -> None:
        super().__init__(f, layers, **more)
        self.streams, self.rank = streams, rank
        self._ngrams = next((layer.ngrams for layer in layers if isinstance(layer, Streams) and layer.ngrams is not None), None)

    def tensors(self) -> list[Spec]:
        wide = self.streams * self.n_embd
        out = [spec for spec in super().tensors() if spec.name != "output_norm.weight"]
        out += [
            *specs("output_", {"hc_down": (wide, self.rank), "hc_up": (self.rank, wide)}),
            _norm(self.f, "output_hc_norm", self.streams),
        ]
        own = self._ngrams
        return out + ([Spec(TABLE, (own.size, own.rows), ROWS, layer=own.layer)] if own is not None else [])

    def extra(self, g: Graph, x: Tensor, tokens: Tensor) -> Tensor | None:
        return g.reshape(g.cast(tokens, F32), 1, tokens.ne[0]) if self._ngrams is not None else None

    def widened(self, g: Graph, x: Tensor) -> Tensor:
        return g.repeat(g.reshape(x, self.n_embd, 1, x.ne[1]), self.n_embd, self.streams, x.ne[1])

    def normed(self, g: Graph, x: Tensor, extra: Tensor | None) -> Tensor:
        w, h = self.weights, self.streams
        n = g.flat(_rms(g, x, w["output_hc_norm.weight"], self.eps))
        gated = g.mul(n, g.sigmoid(gates(g, h, n, w.matrix("output_hc_down.weight"), w.matrix("output_hc_up.weight"))))
        return self.feature(g, g.reshape(gated, *list(x.ne)[:3]))

    def feature(self, g: Graph, x: Tensor) -> Tensor:
        return mean_of_streams(g, x)


def mean_of_streams(g: Graph, x: Tensor) -> Tensor:
    """F32 [n, H, T] -> F32 [n, T]."""
    total = g.cont(g.pick(x, 1, 0))
    for i in range(1, x.ne[1]):
        total = g.add(total, g.pick(x, 1, i))
    return g.scale(total, float(np.float32(1) / np.float32(x.ne[1])))
