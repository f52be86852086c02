"""The verbs of ``ggml.graph.Graph`` on torch tensors, so that targets and drafters are trained from the descriptions that the engine runs.

A ``Node`` has ggml's ``ne``, innermost first; its torch ``value`` has the dimensions reversed and, unless it is a weight, the batch before them. Caches are
nodes whose rows grow as layers write them. A verb that is missing here raises AttributeError: the architecture's hidden states come from the engine then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.base import KVLayer, KVShape


class Node:
    """An activation; ``value`` [batch, ..., n]."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @property
    def ne(self) -> tuple[int, ...]:
        sizes = tuple(self.value.shape[:0:-1])
        return sizes + (1,) * (4 - len(sizes))


class Weight(Node):
    """A tensor of the file; ``value`` [..., n]."""

    __slots__ = ()

    @property
    def ne(self) -> tuple[int, ...]:
        sizes = tuple(self.value.shape[::-1])
        return sizes + (1,) * (4 - len(sizes))


class Cache(Node):
    """K or V rows, [batch, rows, n], as far as they are written."""

    __slots__ = ()

    def append(self, rows: Tensor) -> None:
        self.value = torch.cat([self.value.to(rows.dtype), rows], 1) if self.value.shape[1] else rows


class Room(Cache):
    """A cache whose memory [batch, most rows, n] is there from the first; rows go to columns ``at`` I64 [rows], the same tensor for all. Without gradients."""

    __slots__ = ("at",)

    def __init__(self, memory: Tensor, at: Tensor) -> None:
        super().__init__(memory)
        self.at = at

    def append(self, rows: Tensor) -> None:
        self.value.index_copy_(1, self.at, rows.to(self.value.dtype))


def node(value: Tensor) -> Any:
    """A Node, for functions that are declared for ggml's tensors."""
    return Node(value)


def _of(function: Callable) -> Any:
    return lambda self, x, *more: Node(function(x.value, *more))


def caches(shapes: Sequence[KVShape], make: Callable[[int], Cache]) -> tuple[KVLayer, ...]:
    """Caches that ``make`` makes, by the size of a row. Raises NotImplementedError: rows that are not plain K and V."""
    if any(shape.latent or shape.index or shape.exact for shape in shapes):
        raise NotImplementedError("latent or indexed K/V rows")
    sizes = [(shape.n_head_kv * shape.size, shape.n_head_kv * shape.size_v) for shape in shapes]
    made: Any = make
    return tuple(KVLayer(*map(made, pair)) for pair in sizes)


def empty(batch: int, like: Tensor) -> Callable[[int], Cache]:
    """For ``caches``: without rows."""
    return lambda n: Cache(like.new_empty(batch, 0, n))


class Ops:
    """In place of a Graph. ``mask`` of attention: a Node of booleans [1 or batch, rows, cache rows], True where visible; None for causal rows."""

    def __init__(self) -> None:
        self._positions: Tensor | None = None  # of which ``_turns`` are
        self._turns: dict[tuple, Tensor] = {}

    def matmul(self, weight: Node, x: Node) -> Node:
        if weight.value.dim() == 1:
            return Node((x.value * weight.value).sum(-1, keepdim=True))
        if weight.value.dim() != 2:
            raise NotImplementedError("products per head")
        return Node(F.linear(x.value if weight.value.requires_grad else x.value.to(weight.value.dtype), weight.value))

    def aligned_outputs(self, weight: Node, count: int) -> int:
        return count

    def first_outputs(self, weight: Node, count: int) -> Node:
        return Weight(weight.value[:count])

    def rows(self, table: Node, index: Node) -> Node:
        return Node(F.embedding(index.value, table.value).float())

    sigmoid, silu, softplus, tanh, abs, sqrt, sqr = map(
        _of, (torch.sigmoid, F.silu, F.softplus, torch.tanh, torch.abs, torch.sqrt, torch.square)
    )
    gelu = _of(lambda x: F.gelu(x, approximate="tanh"))
    scale = _of(lambda x, factor: x * factor)
    scale_bias = _of(lambda x, factor, bias: x * factor + bias)
    clamp = _of(lambda x, low, high: x.clamp(low, high))
    softmax = _of(lambda x: x.softmax(-1))

    def add(self, a: Node, b: Node) -> Node:
        return Node(a.value + b.value)

    def sub(self, a: Node, b: Node) -> Node:
        return Node(a.value - b.value)

    def mul(self, a: Node, b: Node) -> Node:
        return Node(a.value * b.value)

    def div(self, a: Node, b: Node) -> Node:
        return Node(a.value / b.value)

    def soft_cap(self, x: Node, cap: float) -> Node:
        return Node(torch.tanh(x.value / cap) * cap) if cap else x

    def relu_squared(self, x: Node) -> Node:
        return Node(F.relu(x.value).square())

    def gated(self, glu: str, gate: Node, up: Node, native: bool = True) -> Node:
        if glu == "swiglu_oai":
            g = gate.value.clamp(max=7.0)
            return Node(g * torch.sigmoid(1.702 * g) * (up.value.clamp(-7, 7) + 1))
        return Node((F.silu(gate.value) if glu == "swiglu" else F.gelu(gate.value, approximate="tanh")) * up.value)

    def gated_halves(self, glu: str, x: Node) -> Node:
        gate, up = x.value.chunk(2, -1)
        return self.gated(glu, Node(gate), Node(up))

    def swiglu_limited(self, gate: Node, up: Node, limit: float) -> Node:
        return Node(F.silu(gate.value).clamp(max=limit) * up.value.clamp(-limit, limit))

    def sigmoid_gated(self, x: Node, gate: Node) -> Node:
        return Node(x.value * torch.sigmoid(gate.value.flatten(-2)))

    def rms_norm(self, x: Node, weight: Node | None, eps: float) -> Node:
        out = F.rms_norm(x.value.float(), x.value.shape[-1:], eps=eps)
        return Node(out if weight is None else out * weight.value)

    def layer_norm(self, x: Node, weight: Node, bias: Node | None, eps: float) -> Node:
        return Node(F.layer_norm(x.value.float(), x.value.shape[-1:], weight.value, None if bias is None else bias.value, eps))

    def gated_norm(self, x: Node, weight: Node, eps: float, gate: Node) -> Node:
        return Node(self.rms_norm(x, weight, eps).value.flatten(-2) * F.silu(gate.value.float()))

    def rope(
        self, x: Node, positions: Node, n_rot: int, neox: bool, base: float, scale: float, factors: Node | None = None,
        n_ctx_orig: int = 0, yarn: tuple[float, float, float, float] = (0.0, 1.0, 32.0, 1.0)
    ) -> Node:  # fmt: skip
        if yarn[0] != 0 or yarn[1] != 1:
            raise NotImplementedError("yarn")
        v, half = x.value, n_rot // 2
        if self._positions is not positions.value:
            self._positions, self._turns = positions.value, {}
        key = n_rot, base, scale, None if factors is None else id(factors.value)
        if key not in self._turns:  # the same for q and k of all layers
            angle = base ** (-torch.arange(half, device=v.device, dtype=torch.float32) / half) * scale
            angle = positions.value.float()[..., None] * (angle if factors is None else angle / factors.value[:half])  # [batch, rows, half]
            self._turns[key] = torch.polar(torch.ones_like(angle), angle)[..., None, :]
        turned, rest = v[..., :n_rot].float(), v[..., n_rot:]
        pairs = turned.unflatten(-1, (2, half)).mT if neox else turned.unflatten(-1, (half, 2))
        out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * self._turns[key])
        out = (out.mT if neox else out).flatten(-2)
        return Node(torch.cat([out, rest.float()], -1) if rest.shape[-1] else out)

    # -- shapes

    def heads(self, x: Node, size: int, count: int, stride: int | None = None, first: int = 0) -> Node:
        step = stride or size
        v = x.value[..., first:]
        v = F.pad(v, (0, count * step - v.shape[-1])) if v.shape[-1] < count * step else v[..., : count * step]
        return Node(v.unflatten(-1, (count, step))[..., :size])

    def slice(self, x: Node, dim: int, first: int, count: int) -> Node:
        return type(x)(x.value.narrow(-1 - dim, first, count))

    def pick(self, x: Node, dim: int, i: int) -> Node:
        return Node(x.value.select(-1 - dim, i))

    def concat(self, parts: Sequence[Node]) -> Node:
        return Node(torch.cat([part.value.float() for part in parts], -1))

    def reshape(self, x: Node, *shape: int) -> Node:
        return Weight(x.value.reshape(shape[::-1])) if isinstance(x, Weight) else Node(x.value.reshape(x.value.shape[0], *shape[::-1]))

    def flat(self, x: Node) -> Node:
        return Node(x.value.flatten(-2))

    cont_flat = flat

    def cont(self, x: Node) -> Node:
        return x

    def view_source(self, x: Node) -> Node:
        return x

    def hadamard(self, x: Node, hadamard: None) -> Node:
        return x

    def expand(self, node: Node) -> None:
        """Nodes are computed as they are made."""

    expand_norm = expand

    def name(self, node: Node, name: str) -> Node:
        return node

    # -- caches

    def kv_write_rows(self, cache: Cache, rows: Node, index: object) -> None:
        cache.append(rows.value.flatten(2))

    def flash_attention(
        self, q: Node, k: Node, v: Node, mask: Node | None, heads: int, kv_bucket: int, scale: float, sinks: Node | None = None, cap: float = 0.0
    ) -> Node:  # fmt: skip
        kinds = torch.get_autocast_dtype(q.value.device.type) if torch.is_autocast_enabled(q.value.device.type) else v.value.dtype
        queries = q.value.transpose(1, 2).to(kinds)
        keys, values = (x.value.unflatten(-1, (heads, -1)).transpose(1, 2).to(kinds) for x in (k, v))
        if cap or sinks is not None:
            raise NotImplementedError("capped scores or sinks")
        groups, rows = queries.shape[1] // heads, queries.shape[2]
        seen = None if mask is None else mask.value[:, None]
        if groups > 1 and rows == 1:  # decoding: what reads the same keys is a row of one product
            queries = queries.unflatten(1, (heads, groups)).flatten(2, 3)
        elif groups > 1:
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, is_causal=mask is None, scale=scale)
        out = out.unflatten(2, (groups, 1)).flatten(1, 2) if groups > 1 and rows == 1 else out
        return Node(out.transpose(1, 2).flatten(2))
