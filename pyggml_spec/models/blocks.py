"""Subgraphs that several architectures share."""

from collections.abc import Callable
from dataclasses import replace

from ..ggml.graph import Graph
from ..ggml.library import Tensor
from .base import KVLayer
from .weights import Group, Matrix


def head_product(g: Graph, matrix: Matrix, x: Tensor, tokens: int = 0) -> Tensor:
    """``product`` of a head, limited to the first ``tokens`` outputs unless 0."""
    if not tokens or tokens >= matrix.weight.ne[1]:
        return product(g, matrix, x)
    count = g.aligned_outputs(matrix.weight, tokens)
    scale, bias = (v if v is None or v.ne[0] == 1 else g.slice_1d(v, 0, count) for v in (matrix.scale, matrix.bias))
    out = product(g, replace(matrix, weight=g.first_outputs(matrix.weight, count), scale=scale, bias=bias), x)
    return out if count == tokens else g.cont(g.columns_3d(out, tokens, 0))


def product(g: Graph, matrix: Matrix, x: Tensor) -> Tensor:
    """x F32 [n_in, T] times the matrix, with the file's scale and bias; F32 [n_out, T]."""
    out = g.matmul(matrix.weight, x)
    if matrix.bias is not None and matrix.bias_first:
        out = g.add(out, matrix.bias)
    if matrix.scale is not None:
        out = g.mul(out, matrix.scale)
    if matrix.bias is not None and not matrix.bias_first:
        out = g.add(out, matrix.bias)
    return out


def project(g: Graph, group: Group, x: Tensor) -> list[Tensor]:
    """x F32 [n_in, T] times each matrix of the group; F32 [rows_i, T], as views of one product where matrices are fused."""
    out: list[Tensor] = []
    for matrix, rows in group.runs:
        joined, first = product(g, matrix, x), 0
        for n in rows:
            out.append(g.columns(joined, n, first) if len(rows) > 1 else joined)
            first += n
    return out


def swiglu_ffn(g: Graph, gate_up: Group, down: Matrix, x: Tensor) -> Tensor:
    """W_down (silu(W_gate x) * W_up x). For one row ggml-cuda fuses two matmuls and the gate into one kernel; for more, one matmul is faster."""
    return _gated_ffn(g, gate_up, down, x, g.swiglu, g.swiglu_halves)


def geglu_ffn(g: Graph, gate_up: Group, down: Matrix, x: Tensor) -> Tensor:
    """W_down (gelu(W_gate x) * W_up x), with the tanh approximation of GELU."""
    return _gated_ffn(g, gate_up, down, x, g.geglu, g.geglu_halves)


def _gated_ffn(
    g: Graph, gate_up: Group, down: Matrix, x: Tensor, split: Callable[[Tensor, Tensor], Tensor], halves: Callable[[Tensor], Tensor]
) -> Tensor:
    separate = [run.matrix for run in gate_up.runs] if gate_up.fused is None else gate_up.parts if x.ne[1] == 1 else ()
    if separate:
        gate, up = (product(g, matrix, x) for matrix in separate)
        return product(g, down, split(gate, up))
    assert gate_up.fused is not None
    return product(g, down, halves(product(g, gate_up.fused, x)))


def write_kv(g: Graph, k: Tensor, v: Tensor, kv: KVLayer, kv_rows: Tensor) -> None:
    """Writes k, v F32 [D, H_kv, T] into the cache rows. RoPE, view and row write of K stay adjacent, which ggml-cuda fuses."""
    k, v = g.hadamard(k, kv.rotation_k), g.hadamard(v, kv.rotation_v)
    g.expand(v)
    g.kv_write_rows(kv.k, k, kv_rows)
    g.kv_write_rows(kv.v, v, kv_rows)


def softplus_gated(g: Graph, out: Tensor, gate: Tensor, head_size: int) -> Tensor:
    """out F32 [D * H, T] * softplus(gate); gate has one value per head, F32 [H, T], or one per output."""
    # a part of a fused product is a view, and ggml-cuda's unary kernels need contiguous tensors
    gate = g.softplus(gate if g.view_source(gate) == gate else g.cont(gate))
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
    kv_rows: Tensor,
    mask: Tensor,
    kv_bucket: int,
    n_head_kv: int,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Writes k, v F32 [D, H_kv, T] into the cache rows and attends with q F32 [D, H, T] to the KV bucket. Returns F32 [D * H, T].

    ``sinks`` F32 [H]: per-head score that takes part in the softmax without a value. k and v None: ``kv`` has the rows of an earlier layer.
    """
    q = g.hadamard(q, kv.rotation_k)
    if k is None and q.ne[2] == kv.k.ne[2]:  # one row of each sequence
        # With replayed CUDA graphs, ggml-cuda's one-row attention right after the query's rotation reads it too early (PDL); a copy between them helps.
        q = g.cont(q)
    g.expand(q)
    if k is not None and v is not None:
        write_kv(g, k, v, kv, kv_rows)
    return g.hadamard(g.flash_attention(q, kv.k, kv.v, mask, n_head_kv, kv_bucket, scale, sinks, cap), kv.rotation_v)
