"""gemma4: sliding-window and full layers with head sizes and rope of their own, GELU-gated FFNs, norms before and behind every part.

With rms(x; w) = x / sqrt(mean x^2 + eps) * w (no +1), x = E[t] * sqrt(n_embd), and per layer:
    h = rms(x; attn_norm);  q, k rms-normalised per head, then rotated;  v rms-normalised without weight, and k's own projection where
    the layer has no attn_v;  a = x + rms(W_o attention(q, k, v); post_attention_norm), with scores that are not scaled
    dense: f = GEGLU(rms(a; ffn_norm));  routed: f = rms(GEGLU(rms(a; ffn_norm)); post_ffw_norm_1) + rms(experts(rms(a; pre_ffw_norm_2));
    post_ffw_norm_2), the router reading rms(a) / sqrt(n_embd) * ffn_gate_inp.scale
    x = a + rms(f; post_ffw_norm);  per-layer embeddings: x += rms(W_proj(gelu(W_inp_gate x) * ple_l); post_norm);  x *= layer_output_scale
The last `shared_kv_layers` layers own no K/V and read those of an earlier layer of their kind. Logits are capped: c tanh(l / c).
Source of the formulae: llama.cpp, src/models/gemma4.cpp.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .base import KVShape, Rows
from .blocks import attend, geglu_ffn, product, project
from .hparams import ends, epsilon, inverse_root, layer_heads, per_layer, positive, vocabulary, windowed_layers
from .moe import Experts
from .qwen3 import Qwen3
from .rope import Rope
from .weights import ROWS, VECTOR, Matrix, Spec

FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Kind:
    """What full layers and sliding layers differ in."""

    head_size: int
    rope: Rope


def kinds(file: GGUFFile, arch: str, default: int) -> tuple[Kind, Kind]:
    """Full and sliding layers; heads of ``default`` values where the file does not say."""
    size = positive(file, f"{arch}.attention.key_length", default, 4096)
    size_swa = positive(file, f"{arch}.attention.key_length_swa", size, 4096)
    for name, expected in (("value_length", size), ("value_length_swa", size_swa)):
        if file.get(f"{arch}.attention.{name}", int, expected) != expected:
            raise ModelError(f"{file.path}: attention.{name} differs from the key length {expected}, which {arch} does not have")
    rope = Rope.from_gguf(file, arch, size, asks=False)
    return Kind(size, rope), Kind(size_swa, rope.swa(file, arch, size_swa, 10000.0))


@dataclass(frozen=True)
class Hparams:
    """Hyper-parameters; tuples per layer. The first ``n_own_kv`` layers own K/V rows; ``n_per_layer`` 0 without per-layer embeddings."""

    n_layer: int
    n_embd: int
    n_ff: tuple[int, ...]
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    eps: float
    full: Kind
    slide: Kind
    window: int
    sliding: tuple[bool, ...]
    n_own_kv: int
    n_per_layer: int
    experts: Experts | None
    softcap: float
    context_length: int

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str) -> "Hparams":
        n_layer, n_embd = positive(file, f"{arch}.block_count", limit=1024), positive(file, f"{arch}.embedding_length")
        heads, heads_kv = layer_heads(file, arch, n_layer)
        window, sliding = windowed_layers(file, arch, n_layer)
        full, slide = kinds(file, arch, n_embd // heads[0])
        n_own = n_layer - file.get(f"{arch}.attention.shared_kv_layers", int, 0)
        if not 0 < n_own <= n_layer or any(sliding[i] != sliding[n_own - 1 - sliding[i]] or n_own < 2 for i in range(n_own, n_layer)):
            raise ModelError(f"{file.path}: attention.shared_kv_layers leaves {n_own} of {n_layer} layers, not one of each kind")
        # 30 without the key, as llama.cpp has it; every published model says 30
        softcap = file.get(f"{arch}.final_logit_softcapping", float, 30.0)
        n_per = file.get(f"{arch}.embedding_length_per_layer_input", int, 0)
        if softcap < 0 or not 0 <= n_per <= 1 << 20:
            raise ModelError(f"{file.path}: final_logit_softcapping {softcap} or embedding_length_per_layer_input {n_per} is out of range")
        routed = file.get(f"{arch}.expert_count", int, 0) > 0
        return cls(
            n_layer,
            n_embd,
            per_layer(file, f"{arch}.feed_forward_length", n_layer),
            heads,
            heads_kv,
            epsilon(file, arch),
            full,
            slide,
            window,
            sliding,
            n_own,
            n_per,
            Experts.from_gguf(file, arch, n_layer, glu="geglu") if routed else None,
            softcap,
            positive(file, f"{arch}.context_length", limit=1 << 31),
        )

    def kind(self, i: int) -> Kind:
        return self.slide if self.sliding[i] else self.full

    def kv_of(self, i: int) -> int:
        """The layer whose K/V rows layer i reads: its own, or that of the last owning layer of its kind."""
        return i if i < self.n_own_kv else self.n_own_kv - (2 if self.sliding[i] else 1)


class Gemma4(Qwen3):
    """The gemma4 target: the frame of qwen3 with its own layers."""

    arch = "gemma4"
    hp: Hparams
    biased = ()

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.hp = file, Hparams.from_gguf(file, self.arch)
        self.n_embd, self.n_layer, self.context_length = self.hp.n_embd, self.hp.n_layer, self.hp.context_length
        self.window, self.n_vocab = self.hp.window, vocabulary(file)
        self.embedding_scale, self.softcap = float(np.sqrt(np.float32(self.n_embd))), self.hp.softcap

    @property
    def experts(self) -> Experts | None:
        return self.hp.experts

    # -- what it reads

    def tensors(self) -> list[Spec]:
        hp, n = self.hp, self.n_embd
        out = ends(self.file, n, self.n_vocab)
        if not all(hp.sliding):
            out.append(Spec(FACTORS, (hp.full.head_size // 2,), VECTOR))
        if hp.n_per_layer:
            wide = hp.n_per_layer * hp.n_layer
            out.append(Spec("per_layer_token_embd.weight", (wide, self.n_vocab), ROWS))
            out.append(Spec("per_layer_model_proj.weight", (n, wide)))
            out.append(Spec("per_layer_proj_norm.weight", (hp.n_per_layer,), VECTOR))
        for i in range(hp.n_layer):
            out += self._layer_specs(i)
        return out

    def idle(self) -> dict[str, str]:
        names = [f"blk.{i}.{name}.weight" for i in range(self.hp.n_own_kv, self.hp.n_layer) for name in ("attn_k", "attn_v", "attn_k_norm")]
        return super().idle() | dict.fromkeys(names, "K/V of a layer that reads those of an earlier one")

    def _layer_specs(self, i: int) -> list[Spec]:
        hp, n, b, size, n_ff = self.hp, self.n_embd, f"blk.{i}.", self.hp.kind(i).head_size, self.hp.n_ff[i]
        width, width_kv = size * hp.n_head[i], size * hp.n_head_kv[i]
        shapes = {name: (n, width if name == "attn_q" else width_kv) for name in self._mixer(i)}
        shapes |= {"attn_output": (width, n), "ffn_gate": (n, n_ff), "ffn_up": (n, n_ff), "ffn_down": (n_ff, n)}
        vectors = dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), n) | {"attn_q_norm": size}
        out = []
        if i < hp.n_own_kv:
            vectors["attn_k_norm"] = size
        if self._routed(i):
            assert hp.experts is not None
            vectors |= dict.fromkeys(("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"), n)
            out = [*hp.experts.specs(self.file, b, n), Spec(f"{b}ffn_gate_inp.scale", (n,), VECTOR)]
        if hp.n_per_layer:
            shapes |= {"inp_gate": (n, hp.n_per_layer), "proj": (hp.n_per_layer, n)}
            vectors["post_norm"] = n
        if f"{b}layer_output_scale.weight" in self.file.tensors:
            vectors["layer_output_scale"] = 1
        out += [Spec(f"{b}{name}.weight", shape) for name, shape in shapes.items()]
        return out + [Spec(f"{b}{name}.weight", (size,), VECTOR) for name, size in vectors.items()]

    def _mixer(self, i: int) -> tuple[str, ...]:
        """The matrices that read the normalised input: v may be missing (it is k then), k too where another layer's rows are read."""
        if i >= self.hp.n_own_kv:
            return ("attn_q",)
        return ("attn_q", "attn_k", "attn_v") if f"blk.{i}.attn_v.weight" in self.file.tensors else ("attn_q", "attn_k")

    def _routed(self, i: int) -> bool:
        return self.hp.experts is not None and f"blk.{i}.ffn_gate_inp.weight" in self.file.tensors

    def groups(self) -> dict[str, tuple[str, ...]]:
        out = {}
        for i in range(self.n_layer):
            out[f"blk.{i}.mixer"] = tuple(f"blk.{i}.{name}.weight" for name in self._mixer(i))
            out[f"blk.{i}.ffn"] = tuple(f"blk.{i}.{name}.weight" for name in ("ffn_gate", "ffn_up"))
        return out

    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(self.hp.n_head_kv[i], self.hp.kind(i).head_size, self.hp.sliding[i]) for i in range(self.hp.n_own_kv)]

    def caches_before(self, layer: int) -> tuple[int, int]:
        return min(layer, self.hp.n_own_kv), 0

    def last_cut(self) -> int:
        """The layers whose rows later ones read stay with these."""
        return min((self.hp.kv_of(i) for i in range(self.hp.n_own_kv, self.n_layer)), default=self.n_layer - 1)

    # -- the graph

    def forward(self, g: Graph, rows: Rows, capture: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """As in ``Qwen3``; the input of layer 0 is the scaled embedding."""
        hp, captured = self.hp, {}
        x = g.scale(self.embed(g, rows.tokens), self.embedding_scale)
        extra = self._per_layer_inputs(g, x, rows.tokens) if hp.n_per_layer else None
        for i in range(hp.n_layer):
            rows, x, extra = rows.at(i, x, extra)
            captured[i] = x
            x = self._layer(g, rows, x, i)
            if extra is not None:
                inner = g.gelu(g.matmul(self._w(i, "inp_gate"), x))
                inner = g.matmul(self._w(i, "proj"), g.mul(inner, g.plane(extra, i)))
                x = g.add(x, self._norm(g, inner, i, "post_norm"))
            if f"blk.{i}.layer_output_scale.weight" in self.weights:
                x = g.mul(x, self._w(i, "layer_output_scale"))
        captured[hp.n_layer] = x
        return g.rms_norm(x, self.weights["output_norm.weight"], hp.eps), [captured[v] for v in capture]

    def logits(self, g: Graph, hidden: Tensor, tokens: int = 0) -> Tensor:
        """F32 [n_embd, T] -> F32 [n_vocab, T], capped where the file says so."""
        return g.soft_cap(super().logits(g, hidden, tokens), self.softcap)

    def _w(self, i: int, name: str) -> Tensor:
        return self.weights[f"blk.{i}.{name}.weight"]

    def _matrix(self, i: int, name: str) -> Matrix:
        return self.weights.matrix(f"blk.{i}.{name}.weight")

    def _norm(self, g: Graph, x: Tensor, i: int, name: str) -> Tensor:
        return g.rms_norm(x, self._w(i, name), self.hp.eps)

    def _per_layer_inputs(self, g: Graph, x: Tensor, tokens: Tensor) -> Tensor:
        """What each layer adds to its output: F32 [n_per_layer, T, n_layer]."""
        hp, w, rows = self.hp, self.weights, x.ne[1]
        looked_up = g.shaped(g.rows(w["per_layer_token_embd.weight"], tokens), hp.n_per_layer, hp.n_layer, rows)
        looked_up = g.scale(looked_up, float(np.sqrt(np.float32(hp.n_per_layer))))
        projected = g.scale(g.matmul(w["per_layer_model_proj.weight"], x), inverse_root(self.n_embd))
        projected = g.rms_norm(g.shaped(projected, hp.n_per_layer, hp.n_layer, rows), w["per_layer_proj_norm.weight"], hp.eps)
        both = g.scale(g.add(projected, looked_up), inverse_root(2))
        return g.cont(g.permute(both, 0, 2, 1, 3))

    def _layer(self, g: Graph, rows: Rows, x: Tensor, i: int) -> Tensor:
        a = self._attention(g, rows, self._norm(g, x, i, "attn_norm"), i)
        a = g.add(self._norm(g, a, i, "post_attention_norm"), x)
        f = geglu_ffn(g, self.weights.group(f"blk.{i}.ffn"), self._matrix(i, "ffn_down"), self._norm(g, a, i, "ffn_norm"))
        if self._routed(i):
            f = g.add(self._norm(g, f, i, "post_ffw_norm_1"), self._norm(g, self._experts(g, a, i), i, "post_ffw_norm_2"))
        return g.add(self._norm(g, f, i, "post_ffw_norm"), a)

    def _experts(self, g: Graph, a: Tensor, i: int) -> Tensor:
        n = self._norm(g, a, i, "pre_ffw_norm_2")
        seen = g.scale(g.norm(a, self.hp.eps), inverse_root(self.n_embd))
        logits = g.matmul(self._w(i, "ffn_gate_inp"), g.mul(seen, self.weights[f"blk.{i}.ffn_gate_inp.scale"]))
        assert self.hp.experts is not None
        return self.hp.experts(g, self.weights, f"blk.{i}.", n, logits)

    def _attention(self, g: Graph, rows: Rows, h: Tensor, i: int) -> Tensor:
        hp, kind, kv_heads = self.hp, self.hp.kind(i), self.hp.n_head_kv[i]
        seen = rows.of_sliding if hp.sliding[i] else rows
        factors = None if hp.sliding[i] else self.weights[FACTORS]
        q, *own = project(g, self.weights.group(f"blk.{i}.mixer"), h)
        q = kind.rope(g, self._norm(g, g.heads(q, kind.head_size, hp.n_head[i]), i, "attn_q_norm"), rows.positions, factors)
        k = v = None
        if own:
            k = kind.rope(g, self._norm(g, g.heads(own[0], kind.head_size, kv_heads), i, "attn_k_norm"), rows.positions, factors)
            v = g.norm(g.heads(own[-1], kind.head_size, kv_heads), hp.eps)
        out = attend(g, q, k, v, rows.kv[hp.kv_of(i)], seen.kv_rows, seen.mask, seen.span, kv_heads, 1.0)
        return product(g, self._matrix(i, "attn_output"), out)
