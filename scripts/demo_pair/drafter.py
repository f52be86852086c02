"""The DFlash drafter of the demo pair and the exact simulation of its use.

A block of rows [pending token, MASK, MASK, ...] at positions a, a+1, ... attends to context rows of positions < a
(made from the target's hidden states) and to every row of its own block; row k proposes the token at position a + k.
"""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .target import rms, rope


@dataclasses.dataclass
class DrafterConfig:
    n_embd: int = 512
    n_layer: int = 2
    n_ff: int = 1024
    n_head: int = 8
    n_kv: int = 4
    head_dim: int = 64
    rope_base: float = 100000.0
    block: int = 16
    target_layers: tuple = (1, 4, 6, 7)  # value v is the input of target layer v
    eps: float = 1e-6


class DrafterLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.attn_norm = nn.Parameter(torch.ones(c.n_embd))
        self.ffn_norm = nn.Parameter(torch.ones(c.n_embd))
        self.attn_q = nn.Linear(c.n_embd, c.n_head * c.head_dim, bias=False)
        self.attn_k = nn.Linear(c.n_embd, c.n_kv * c.head_dim, bias=False)
        self.attn_v = nn.Linear(c.n_embd, c.n_kv * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=False)
        self.attn_q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.attn_k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.ffn_gate = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_up = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_down = nn.Linear(c.n_ff, c.n_embd, bias=False)

    def keys(self, x, pos):
        """x [B, T, n_embd] at positions pos [T] -> keys and values, each [B, n_head, T, D]."""
        c, (B, T, _) = self.c, x.shape
        v = self.attn_v(x).reshape(B, T, c.n_kv, c.head_dim)
        k = rope(rms(self.attn_k(x).reshape(B, T, c.n_kv, c.head_dim), self.attn_k_norm, c.eps), pos, c.head_dim, c.rope_base)
        return tuple(t.transpose(1, 2).repeat_interleave(c.n_head // c.n_kv, 1) for t in (k.to(v.dtype), v))

    def forward(self, x, ctx, pos, ctx_pos, mask):
        c, (B, Q, _) = self.c, x.shape
        h = rms(x, self.attn_norm, c.eps)
        q = rope(rms(self.attn_q(h).reshape(B, Q, c.n_head, c.head_dim), self.attn_q_norm, c.eps), pos, c.head_dim, c.rope_base)
        (ck, cv), (bk, bv) = self.keys(ctx, ctx_pos), self.keys(h, pos)
        y = F.scaled_dot_product_attention(q.to(bk.dtype).transpose(1, 2), torch.cat([ck, bk], 2), torch.cat([cv, bv], 2), attn_mask=mask)
        x = x + self.attn_output(y.transpose(1, 2).reshape(B, Q, -1))
        n = rms(x, self.ffn_norm, c.eps)
        return x + self.ffn_down(F.silu(self.ffn_gate(n)) * self.ffn_up(n))


class Drafter(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.fc = nn.Linear(len(c.target_layers) * c.n_embd, c.n_embd, bias=False)
        self.enc_output_norm = nn.Parameter(torch.ones(c.n_embd))
        self.output_norm = nn.Parameter(torch.ones(c.n_embd))
        self.blk = nn.ModuleList(DrafterLayer(c) for _ in range(c.n_layer))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def context(self, features):
        """List of hidden states [B, T, n_embd] -> context rows [B, T, n_embd]."""
        return rms(self.fc(torch.cat(features, -1)), self.enc_output_norm, self.c.eps)

    def forward(self, ctx, block_embd, anchors, widths):
        """ctx [B, T, n_embd]; block_embd [B, A, W, n_embd] for anchors [A]; widths [A] rows in use of each block.

        Returns normalised rows [B, A, W, n_embd] to be multiplied by the target's head.
        """
        B, A, W, E = block_embd.shape
        T, dev = ctx.shape[1], ctx.device
        offset = torch.arange(W, device=dev)
        pos = (anchors[:, None] + offset).reshape(-1)
        owner = torch.arange(A, device=dev).repeat_interleave(W)
        ctx_pos = torch.arange(T, device=dev)
        in_use = (offset[None] < widths[:, None]).reshape(-1)
        see_ctx = ctx_pos[None] < anchors[owner][:, None]
        see_block = (owner[:, None] == owner[None]) & in_use[None]
        # Rows that are not in use would see no block row at anchor 0; they always see themselves.
        see_block |= torch.eye(A * W, device=dev, dtype=torch.bool)
        mask = torch.cat([see_ctx, see_block], 1)
        x = block_embd.reshape(B, A * W, E)
        for layer in self.blk:
            x = layer(x, ctx, pos, ctx_pos, mask)
        return rms(x, self.output_norm, self.c.eps).reshape(B, A, W, E)


def block_tokens(tokens, anchors, width, mask_id):
    """tokens [B, T], anchors [A] -> block inputs [B, A, width]: the pending token, then masks."""
    out = tokens.new_full((tokens.shape[0], anchors.numel(), width), mask_id)
    out[:, :, 0] = tokens[:, anchors]
    return out


@torch.no_grad()
def matched_lengths(target, drafter, tokens, first, width, mask_id, group=32):
    """For every anchor a in first .. T-width: how many drafts of its block equal the sequence, as [B, T-width-first+1]."""
    layers = drafter.c.target_layers
    _, features = target(tokens, features=layers)
    ctx = drafter.context(features)
    out = []
    for anchors in torch.arange(first, tokens.shape[1] - width + 1, device=tokens.device).split(group):
        embd = F.embedding(block_tokens(tokens, anchors, width, mask_id), target.token_embd)
        rows = drafter(ctx, embd, anchors, torch.full_like(anchors, width))
        drafts = target.logits(rows[:, :, 1:]).argmax(-1)
        truth = tokens[:, anchors[:, None] + torch.arange(1, width, device=tokens.device)]
        out.append((drafts == truth).int().cumprod(-1).sum(-1))
    return torch.cat(out, 1).cpu().numpy()


def simulate(matched, width):
    """Walk the speculative loop over matched [B, N]; return steps, mean tokens per step and per-position acceptance.

    The target's text does not depend on the drafts, so walking its finished text gives exactly the steps that the
    loop would have taken. Acceptance of position k is the share of steps whose first k drafts were all accepted.
    """
    steps = tokens = 0
    reach = np.zeros(width)
    for row in matched:
        a = 0
        while a < row.size:
            m = int(row[a])
            reach[: m + 1] += 1
            steps, tokens, a = steps + 1, tokens + m + 1, a + m + 1
    return {
        "width": width,
        "steps": steps,
        "tokens_per_step": round(tokens / max(steps, 1), 3),
        "acceptance": [round(float(x), 4) for x in reach[1:] / max(steps, 1)],
    }
