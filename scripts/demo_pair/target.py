"""The demo target: a small qwen35 text model (gated delta net, every fourth layer full attention) in plain PyTorch.

Weights are kept in the layout of the GGUF architecture "qwen35": norm weights carry no +1 offset, value heads are
tiled over key heads (value head h reads key head h % H_k), so export copies tensors without reordering.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

from pyggml_spec.train.recurrent import delta_rule


@dataclasses.dataclass
class TargetConfig:
    vocab: int = 4096
    n_embd: int = 512
    n_layer: int = 8
    n_ff: int = 1280
    n_head: int = 8
    n_kv: int = 2
    head_dim: int = 64
    n_rot: int = 32
    rope_base: float = 100000.0
    k_heads: int = 4
    v_heads: int = 8
    state: int = 64
    conv: int = 4
    interval: int = 4
    eps: float = 1e-6
    context: int = 2048


def rms(x, weight, eps):
    """x [..., n], weight [n] -> x normalised by its root mean square, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x, pos, n_rot, base):
    """Rotate the first n_rot dims of x [B, T, H, D] by positions pos [T] (pairs i and i + n_rot/2)."""
    half = n_rot // 2
    inv = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = pos.float()[:, None] * inv
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    a, b, rest = x[..., :half].float(), x[..., half:n_rot].float(), x[..., n_rot:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def delta_step(q, k, v, g, beta, state):
    """One token of the gated delta rule: q, k, v [B, 1, H, S], g, beta [B, 1, H], state [B, H, S, S]."""
    q, k, v = (x[:, 0, :, None] for x in (q, k, v))
    state = state * g[:, 0, :, None, None].exp()
    new = (v - k @ state) * beta[:, 0, :, None, None]
    state = state + k.transpose(-1, -2) @ new
    return (q @ state)[:, None, :, 0] / math.sqrt(q.shape[-1]), state


class DeltaMixer(nn.Module):
    """Gated delta net layer; cache is (last conv inputs [B, conv-1, C], state [B, H_v, S, S])."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        key, value = c.k_heads * c.state, c.v_heads * c.state
        self.attn_qkv = nn.Linear(c.n_embd, 2 * key + value, bias=False)
        self.attn_gate = nn.Linear(c.n_embd, value, bias=False)
        self.ssm_beta = nn.Linear(c.n_embd, c.v_heads, bias=False)
        self.ssm_alpha = nn.Linear(c.n_embd, c.v_heads, bias=False)
        self.ssm_out = nn.Linear(value, c.n_embd, bias=False)
        self.ssm_conv1d = nn.Parameter(torch.randn(2 * key + value, c.conv) * 0.3)
        self.a_log = nn.Parameter(torch.empty(c.v_heads).uniform_(1, 16).log())
        dt = torch.exp(torch.rand(c.v_heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.ssm_dt = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.ssm_norm = nn.Parameter(torch.ones(c.state))

    def forward(self, h, pos, start, cache=None):
        c, (B, T, _) = self.c, h.shape
        mixed, z = self.attn_qkv(h), self.attn_gate(h)
        beta = self.ssm_beta(h).float().sigmoid()
        g = -self.a_log.exp() * F.softplus(self.ssm_alpha(h).float() + self.ssm_dt)
        past = mixed.new_zeros(B, c.conv - 1, mixed.shape[-1]) if cache is None else cache[0].to(mixed.dtype)
        wide = torch.cat([past, mixed], 1)
        mixed = sum(wide[:, j : j + T].float() * self.ssm_conv1d[:, j] for j in range(c.conv))
        key, repeat = c.k_heads * c.state, c.v_heads // c.k_heads
        q, k, v = F.silu(mixed).split([key, key, c.v_heads * c.state], -1)
        q, k = (x.reshape(B, T, c.k_heads, c.state) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + c.eps) for x in (q, k))
        q, k = (x.repeat(1, 1, repeat, 1) for x in (q, k))
        v = v.reshape(B, T, c.v_heads, c.state)
        with torch.autocast(h.device.type, enabled=False):
            if cache is not None and T == 1:
                o, state = delta_step(q, k, v, g, beta, cache[1])
            else:
                o, state = delta_rule(q, k, v, g, beta, None if cache is None else cache[1])
        y = rms(o, self.ssm_norm, c.eps) * F.silu(z.float()).reshape(B, T, c.v_heads, c.state)
        return self.ssm_out(y.reshape(B, T, -1)), (wide[:, T:], state)


class Attention(nn.Module):
    """Full attention with output gate; cache is (keys, values) [B, L, n_kv, D] buffers filled from position start."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.attn_q = nn.Linear(c.n_embd, 2 * c.n_head * c.head_dim, bias=False)
        self.attn_k = nn.Linear(c.n_embd, c.n_kv * c.head_dim, bias=False)
        self.attn_v = nn.Linear(c.n_embd, c.n_kv * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=False)
        self.attn_q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.attn_k_norm = nn.Parameter(torch.ones(c.head_dim))

    def forward(self, h, pos, start, cache=None):
        c, (B, T, _) = self.c, h.shape
        q, gate = self.attn_q(h).reshape(B, T, c.n_head, 2 * c.head_dim).chunk(2, -1)
        k = self.attn_k(h).reshape(B, T, c.n_kv, c.head_dim)
        v = self.attn_v(h).reshape(B, T, c.n_kv, c.head_dim)
        q = rope(rms(q, self.attn_q_norm, c.eps), pos, c.n_rot, c.rope_base).to(v.dtype)
        k = rope(rms(k, self.attn_k_norm, c.eps), pos, c.n_rot, c.rope_base).to(v.dtype)
        if cache is not None:
            cache[0][:, start : start + T], cache[1][:, start : start + T] = k, v
            if T == 1:
                k, v = cache[0][:, : start + 1].to(v.dtype), cache[1][:, : start + 1].to(v.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if T == 1:  # query heads of one key head become rows: no copy of the cache is made
            y = F.scaled_dot_product_attention(q.reshape(B, c.n_kv, -1, c.head_dim), k, v).reshape(B, c.n_head, 1, c.head_dim)
        else:
            k, v = (x.repeat_interleave(c.n_head // c.n_kv, 1) for x in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).float() * gate.float().sigmoid()
        return self.attn_output(y.reshape(B, T, -1)), cache


class Block(nn.Module):
    def __init__(self, c, full):
        super().__init__()
        self.eps = c.eps
        self.attn_norm = nn.Parameter(torch.ones(c.n_embd))
        self.post_attention_norm = nn.Parameter(torch.ones(c.n_embd))
        self.mixer = Attention(c) if full else DeltaMixer(c)
        self.ffn_gate = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_up = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_down = nn.Linear(c.n_ff, c.n_embd, bias=False)

    def forward(self, x, pos, start, cache=None):
        y, cache = self.mixer(rms(x, self.attn_norm, self.eps), pos, start, cache)
        x = x + y
        n = rms(x, self.post_attention_norm, self.eps)
        return x + self.ffn_down(F.silu(self.ffn_gate(n)) * self.ffn_up(n)), cache


class Target(nn.Module):
    """tokens [B, T] -> hidden [B, T, n_embd] after the last norm; logits are hidden @ token_embd^T."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.token_embd = nn.Parameter(torch.randn(c.vocab, c.n_embd) * 0.02)
        self.blk = nn.ModuleList(Block(c, (i + 1) % c.interval == 0) for i in range(c.n_layer))
        self.output_norm = nn.Parameter(torch.ones(c.n_embd))
        for name, p in self.named_parameters():
            if p.dim() == 2 and "token_embd" not in name and "conv1d" not in name:
                std = 0.02 / math.sqrt(2 * c.n_layer) if name.split(".")[-2] in ("ssm_out", "attn_output", "ffn_down") else 0.02
                nn.init.normal_(p, std=std)

    def forward(self, tokens, start=0, caches=None, features=()):
        """Return (hidden, list of layer inputs for the layers named in features); caches are updated in place."""
        x = F.embedding(tokens, self.token_embd)
        pos = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        taken = []
        for i, block in enumerate(self.blk):
            if i in features:
                taken.append(x)
            x, new = block(x, pos, start, None if caches is None else caches[i])
            if caches is not None:
                caches[i] = new
        return rms(x, self.output_norm, self.c.eps), taken

    def logits(self, hidden):
        """hidden [..., n_embd] -> logits [..., vocab]."""
        return F.linear(hidden, self.token_embd)

    def new_caches(self, batch, length, dtype):
        """Empty per-layer caches for `batch` sequences of at most `length` tokens."""
        c, dev, out = self.c, self.token_embd.device, []
        for block in self.blk:
            if isinstance(block.mixer, Attention):
                out.append(tuple(torch.zeros(batch, length, c.n_kv, c.head_dim, device=dev, dtype=dtype) for _ in range(2)))
            else:
                out.append(
                    (
                        torch.zeros(batch, c.conv - 1, block.mixer.attn_qkv.out_features, device=dev, dtype=dtype),
                        torch.zeros(batch, c.v_heads, c.state, c.state, device=dev),
                    )
                )
        return out

    @torch.no_grad()
    def generate(self, prompts, total, temperature, generator):
        """Continue prompts [B, P] to [B, total]; temperature [B] per row, 0 meaning the most likely token."""
        B, P = prompts.shape
        dtype = torch.bfloat16 if prompts.device.type == "cuda" else torch.float32
        caches, tokens = self.new_caches(B, total, dtype), torch.empty(B, total, dtype=torch.long, device=prompts.device)
        tokens[:, :P] = prompts
        hot = temperature[:, None] > 0
        scale = torch.where(hot, 1 / temperature[:, None].clamp_min(1e-3), 1.0)
        hidden, _ = self(prompts, 0, caches)
        for p in range(P, total):
            logits = self.logits(hidden[:, -1]).float() * scale
            noise = -torch.empty_like(logits).exponential_(generator=generator).log()
            tokens[:, p] = (logits + torch.where(hot, noise, 0.0)).argmax(-1)
            if p + 1 < total:
                hidden, _ = self(tokens[:, p : p + 1], p, caches)
        return tokens
