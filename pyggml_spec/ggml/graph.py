"""Graph allocators (one per kind of step) and graphs (built once, then recomputed), with the operations that models use."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeviceError, EngineError
from .device import Backend
from .kernels import Packed, multiplies_experts, packed_shape
from .library import Tensor, check, ffi, lib, new_err, text

NODES = 16384  # node limit of a graph; about 6 MB of metadata each
CAPPED = {"CUDA": (128, 256, 512)}  # head sizes; of others ggml-cuda says that it can, and ends the process
SPARE = 1024  # more nodes than a model adds between two calls of ``expand``
_PACKED_OUTPUTS = 32  # largest group of outputs in ggml's packing CPU kernels


NOT_WEIGHTS = {"q8_1", "q8_K", "i8", "i16", "i32", "i64", "f64"}  # ggml aborts on products of these
F32, I32, I64 = lib.GGML_TYPE_F32, lib.GGML_TYPE_I32, lib.GGML_TYPE_I64


def described(tensor: Tensor) -> str:
    """Type and shape, like "F32 [64, 5]"."""
    ne = list(tensor.ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return f"{text(lib.ggml_type_name(tensor.type)).upper()} {ne}"


def require(fits: bool, verb: str, **operands: object) -> None:
    """Raises EngineError that shows the operands, unless ``fits``."""
    if not fits:
        shown = ", ".join(f"{name} {described(x) if isinstance(x, Tensor) else x}" for name, x in operands.items())
        raise EngineError(f"{verb} cannot be computed of {shown}")


def can_repeat(small: Tensor, big_ne: Iterable[int]) -> bool:
    """Whether ``small`` repeats to the shape ``big_ne`` of up to 4 dimensions."""
    for n, big in zip(small.ne, (*big_ne, 1, 1, 1)):  # noqa: SIM110  (half the time of all())
        if n < 1 or big % n:
            return False
    return True


def in_range(x: Tensor, dim: int, first: int, count: int) -> bool:
    """Whether [first, first + count) is inside dimension ``dim``."""
    return first >= 0 and count > 0 and first + count <= x.ne[dim]


class AllocatorCounters(NamedTuple):
    """Counters of an allocator: graphs planned, plans within the existing buffer, buffers allocated, graphs computed."""

    graphs_built: int
    replans: int
    buffer_growths: int
    computes: int


class GraphAllocator:
    """The compute buffer shared by all graphs of one kind of step, which never run concurrently. ``nodes``: limit per graph.

    On a counting backend graphs are measured; the largest one is the size that the buffer would have.

    Args:
        before: of another kind of step, which never runs at the same time and outlives this one's graphs: those that fit its buffer use it.
    """

    def __init__(self, backend: Backend, name: str, nodes: int = NODES, before: "GraphAllocator | None" = None) -> None:
        self.name, self.backend, self.nodes, self.before = name, backend, nodes, before
        self.handle: Any = lib.pgs_allocator_new(backend.handle, before.handle if before is not None else ffi.NULL)
        self.counted = 0  # bytes of the largest graph so far, on a counting backend

    def count(self, nbytes: int) -> None:
        """Of a graph on a counting backend."""
        other = self.before
        while other is not None and nbytes > other.counted:
            other = other.before
        if other is None:
            self.counted = max(self.counted, nbytes)

    @property
    def counters(self) -> AllocatorCounters:
        out = ffi.new("pgs_counters *")
        lib.pgs_allocator_counters(self.handle, out)
        return AllocatorCounters(out.graphs_built, out.replans, out.buffer_growths, out.computes)

    @property
    def buffer_bytes(self) -> int:
        return self.counted if self.backend.counting else lib.pgs_allocator_buffer_size(self.handle)

    def close(self) -> None:
        if self.handle is not None:
            lib.pgs_allocator_free(self.handle)
            self.handle = None


OPTIONS_PER_DRAW = ffi.sizeof("pgs_draw_options") // 4  # I32 values


def _operation(name: str) -> Callable[..., Tensor]:
    """A method of ``Graph`` that adds ``ggml_<name>``, which any operands fit."""
    function = getattr(lib, f"ggml_{name}")
    return lambda self, *operands: function(self.ctx, *operands)


def _read(function: Callable[[Any], int]) -> property:
    return property(lambda self: function(self.handle))


class Graph:
    """One graph in its own arena. Add nodes, ``plan()`` once, then compute it any number of times.

    Tensors are opaque handles; shapes are in ggml order, innermost first. Methods named like a ggml function are that function.
    """

    host_bytes = _read(lib.pgs_graph_host_bytes)  # of its nodes
    n_cuts = _read(lib.pgs_graph_cuts)  # points where the host takes part (experts in host memory): one fewer than the parts of the graph
    named: dict[str, Tensor] | None = None  # nodes by name, of graphs built while ``debug``
    debug = False  # class attribute: name nodes and keep their values, to compare with llama.cpp
    segment = -1  # index of the device in a split model that computes this graph

    def __init__(self, allocator: GraphAllocator) -> None:
        self.allocator, self.backend = allocator, allocator.backend
        self._err = new_err()
        self.handle: Any = lib.pgs_graph_new(allocator.handle, allocator.nodes, self._err)
        if self.handle == ffi.NULL:
            raise EngineError(text(self._err))
        self.ctx = lib.pgs_graph_context(self.handle)
        self.gf = lib.pgs_graph_cgraph(self.handle)
        if Graph.debug:
            self.named = {}
        self._activations: dict[tuple[Tensor | int, ...], Tensor] = {}
        self._whole: dict[Tensor, Callable[[], Tensor]] = {}
        self._orders: dict[tuple[Tensor, int], Tensor] = {}

    # -- operations of models

    # of one tensor, with the arguments of ggml: scale(x, factor); gelu is the tanh approximation, softmax over the innermost dimension
    scale, sigmoid, silu, softplus, tanh, gelu, softmax, cont, abs, sgn, sqrt, sqr, mean, step = map(
        _operation,
        ("scale", "sigmoid", "silu", "softplus", "tanh", "gelu", "soft_max", "cont", "abs", "sgn", "sqrt", "sqr", "mean", "step"),
    )

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        """ggml-cuda's kernel takes rows with gaps between them for rows without."""
        return lib.ggml_clamp(self.ctx, x if lib.ggml_is_contiguous(x) else self.cont(x), low, high)

    def matmul(self, weight: Tensor, x: Tensor) -> Tensor:
        """weight [n_in, n_out], x F32 [n_in, T] -> F32 [n_out, T]; per head: [n_in, n_out, H], [n_in, T, H] -> [n_out, T, H]."""
        if isinstance(weight, Packed):
            return self._packed_matmul(weight, x)
        a, b = weight.ne, x.ne
        fits = a[0] == b[0] and b[2] % a[2] == 0 and b[3] % a[3] == 0 and weight.nb[0] <= weight.nb[1]
        require(fits, "matmul", weight=weight, x=x)
        return lib.ggml_mul_mat(self.ctx, weight, x)

    def aligned_outputs(self, weight: Tensor, count: int) -> int:
        """The smallest number of outputs >= ``count`` for which ``first_outputs`` gives a valid matrix.

        ggml's packing CPU kernels work on groups of 4 to 32 outputs; a partial group is read as unpacked weights, or skipped (AMX).
        """
        if isinstance(weight, Packed) or self.backend.device.kind != "cpu":
            return count
        as_they_are = lib.ggml_backend_buft_is_host(lib.ggml_backend_buffer_get_type(weight.buffer))
        return count if as_they_are else min(-(-count // _PACKED_OUTPUTS) * _PACKED_OUTPUTS, weight.ne[1])

    def first_outputs(self, weight: Tensor, count: int) -> Tensor:
        """The first ``count`` outputs of a matrix [n_in, n_out], as a view."""
        fits = 0 < count <= weight.ne[1] and weight.ne[2] == weight.ne[3] == 1
        require(fits, "first_outputs", weight=tuple(weight.ne[0:4]), count=count)
        if isinstance(weight, Packed):
            _, blocks, groups = packed_shape(weight.type, (weight.ne[0], count)) or (0, 0, 0)
            t = weight.tensor  # groups of outputs are stored in pairs
            part_of = lib.ggml_view_3d(self.ctx, t, t.ne[0], blocks, min(groups + groups % 2, t.ne[2]), t.nb[1], t.nb[2], 0)
            return replace(weight, ne=(weight.ne[0], count, 1, 1), tensor=part_of)
        return self.slice(weight, 1, 0, count)

    def _packed_matmul(self, weight: Packed, x: Tensor) -> Tensor:
        """By native kernels. The quantised activations of ``x`` are shared by all products with it, unless the first one had better make its own."""
        require(weight.ne[0] == x.ne[0] and x.type == F32, "matmul", weight=weight.ne[:2], x=x)
        x = x if x.nb[0] == 4 else self.cont(x)
        level = self.backend.level_handle
        key = (x, lib.pgs_activation_type(level, weight.type))
        before = self._activations.get(key)
        alone = before is None and lib.pgs_rounds_alone(level, weight.type, x)
        if not before:
            self._activations[key] = ffi.NULL if alone else lib.pgs_activations(self.ctx, level, weight.type, x)
        return lib.pgs_product(self.ctx, level, weight.type, weight.tensor, weight.ne[1], self._activations[key], x)

    def matmul_experts(self, experts: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
        """experts [n_in, n_out, n_expert], x F32 [n_in, 1 or n_used, T], chosen I32 [n_used, T] -> F32 [n_out, n_used, T]."""
        fits = experts.ne[0] == x.ne[0] and chosen.type == I32 and chosen.ne[1] == x.ne[2] and chosen.ne[0] % x.ne[1] == 0
        require(fits and experts.ne[3] == x.ne[3] == chosen.ne[2] == 1, "matmul_experts", experts=experts, x=x, chosen=chosen)
        native = isinstance(experts, Packed) or multiplies_experts(self.backend.level, experts.type, experts.ne[0])
        if native and x.ne[1] in (1, chosen.ne[0]) and x.nb[0] == 4:
            return self._native_experts(experts, x, chosen)
        return lib.ggml_mul_mat_id(self.ctx, experts, x, chosen)

    def _native_experts(self, experts: Tensor | Packed, x: Tensor, chosen: Tensor) -> Tensor:
        """By native kernels. All products share the order of the choices; those of the same ``x`` share its quantised activations."""
        level, (n_in, n_out, n_expert) = self.backend.level_handle, experts.ne[0:3]
        choice = chosen, n_expert
        if choice not in self._orders:
            self._orders[choice] = lib.pgs_expert_order(self.ctx, chosen, n_expert)
        order, key = self._orders[choice], (x, lib.pgs_activation_type(level, experts.type), *choice)
        if key not in self._activations:
            self._activations[key] = lib.pgs_expert_activations(self.ctx, level, experts.type, x, order, chosen, n_expert)
        tensor = experts.tensor if isinstance(experts, Packed) else experts
        return lib.pgs_expert_product(self.ctx, level, experts.type, tensor, n_in, n_out, n_expert, self._activations[key], order, chosen)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, b repeated where it has fewer rows. Fused if ``a`` is a product of native kernels; another reader of ``a`` recomputes it."""
        require(can_repeat(b, a.ne), "add", a=a, b=b)
        level = self.backend.level_handle
        both = lib.pgs_product_plus(self.ctx, level, a, b) if level != ffi.NULL else ffi.NULL
        return both or lib.ggml_add(self.ctx, a, b)

    def add_rows(self, x: Tensor, table: Tensor, index: Tensor) -> Tensor:
        """x F32 [n, m, T] plus rows of the table F32 [n, rows], selected by index I32 [m, T]."""
        fits = x.type == table.type == F32 and index.type == I32 and list(index.ne)[:3] == [x.ne[1], x.ne[2], 1]
        require(fits and x.ne[0] == table.ne[0] and x.ne[3] == table.ne[2] == 1, "add_rows", x=x, table=table, index=index)
        return lib.ggml_add_id(self.ctx, x, table, index)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        require(can_repeat(b, a.ne), "mul", a=a, b=b)
        return lib.ggml_mul(self.ctx, a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        require(can_repeat(b, a.ne), "div", a=a, b=b)
        return lib.ggml_div(self.ctx, a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        require(can_repeat(b, a.ne), "sub", a=a, b=b)
        return lib.ggml_sub(self.ctx, a, b)

    def scale_bias(self, x: Tensor, scale: float, bias: float) -> Tensor:
        """x * scale + bias."""
        return lib.ggml_scale_bias(self.ctx, x, scale, bias)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap); x itself for 0."""
        return self.scale(self.tanh(self.scale(x, float(np.float32(1) / np.float32(cap)))), cap) if cap else x

    def relu_squared(self, x: Tensor) -> Tensor:
        """max(x, 0)^2."""
        rectified = self.clamp(x, 0.0, float("inf"))
        return self.mul(rectified, rectified)

    def xielu(self, x: Tensor, negative: float, positive: float, beta: float, eps: float) -> Tensor:
        """Apertus's activation: with a = softplus(positive), x > 0: a x^2 + beta x; below, of exp(x) and softplus(negative)."""
        return lib.ggml_xielu(self.ctx, x, negative, positive, beta, eps)

    def gated(self, glu: str, gate: Tensor, up: Tensor, native: bool = True) -> Tensor:
        """act(gate) * up, elementwise; ``native`` False: always by ggml's kernel.

        ``glu``: "swiglu" for silu, "geglu" for gelu, or gpt-oss's "swiglu_oai": g sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and
        u = clamp(up, -7, 7).
        """
        require(list(gate.ne) == list(up.ne) and gate.type == up.type, glu, gate=gate, up=up)
        if glu == "swiglu_oai":
            return lib.ggml_swiglu_oai(self.ctx, gate, up, 1.702, 7.0)
        if glu == "swiglu" and native and self._gates(gate, up):
            return lib.pgs_gate(self.ctx, self.backend.level_handle, up, gate, True)
        return (lib.ggml_swiglu_split if glu == "swiglu" else lib.ggml_geglu_split)(self.ctx, gate, up)

    def gated_halves(self, glu: str, x: Tensor) -> Tensor:
        """``gated`` of x F32 [2 n, T] = [gate | up] -> F32 [n, T]; not for "swiglu_oai"."""
        half = x.ne[0] // 2
        require(x.ne[0] == 2 * half, f"{glu}_halves", x=x)
        if glu == "swiglu" and self._gates(x, x):
            return self.gated(glu, self.slice(x, 0, 0, half), self.slice(x, 0, half, half))
        return (lib.ggml_swiglu if glu == "swiglu" else lib.ggml_geglu)(self.ctx, x)

    def swiglu_limited(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        """min(silu(gate), limit) * clamp(up, -limit, limit), elementwise."""
        act = self.clamp(self.silu(gate if self.view_source(gate) == gate else self.cont(gate)), float("-inf"), limit)
        return self.mul(act, self.clamp(up, -limit, limit))

    def swiglu_clamped(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        """silu(min(gate, limit)) * clamp(up, -limit, limit), elementwise."""
        require(list(gate.ne) == list(up.ne) and gate.type == up.type == F32, "swiglu_clamped", gate=gate, up=up)
        return lib.ggml_swiglu_clamp(self.ctx, gate, up, limit)

    def situ(self, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        """b tanh(gate / b) sigmoid(gate) * l tanh(up / l), elementwise; up itself for an l of 0."""
        gate, up = (x if self.view_source(x) == x else self.cont(x) for x in (gate, up))
        act = self.mul(self.soft_cap(gate, beta), self.sigmoid(gate))
        return self.mul(act, self.soft_cap(up, linear_beta))

    def _gates(self, gate: Tensor, up: Tensor) -> bool:
        """Whether the native gate kernel supports these operands."""
        return self.backend.level is not None and all(x.type == F32 and x.nb[0] == 4 and x.ne[2] == x.ne[3] == 1 for x in (gate, up))

    def sigmoid_gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """x F32 [D * H, T] times sigmoid(gate), gate F32 [D, H, T], possibly strided."""
        fits = x.type == gate.type == F32 and gate.ne[0] * gate.ne[1] == x.ne[0] and gate.ne[2] == x.ne[1] and x.ne[2] == gate.ne[3] == 1
        require(fits, "sigmoid_gated", x=x, gate=gate)
        level = self.backend.level_handle
        if level != ffi.NULL and gate.nb[0] == x.nb[0] == 4:
            return lib.pgs_gate(self.ctx, level, x, gate, False)
        return self.mul(x, self.sigmoid(self.cont_flat(gate)))

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) over the innermost dimension, times ``weight`` if any."""
        level, native = self.backend.level_handle, x.type == F32 and x.nb[0] == 4
        if level != ffi.NULL and native and (weight is None or (weight.type == F32 and list(weight.ne) == [x.ne[0], 1, 1, 1])):
            return lib.pgs_norm(self.ctx, level, x, weight or ffi.NULL, ffi.NULL, eps)
        out = lib.ggml_rms_norm(self.ctx, x, eps)
        return out if weight is None else self.mul(out, weight)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the innermost dimension."""
        out = self.mul(lib.ggml_norm(self.ctx, x, eps), weight)
        return out if bias is None else self.add(out, bias)

    def gated_norm(self, x: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
        """x F32 [D, H, T] as in ``rms_norm``, times silu(gate), F32 [D * H, T] -> F32 [D * H, T]."""
        size, heads, rows = x.ne[0], x.ne[1], x.ne[2]
        require(gate.ne[0] == size * heads and gate.ne[1] == rows and gate.type == F32, "gated_norm", x=x, gate=gate)
        level = self.backend.level_handle
        if level != ffi.NULL and x.nb[0] == gate.nb[0] == 4 and list(weight.ne) == [size, 1, 1, 1]:
            return self.flat(lib.pgs_norm(self.ctx, level, x, weight, self.heads(gate, size, heads), eps))
        return self.gated("swiglu", gate, self.flat(self.rms_norm(x, weight, eps)))

    def rows(self, table: Tensor, index: Tensor) -> Tensor:
        """table [n, rows], index I32 [T] -> F32 [n, T] (I32 of an I32 table)."""
        if isinstance(table, Packed):
            require(index.type == I32 and index.ne[1] == index.ne[2] == index.ne[3] == 1, "rows", table=table.ne[:2], index=index)
            return lib.pgs_packed_rows(self.ctx, table.type, table.tensor, table.ne[0], index)
        fits = index.type == I32 and table.ne[2] == index.ne[1] and table.ne[3] == index.ne[2] and index.ne[3] == 1
        require(fits, "rows", table=table, index=index)
        return lib.ggml_get_rows(self.ctx, table, index)

    def fill_other_rows(self, x: Tensor, index: Tensor, other: float) -> Tensor:
        """x F32 [n, rows, T]; the rows not in index I32 [m, T] are filled with ``other``."""
        fits = x.type == F32 and index.type == I32 and x.ne[3] == 1 and list(index.ne)[1:] == [x.ne[2], 1, 1] and index.ne[0] <= x.ne[1]
        require(fits, "fill_other_rows", x=x, index=index)
        return lib.ggml_set_rows(self.ctx, lib.ggml_fill(self.ctx, x, other), lib.ggml_get_rows(self.ctx, x, index), index)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenates tensors of T columns along the innermost dimension."""
        out, level = parts[0], self.backend.level_handle
        if level != ffi.NULL and 1 < len(parts) < 10 and all(x.type == F32 and x.nb[0] == 4 and x.ne[2] == x.ne[3] == 1 for x in parts):
            require(all(x.ne[1] == out.ne[1] for x in parts), "concat", **{f"part_{i}": x for i, x in enumerate(parts)})
            return lib.pgs_join(self.ctx, list(parts), len(parts))
        for x in parts[1:]:
            require(list(out.ne)[1:] == list(x.ne)[1:] and out.type == x.type, "concat", first=out, next=x)
            out = lib.ggml_concat(self.ctx, out, x, 0)
        return out

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenates matrices of the same width, or stacks of as many, along the second dimension."""
        out = parts[0]
        for x in parts[1:]:
            require(out.ne[0] == x.ne[0] and out.ne[2] == x.ne[2] and out.type == x.type, "stack", first=out, next=x)
            out = lib.ggml_concat(self.ctx, out, x, 1)
        return out

    def pile(self, a: Tensor, b: Tensor) -> Tensor:
        """Concatenates a [n, T, H] and b [n, T, I] along the third dimension."""
        require(list(a.ne)[:2] == list(b.ne)[:2] and a.type == b.type, "pile", a=a, b=b)
        return lib.ggml_concat(self.ctx, a, b, 2)

    def prepend_row(self, first: Tensor, x: Tensor) -> Tensor:
        """first F32 [n, S], x F32 [n, T] in S sequences -> F32 [n, T / S + 1, S], with ``first`` before each sequence's rows."""
        slots = first.ne[1]
        fits = first.type == x.type == F32 and first.ne[0] == x.ne[0] and x.ne[1] % slots == 0 and x.ne[2] == first.ne[2] == 1
        require(fits and lib.ggml_is_contiguous(x) and lib.ggml_is_contiguous(first), "prepend_row", first=first, x=x)
        front = lib.ggml_reshape_3d(self.ctx, first, first.ne[0], 1, slots)
        return lib.ggml_concat(self.ctx, front, lib.ggml_reshape_3d(self.ctx, x, x.ne[0], x.ne[1] // slots, slots), 1)

    def sum_rows(self, x: Tensor) -> Tensor:
        if self.backend.level is not None and x.type == F32 and x.nb[0] == 4:
            return lib.pgs_sum_rows(self.ctx, self.backend.level_handle, x)
        return lib.ggml_sum_rows(self.ctx, x)

    def top_k(self, x: Tensor, k: int) -> Tensor:
        """F32 [n, T] -> I32 [k, T], indices of the k largest values, largest first."""
        require(0 < k <= x.ne[0], "top_k", x=x, k=k)
        return lib.ggml_argsort_top_k(self.ctx, x, k)

    def masked_softmax(self, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Softmax of scale * x F32 [n, 1, H, T] + mask F32 [n, 1, 1, T] over the innermost dimension."""
        fits = x.type == mask.type == F32 and [x.ne[0], x.ne[1], x.ne[3]] == [mask.ne[0], mask.ne[1], mask.ne[3]] and mask.ne[2] == 1
        require(fits and lib.ggml_is_contiguous(x) and lib.ggml_is_contiguous(mask), "masked_softmax", x=x, mask=mask)
        return lib.ggml_soft_max_ext(self.ctx, x, mask, scale, 0.0)

    def index_scores(self, q: Tensor, cache: Tensor, weights: Tensor, mask: Tensor, kv_bucket: int) -> Tensor:
        """An indexer's score of the first ``kv_bucket`` cache rows: sum over heads of weight * max(q . row, 0), plus the mask.

        q F32 [n, H, T], cache [n, rows (, slots)], weights F32 [H, T], mask as of ``kv_mask`` -> F32 of the mask's shape.
        """
        slots, count = mask.ne[3], q.ne[2]
        fits = q.type == weights.type == F32 and q.ne[0] == cache.ne[0] and list(weights.ne)[:3] == [q.ne[1], count, 1] and q.nb[0] == 4
        fits &= in_range(cache, 1, 0, kv_bucket) and mask.ne[0] == kv_bucket and mask.ne[1] * slots == count and slots <= cache.ne[2]
        require(fits, "index_scores", q=q, cache=cache, weights=weights, mask=mask, kv_bucket=kv_bucket)
        each = count // slots
        k = lib.ggml_view_4d(self.ctx, cache, cache.ne[0], 1, kv_bucket, slots, cache.nb[1], cache.nb[1], cache.nb[2], 0)
        q = lib.ggml_view_4d(self.ctx, q, q.ne[0], q.ne[1], each, slots, q.nb[1], q.nb[2], q.nb[2] * each, 0)
        step = weights.nb[1]
        weights = lib.ggml_view_4d(self.ctx, weights, weights.ne[0], each, 1, slots, step, step * each, step * each, 0)
        return lib.ggml_lightning_indexer(self.ctx, q, k, weights, mask)

    def arange(self, start: float, stop: float, step: float = 1.0) -> Tensor:
        """F32 [n]: start, start + step, ... below stop."""
        require(step > 0 and start < stop, "arange", start=start, stop=stop, step=step)
        return lib.ggml_arange(self.ctx, start, stop, step)

    def cast(self, x: Tensor, kind: int) -> Tensor:
        """``x`` in another type, a copy."""
        return lib.ggml_cast(self.ctx, x, kind)

    def streams_mean(self, x: Tensor, gate: Tensor) -> Tensor:
        """The mean over H of x * sigmoid(gate), both F32 [n, H, T] -> F32 [n, T]."""
        require(list(x.ne) == list(gate.ne) and x.type == gate.type == F32, "streams_mean", x=x, gate=gate)
        return lib.ggml_dsv4_hc_pre_gated(self.ctx, x, gate, float(np.float32(1) / np.float32(x.ne[1])))

    def streams_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum over H of x F32 [n, H, T] times weights F32 [H, T]: F32 [n, T]."""
        require(list(weights.ne)[:2] == list(x.ne)[1:3] and x.type == weights.type == F32, "streams_sum", x=x, weights=weights)
        return lib.ggml_dsv4_hc_pre(self.ctx, x, weights)

    def add_to_streams(self, x: Tensor, streams: Tensor, weights: Tensor, mixing: Tensor | None = None) -> Tensor:
        """streams F32 [n, H, T], mixed by F32 [H, H, T] of ``mixing_matrices`` if any, plus x F32 [n, T] times weights F32 [H, T]."""
        fits = list(x.ne)[:2] == [streams.ne[0], streams.ne[2]] and list(weights.ne)[:2] == [streams.ne[1], streams.ne[2]]
        fits &= mixing is None or list(mixing.ne)[:3] == [streams.ne[1], *list(streams.ne)[1:3]]
        require(fits, "add_to_streams", x=x, streams=streams, weights=weights, mixing=mixing)
        return lib.ggml_dsv4_hc_post(self.ctx, x, streams, weights, ffi.NULL if mixing is None else mixing)

    def mixing_matrices(self, mixes: Tensor, scale: Tensor, base: Tensor, eps: float, iterations: int) -> Tensor:
        """Of the last 16 rows of mixes F32 [24, T], times scale[2], plus base F32 [24]: F32 [4, 4, T] with rows and columns of sum 1, nearly (Sinkhorn)."""
        fits = list(mixes.ne)[:1] == list(base.ne)[:1] == [24] and scale.ne[0] == 3 and iterations > 0
        require(fits and lib.ggml_is_contiguous(mixes), "mixing_matrices", mixes=mixes, scale=scale, base=base, iterations=iterations)
        return lib.ggml_dsv4_hc_comb(self.ctx, mixes, scale, base, eps, iterations)

    def block_max(self, x: Tensor, n: int) -> Tensor:
        """The largest of each ``n`` values, F32 [n * m, ...] -> [m, ...]."""
        require(x.type == F32 and x.ne[0] % n == 0 and lib.ggml_is_contiguous(x), "block_max", x=x, n=n)
        return lib.ggml_pool_2d(self.ctx, x, lib.GGML_OP_POOL_MAX, n, 1, n, 1, 0, 0)

    def top_blocks(self, scores: Tensor, k: int) -> Tensor:
        """I32 [k, ...]: the blocks with the largest scores F32 [blocks, ...], as ``block_mask`` shows them."""
        require(0 < k <= scores.ne[0] and scores.type == F32, "top_blocks", scores=scores, k=k)
        return lib.ggml_top_k(self.ctx, scores, k)

    def block_mask(self, scores: Tensor, k: int, n: int) -> Tensor:
        """0 for each ``n`` values of the ``k`` blocks with the largest scores, -inf for others: F32 [blocks, H, T] -> F32 [blocks * n, H, T]."""
        blocks, heads, rows = list(scores.ne)[:3]
        require(0 < k <= blocks and scores.type == F32 and scores.ne[3] == 1, "block_mask", scores=scores, k=k)
        chosen = self.reshape(self.top_blocks(scores, k), k, heads * rows)
        hidden = self.reshape(lib.ggml_fill(self.ctx, scores, float("-inf")), 1, blocks, heads * rows)
        zeros = self.reshape(lib.ggml_fill(self.ctx, lib.ggml_view_1d(self.ctx, scores, k * heads * rows, 0), 0.0), 1, k, heads * rows)
        seen = lib.ggml_set_rows(self.ctx, hidden, zeros, chosen)
        return self.reshape(self.repeat(seen, n, blocks, heads * rows), blocks * n, heads, rows)

    def of_head(self, cache: Tensor, size: int, head: int) -> Tensor:
        """Rows of one K/V head of [size * heads, rows (, slots)], as a view."""
        require(
            (head + 1) * size <= cache.ne[0] and size % lib.ggml_blck_size(cache.type) == 0, "of_head", cache=cache, size=size, head=head
        )
        first = lib.ggml_row_size(cache.type, size) * head
        return lib.ggml_view_3d(self.ctx, cache, size, cache.ne[1], cache.ne[2], cache.nb[1], cache.nb[2], first)

    def rows_before(self, cache: Tensor, positions: Tensor, back: int) -> Tensor:
        """Of a ring F32 [n, rows (, slots)], position p in row p % rows, those ``back`` before positions I32 [T]: F32 [n, T], 0 before the first. On CPUs."""
        fits = cache.type == F32 and positions.type == I32 and positions.ne[0] % cache.ne[2] == 0 and back >= 0
        require(fits, "rows_before", cache=cache, positions=positions, back=back)
        return lib.pgs_rows_before(self.ctx, cache, positions, back)

    def ngram_rows(self, tokens: Tensor, positions: Tensor, hashes: Any) -> Tensor:
        """Rows of the n-grams (``pgs_ngrams``) that end at positions I32 [T], of ids F32 [1, rows (, slots)] as in ``rows_before``: I32 [hashes, T]. On CPUs."""
        fits = tokens.type == F32 and positions.type == I32 and positions.ne[0] % tokens.ne[2] == 0 and tokens.ne[0] == 1
        require(fits, "ngram_rows", tokens=tokens, positions=positions)
        return lib.pgs_ngram_rows(self.ctx, tokens, positions, hashes)

    def top_k_mask(self, mask: Tensor, scores: Tensor, k: int) -> Tensor:
        """mask F16 [kv_bucket, T, 1, S] with -inf outside the ``k`` largest scores (F32, same shape) of each row."""
        kv_bucket, count, _, slots = mask.ne
        fits = scores.type == F32 and list(scores.ne) == list(mask.ne) and mask.ne[2] == 1 and 0 < k <= kv_bucket
        require(fits and lib.ggml_is_contiguous(mask) and lib.ggml_is_contiguous(scores), "top_k_mask", mask=mask, scores=scores, k=k)
        chosen = self.reshape(lib.ggml_top_k(self.ctx, scores, k), k, count, slots)
        hidden = self.reshape(lib.ggml_fill(self.ctx, mask, float("-inf")), 1, kv_bucket, count, slots)
        zeros = self.reshape(lib.ggml_fill(self.ctx, lib.ggml_view_1d(self.ctx, scores, k * count * slots, 0), 0.0), 1, k, count, slots)
        seen = lib.ggml_set_rows(self.ctx, hidden, zeros, chosen)
        return self.add(self.reshape(seen, kv_bucket, count, 1, slots), mask)  # masked rows are among the k where fewer than k are visible

    def argmax(self, x: Tensor) -> Tensor:
        """F32 [n, T] -> I32 [T]."""
        require(x.type == F32 and x.ne[2] == x.ne[3] == 1, "argmax", x=x)
        if self.backend.level is not None and x.nb[0] == 4:
            return lib.pgs_argmax(self.ctx, self.backend.level_handle, x)
        return lib.ggml_argmax(self.ctx, x)

    def draw(self, logits: Tensor, draws: Tensor, first: int, tokens: Tensor | None = None) -> Tensor:
        """F32 [n, T] -> I32 [T], where ``backend.draws``: argmax, or a draw with the noise of ``draws`` I32 [8, >= first + T] (``pgs_draw_options``) from ``first`` on.

        ``tokens``: I32 or I64 [n] or [n, T], the target's token of each logit; None where they are the same.
        """
        rows = logits.ne[1]
        fits = logits.type == F32 and logits.nb[0] == 4 and draws.type == I32 and draws.ne[0] == OPTIONS_PER_DRAW
        fits = fits and first + rows <= draws.ne[1]
        fits = fits and (tokens is None or (tokens.type in (I32, I64) and tokens.ne[0] == logits.ne[0] and tokens.ne[1] in (1, rows)))
        require(fits and self.backend.draws, "draw", logits=logits, draws=draws, first=first)
        own = lib.ggml_view_2d(self.ctx, draws, OPTIONS_PER_DRAW, rows, draws.nb[1], first * draws.nb[1])
        if self.backend.device.kind != "cpu":
            return lib.pgs_device_draw(self.ctx, logits, own, ffi.NULL if tokens is None else tokens)
        level = self.backend.level_handle if self.backend.level is not None else ffi.NULL
        return lib.pgs_draw_node(self.ctx, level, logits, own, ffi.NULL if tokens is None else tokens)

    def top_k_unordered(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """F32 [n, T] -> indices I32 [k, T] of the k largest values, unordered, and the values F32 [1, k, T]."""
        require(x.type == F32 and 0 < k <= x.ne[0] and x.ne[2] == 1, "top_k_unordered", x=x, k=k)
        places = lib.ggml_top_k(self.ctx, x, k)
        return places, lib.ggml_get_rows(self.ctx, self.reshape(x, 1, x.ne[0], x.ne[1]), places)

    def rope(
        self, x: Tensor, positions: Tensor, n_rot: int, neox: bool, base: float, scale: float, factors: Tensor | None = None,
        n_ctx_orig: int = 0, yarn: tuple[float, float, float, float] = (0.0, 1.0, 32.0, 1.0)
    ) -> Tensor:  # fmt: skip
        """RoPE on the first ``n_rot`` values of each head. x F32 [D, H, T], positions I32 [T].

        ``neox`` pairs (i, i + n_rot / 2), otherwise (2 i, 2 i + 1). ``factors`` F32 [n_rot / 2] divide the frequencies. ``yarn`` is
        (extrapolation, magnitude, beta_fast, beta_slow).
        """
        fits = positions.type == I32 and positions.ne[0] == x.ne[2] and 0 < n_rot <= x.ne[0] and n_rot % 2 == 0
        require(fits and (factors is None or 2 * factors.ne[0] >= n_rot), "rope", x=x, positions=positions, n_rot=n_rot, factors=factors)
        mode = lib.GGML_ROPE_TYPE_NEOX if neox else lib.GGML_ROPE_TYPE_NORMAL
        return lib.ggml_rope_ext(self.ctx, x, positions, factors or ffi.NULL, n_rot, mode, n_ctx_orig, base, scale, *yarn)

    def rope_by_axis(
        self, x: Tensor, positions: Tensor, n_rot: int, sections: Sequence[int], interleaved: bool, base: float, scale: float,
        factors: Tensor | None = None, n_ctx_orig: int = 0, yarn: tuple[float, float, float, float] = (0.0, 1.0, 32.0, 1.0)
    ) -> Tensor:  # fmt: skip
        """As ``rope`` in NEOX pairs, each by one of four axes of positions I32 [4 T], one axis after the other: ``sections`` pairs each, in turns if
        ``interleaved``."""
        fits = positions.type == I32 and positions.ne[0] == 4 * x.ne[2] and 0 < n_rot <= x.ne[0] and n_rot % 2 == 0 and len(sections) == 4
        require(
            fits and min(sections) >= 0 and 0 < sum(sections) <= x.ne[0] and (factors is None or 2 * factors.ne[0] >= n_rot),
            "rope_by_axis", x=x, positions=positions, n_rot=n_rot, sections=tuple(sections), factors=factors,
        )  # fmt: skip
        mode = lib.GGML_ROPE_TYPE_IMROPE if interleaved else lib.GGML_ROPE_TYPE_MROPE
        return lib.ggml_rope_multi(
            self.ctx, x, positions, factors or ffi.NULL, n_rot, ffi.new("int[4]", list(sections)), mode, n_ctx_orig, base, scale, *yarn
        )

    # -- shapes

    def heads(self, x: Tensor, size: int, count: int, stride: int | None = None, first: int = 0) -> Tensor:
        """[n, T] as F32 [size, count, T], a view; ``stride`` floats between heads (default ``size``), the first head at ``first``."""
        step, rows, each = stride or size, x.ne[1], x.nb[1]
        end = first + (count - 1) * step + size  # values of the first row up to here
        fits = x.type == F32 and size > 0 and count > 0 and rows > 0 and first >= 0 and step >= 0
        fits = fits and 4 * end + (rows - 1) * each <= lib.ggml_nbytes(x)
        require(fits, "heads", x=x, size=size, count=count, stride=stride, first=first)
        return lib.ggml_view_3d(self.ctx, x, size, count, rows, 4 * step, each, 4 * first)

    def group_tails(self, x: Tensor, rows: int, first: int) -> Tensor:
        """F32 [n, T] in groups of ``rows`` -> rows [first, rows) of each group, F32 [n, T * (rows - first) / rows], a copy."""
        require(0 <= first < rows and x.ne[1] % rows == 0, "group_tails", x=x, rows=rows, first=first)
        count = x.ne[1] // rows
        view = lib.ggml_view_3d(self.ctx, x, x.ne[0], rows - first, count, x.nb[1], x.nb[1] * rows, x.nb[1] * first)
        return lib.ggml_cont_2d(self.ctx, view, x.ne[0], (rows - first) * count)

    def slice(self, x: Tensor, dim: int, first: int, count: int) -> Tensor:
        """Elements [first, first + count) of dimension ``dim`` of a tensor with up to 3 dimensions, as a view."""
        ne, nb = list(x.ne), x.nb
        fits = 0 <= dim < 3 and in_range(x, dim, first, count) and ne[3] == 1 and (dim > 0 or lib.ggml_blck_size(x.type) == 1)
        require(fits, "slice", x=x, dim=dim, first=first, count=count)
        ne[dim] = count
        if dim < 2 and ne[2] == 1:
            return lib.ggml_view_2d(self.ctx, x, ne[0], ne[1], nb[1], first * nb[dim])
        return lib.ggml_view_3d(self.ctx, x, ne[0], ne[1], ne[2], nb[1], nb[2], first * nb[dim])

    def pick(self, x: Tensor, dim: int, i: int) -> Tensor:
        """The i-th of dimension 1 or 2 of [n, H, L]: [n, L] or [n, H], as a view."""
        require(dim in (1, 2) and in_range(x, dim, i, 1), "pick", x=x, dim=dim, i=i)
        other = 3 - dim
        return lib.ggml_view_2d(self.ctx, x, x.ne[0], x.ne[other], x.nb[other], i * x.nb[dim])

    def every_nth(self, x: Tensor, rows: int, i: int) -> Tensor:
        """[n, T] in groups of ``rows`` -> the i-th row of each group, [n, T / rows], as a view."""
        require(0 <= i < rows and x.ne[1] % rows == 0 and x.ne[2] == x.ne[3] == 1, "every_nth", x=x, rows=rows, i=i)
        return lib.ggml_view_2d(self.ctx, x, x.ne[0], x.ne[1] // rows, rows * x.nb[1], i * x.nb[1])

    def group_firsts(self, x: Tensor, rows: int) -> Tensor:
        """[T] in groups of ``rows`` -> the first of each group, [T / rows], a copy."""
        count = x.ne[0] // rows
        return self.reshape(self.cont(self.every_nth(self.reshape(x, 1, x.ne[0]), rows, 0)), count)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """[k, S], index I32 [S] -> x[index[s], s], [1, 1, S]."""
        require(x.nb[0] == 4 and index.type == I32 and index.ne[0] == x.ne[1] and x.ne[2] == 1, "gather", x=x, index=index)
        table = lib.ggml_view_3d(self.ctx, x, 1, x.ne[0], x.ne[1], x.nb[0], x.nb[1], 0)
        return lib.ggml_get_rows(self.ctx, table, self.reshape(index, 1, x.ne[1]))

    def permute(self, x: Tensor, *axes: int) -> Tensor:
        """Dimension j moves to axes[j], as a view."""
        require(sorted(axes) == [0, 1, 2, 3], "permute", x=x, axes=axes)
        return lib.ggml_permute(self.ctx, x, *axes)

    def reshape(self, x: Tensor, *shape: int) -> Tensor:
        """A contiguous tensor reshaped to 1 to 4 dimensions."""
        fits = 1 <= len(shape) <= 4 and min(shape) > 0 and math.prod(shape) == math.prod(x.ne) and lib.ggml_is_contiguous(x)
        require(fits, "reshape", x=x, shape=shape)
        return (lib.ggml_reshape_1d, lib.ggml_reshape_2d, lib.ggml_reshape_3d, lib.ggml_reshape_4d)[len(shape) - 1](self.ctx, x, *shape)

    def hadamard(self, x: Tensor, hadamard: Tensor | None) -> Tensor:
        """F32 [D, H, T] or [D, T] with each block of n values multiplied by ``hadamard`` F32 [n, n]; unchanged if None."""
        if hadamard is None:
            return x
        n, x = hadamard.ne[0], x if lib.ggml_is_contiguous(x) else self.cont(x)
        out = lib.ggml_mul_mat(self.ctx, hadamard, lib.ggml_reshape_2d(self.ctx, x, n, x.ne[0] * x.ne[1] * x.ne[2] // n))
        lib.ggml_mul_mat_set_hint(out, lib.GGML_HINT_SRC0_IS_HADAMARD)
        return lib.ggml_reshape_3d(self.ctx, out, *x.ne[0:3])

    def hadamard_product(self, x: Tensor, hadamard: Tensor) -> Tensor:
        """F32 [D, H, T] times ``hadamard`` F32 [D, D], as llama.cpp's indexer does: a matmul on CPUs, ``hadamard`` elsewhere."""
        return self.matmul(hadamard, x) if self.backend.device.kind == "cpu" else self.hadamard(x, hadamard)

    def repeat(self, x: Tensor, *shape: int) -> Tensor:
        """Repeats x to a 3-D shape."""
        require(len(shape) == 3 and can_repeat(x, shape), "repeat", x=x, shape=shape)
        return lib.ggml_repeat_4d(self.ctx, x, shape[0], shape[1], shape[2], 1)

    def view_source(self, x: Tensor) -> Tensor:
        """The tensor that ``x`` is a view of, or ``x`` itself."""
        return x.view_src if x.view_src != ffi.NULL else x

    def flat(self, x: Tensor) -> Tensor:
        """[D, H, T] -> [D * H, T] of a contiguous tensor."""
        require(lib.ggml_is_contiguous(x) and x.ne[3] == 1, "flat", x=x)
        return lib.ggml_reshape_2d(self.ctx, x, x.ne[0] * x.ne[1], x.ne[2])

    def cont_flat(self, x: Tensor) -> Tensor:
        """[D, H, T] -> contiguous [D * H, T], by copy."""
        return lib.ggml_cont_2d(self.ctx, x, x.ne[0] * x.ne[1], x.ne[2])

    # -- engine nodes

    def expand(self, node: Tensor) -> None:
        """Appends ``node`` and its dependencies to the graph; call order is execution order.

        Raises EngineError when the node limit is near: ggml would abort.
        """
        lib.ggml_build_forward_expand(self.gf, node)
        if lib.ggml_graph_n_nodes(self.gf) > self.allocator.nodes - SPARE:
            raise EngineError(f"a graph of {self.n_nodes} nodes exceeds the {self.allocator.nodes} planned for this model")

    def expand_norm(self, x: Tensor) -> None:
        """Expands a norm first: ggml-cuda fuses adjacent norm nodes. Native products compute norms themselves."""
        if self.backend.level is None:
            self.expand(x)

    def keep_output(self, node: Tensor) -> None:
        """Expands ``node`` and keeps its memory until the next run, for the host to read."""
        lib.ggml_set_output(node)
        self.expand(node)

    def name(self, node: Tensor, name: str) -> Tensor:
        """Names ``node`` as llama.cpp does; with ``debug`` it is kept in ``named``."""
        if self.named is not None:
            node = self.cont(node) if not lib.ggml_is_contiguous(node) else node
            self.keep_output(lib.ggml_set_name(node, name.encode()))
            self.named[name] = node
        return node

    def place(self, home: Tensor, offset: int, node: Tensor) -> None:
        """Gives ``node`` the memory at byte ``offset`` of the allocated tensor ``home``."""
        check(lib.pgs_place(home, offset, node, self._err), self._err)

    def kv_write_rows(self, cache: Tensor, rows: Tensor, index: Tensor) -> None:
        fits = rows.type == F32 and cache.ne[0] == rows.ne[0] * rows.ne[1] and index.type in (I32, I64) and index.ne[0] == rows.ne[2]
        require(fits, "kv_write_rows", cache=cache, rows=rows, index=index)
        lib.pgs_kv_write_rows(self.ctx, self.gf, cache, rows, index)

    def kv_mask(
        self, mask_base: Tensor, q_last: Tensor, q_first: Tensor | None, kv_bucket: int, slots: int = 1, columns: int | None = None
    ) -> Tensor:
        """F16 [kv_bucket, T / slots, 1, slots]. ``columns``: of the last ones only, for one slot whose rows see all cache rows in front of them."""
        if columns is not None and columns < kv_bucket:
            require(self.backend.narrow_masks and slots == 1 and q_first is None, "kv_mask", columns=columns, slots=slots)
            mask = self.kv_mask(self.slice(mask_base, 0, kv_bucket - columns, columns), q_last, None, columns)
            self._whole[mask] = cache(lambda: self.kv_mask(mask_base, q_last, None, kv_bucket))
            return mask
        fits = slots > 0 and (mask_base.ne[1] == 1 or slots <= mask_base.ne[1]) and q_last.ne[1] % slots == 0 and q_last.ne[0] == 1
        require(
            fits and in_range(mask_base, 0, 0, kv_bucket), "kv_mask", mask_base=mask_base, q_last=q_last, kv_bucket=kv_bucket, slots=slots
        )
        return lib.pgs_kv_mask(self.ctx, self.gf, mask_base, q_last, q_first or ffi.NULL, kv_bucket, slots, self.backend.level_handle)

    def flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: int, kv_bucket: int, scale: float, sinks: Any = None, cap: float = 0.0
    ) -> Tensor:
        """q F32 [D, H, T] over the first ``kv_bucket`` rows of the caches k and v, of ``heads`` K/V heads; mask as of ``kv_mask``, sinks F32 [H].

        Attention that takes no narrow mask gets the whole one.
        """
        fits = heads > 0 and k.ne[0] == q.ne[0] * heads and v.ne[0] % heads == 0 and q.ne[1] % heads == 0
        whole = self._whole.get(mask) if mask.ne[0] < kv_bucket else None
        fits = fits and in_range(k, 1, 0, kv_bucket) and in_range(v, 1, 0, kv_bucket) and (mask.ne[0] == kv_bucket or whole is not None)
        fits = fits and q.ne[2] % mask.ne[3] == 0 and mask.ne[1] * mask.ne[3] >= q.ne[2] and mask.ne[3] <= k.ne[2] == v.ne[2]
        fits = fits and (sinks is None or (sinks.type == F32 and list(sinks.ne) == [q.ne[1], 1, 1, 1]))
        require(fits, "flash_attention", q=q, k=k, v=v, mask=mask, heads=heads, kv_bucket=kv_bucket, sinks=sinks)
        device = self.backend.device.name
        if cap and q.ne[0] not in CAPPED.get(device.rstrip("0123456789"), (q.ne[0],)):
            raise DeviceError(
                f"{device} cannot cap scores of heads of {q.ne[0]} values in this llama-cpp-python; use another device, the CPU caps any"
            )
        level = self.backend.level_handle

        def attention(mask: Tensor) -> Tensor:
            return lib.pgs_flash_attention(self.ctx, q, k, v, mask, heads, kv_bucket, scale, cap, sinks or ffi.NULL, level)

        out = attention(mask)
        return out if whole is None or self.backend.supports(self.view_source(out)) else attention(whole())

    def host_view(self, node: Tensor) -> np.ndarray:
        """F32 values [rows, n] of a planned node in host memory, without a copy; CPU backends only, see ``keep_output``."""
        require(node.type == F32 and node.data != ffi.NULL, "host_view", node=node, planned=node.data != ffi.NULL)
        return np.frombuffer(ffi.buffer(node.data, lib.ggml_nbytes(node)), np.float32).reshape(-1, node.ne[0])

    # -- lifecycle

    def plan(self) -> None:
        """Checks support of every node, plans and allocates memory. Raises EngineError with the unsupported node."""
        if self.backend.counting:
            self.allocator.count(self.measure())
        else:
            check(lib.pgs_graph_plan(self.handle, self._err), self._err)

    def capture(self) -> tuple[int, int, int] | None:
        """Captures the planned graph as a CUDA graph before its first run: microseconds (record, instantiate, upload), or None where
        unsupported. Nothing else may use the backend meanwhile."""
        us = ffi.new("int64_t[3]")
        return (us[0], us[1], us[2]) if lib.pgs_graph_capture(self.handle, us) else None

    @property
    def parts(self) -> "list[Graph]":
        """The graphs of the devices that take part (see chain.py)."""
        return [self]

    def measure(self) -> int:
        """Bytes of compute buffer that this graph alone needs. Nothing is allocated."""
        sizes = ffi.new("size_t[1]")
        galloc = lib.ggml_gallocr_new(self.backend.default_buffer_type)
        lib.ggml_gallocr_reserve_n_size(galloc, self.gf, ffi.NULL, ffi.NULL, sizes)
        lib.ggml_gallocr_free(galloc)
        return sizes[0]

    def measure_between(self, high: "Graph", part: int, whole: int) -> int:
        """``measure`` of the graph whose K/V bucket lies ``part`` of ``whole`` above this one's, on the way to that of ``high``, neither of them planned;
        0 where the two differ in more than shapes that grow evenly."""
        return lib.pgs_graph_measure_between(self.handle, high.handle, part, whole)

    @property
    def stale(self) -> bool:
        """Whether the role's buffer has moved since this graph was planned."""
        return not self.backend.counting and bool(lib.pgs_graph_stale(self.handle))

    @property
    def n_nodes(self) -> int:
        return lib.ggml_graph_n_nodes(self.gf)

    def op_counts(self) -> Counter[str]:
        """Number of nodes by operation; native nodes by their name."""
        nodes = [lib.ggml_graph_node(self.gf, i) for i in range(self.n_nodes)]
        ops = [(text(lib.ggml_op_desc(node)), node) for node in nodes]
        return Counter(text(lib.ggml_get_name(node)) if op == "CUSTOM" else op for op, node in ops)

    def traffic(self) -> int:
        """Lower bound of bytes that one run moves: weights, K/V and recurrent state read once, plus writes. Experts count as all distinct."""
        return lib.pgs_graph_traffic(self.handle)

    def close(self) -> None:
        if self.handle is not None:
            lib.pgs_graph_free(self.handle)
            self.handle = None
