"""Building blocks of layers: attention, FFNs, experts, and the frame around them.

A part is a frozen value without weights. It lists its tensors (``tensors``), matrices with a common input (``groups``) and caches (``kv``,
``recurrent``), and adds nodes to a graph (``__call__``). The order of nodes and operands is llama.cpp's, but for
a shared expert, which precedes the routed ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..ggml.graph import Graph
from ..ggml.library import Tensor
from .base import AttentionInputs, KVLayer, KVShape, RecurrentLayers, RecurrentShape
from .hparams import Hparams, inverse_root
from .model import FFN
from .moe import Experts
from .rope import Rope
from .weights import VECTOR, Delta, Group, Matrix, Spec, Weights

ROPE_FREQS = "rope_freqs.weight"  # divisors of the frequencies, Llama 3.1 and later
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # the same, chosen by the context length
QKV = "attn_qkv"  # q, k and v as one matrix of the file
# norms of q and k: per head, over all heads, per head with weights of its own, or per head without, after RoPE
HEAD, ROW, EACH, UNIT = "head", "row", "each", "unit"
MAY, MUST = "may", "must"  # have a bias


def specs(prefix: str, matrices: Mapping[str, tuple[int, ...]], vectors: Mapping[str, int] = {}) -> list[Spec]:
    """Specs of a layer's tensors by short names."""
    out = [Spec(f"{prefix}{name}.weight", shape) for name, shape in matrices.items()]
    return out + [Spec(f"{prefix}{name}.weight", (size,), VECTOR) for name, size in vectors.items()]


def head_product(g: Graph, matrix: Matrix, x: Tensor, tokens: int = 0) -> Tensor:
    """``product`` of a head, limited to the first ``tokens`` outputs unless 0."""
    if not tokens or tokens >= matrix.weight.ne[1]:
        return product(g, matrix, x)
    count = g.aligned_outputs(matrix.weight, tokens)
    scale, bias = (v if v is None or v.ne[0] == 1 else g.slice(v, 0, 0, count) for v in (matrix.scale, matrix.bias))
    out = product(g, matrix._replace(weight=g.first_outputs(matrix.weight, count), scale=scale, bias=bias, deltas=()), x)
    return out if count == tokens else g.cont(g.slice(out, 0, 0, tokens))


def product(g: Graph, matrix: Matrix, x: Tensor) -> Tensor:
    """x F32 [n_in, T] times the matrix, with the file's scale and bias; F32 [n_out, T]."""
    out = g.matmul(matrix.weight, x)
    if matrix.bias_first:
        out = with_deltas(g, out, matrix.deltas, x)
        out = g.add(out, matrix.bias) if matrix.bias is not None else out
    if matrix.scale is not None:
        out = g.mul(out, matrix.scale)
    if not matrix.bias_first:
        out = with_deltas(g, out, matrix.deltas, x)
    if matrix.bias is not None and not matrix.bias_first:
        out = g.add(out, matrix.bias)
    return out


def with_deltas(g: Graph, out: Tensor, deltas: Iterable[Delta], x: Tensor) -> Tensor:
    """A product ``out`` with what adapters add to it."""
    for a, b, scale in deltas:
        out = g.add(out, g.scale(g.matmul(b, g.matmul(a, x)), scale))
    return out


def project(g: Graph, group: Group, x: Tensor) -> list[Tensor]:
    """x F32 [n_in, T] times each matrix of the group; F32 [rows_i, T], as views of one product where matrices are fused."""
    out: list[Tensor] = []
    for matrix, rows, deltas in group.runs:
        joined = product(g, matrix if not any(deltas) else matrix._replace(bias=None), x)
        if any(deltas):
            parts = [with_deltas(g, part, of, x) for part, of in zip(_parts(g, joined, rows), deltas, strict=True)]
            joined = g.concat(parts)  # recurrent layers keep a fused product whole
            joined = joined if matrix.bias is None else g.add(joined, matrix.bias)
        out += _parts(g, joined, rows)
    return out


def _parts(g: Graph, joined: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Views of so many outputs each; the product itself where it is one."""
    firsts = accumulate(rows, initial=0)
    return [g.slice(joined, 0, first, n) for first, n in zip(firsts, rows)] if len(rows) > 1 else [joined]


def gated_ffn(g: Graph, glu: str, gate_up: Group, down: Matrix, x: Tensor) -> Tensor:
    """W_down (act(W_gate x) * W_up x), ``glu`` as of ``Graph.gated``. For one row ggml-cuda fuses two matmuls and the gate into one kernel; for more,
    one matmul is faster."""
    if gate_up.adapted:
        gate, up = (part if g.view_source(part) == part else g.cont(part) for part in project(g, gate_up, x))
        return product(g, down, g.gated(glu, gate, up))
    separate = [run.matrix for run in gate_up.runs] if gate_up.fused is None else gate_up.parts if x.ne[1] == 1 else ()
    if separate:
        gate, up = (product(g, matrix, x) for matrix in separate)
        return product(g, down, g.gated(glu, gate, up))
    assert gate_up.fused is not None
    return product(g, down, g.gated_halves(glu, product(g, gate_up.fused, x)))


def write_kv(g: Graph, k: Tensor, v: Tensor, kv: KVLayer, kv_rows: Tensor) -> None:
    """Writes k, v F32 [D, H_kv, T] into the cache rows. RoPE, view and row write of K stay adjacent, which ggml-cuda fuses."""
    k, v = g.hadamard(k, kv.rotation_k), g.hadamard(v, kv.rotation_v)
    g.expand(v)
    g.kv_write_rows(kv.k, k, kv_rows)
    g.kv_write_rows(kv.v, v, kv_rows)


def head_gated(g: Graph, out: Tensor, gate: Tensor, head_size: int, act: Callable[[Tensor], Tensor]) -> Tensor:
    """out F32 [D * H, T] * act(gate); gate has one value per head, F32 [H, T], or one per output."""
    # a part of a fused product is a view, and ggml-cuda's unary kernels need contiguous tensors
    gate = act(gate if g.view_source(gate) == gate else g.cont(gate))
    if gate.ne[0] == out.ne[0]:
        return g.mul(out, gate)
    heads, rows = gate.ne[0], out.ne[1]
    return g.flat(g.mul(g.reshape(out, head_size, heads, rows), g.reshape(gate, 1, heads, rows)))


def attend(
    g: Graph,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv: KVLayer,
    at: AttentionInputs,
    scale: float,
    sinks: Any = None,
    cap: float = 0.0,
) -> Tensor:
    """Writes k, v F32 [D, H_kv, T] into the cache rows and attends with q F32 [D, H, T] to the KV bucket. Returns F32 [D * H, T].

    ``sinks`` F32 [H]: per-head score that takes part in the softmax without a value. k and v None: ``kv`` has the rows of an earlier layer.
    """
    n_head_kv = kv.k.ne[0] // q.ne[0]
    q = g.hadamard(q, kv.rotation_k)
    if k is None and q.ne[2] == kv.k.ne[2]:  # one row of each sequence
        # With replayed CUDA graphs, ggml-cuda's one-row attention right after the query's rotation reads it too early (PDL); a copy between them helps.
        q = g.cont(q)
    g.expand(q)
    if k is not None and v is not None:
        write_kv(g, k, v, kv, at.kv_rows)
    return g.hadamard(g.flash_attention(q, kv.k, kv.v, at.mask, n_head_kv, at.kv_bucket, scale, sinks, cap), kv.rotation_v)


@dataclass
class LayerContext:
    """One layer of a graph under construction.

    Attributes:
        i: layer index; its tensors are `blk.{i}.*`.
        positions: I32 [T].
        attention: cache rows, mask and KV bucket; None where the layer only writes K/V.
        caches: K/V by index of the owning layer.
        recurrent, state: the recurrent states, and the index of this layer's.
        extra: a tensor passed from layer to layer; None for most architectures.
        layer_norms: norms subtract the mean, too.
        factors: F32 [n_rot / 2] divisors of RoPE frequencies, or None.
        q_scale: F32 [1, 1, T] factors of queries by position, or None.
    """

    g: Graph
    w: Weights
    i: int
    eps: float
    positions: Tensor
    attention: AttentionInputs | None
    caches: Mapping[int, KVLayer]
    recurrent: RecurrentLayers | None = None
    state: int = 0
    extra: Tensor | None = None
    layer_norms: bool = False
    factors: Tensor | None = None
    q_scale: Tensor | None = None

    @property
    def prefix(self) -> str:
        return f"blk.{self.i}."

    @property
    def kv(self) -> KVLayer:
        return self.caches[self.i]

    def __contains__(self, name: str) -> bool:
        return f"{self.prefix}{name}.weight" in self.w

    def __getitem__(self, name: str) -> Tensor:
        return self.w[f"{self.prefix}{name}.weight"]

    def matrix(self, name: str) -> Matrix:
        return self.w.matrix(f"{self.prefix}{name}.weight")

    def product(self, name: str, x: Tensor) -> Tensor:
        return product(self.g, self.matrix(name), x)

    def project(self, group: str, x: Tensor) -> list[Tensor]:
        return project(self.g, self.w.group(f"{self.prefix}{group}"), x)

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """The model's kind of norm."""
        return any_norm(self.g, self.w, f"{self.prefix}{name}", x, self.eps if eps is None else eps, self.layer_norms)

    def rms_norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return self.g.rms_norm(x, self[name], self.eps if eps is None else eps)

    def name(self, node: Tensor, name: str) -> Tensor:
        """Names a node as llama.cpp does, for ``pyspec compare --nodes``."""
        return self.g.name(node, f"{name}-{self.i}")


def any_norm(g: Graph, w: Weights, name: str, x: Tensor, eps: float, layer_norm: bool) -> Tensor:
    """The norm ``name`` with its bias, if any: of layers (minus the mean) or RMS."""
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    if layer_norm:
        return g.layer_norm(x, weight, bias, eps)
    out = g.rms_norm(x, weight, eps)
    return out if bias is None else g.add(out, bias)


class Part:
    """A mixer or an FFN. Subclasses are frozen dataclasses."""

    kv: KVShape | None = None
    recurrent: RecurrentShape | None = None
    experts: Experts | None = None
    ggml_attention = ""  # reason for ggml's attention where native kernels run
    sliding = False
    narrow = False  # whether nothing but attention reads its mask, which may be one of the last columns only
    kept_group = ""  # the group whose fused product is the input of the convolution, if any
    reads_extra = False  # the ``extra`` of the previous layer

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        raise NotImplementedError

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        """Short names of matrices with a common input, by group."""
        return {}

    def unused(self, f: Hparams, prefix: str) -> dict[str, str]:
        """Full names of tensors that no graph uses, with the reason."""
        return {}

    def row(self, group: Group | None) -> int:
        """Floats per row of the convolution's input in the recurrent state; ``group``: ``kept_group``."""
        assert self.recurrent is not None
        return self.recurrent.channels

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        """F32 [n_embd, T], normalised -> F32 [n_embd, T]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Attention(Part):
    """Softmax attention: ``heads`` query heads of ``size`` values, ``kv_heads`` K/V heads.

    Attributes:
        rope: None for layers without RoPE.
        factors: whether the frequency divisors of the file apply, if present.
        norm: HEAD or ROW for RMS norms of q and k before RoPE, EACH for the model's kind of norm; ``norm_last``: after it.
        scale: of the scores, None for 1 / sqrt(size); ``scale_q``: q is scaled instead.
        tempered: whether queries are scaled by position, in models that do.
        cap: scores are cap * tanh(score / cap); 0 for none.
        out_bias: whether the output MAY or MUST have a bias.
        sliding: limited to the model's window.
        sinks: per-head scores without a value in the softmax.
        other_v: values per head of V and of the result, 0 for ``size``.
        result_scale: factor of the output, 0 for none.
        gate: output gate: "sigmoid", "softplus" or, with a value per head, "sigmoid of heads" of a further product, or the sigmoid of values "in q", interleaved with each head's.
    """

    heads: int
    kv_heads: int
    size: int
    rope: Rope | None
    factors: bool = False
    norm: str = ""
    norm_last: bool = False
    scale: float | None = None
    scale_q: bool = False
    cap: float = 0.0
    out_bias: str = ""
    sliding: bool = False
    sinks: bool = False
    gate: str = ""
    other_v: int = 0
    result_scale: float = 0.0
    tempered: bool = True
    narrow = True

    @property
    def kv(self) -> KVShape:  # type: ignore[override]
        return KVShape(self.kv_heads, self.size, self.sliding, other_v=self.other_v, queries=0 if self.cap else self.heads // self.kv_heads)

    @property
    def size_v(self) -> int:
        """Values per head of V."""
        return self.other_v or self.size

    @property
    def wide(self) -> tuple[int, int, int]:
        """Values of q, k and v."""
        return self.size * self.heads, self.size * self.kv_heads, self.size_v * self.kv_heads

    @property
    def ggml_attention(self) -> str:  # type: ignore[override]
        return "it has sinks" if self.sinks else "it caps scores" if self.cap else ""

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        (wide, wide_k, wide_v), n, out = self.wide, f.n_embd, self.size_v * self.heads
        matrices = {"attn_q": (n, 2 * wide if self.gate == "in q" else wide), "attn_k": (n, wide_k), "attn_v": (n, wide_v)}
        if self.is_packed(f, prefix):
            matrices = {QKV: (n, wide + wide_k + wide_v)}
        if self._has_gate_matrix:
            shape = f.shape(f"{prefix}attn_gate.weight")  # one value per head, or one per output
            of_heads = self.gate == "sigmoid of heads" or (self.gate == "softplus" and (shape is None or shape[-1] != out))
            matrices["attn_gate"] = (n, self.heads if of_heads else out)
        matrices["attn_output"] = (out, n)
        vectors = {"attn_sinks": self.heads} if self.sinks else {}
        norms = []
        for name, heads in (("attn_q_norm", self.heads), ("attn_k_norm", self.kv_heads)) if self.norm not in ("", UNIT) else ():
            shape = {HEAD: (self.size,), ROW: (self.size * heads,), EACH: (self.size, heads)}[self.norm]
            norms.append(Spec(f"{prefix}{name}.weight", shape, VECTOR))
        bias = [Spec(f"{prefix}attn_output.bias", (n,), VECTOR, of=f"{prefix}attn_output.weight")] if self.out_bias == MUST else []
        return specs(prefix, matrices, vectors) + norms + bias

    @staticmethod
    def is_packed(f: Hparams, prefix: str) -> bool:
        return f.shape(f"{prefix}{QKV}.weight") is not None

    @property
    def _has_gate_matrix(self) -> bool:
        return self.gate in ("sigmoid", "sigmoid of heads", "softplus")

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        inputs = (QKV,) if self.is_packed(f, prefix) else ("attn_q", "attn_k", "attn_v")
        return {"mixer": (*inputs, *(("attn_gate",) if self._has_gate_matrix else ()))}

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        inputs = c.project("mixer", x)
        return self.attend(c, *(self.unpacked(c, inputs[0]) if QKV in c else inputs[:1]), *inputs[1:])

    def unpacked(self, c: LayerContext, qkv: Tensor) -> list[Tensor]:
        """q, k and v of the packed product."""
        wide, wide_k, wide_v = self.wide
        return [c.g.slice(qkv, 0, first, n) for first, n in ((0, wide), (wide, wide_k), (wide + wide_k, wide_v))]

    def attend(self, c: LayerContext, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """From the projections F32 [.., T]: writes K and V if any, attends, and projects to F32 [n_embd, T]."""
        g, size, stride = c.g, self.size, None
        if self.gate == "in q":
            stride = 2 * size
            gate = g.heads(q, size, self.heads, stride, first=size)
        q = c.name(self._rotated(c, q, self.heads, "attn_q_norm", stride), "Qcur")
        scale = inverse_root(size) if self.scale is None else self.scale
        if self.scale_q:
            q, scale = g.scale(q, scale), 1.0
        q = q if c.q_scale is None or not self.tempered else g.mul(q, c.q_scale)
        if k is not None and v is not None:
            k, v = self.keys_values(c, k, v)
            k, v = c.name(k, "Kcur"), c.name(v, "Vcur")
        assert c.attention is not None
        out = attend(g, q, k, v, self.cache(c), c.attention, scale, c["attn_sinks"] if self.sinks else None, self.cap)
        if self.gate in ("softplus", "sigmoid of heads"):
            assert gate is not None
            out = head_gated(g, out, gate, self.size_v, g.softplus if self.gate == "softplus" else g.sigmoid)
        elif self.gate == "in q":
            assert gate is not None
            out = g.sigmoid_gated(out, gate)
        elif gate is not None:
            # a part of a fused product is a view, and ggml-cuda's unary kernels need contiguous tensors
            out = g.mul(out, g.sigmoid(gate if g.view_source(gate) == gate else g.cont(gate)))
        out = c.product("attn_output", c.name(out, "kqv_out"))
        return g.scale(out, self.result_scale) if self.result_scale else out

    def cache(self, c: LayerContext) -> KVLayer:
        """The rows that it attends to."""
        return c.kv

    def keys_values(self, c: LayerContext, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Projections F32 [.., T] -> K and V as stored, F32 [size, kv_heads, T]."""
        return self._rotated(c, k, self.kv_heads, "attn_k_norm"), c.g.heads(v, self.size_v, self.kv_heads)

    def _rotated(self, c: LayerContext, x: Tensor, heads: int, norm: str, stride: int | None = None) -> Tensor:
        x = c.rms_norm(x, norm) if self.norm == ROW else x
        x = c.g.heads(x, self.size, heads, stride)
        x = c.norm(x, norm) if self.norm == EACH else c.rms_norm(x, norm) if self.norm == HEAD and not self.norm_last else x
        if self.rope is not None:
            x = self.rope(c.g, x, c.positions, c.factors if self.factors else None)
        if self.norm == UNIT:
            return c.g.rms_norm(x, None, c.eps)
        return c.rms_norm(x, norm) if self.norm == HEAD and self.norm_last else x


@dataclass(frozen=True)
class GatedMLP(Part):
    """W_down (act(W_gate x) * W_up x) with ``n_ff`` hidden values.

    ``act`` "silu", "gelu" or "oai", gpt-oss's; ``suffix`` of the tensors' names; ``packed``: gate and up are one tensor, `ffn_up`; ``limit``: see ``Graph.swiglu_limited``, 0
    for none; ``clamps``: see ``Graph.swiglu_clamped`` instead; ``situ``: the numbers of ``Graph.situ``, or None.
    """

    n_ff: int
    act: str = "silu"
    suffix: str = ""
    packed: bool = False
    limit: float = 0.0
    clamps: bool = False
    situ: tuple[float, float] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{name}{self.suffix}" for name in FFN)

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        gate, up, down = self.names
        inputs = {up: (f.n_embd, 2 * self.n_ff)} if self.packed else {gate: (f.n_embd, self.n_ff), up: (f.n_embd, self.n_ff)}
        return specs(prefix, {**inputs, down: (self.n_ff, f.n_embd)})

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        return {} if self.packed else {"ffn": self.names[:2]}

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        if self.situ:
            gate, up = c.project("ffn", x)
            return c.product(self.names[2], c.g.situ(gate, up, *self.situ))
        if self.act == "oai":
            gate, up = c.project("ffn", x)
            return c.product(self.names[2], c.g.gated("swiglu_oai", gate, up))
        glu = {"silu": "swiglu", "gelu": "geglu"}[self.act]
        if self.packed:
            return c.product(self.names[2], c.g.gated_halves(glu, c.product(self.names[1], x)))
        if self.limit:
            gate, up = c.project("ffn", x)
            limited = c.g.swiglu_clamped if self.clamps else c.g.swiglu_limited
            return c.product(self.names[2], limited(gate, up, self.limit))
        return gated_ffn(c.g, glu, c.w.group(f"{c.prefix}ffn"), c.matrix(self.names[2]), x)


@dataclass(frozen=True)
class MLP(Part):
    """W_down act(W_up x) with ``n_ff`` hidden values; ``act``: the method of ``Graph``."""

    n_ff: int
    act: str
    suffix: str = ""

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        return specs(prefix, {f"ffn_up{self.suffix}": (f.n_embd, self.n_ff), f"ffn_down{self.suffix}": (self.n_ff, f.n_embd)})

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        return c.product(f"ffn_down{self.suffix}", getattr(c.g, self.act)(c.product(f"ffn_up{self.suffix}", x)))


@dataclass(frozen=True)
class MoE(Part):
    """Routed experts, plus a ``shared`` FFN for every token, with a sigmoid gate if ``gated``.

    ``gate_by_silu``: the gate is silu(z) / z, a sigmoid with other last bits.
    """

    experts: Experts
    shared: GatedMLP | None = None
    gated: bool = False
    gate_by_silu: bool = False

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        out = self.experts.specs(f.file, prefix, f.n_embd)
        out += specs(prefix, {"ffn_gate_inp_shexp": (f.n_embd,)}) if self.gated else []
        return out + (self.shared.tensors(f, prefix) if self.shared else [])

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        return self.shared.groups(f, prefix) if self.shared else {}

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g = c.g
        if self.shared is None:
            return self.experts(g, c.w, c.prefix, x)
        dense = self.shared(c, x)
        g.expand(
            dense
        )  # first: CUDA devices convert activations in the norm for a product that follows, and end the layer in one kernel (patches/0039)
        routed = self.experts(g, c.w, c.prefix, x)
        if not self.gated:
            return g.add(routed, dense)
        logit = g.matmul(c["ffn_gate_inp_shexp"], x)
        return g.add(routed, g.mul(dense, g.div(g.silu(logit), logit) if self.gate_by_silu else g.sigmoid(logit)))


@dataclass(frozen=True)
class Layer:
    """x += mixer(norm(x)); x += FFN(norm(x)). Without an FFN the mixer may be any part.

    Attributes:
        mixer_norm, ffn_norm: names of the input norms, "" for none.
        post_mixer, post_ffn: names of the output norms, "" for none; ``post_eps``: of these, None for the model's.
        parallel: the FFN reads the mixer's input; ``parts_first``: both outputs are added before the residual.
        residual: factor of the outputs.
    """

    mixer: Part
    ffn: Part | None
    mixer_norm: str = "attn_norm"
    ffn_norm: str = "ffn_norm"
    post_mixer: str = ""
    post_ffn: str = ""
    post_eps: float | None = None
    parallel: bool = False
    residual: float = 1.0
    parts_first: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.mixer,) if self.ffn is None else (self.mixer, self.ffn)

    @property
    def norms(self) -> list[str]:
        """Names of the layer's norms."""
        names = (self.mixer_norm, "" if self.parallel or not self.ffn else self.ffn_norm, self.post_mixer, self.post_ffn)
        return [name for name in names if name]

    @property
    def reads_extra(self) -> bool:
        """Whether it reads the previous layer's ``extra``; otherwise that is not copied between devices."""
        return self.mixer.reads_extra

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        names, tensors = [f"{prefix}{name}" for name in self.norms], f.file.tensors
        # some converters leave norms without the suffix
        norms = [Spec(f"{name}.weight", (f.n_embd,), VECTOR, name if name in tensors else None) for name in names]
        return norms + [s for part in self.parts for s in part.tensors(f, prefix)]

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        found: Iterable[tuple[str, Any]] = (item for part in self.parts for item in part.groups(f, prefix).items())
        return {f"{prefix}{group}": tuple(f"{prefix}{name}.weight" for name in names) for group, names in found}

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        h = x
        if self.mixer_norm:
            h = c.name(c.norm(x, self.mixer_norm), "attn_norm")
            c.g.expand_norm(h)
        a = self._residual(c, self.mixer(c, h), self.post_mixer)
        if self.ffn is None:
            return c.name(c.g.add(a, x), "l_out")
        if self.parallel and self.parts_first:
            return c.name(c.g.add(c.g.add(a, c.name(self.ffn(c, h), "ffn_out")), x), "l_out")
        if self.parallel:
            return c.name(c.g.add(c.g.add(c.name(self.ffn(c, h), "ffn_out"), x), a), "l_out")
        x = c.name(c.g.add(a, x), "ffn_inp")
        n = c.name(c.norm(x, self.ffn_norm), "ffn_norm") if self.ffn_norm else x
        return c.name(c.g.add(self._residual(c, c.name(self.ffn(c, n), "ffn_out"), self.post_ffn), x), "l_out")

    def _residual(self, c: LayerContext, x: Tensor, norm: str) -> Tensor:
        """The term of a part in the residual stream."""
        x = c.norm(x, norm, self.post_eps) if norm else x
        return c.g.scale(x, self.residual) if self.residual not in (0.0, 1.0) else x


def post_normed(mixer: Part, ffn: Part, before: bool = True, eps: float | None = None) -> Layer:
    """A layer with norms of both outputs, ``eps`` as of ``Layer.post_eps``, and ``before`` both inputs."""
    names = ("attn_norm", "ffn_norm") if before else ("", "")
    return Layer(mixer, ffn, *names, "post_attention_norm", "post_ffw_norm", eps)
