"""laguna: routed experts behind one full-attention layer to three sliding-window ones, with an output gate on attention.

Per layer, with rms(x; w) = x / sqrt(mean x^2 + eps) * w:
    h = rms(x; attn_norm);  q, k rms-normalised per head, then rotated;  a = attention(q, k, v) * softplus(W_gate h);  x += W_o a
    n = rms(x; ffn_norm);  x += SwiGLU(n) in the leading dense layers, experts(n) + SwiGLU_shared(n) in the others
The gate has one value per head or one per attention output, as its tensor's shape says. Layers may differ in their number of heads. Full
layers stretch positions by yarn where the file says so, sliding ones never. The router adds a bias to the sigmoids it chooses by.
Source of the formulae: llama.cpp, src/models/laguna.cpp. Smaller models of the family have no sliding window.
"""

from dataclasses import dataclass

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .base import KVShape, Rows
from .blocks import attend, product, project, softplus_gated, swiglu_ffn
from .hparams import OF_SLIDING, ends, epsilon, inverse_root, layer_heads, per_layer, positive, size_of_heads, sliding_layers, vocabulary
from .model import ATTENTION, EXPERT, FFN, SHARED
from .moe import SIGMOID, SOFTMAX, Experts
from .qwen3 import Qwen3
from .rope import Rope
from .weights import VECTOR, Spec


@dataclass(frozen=True)
class Hparams:
    """Hyper-parameters as the GGUF keys give them; ``n_head``, ``n_head_kv`` and ``sliding`` per layer; ``window`` 0 for none."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    head_size: int
    eps: float
    rope: Rope
    rope_sliding: Rope
    window: int
    sliding: tuple[bool, ...]
    n_dense: int
    experts: Experts
    n_ff_shared: int
    context_length: int

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str) -> "Hparams":
        n_layer, n_embd = positive(file, f"{arch}.block_count", limit=1024), positive(file, f"{arch}.embedding_length")
        heads, heads_kv = layer_heads(file, arch, n_layer)
        size = size_of_heads(file, arch, n_embd // heads[0], *OF_SLIDING)
        window, sliding = sliding_layers(file, arch, n_layer)
        rope = Rope.from_gguf(file, arch, size, yarn=True, asks=False)
        gating = file.get(f"{arch}.expert_gating_func", int, SIGMOID) or SIGMOID
        if gating not in (SOFTMAX, SIGMOID):
            raise ModelError(f"{file.path}: expert_gating_func is {gating}; {SOFTMAX} (softmax) and {SIGMOID} (sigmoid) are supported")
        experts = Experts.from_gguf(
            file,
            arch,
            n_layer,
            gating=gating,
            normalise=file.get(f"{arch}.expert_weights_norm", bool, False),
            scale=file.get(f"{arch}.expert_weights_scale", float, 0.0),
            biased=True,
        )
        n_dense = file.get(f"{arch}.leading_dense_block_count", int)
        if not 0 <= n_dense <= n_layer:
            raise ModelError(f"{file.path}: leading_dense_block_count is {n_dense}, but the model has {n_layer} layers")
        shared = file.get(f"{arch}.expert_shared_feed_forward_length", int, 0)
        return cls(
            n_layer,
            n_embd,
            per_layer(file, f"{arch}.feed_forward_length", n_layer)[0] if n_dense else 0,
            heads,
            heads_kv,
            size,
            epsilon(file, arch),
            rope,
            rope.swa(file, arch, size) if window else rope,
            window,
            sliding,
            n_dense,
            experts,
            positive(file, f"{arch}.expert_shared_feed_forward_length") if shared else experts.n_ff,
            positive(file, f"{arch}.context_length", limit=1 << 31),
        )


class Laguna(Qwen3):
    """The laguna target: the frame of qwen3 with its own attention and FFN."""

    arch = "laguna"
    hp: Hparams
    biased = ATTENTION
    unscaled = frozenset(("attn_gate", "output", *FFN, *SHARED, *EXPERT))

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.hp = file, Hparams.from_gguf(file, self.arch)
        self.n_embd, self.n_layer, self.context_length = self.hp.n_embd, self.hp.n_layer, self.hp.context_length
        self.window, self.n_vocab = self.hp.window, vocabulary(file)

    @property
    def experts(self) -> Experts | None:
        return self.hp.experts

    # -- what it reads

    def tensors(self) -> list[Spec]:
        hp, n = self.hp, self.n_embd
        out = ends(self.file, n, self.n_vocab)
        for i in range(hp.n_layer):
            b, width, width_kv = f"blk.{i}.", hp.head_size * hp.n_head[i], hp.head_size * hp.n_head_kv[i]
            shapes = {"attn_q": (n, width), "attn_k": (n, width_kv), "attn_v": (n, width_kv), "attn_output": (width, n)}
            shapes["attn_gate"] = (n, width if self._gate_is_wide(i) else hp.n_head[i])
            gate, up, down = self._ffn_names(i)
            n_ff = hp.n_ff if i < hp.n_dense else hp.n_ff_shared
            shapes |= {gate: (n, n_ff), up: (n, n_ff), down: (n_ff, n)}
            vectors = {"attn_norm": n, "ffn_norm": n, "attn_q_norm": hp.head_size, "attn_k_norm": hp.head_size}
            out += [Spec(f"{b}{name}.weight", shape) for name, shape in shapes.items()]
            out += [Spec(f"{b}{name}.weight", (size,), VECTOR) for name, size in vectors.items()]
            if i >= hp.n_dense:
                out += hp.experts.specs(self.file, b, n)
        return out

    def _gate_is_wide(self, i: int) -> bool:
        """One gate value per attention output instead of one per head."""
        gate = self.file.tensors.get(f"blk.{i}.attn_gate.weight")
        return gate is not None and gate.shape[-1] == self.hp.head_size * self.hp.n_head[i]

    def _ffn_names(self, i: int) -> tuple[str, str, str]:
        suffix = "" if i < self.hp.n_dense else "_shexp"
        return f"ffn_gate{suffix}", f"ffn_up{suffix}", f"ffn_down{suffix}"

    def groups(self) -> dict[str, tuple[str, ...]]:
        out = {}
        for i in range(self.n_layer):
            out[f"blk.{i}.mixer"] = tuple(f"blk.{i}.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_gate"))
            out[f"blk.{i}.ffn"] = tuple(f"blk.{i}.{name}.weight" for name in self._ffn_names(i)[:2])
        return out

    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(n, self.hp.head_size, sliding) for n, sliding in zip(self.hp.n_head_kv, self.hp.sliding, strict=True)]

    # -- the graph

    def _attention(self, g: Graph, rows: Rows, h: Tensor, i: int) -> Tensor:
        hp, w, b, size, heads = self.hp, self.weights, f"blk.{i}.", self.hp.head_size, self.hp.n_head[i]
        rope, seen = (hp.rope_sliding, rows.of_sliding) if hp.sliding[i] else (hp.rope, rows)
        q, k, v, gate = project(g, w.group(f"{b}mixer"), h)
        q = rope(g, g.rms_norm(g.heads(q, size, heads), w[f"{b}attn_q_norm.weight"], hp.eps), rows.positions)
        k = rope(g, g.rms_norm(g.heads(k, size, hp.n_head_kv[i]), w[f"{b}attn_k_norm.weight"], hp.eps), rows.positions)
        v = g.heads(v, size, hp.n_head_kv[i])
        out = attend(g, q, k, v, rows.kv[i], seen.kv_rows, seen.mask, seen.span, hp.n_head_kv[i], inverse_root(size))
        return product(g, w.matrix(f"{b}attn_output.weight"), softplus_gated(g, out, gate, size))

    def _ffn(self, g: Graph, n: Tensor, i: int) -> Tensor:
        w, b = self.weights, f"blk.{i}."
        routed = self.hp.experts(g, w, b, n) if i >= self.hp.n_dense else None
        dense = swiglu_ffn(g, w.group(f"{b}ffn"), w.matrix(f"{b}{self._ffn_names(i)[2]}.weight"), n)
        return dense if routed is None else g.add(routed, dense)
