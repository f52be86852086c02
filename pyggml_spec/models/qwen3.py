"""qwen3: the dense transformer of Qwen3, for which most DFlash drafters were published first.

Per layer, with rms(x; w) = x / sqrt(mean x^2 + eps) * w:
    h = rms(x; attn_norm);  q, k rms-normalised per head, then rotated (NEOX pairs);  x += W_o attention(q, k, v)
    n = rms(x; ffn_norm);  x += W_down(silu(W_gate n) * W_up n)
Source of the formulae: llama.cpp, src/models/qwen3.cpp. ``llama`` differs in two places only and builds on this class.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .base import DeltaShape, KVShape, Rows
from .blocks import attend, head_product, product, project, swiglu_ffn
from .hparams import ends, epsilon, inverse_root, kv_heads, positive, size_of_heads, vocabulary
from .model import ATTENTION, Model
from .rope import Rope
from .weights import VECTOR, Spec, Weights


@dataclass(frozen=True)
class Hparams:
    """Hyper-parameters as the GGUF keys give them; sizes in values. ``n_ff`` is 0 where experts take the FFN's place."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_size: int
    eps: float
    rope: Rope
    context_length: int

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str, neox: bool, routed: bool = False) -> "Hparams":
        return cls(**cls.common(file, arch, neox, routed))

    @staticmethod
    def common(
        file: GGUFFile,
        arch: str,
        neox: bool = True,
        routed: bool = False,
        yarn: bool = True,
        asks: bool = True,
        alike: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """The fields above by name; ``yarn``, ``asks`` and ``alike`` as in ``Rope.from_gguf`` and ``size_of_heads``."""
        n_embd, n_head = positive(file, f"{arch}.embedding_length"), positive(file, f"{arch}.attention.head_count")
        head_size = size_of_heads(file, arch, n_embd // n_head, *alike)
        if not routed and file.get(f"{arch}.expert_count", int, 0):
            raise ModelError(f"{file.path} has routed experts, which {arch} models here do not; use a dense model")
        return {
            "n_layer": positive(file, f"{arch}.block_count", limit=1024),
            "n_embd": n_embd,
            "n_ff": 0 if routed else positive(file, f"{arch}.feed_forward_length"),
            "n_head": n_head,
            "n_head_kv": kv_heads(file, arch, n_head),
            "head_size": head_size,
            "eps": epsilon(file, arch),
            "rope": Rope.from_gguf(file, arch, head_size, neox, yarn, asks),
            "context_length": positive(file, f"{arch}.context_length", limit=1 << 31),
        }


class Qwen3(Model):
    """The qwen3 target. ``weights`` has to be set before ``forward``."""

    arch = "qwen3"
    hp: Any  # the Hparams of the architecture; this frame asks for what they have in common
    weights: Weights
    biased: tuple[str, ...] = ATTENTION
    neox = True  # rope pairs (i, i + n_rot / 2)
    head_norms: tuple[str, ...] = ("attn_q_norm", "attn_k_norm")
    ffn_norm = "ffn_norm"  # the norm in front of the FFN
    routed = False  # experts in place of the dense FFN
    window = 0
    embedding_scale, softcap = 1.0, 0.0

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.hp = file, Hparams.from_gguf(file, self.arch, self.neox, self.routed)
        self.n_embd, self.n_layer, self.context_length = self.hp.n_embd, self.hp.n_layer, self.hp.context_length
        self.n_vocab = vocabulary(file)

    # -- what it reads

    def tensors(self) -> list[Spec]:
        hp, n = self.hp, self.n_embd
        width, width_kv = hp.head_size * hp.n_head, hp.head_size * hp.n_head_kv
        shapes = {
            "attn_q": (n, width),
            "attn_k": (n, width_kv),
            "attn_v": (n, width_kv),
            "attn_output": (width, n),
        }
        vectors = {"attn_norm": n, self.ffn_norm: n, **dict.fromkeys(self.head_norms, hp.head_size)}
        out = ends(self.file, n, self.n_vocab)
        for i in range(hp.n_layer):
            out += [Spec(f"blk.{i}.{name}.weight", shape) for name, shape in shapes.items()]
            out += [Spec(f"blk.{i}.{name}.weight", (size,), VECTOR) for name, size in vectors.items()]
            out += self._ffn_specs(i)
        return out + self._more_specs()

    def _ffn_specs(self, i: int) -> list[Spec]:
        n, n_ff = self.n_embd, self.hp.n_ff
        shapes = {"ffn_gate": (n, n_ff), "ffn_up": (n, n_ff), "ffn_down": (n_ff, n)}
        return [Spec(f"blk.{i}.{name}.weight", shape) for name, shape in shapes.items()]

    def idle(self) -> dict[str, str]:
        return super().idle() | {"cls.output.weight": "the head of a reranker, which generates no text"}

    def _more_specs(self) -> list[Spec]:
        return []

    def groups(self) -> dict[str, tuple[str, ...]]:
        out = {}
        for i in range(self.n_layer):
            out[f"blk.{i}.mixer"] = tuple(f"blk.{i}.{name}.weight" for name in ("attn_q", "attn_k", "attn_v"))
            if not self.routed:
                out[f"blk.{i}.ffn"] = tuple(f"blk.{i}.{name}.weight" for name in ("ffn_gate", "ffn_up"))
        return out

    def fused_alike(self) -> list[tuple[str, ...]]:
        return []

    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(self.hp.n_head_kv, self.hp.head_size)] * self.n_layer

    def delta_shape(self) -> DeltaShape | None:
        return None

    def delta_row(self, first: int = 0) -> int:
        return 0

    def caches_before(self, layer: int) -> tuple[int, int]:
        return layer, 0

    def last_cut(self) -> int:
        return self.n_layer - 1

    # -- the graph

    def embed(self, g: Graph, tokens: Tensor) -> Tensor:
        return g.rows(self.weights["token_embd.weight"], tokens)

    def _first(self, g: Graph, tokens: Tensor) -> Tensor:
        """The input of layer 0."""
        return self.embed(g, tokens)

    def forward(self, g: Graph, rows: Rows, capture: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Adds all layers. Returns (F32 [n_embd, T] normalised for the head, captured inputs of the layers named by ``capture``).

        A value v in ``capture`` is the input of layer v, that is the output of layer v - 1; v = n_layer is the last layer's output.
        """
        hp, w = self.hp, self.weights
        x, captured = self._first(g, rows.tokens), {}
        for i in range(hp.n_layer):
            rows, x = rows.at(i, x)
            captured[i] = x
            h = g.rms_norm(x, w[f"blk.{i}.attn_norm.weight"], hp.eps)
            x = g.add(self._attention(g, rows, h, i), x)
            n = g.rms_norm(x, w[f"blk.{i}.{self.ffn_norm}.weight"], hp.eps)
            x = g.add(self._ffn(g, n, i), x)
        captured[hp.n_layer] = x
        return g.rms_norm(x, w["output_norm.weight"], hp.eps), [captured[v] for v in capture]

    def logits(self, g: Graph, hidden: Tensor, tokens: int = 0) -> Tensor:
        """F32 [n_embd, T] -> F32 [n_vocab, T]; of the first ``tokens`` only unless that is 0."""
        return head_product(g, self.weights.matrix("output.weight"), hidden, tokens)

    def _attention(self, g: Graph, rows: Rows, h: Tensor, i: int) -> Tensor:
        hp, size = self.hp, self.hp.head_size
        q, k, v = project(g, self.weights.group(f"blk.{i}.mixer"), h)
        q = self._rotate(g, g.heads(q, size, hp.n_head), rows.positions, f"blk.{i}.attn_q_norm.weight")
        k = self._rotate(g, g.heads(k, size, hp.n_head_kv), rows.positions, f"blk.{i}.attn_k_norm.weight")
        v = g.heads(v, size, hp.n_head_kv)
        out = attend(g, q, k, v, rows.kv[i], rows.kv_rows, rows.mask, rows.span, hp.n_head_kv, inverse_root(size))
        return product(g, self.weights.matrix(f"blk.{i}.attn_output.weight"), out)

    def _ffn(self, g: Graph, n: Tensor, i: int) -> Tensor:
        return swiglu_ffn(g, self.weights.group(f"blk.{i}.ffn"), self.weights.matrix(f"blk.{i}.ffn_down.weight"), n)

    def _rotate(self, g: Graph, x: Tensor, positions: Tensor, norm: str) -> Tensor:
        return self.hp.rope(g, g.rms_norm(x, self.weights[norm], self.hp.eps), positions)
