"""Forward passes of published drafters in numpy, from their makers' tensors and config.json.

After z-lab/dflash (dflash/model.py), hao-ai-lab/JetSpec, vllm-project/speculators, deepseek-ai/DeepSpec and vLLM's laguna_dflash.py. Float64,
but for K and V, which are stored as F16 here.
"""

import math

import numpy as np


def rms(x, weight=1.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rotated(x, positions, frequencies):
    """x [rows, heads, size]: the halves of a head are its pairs."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


def stored(x):
    return x.astype(np.float16).astype(float)


def softmax(scores):
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


class Reference:
    """What all have in common. ``embedding``, ``head``: the target's."""

    def __init__(self, config, tensors, embedding, head):
        self.c = c = {
            **config,
            **config.get("transformer_layer_config", {}),
            **config.get("dflash_config", {}),
            **config.get("eagle_config", {}),
        }
        self.w = w = {name.removesuffix(".weight"): values.astype(float) for name, values in tensors.items()}
        self.embedding, self.head = w.get("embed_tokens", embedding), w.get("lm_head", head)
        self.ids = np.arange(len(self.head)) + tensors.get("d2t", 0)
        self.gemma = "Gemma4DSparkModel" in config["architectures"]
        size = self.size = c["global_head_dim"] if self.gemma else c["head_dim"]
        self.kv = c["num_global_key_value_heads"] if self.gemma else c["num_key_value_heads"]
        rope = c.get("rope_parameters") or c
        rope = rope.get("full_attention", rope)
        self.frequencies = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
        if self.gemma:
            self.frequencies[int(rope["partial_rotary_factor"] * size / 2) :] = 0

    def heads(self, x, name, norm=True):
        x = x.reshape(len(x), -1, self.size)
        return rms(x, self.w[name]) if norm and name in self.w else x

    def attention(self, q, k, v, unseen):
        """q [T, heads, size] over k, v [rows, kv heads, size]; ``unseen`` [T, rows]."""
        k, v = (np.repeat(x, q.shape[1] // self.kv, 1) for x in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / (1.0 if self.gemma else self.size**0.5)
        scores[:, unseen] = -np.inf
        return np.einsum("hqk,khd->qhd", softmax(scores), v)

    def ffn(self, layer, x):
        act = gelu if self.gemma else silu
        gate, up = (x @ self.w[f"{layer}mlp.{name}_proj"].T for name in ("gate", "up"))
        return (act(gate) * up) @ self.w[f"{layer}mlp.down_proj"].T


class Block(Reference):
    """DFlash and what is built on it."""

    def qkv(self, layer, x):
        if f"{layer}self_attn.qkv_proj" in self.w:
            wide, narrow = self.c["num_attention_heads"] * self.size, self.kv * self.size
            return np.split(x @ self.w[f"{layer}self_attn.qkv_proj"].T, [wide, wide + narrow], -1)
        q, k = (x @ self.w[f"{layer}self_attn.{name}_proj"].T for name in "qk")
        return q, k, k if self.gemma else x @ self.w[f"{layer}self_attn.v_proj"].T

    def keys_values(self, layer, x, positions):
        _, k, v = self.qkv(layer, x)
        v = self.heads(v, "")
        k = rotated(self.heads(k, f"{layer}self_attn.k_norm"), positions, self.frequencies)
        return stored(k), stored(rms(v) if self.gemma else v)

    def unseen(self, i, ahead):
        """``ahead`` [T, rows]: how far a query is ahead of a row."""
        kind = (self.c.get("layer_types") or ["full_attention"] * (i + 1))[i]
        said = [self.c[key] for key in ("is_causal", "causal", "causal_head") if self.c.get(key) is not None]
        sliding = kind == "sliding_attention"
        causal = said[0] if said else sliding and not self.c.get("sliding_window_non_causal")
        return (ahead < 0) & causal | (ahead >= self.c["sliding_window"] if sliding else np.zeros_like(ahead, bool))

    def convolved(self, name, side, x, coefficients):
        """x [T, n]; ``coefficients`` [T, 2, taps, groups]; nothing left of the block."""
        if f"{name}.base_kernel" not in self.w:
            return x
        base, out = self.w[f"{name}.base_kernel"][side], 0.0
        for tap in range(len(base)):
            before = np.concatenate([np.zeros((tap, x.shape[1])), x[: len(x) - tap]])
            out = out + (base[tap] + np.repeat(coefficients[:, side, tap], self.c["conv_group_size"], -1)) * before
        return out

    def coefficients(self, name, x):
        if f"{name}.kernel_projection" in self.w:
            return (x @ self.w[f"{name}.kernel_projection"].T).reshape(len(x), 2, self.c["conv_kernel_size"], -1)
        return None

    def hidden(self, features, last_token, rows):
        """[rows, n] of a block of ``rows``, from the target's hidden states [layers, n, n_embd] of all tokens before the last one."""
        n, w = features.shape[1], self.w
        f = np.moveaxis(features.astype(float), 0, 1)
        laguna = "aux_hidden_norms.0" in w
        if laguna:
            f = np.stack([rms(f[:, k], w[f"aux_hidden_norms.{k}"]) for k in range(f.shape[1])], 1)
        c = rms(f.reshape(n, -1) @ w["fc"].T, w["hidden_norm"])
        scale = self.embedding.shape[1] ** 0.5 if self.gemma else 1.0
        x = scale * self.embedding[[last_token] + [self.c["mask_token_id"]] * (rows - 1)]
        past, here = np.arange(n), n + np.arange(rows)
        ahead = here[:, None] - np.concatenate([past, here])[None, :]
        for i in range(self.c["num_hidden_layers"]):
            layer = f"layers.{i}."
            h = rms(x, w[f"{layer}input_layernorm"])
            kernel = self.coefficients(f"{layer}attention_conv", h)
            h = self.convolved(f"{layer}attention_conv", 0, h, kernel)
            old = self.keys_values(layer, rms(c, w[f"{layer}input_layernorm"]) if laguna else c, past)
            k, v = (np.concatenate(both) for both in zip(old, self.keys_values(layer, h, here), strict=True))
            q = rotated(self.heads(self.qkv(layer, h)[0], f"{layer}self_attn.q_norm"), here, self.frequencies)
            out = self.attention(q, k, v, self.unseen(i, ahead))
            if f"{layer}self_attn.g_proj" in w:
                out = out * np.log1p(np.exp(h @ w[f"{layer}self_attn.g_proj"].T)).reshape(rows, q.shape[1], -1)
            out = out.reshape(rows, -1) @ w[f"{layer}self_attn.o_proj"].T
            out = self.convolved(f"{layer}attention_conv", 1, out, kernel)
            if self.gemma:
                x = x + rms(out, w[f"{layer}post_attention_layernorm"])
                x = x + rms(self.ffn(layer, rms(x, w[f"{layer}pre_feedforward_layernorm"])), w[f"{layer}post_feedforward_layernorm"])
                x = x * w[f"{layer}layer_scalar"]
                continue
            x = x + out
            m = rms(x, w[f"{layer}post_attention_layernorm"])
            kernel = self.coefficients(f"{layer}mlp_conv", m)
            m = self.ffn(layer, self.convolved(f"{layer}mlp_conv", 0, m, kernel))
            x = x + self.convolved(f"{layer}mlp_conv", 1, m, kernel)
        return rms(x, w["norm"])

    def logits(self, hidden):
        out = hidden @ self.head.T * (self.c.get("output_multiplier") or 1.0)
        cap = self.c.get("final_logit_softcapping")
        return np.tanh(out / cap) * cap if cap else out

    @property
    def from_anchor(self):
        return self.c.get("sample_from_anchor", "markov_rank" in self.c and "transformer_layer_config" not in self.c)

    @property
    def most_drafts(self):
        return self.c["block_size"] - (not self.from_anchor)

    def drafts(self, features, tokens, drafts):
        """(ids, logits [drafts, head], how far each choice was from another one) of a block that makes so many ``drafts`` after ``tokens``, of which the
        last one has no hidden states yet."""
        rows, token = drafts + (not self.from_anchor), tokens[-1]
        hidden = self.hidden(features, token, rows)[rows - drafts :]
        logits, ids, margins = self.logits(hidden), [], []
        for i in range(drafts):
            scores, candidates = logits[i], np.arange(len(self.head))
            if "markov_head.markov_w1" in self.w:
                scores = scores + self.w["markov_head.markov_w2"] @ self.w["markov_head.markov_w1"][token]
            if "candidate_selector.hidden_projection" in self.w:
                candidates = np.argsort(-scores)[: self.c["selector_top_k"]]
                pair = self.w["candidate_selector.predecessor_codebook"][token] * (
                    self.w["candidate_selector.hidden_projection"] @ hidden[i]
                )
                scores = scores[candidates] + self.w["candidate_selector.successor_codebook"][candidates] @ pair
            best = np.argsort(scores)[::-1][:2]
            token = int(self.ids[candidates[best[0]]])
            ids.append(token)
            margins.append(scores[best[0]] - scores[best[1]])
        return ids, logits, margins


class Eagle(Reference):
    """EAGLE-3: the row of the token x_p is the pair of it and of what the target's layers made of x_{p-1}. P-EAGLE: all drafts' rows at once, of
    which those after the first are pairs of the mask's token and hidden state."""

    most_drafts = 5

    def __init__(self, *args):
        super().__init__(*args)
        self.first = "midlayer." if "midlayer.hidden_norm" in self.w else "layers.0."
        self.parallel = "mask_hidden" in self.w
        self.keys, self.values = {}, {}

    def fused(self, f):
        """Of [rows, 3, n_embd]."""
        if self.c.get("fc_norm"):
            f = np.stack([rms(f[:, k], self.w[f"fc_norm.{k}"]) for k in range(3)], 1)
        f = f.reshape(len(f), -1)
        return (rms(f, self.w["input_norm"]) if self.c.get("norm_before_fc") else f) @ self.w["fc"].T

    def forward(self, tokens, g, at):
        """[rows, n] of more rows, at the positions ``at``; they see those before and themselves."""
        w, x = self.w, g
        for i in range(self.c["num_hidden_layers"]):
            layer = f"layers.{i}." if i else self.first
            h = rms(x, w[f"{layer}hidden_norm"]) if not i else rms(x, w[f"{layer}input_layernorm"])
            x = h if not i and self.c.get("norm_before_residual") else x
            if not i:
                h = np.concatenate([rms(self.embedding[tokens], w[f"{layer}input_layernorm"]), h], -1)
            q, k, v = (h @ w[f"{layer}self_attn.{name}_proj"].T for name in "qkv")
            k = stored(rotated(self.heads(k, f"{layer}self_attn.k_norm"), at, self.frequencies))
            k = self.keys[i] = np.concatenate([self.keys[i], k] if i in self.keys else [k])
            v = stored(self.heads(v, ""))
            v = self.values[i] = np.concatenate([self.values[i], v] if i in self.values else [v])
            q = rotated(self.heads(q, f"{layer}self_attn.q_norm"), at, self.frequencies)
            out = self.attention(q, k, v, np.arange(len(k))[None, :] > at[:, None])
            x = x + out.reshape(len(at), -1) @ w[f"{layer}self_attn.o_proj"].T
            x = x + self.ffn(layer, rms(x, w[f"{layer}post_attention_layernorm"]))
        return x

    def drafts(self, features, tokens, drafts):
        """As of ``Block``."""
        self.keys, self.values = {}, {}
        g, n = self.fused(np.moveaxis(features.astype(float), 0, 1)), len(tokens) - 2
        self.forward(np.array(tokens[1:-1]), g[:-1], np.arange(n))
        ids, logits, margins, token, carry = [], [], [], np.array(tokens[-1:]), g[-1:]
        if self.parallel:
            masks = np.repeat(self.fused(self.w["mask_hidden"].reshape(1, 3, -1)), drafts - 1, 0)
            token = np.concatenate([token, np.full(drafts - 1, self.c.get("mask_token_id", self.c.get("ptd_token_id")))])
            carry = np.concatenate([carry, masks])
        while len(ids) < drafts:
            x = self.forward(token, carry, n + len(ids) + np.arange(len(token)))
            head = rms(x, self.w["norm"])
            carry = head if self.c.get("norm_output") and "transformer_layer_config" in self.c else x
            for scores in head @ self.head.T:
                best = np.argsort(scores)[::-1][:2]
                ids.append(int(self.ids[best[0]]))
                logits.append(scores)
                margins.append(scores[best[0]] - scores[best[1]])
            token = np.array(ids[-1:])
        return ids, np.stack(logits), margins
