"""gemma4: sliding-window and full layers with different head sizes and RoPE, GELU-gated FFNs, norms before and after every part.

With rms(x; w) = x / sqrt(mean x^2 + eps) * w (no +1), x = E[t] * sqrt(n_embd), and per layer:
    h = rms(x; attn_norm);  q, k rms-normalised per head, then rotated;  v rms-normalised without weight, and k's own projection where
    the layer has no attn_v;  a = x + rms(W_o attention(q, k, v); post_attention_norm), with scores that are not scaled
    dense: f = GEGLU(rms(a; ffn_norm));  routed: f = rms(GEGLU(rms(a; ffn_norm)); post_ffw_norm_1) + rms(experts(rms(a; pre_ffw_norm_2));
    post_ffw_norm_2), the router reading rms(a) / sqrt(n_embd) * ffn_gate_inp.scale
    x = a + rms(f; post_ffw_norm);  per-layer embeddings: x += rms(W_proj(gelu(W_inp_gate x) * ple_l); post_norm);  x *= layer_output_scale
The last `shared_kv_layers` layers own no K/V and read those of an earlier layer of their kind. Logits are capped: c tanh(l / c).
Source of the formulae: llama.cpp, src/models/gemma4.cpp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ggml.graph import Graph
from ...ggml.library import Tensor
from ..base import KVLayer, KVShape
from ..decoder import Decoder, register
from ..hparams import Hparams, inverse_root
from ..layers import HEAD, ROPE_FREQS, Attention, GatedMLP, Layer, LayerContext, specs
from ..moe import Experts
from ..rope import Rope
from ..weights import ROWS, VECTOR, Spec


def kinds(f: Hparams, default: int) -> tuple[tuple[int, Rope], tuple[int, Rope]]:
    """Head size and RoPE of full and of sliding layers; ``default``: head size without the key."""
    size = f.positive("attention.key_length", default, 4096)
    size_swa = f.positive("attention.key_length_swa", size, 4096)
    for name, expected in (("value_length", size), ("value_length_swa", size_swa)):
        if f.get(f"attention.{name}", int, expected) != expected:
            raise f.refuse(f"attention.{name} differs from the key length {expected}, which {f.arch} does not have")
    rope = f.rope(size, yarn=False, windowed=True)
    return (size, rope), (size_swa, f.sliding_rope(rope, size_swa, 10000.0))


@register("gemma4")
def gemma4(f: Hparams) -> Decoder:
    heads, kv_heads = f.heads_by_layer
    window, sliding = f.window()
    full, local = kinds(f, f.n_embd // heads[0])
    n_own = f.n_layer - f.get("attention.shared_kv_layers", int, 0)
    if not 0 < n_own <= f.n_layer or any(sliding[i] != sliding[n_own - 1 - sliding[i]] or n_own < 2 for i in range(n_own, f.n_layer)):
        raise f.refuse(f"attention.shared_kv_layers leaves {n_own} of {f.n_layer} layers, not one of each kind")
    n_per_layer = f.number("embedding_length_per_layer_input", 0, 0, 1 << 20)
    ff = f.per_layer("feed_forward_length")
    experts = f.experts(glu="geglu") if f.get("expert_count", int, 0) > 0 else None
    layers = []
    for i, one in enumerate(sliding):
        owner = i if i < n_own else n_own - (2 if one else 1)  # itself, or the last owning layer of its kind
        has_v = f.shape(f"blk.{i}.attn_v.weight") is not None
        routed = experts if f.shape(f"blk.{i}.ffn_gate_inp.weight") is not None else None
        scaled = f.shape(f"blk.{i}.layer_output_scale.weight") is not None
        size, rope = local if one else full
        mixer = SharedAttention(heads[i], kv_heads[i], size, rope, factors=not one, sliding=one, owner=owner, owns=owner == i, has_v=has_v)
        layers.append(GemmaLayer(mixer, GatedMLP(ff[i], "gelu"), experts=routed, n_per_layer=n_per_layer, scaled=scaled))
    softcap = f.number("final_logit_softcapping", 30.0)  # llama.cpp's default
    return Gemma4(
        f, layers, n_per_layer, window=window, embedding_scale=f.root_embd, softcap=softcap, scales_pictures=False, both_ways="sliding"
    )


@dataclass(frozen=True)
class SharedAttention(Attention):
    """Attention over the K/V of layer ``owner``, possibly an earlier one (``owns`` False). Without ``has_v``, v is k's projection."""

    norm: str = HEAD
    scale: float | None = 1.0
    owner: int = 0
    owns: bool = True
    has_v: bool = True

    @property
    def kv(self) -> KVShape | None:  # type: ignore[override]
        return super().kv if self.owns else None

    @property
    def _absent(self) -> tuple[str, ...]:
        return (() if self.has_v else ("attn_v",)) if self.owns else ("attn_k", "attn_v", "attn_k_norm")

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        absent = {f"{prefix}{name}.weight" for name in self._absent}
        return [spec for spec in super().tensors(f, prefix) if spec.name not in absent]

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        return {"mixer": tuple(name for name in ("attn_q", "attn_k", "attn_v") if name not in self._absent)}

    def unused(self, f: Hparams, prefix: str) -> dict[str, str]:
        names = () if self.owns else self._absent
        return {f"{prefix}{name}.weight": "K/V of a layer that reads those of an earlier one" for name in names}

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        q, *own = c.project("mixer", x)
        return self.attend(c, q, *(own[0], own[-1]) if own else ())

    def cache(self, c: LayerContext) -> KVLayer:
        return c.caches[self.owner]

    def keys_values(self, c: LayerContext, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().keys_values(c, k, v)
        return k, c.g.rms_norm(v, None, c.eps)


@dataclass(frozen=True)
class GemmaLayer(Layer):
    """A layer with optional experts in parallel to its FFN, per-layer embeddings (``extra``) and output scale."""

    post_mixer: str = "post_attention_norm"
    post_ffn: str = "post_ffw_norm"
    experts: Experts | None = None
    n_per_layer: int = 0
    scaled: bool = False

    @property
    def reads_extra(self) -> bool:
        return bool(self.n_per_layer)

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        out, n = super().tensors(f, prefix), f.n_embd
        if self.experts is not None:
            out += [*self.experts.specs(f.file, prefix, n), Spec(f"{prefix}ffn_gate_inp.scale", (n,), VECTOR)]
            out += specs(prefix, {}, dict.fromkeys(("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"), n))
        if self.n_per_layer:
            out += specs(prefix, {"inp_gate": (n, self.n_per_layer), "proj": (self.n_per_layer, n)}, {"post_norm": n})
        return out + (specs(prefix, {}, {"layer_output_scale": 1}) if self.scaled else [])

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g, ffn = c.g, self.ffn
        assert ffn is not None
        a = g.add(self._residual(c, self.mixer(c, c.rms_norm(x, self.mixer_norm)), self.post_mixer), x)
        f = ffn(c, c.rms_norm(a, self.ffn_norm))
        if self.experts is not None:
            f = g.add(c.rms_norm(f, "post_ffw_norm_1"), c.rms_norm(self._routed(c, a, self.experts), "post_ffw_norm_2"))
        x = g.add(self._residual(c, f, self.post_ffn), a)
        if c.extra is not None:
            inner = g.matmul(c["proj"], g.mul(g.gelu(g.matmul(c["inp_gate"], x)), g.pick(c.extra, 2, c.i)))
            x = g.add(x, c.rms_norm(inner, "post_norm"))
        return g.mul(x, c["layer_output_scale"]) if self.scaled else x

    def _routed(self, c: LayerContext, a: Tensor, experts: Experts) -> Tensor:
        g, n = c.g, c.rms_norm(a, "pre_ffw_norm_2")
        seen = g.scale(g.rms_norm(a, None, c.eps), inverse_root(a.ne[0]))
        logits = g.matmul(c["ffn_gate_inp"], g.mul(seen, c.w[f"{c.prefix}ffn_gate_inp.scale"]))
        return experts(g, c.w, c.prefix, n, logits)


class Gemma4(Decoder):
    """gemma4: per-layer embeddings, and layers that share the K/V of earlier ones."""

    scales_borrowed_embedding = True

    def __init__(self, f: Hparams, layers: Sequence[GemmaLayer], n_per_layer: int, **more: Any) -> None:
        super().__init__(f, layers, **more)
        self.n_per_layer = n_per_layer
        self.experts = next((layer.experts for layer in layers if layer.experts), None)

    def mixer(self, i: int) -> SharedAttention:
        mixer = self.layers[i].mixer
        assert isinstance(mixer, SharedAttention)
        return mixer

    def tensors(self) -> list[Spec]:
        out, n_per = [spec for spec in super().tensors() if spec.name != ROPE_FREQS], self.n_per_layer
        full = next((mixer for mixer in map(self.mixer, range(self.n_layer)) if not mixer.sliding), None)
        if full is not None:  # every file has them
            out.append(Spec(ROPE_FREQS, (full.size // 2,), VECTOR))
        if n_per:
            wide = n_per * self.n_layer
            out.append(Spec("per_layer_token_embd.weight", (wide, self.n_vocab), ROWS))
            out.append(Spec("per_layer_model_proj.weight", (self.n_embd, wide)))
            out.append(Spec("per_layer_proj_norm.weight", (n_per,), VECTOR))
        return out

    def last_cut(self) -> int:
        """Layers that own shared K/V stay on the device of their readers."""
        return min((mixer.owner for mixer in map(self.mixer, range(self.n_layer)) if not mixer.owns), default=self.n_layer - 1)

    def extra(self, g: Graph, x: Tensor, tokens: Tensor) -> Tensor | None:
        """Per-layer embeddings, F32 [n_per_layer, T, n_layer]."""
        w, rows, n_per = self.weights, x.ne[1], self.n_per_layer
        if not n_per:
            return None
        looked_up = g.reshape(g.rows(w["per_layer_token_embd.weight"], tokens), n_per, self.n_layer, rows)
        looked_up = g.scale(looked_up, float(np.sqrt(np.float32(n_per))))
        projected = g.scale(g.matmul(w["per_layer_model_proj.weight"], x), inverse_root(self.n_embd))
        projected = g.rms_norm(g.reshape(projected, n_per, self.n_layer, rows), w["per_layer_proj_norm.weight"], self.eps)
        both = g.scale(g.add(projected, looked_up), inverse_root(2))
        return g.cont(g.permute(both, 0, 2, 1, 3))
