"""Drafters of Laguna targets against the formulae in double precision: llama.cpp drafts for no Laguna target."""

import numpy as np
import pytest
from engine.helpers import reference as plain
from engine.helpers import run
from random_gguf.archs import write_laguna, write_qwen3
from random_gguf.model import Shape, write_dflash

import pyggml_spec as ps
from pyggml_spec.gguf_io import GGUFFile

pytestmark = pytest.mark.slow

PROMPT = np.random.default_rng(8).integers(0, 256, 128).tolist()
LIKE_PUBLISHED = {"feature_norms": True, "gate": "head", "causal": True}


def matrices(path) -> dict[str, np.ndarray]:
    with GGUFFile(path) as file:
        return {
            name: np.frombuffer(bytes(file.read(name)), np.float32).reshape(info.shape[::-1]).astype(float)
            for name, info in file.tensors.items()
        }


def rms(x, weight=1.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rotated(x, positions, base):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


class Drafter:
    """One block, from the hidden states of the target's layers F32 [layers, n, n_embd]."""

    def __init__(self, session, target, draft):
        self.hp, self.w, self.t = session.drafter.hp, matrices(draft), matrices(target)

    def keys_values(self, i, x, positions):
        hp, w = self.hp, self.w
        k, v = ((x @ w[f"blk.{i}.attn_{name}.weight"].T).reshape(len(x), hp.n_head_kv, hp.head_size) for name in "kv")
        k = rotated(rms(k, w[f"blk.{i}.attn_k_norm.weight"]), positions, hp.rope.base)
        return k.astype(np.float16).astype(float), v.astype(np.float16).astype(float)

    def hidden(self, features, last_token):
        hp, w, n = self.hp, self.w, features.shape[1]
        f = np.moveaxis(features.astype(float), 0, 1)
        if "enc.aux_norm.weight" in w:
            f = rms(f, w["enc.aux_norm.weight"])
        c = rms(f.reshape(n, -1) @ w["fc.weight"].T, w["enc.output_norm.weight"])
        x = self.t["token_embd.weight"][[last_token] + [hp.mask_token] * (hp.block_size - 1)]
        past, here = np.arange(n), n + np.arange(hp.block_size)
        for i in range(hp.n_layer):
            norm = w[f"blk.{i}.attn_norm.weight"]
            h = rms(x, norm)
            own, old = self.keys_values(i, h, here), self.keys_values(i, rms(c, norm) if "enc.aux_norm.weight" in w else c, past)
            k, v = (np.repeat(np.concatenate(both), hp.n_head // hp.n_head_kv, 1) for both in zip(old, own, strict=True))
            q = (h @ w[f"blk.{i}.attn_q.weight"].T).reshape(len(x), hp.n_head, hp.head_size)
            q = rotated(rms(q, w[f"blk.{i}.attn_q_norm.weight"]), here, hp.rope.base)
            scores = np.einsum("qhd,khd->hqk", q, k) / hp.head_size**0.5
            ahead = here[:, None] - np.concatenate([past, here])[None, :]
            unseen = (ahead < 0) & hp.causal | (ahead >= (hp.window[i] or np.inf))
            scores[:, unseen] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)
            if f"blk.{i}.attn_gate.weight" in w:
                gate = np.log1p(np.exp(h @ w[f"blk.{i}.attn_gate.weight"].T))
                out = out * gate.reshape(len(x), hp.n_head, -1)
            x = x + out.reshape(len(x), -1) @ w[f"blk.{i}.attn_output.weight"].T
            m = rms(x, w[f"blk.{i}.ffn_norm.weight"])
            gate, up = m @ w[f"blk.{i}.ffn_gate.weight"].T, m @ w[f"blk.{i}.ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{i}.ffn_down.weight"].T
        return rms(x, w["output_norm.weight"])


VARIANTS = {
    "an ordinary one": {},
    "feature norms": {"feature_norms": True},
    "gate per head": {"gate": "head"},
    "gate per output": {"gate": "output"},
    "as published": LIKE_PUBLISHED,
}


@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("more", VARIANTS.values(), ids=VARIANTS)
def test_a_block_is_what_the_formulae_give(tmp_path, more, window):
    """The first one, whose drafts equal llama.cpp's for other targets, shows that the formulae here are right. 4 is the last layer's output."""
    shape = Shape(n_layer=4, window=window, target_layers=(1, 2, 4))
    target, draft = write_laguna(tmp_path / "t.gguf", shape), write_dflash(tmp_path / "d.gguf", shape, **more)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
        engine = session.engine
        _, features = engine.capture(PROMPT, shape.target_layers)
        engine.reset()
        last_token = engine.prefill(PROMPT)
        drafted = engine.fused_step().tokens
        sums = engine.graphs.get(engine.graphs.key("fused", 16, 256)).host["draft_sum"].ravel().copy()
        expected = Drafter(session, target, draft)
        hidden = expected.hidden(features, last_token)
    assert np.abs(sums - hidden.sum(1)).max() < 0.1  # of 256 values; attention sums V in F16
    for extra in [name for name in expected.w if "aux_norm" in name or "attn_gate" in name]:
        without = expected.w.pop(extra)
        assert np.abs(sums - expected.hidden(features, last_token).sum(1)).max() > 0.3, extra
        expected.w[extra] = without
    logits = hidden[1:] @ expected.t["output.weight"].T
    top = np.sort(logits, 1)
    clear = top[:, -1] - top[:, -2] > 1e-2
    assert clear.sum() > 8 and (logits.argmax(1) == drafted[1:])[clear].all()


@pytest.mark.parametrize("write", [write_laguna, write_qwen3])
def test_speculative_text_and_requests_at_once(tmp_path, write):
    shape = Shape(n_layer=4, window=12)
    target, draft = write(tmp_path / "t.gguf", shape, "Q8_0"), write_dflash(tmp_path / "d.gguf", shape, "Q8_0", **LIKE_PUBLISHED)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, draft_width=8) as session:
        assert run(session.engine, PROMPT, 40, width=8)[0] == plain(session.engine, PROMPT, 40, width=8)
        alone = [session.generate(PROMPT[i : i + 30], 12, ignore_end=True)[1] for i in range(3)]
        with session.concurrent(slots=3) as server:
            handles = [server.submit(PROMPT[i : i + 30], max_tokens=12, ignore_end=True) for i in range(3)]
            together = [handle.result()[1] for handle in handles]
    assert [s.matched for s in together] == [s.matched for s in alone]
