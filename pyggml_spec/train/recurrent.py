"""The gated delta rule on torch tensors, over whole sequences in chunks, in place of ``cache.recurrent.RecurrentInputs``."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.base import Recurrence, RecurrentShape
from .ops import Node, Ops

CHUNK, BLOCK = 64, 16


class DeltaRule:
    """The states of a target's recurrent layers, which begin empty. Raises NotImplementedError: another recurrence."""

    def __init__(self, shape: RecurrentShape) -> None:
        if shape.recurrence != Recurrence.DELTA:
            raise NotImplementedError("recurrent layers other than gated delta nets")
        self.shape = shape

    def __call__(
        self, g: Ops, state: int, proj: Node, conv: Node, *, beta: Node, alpha: Node, dt: Node, a: Node, eps: float, **other: Any
    ) -> Node:
        s = self.shape
        rows = proj.value[..., : s.channels].float()
        wide = F.pad(rows, (0, 0, s.conv - 1, 0))
        mixed = F.silu(sum(wide[:, j : j + rows.shape[1]] * conv.value[:, j] for j in range(s.conv)))
        keys = s.n_head_k * s.state_size
        q, k, v = mixed.split([keys, keys, s.n_head_v * s.head_size], -1)
        q, k = (self._heads(x, eps) for x in (q, k))
        decay = a.value * F.softplus(alpha.value.float() + dt.value)
        with torch.autocast(rows.device.type, enabled=False):
            return Node(delta_rule(q, k, v.unflatten(-1, (s.n_head_v, s.head_size)), decay, beta.value.float().sigmoid())[0])

    def _heads(self, x: Tensor, eps: float) -> Tensor:
        """[B, T, n_head_k * S] -> of unit length, repeated for every head of v, [B, T, n_head_v, S]."""
        s = self.shape
        x = x.unflatten(-1, (s.n_head_k, s.state_size))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
        return x.repeat_interleave(s.repeat, 2) if s.grouped else x.repeat(1, 1, s.n_head_v // s.n_head_k, 1)


def unit_lower_inverse(m: Tensor) -> Tensor:
    """(I + m)^-1 for strictly lower m [..., n, n], n a power-of-two multiple of BLOCK.

    The series (I+N)(I+N^2)(I+N^4)... is exact on a small diagonal block but cancels on a large one, so blocks use it and larger ones are merged. The last
    line is a Newton step: it restores rounding and carries the exact gradient.
    """
    n = m.shape[-1]
    size = min(BLOCK, n)
    with torch.no_grad():
        lead = m.shape[:-2]
        blocks = m.reshape(*lead, n // size, size, n // size, size)
        neg = -torch.stack([blocks[..., i, :, i, :] for i in range(n // size)], -3)
        eye = torch.eye(size, device=m.device, dtype=m.dtype)
        inv, power, done = eye + neg, neg, 2
        while done < size:
            power = power @ power
            inv = inv @ (eye + power)
            done *= 2
        while size < n:
            rows = m.reshape(*lead, n // size, size, n // size, size)
            low = torch.stack([rows[..., i + 1, :, i, :] for i in range(0, n // size, 2)], -3)
            top, bottom = inv[..., 0::2, :, :], inv[..., 1::2, :, :]
            corner = -(bottom @ low @ top)
            inv = torch.cat([torch.cat([top, torch.zeros_like(top)], -1), torch.cat([corner, bottom], -1)], -2)
            size *= 2
        t = inv[..., 0, :, :]
    full = torch.eye(n, device=m.device, dtype=m.dtype) + m
    return 2 * t - t @ (full @ t)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q, k, v [B, T, H, S] (q, k of unit length), g [B, T, H] log decay, beta [B, T, H], state [B, H, S, S] (key, value) -> [B, T, H, S] and the last state."""
    b, length, heads, size = v.shape
    pad = -length % CHUNK
    if pad:  # rows with beta 0 and no decay leave the state as it is
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    n = (length + pad) // CHUNK

    def split(x: Tensor) -> Tensor:
        return x.reshape(b, n, CHUNK, heads, -1).permute(1, 0, 3, 2, 4).reshape(n, b * heads, CHUNK, x.shape[-1] if x.dim() == 4 else 1)

    q, k, v, g, beta = split(q), split(k), split(v), split(g)[..., 0], split(beta)
    gc = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, device=q.device, dtype=torch.bool).tril()
    decay = (gc[..., :, None] - gc[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    kb, kt = k * beta, k.transpose(-1, -2)
    t = unit_lower_inverse(((kb @ kt) * decay).tril(-1))
    u, w = t @ (v * beta), t @ (kb * gc.exp()[..., None])
    last = gc[..., -1:]
    kd, carry = (k * (last - gc).exp()[..., None]).transpose(-1, -2), last.exp()[..., None]
    s, states, news = q.new_zeros(b * heads, size, size) if state is None else state.reshape(b * heads, size, size), [], []
    for i in range(n):
        states.append(s)
        news.append(torch.baddbmm(u[i], w[i], s, alpha=-1))
        s = torch.baddbmm(s * carry[i], kd[i], news[-1])
    scale = 1 / math.sqrt(size)
    out = (q * (gc.exp()[..., None] * scale)) @ torch.stack(states) + ((q @ kt) * decay * scale) @ torch.stack(news)
    out = out.reshape(n, b, heads, CHUNK, size).permute(1, 0, 3, 2, 4).reshape(b, n * CHUNK, heads, size)[:, :length]
    return out, s.reshape(b, heads, size, size)
