"""The MTP layer of the demo pair: one full-attention layer after the frozen target, which drafts a chain.

The row of draft i (from 0) at position p is the token x_p and a hidden state h of the previous token: the target's, after its last norm, for i = 0,
else that of draft i - 1, after this layer's norm. It predicts the token at p + 1. It attends to rows of committed tokens up to p - i, and to the
chain's rows after them. Earlier drafts of an accepted chain are correct, so training on the true tokens is exact.
"""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .target import rms, rope


@dataclasses.dataclass
class MTPConfig:
    n_embd: int = 512
    n_layer: int = 9  # of target and layer together: the layer's block number + 1, as files count
    n_ff: int = 512
    n_head: int = 8
    n_kv: int = 2
    head_dim: int = 64
    n_rot: int = 32
    rope_base: float = 100000.0
    eps: float = 1e-6
    drafts: int = 7  # of the chains it is trained on


class MTPLayer(nn.Module):
    """Names are those of the tensors after `blk.N.`, with underscores for dots."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.nextn_enorm = nn.Parameter(torch.ones(c.n_embd))
        self.nextn_hnorm = nn.Parameter(torch.ones(c.n_embd))
        self.nextn_shared_head_norm = nn.Parameter(torch.ones(c.n_embd))
        self.nextn_eh_proj = nn.Linear(2 * c.n_embd, c.n_embd, bias=False)
        self.attn_norm = nn.Parameter(torch.ones(c.n_embd))
        self.post_attention_norm = nn.Parameter(torch.ones(c.n_embd))
        self.attn_q = nn.Linear(c.n_embd, 2 * c.n_head * c.head_dim, bias=False)
        self.attn_k = nn.Linear(c.n_embd, c.n_kv * c.head_dim, bias=False)
        self.attn_v = nn.Linear(c.n_embd, c.n_kv * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=False)
        self.attn_q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.attn_k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.ffn_gate = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_up = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_down = nn.Linear(c.n_ff, c.n_embd, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def row(self, embedded, before, pos, context, chain):
        """One draft at every position: embedded, before [B, T, n_embd] -> h [B, T, n_embd]. context: keys and values of committed rows; chain:
        those of the drafts before, last one last, each [B, n_kv, T, D]; its own are appended."""
        c, (B, T, _) = self.c, embedded.shape
        x = self.nextn_eh_proj(torch.cat([rms(embedded, self.nextn_enorm, c.eps), rms(before, self.nextn_hnorm, c.eps)], -1))
        n = rms(x, self.attn_norm, c.eps)
        q, gate = self.attn_q(n).reshape(B, T, c.n_head, 2 * c.head_dim).chunk(2, -1)
        k, v = (y.reshape(B, T, c.n_kv, c.head_dim) for y in (self.attn_k(n), self.attn_v(n)))
        q = rope(rms(q, self.attn_q_norm, c.eps), pos, c.n_rot, c.rope_base).to(v.dtype).transpose(1, 2)
        k = rope(rms(k, self.attn_k_norm, c.eps), pos, c.n_rot, c.rope_base).to(v.dtype).transpose(1, 2)
        own = k, v.transpose(1, 2)
        if context is None:
            context = own
        else:
            chain.append(own)
        y = _attend(q, context, chain)
        y = y.transpose(1, 2).float() * gate.float().sigmoid()
        x = x + self.attn_output(y.reshape(B, T, -1))
        n = rms(x, self.post_attention_norm, c.eps)
        x = x + self.ffn_down(F.silu(self.ffn_gate(n)) * self.ffn_up(n))
        return rms(x, self.nextn_shared_head_norm, c.eps), context

    def forward(self, embedded, hidden, drafts):
        """embedded [B, T, n_embd] of tokens, hidden [B, T, n_embd] the target's -> for each draft i: h [B, T, n_embd], rows below i mean nothing."""
        pos = torch.arange(embedded.shape[1], device=embedded.device)
        out, context, chain, h = [], None, [], hidden
        for _ in range(drafts):
            h, context = self.row(embedded, _shifted(h), pos, context, chain)
            out.append(h)
        return out


def _shifted(h):
    """Row p holds what row p - 1 held; the first is zero."""
    return F.pad(h[:, :-1], (0, 0, 1, 0))


def _attend(q, context, chain):
    """q [B, H, T, D]; row p sees context rows <= p - len(chain), and of the chain's j-th draft (from 1) row p - len(chain) + j."""
    B, H, T, D = q.shape
    k, v = context
    q = q.reshape(B, k.shape[1], -1, T, D)
    scores = torch.einsum("bghtd,bgsd->bghts", q, k)
    gone = torch.arange(T, device=q.device)[:, None] - len(chain) < torch.arange(T, device=q.device)[None]
    scores = scores.masked_fill(gone, float("-inf"))
    back = [(F.pad(a, (0, 0, n, 0))[:, :, :T], F.pad(b, (0, 0, n, 0))[:, :, :T]) for n, (a, b) in zip(range(len(chain) - 1, -1, -1), chain)]
    if back:
        own = torch.stack([torch.einsum("bghtd,bgtd->bght", q, a) for a, _ in back], -1)
        scores = torch.cat([scores, own], -1)
    share = (scores.float() * D**-0.5).softmax(-1).to(v.dtype)
    y = torch.einsum("bghts,bgsd->bghtd", share[..., :T], v)
    for i, (_, b) in enumerate(back):
        y = y + share[..., T + i, None] * b[:, :, None]
    return y.reshape(B, H, T, D)


def loss_of(layer, table, tokens, hidden, drafts, fade=0.8):
    """Mean over positions: each draft's distance from the next token and from the target's own sharpened choice, draft i weighing fade^i."""
    T = tokens.shape[1]
    out = layer(F.embedding(tokens, table), hidden, drafts)
    with torch.no_grad():
        soft = (F.linear(hidden, table).float() / 0.7).softmax(-1)
    total = weights = 0.0
    for i, h in enumerate(out):
        logq = F.linear(h[:, i : T - 1], table).float().log_softmax(-1)
        hard = -logq.gather(-1, tokens[:, i + 1 :, None])[..., 0]
        each = 0.5 * hard - 0.5 * (soft[:, i : T - 1] * logq).sum(-1)
        total, weights = total + fade**i * each.mean(), weights + fade**i
    return total / weights


@torch.no_grad()
def matched_lengths(layer, table, tokens, hidden, first, drafts):
    """For every pending position n in first .. T - 1 - drafts: how many drafts of a chain equal the sequence, as [B, N]."""
    T = tokens.shape[1]
    rows = layer(F.embedding(tokens, table), hidden, drafts)
    right = []
    for i, h in enumerate(rows):
        drafted = torch.cat([F.linear(part, table).argmax(-1) for part in h[:, i : T - 1].split(128, 1)], 1)
        hit = drafted == tokens[:, i + 1 :]  # of chains that begin at 0, 1, ...
        right.append(hit[:, first : T - drafts])
    return torch.stack(right, -1).int().cumprod(-1).sum(-1).cpu().numpy().astype(np.int64)
