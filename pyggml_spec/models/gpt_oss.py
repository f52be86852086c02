"""gpt-oss: routed experts with biases, attention with sinks, every other layer behind a window of 128 tokens.

Per layer, with rms(x; w) = x / sqrt(mean x^2 + eps) * w:
    h = rms(x; attn_norm);  q, k, v = W h + b, q and k rotated (NEOX pairs, yarn in every layer)
    a_j = exp(q . k_j / sqrt(D)) / (exp(s) + sum_i exp(q . k_i / sqrt(D))), s a number of the head's own (`attn_sinks`)
    x += W_o (sum_j a_j v_j) + b_o
    n = rms(x; post_attention_norm);  x += experts(n)
The router takes the largest of W_r n + b_r and a softmax over these alone. An expert is W_down h + b_down, with g = W_gate n + b_gate and
u = W_up n + b_up, h = min(g, 7) sigmoid(1.702 min(g, 7)) * (clamp(u, -7, 7) + 1).
Source of the formulae: llama.cpp, src/models/openai-moe.cpp.
"""

from dataclasses import dataclass, replace

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .base import KVShape, Rows
from .blocks import attend, product, project
from .hparams import OF_SLIDING, ends, inverse_root, vocabulary, windowed_layers
from .model import ATTENTION, EXPERT
from .moe import SOFTMAX_OF_CHOSEN, Experts
from .qwen3 import Hparams as Qwen3Hparams
from .qwen3 import Qwen3
from .rope import Rope
from .weights import VECTOR, Spec


@dataclass(frozen=True)
class Hparams(Qwen3Hparams):
    """Hyper-parameters as the GGUF keys give them; ``sliding`` per layer."""

    rope_sliding: Rope
    window: int
    sliding: tuple[bool, ...]
    experts: Experts

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str, neox: bool = True, routed: bool = True) -> "Hparams":
        common = cls.common(file, arch, neox, routed, asks=False, alike=(*OF_SLIDING, "rope.dimension_count"))
        window, sliding = windowed_layers(file, arch, common["n_layer"], period=2, full_last=True)
        base = file.get(f"{arch}.rope.freq_base_swa", float, common["rope"].base)
        if base <= 0:
            raise ModelError(f"{file.path}: rope.freq_base_swa is {base}, but it has to be above 0")
        return cls(
            **common,
            rope_sliding=replace(common["rope"], base=base),
            window=window,
            sliding=sliding,
            experts=Experts.from_gguf(
                file, arch, common["n_layer"], gating=SOFTMAX_OF_CHOSEN, normalise=False, glu="swiglu_oai", biases=True
            ),
        )


class GptOss(Qwen3):
    """The gpt-oss target: the frame of qwen3 with its own attention and FFN."""

    arch = "gpt-oss"
    hp: Hparams
    biased = ATTENTION
    unscaled = frozenset(EXPERT)
    routed = True
    ffn_norm = "post_attention_norm"
    ggml_attention = "it has sinks"

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.hp = file, Hparams.from_gguf(file, self.arch)
        self.n_embd, self.n_layer, self.context_length = self.hp.n_embd, self.hp.n_layer, self.hp.context_length
        self.window, self.n_vocab, self.experts = self.hp.window, vocabulary(file), self.hp.experts

    # -- what it reads

    def tensors(self) -> list[Spec]:
        hp, n = self.hp, self.n_embd
        width, width_kv = hp.head_size * hp.n_head, hp.head_size * hp.n_head_kv
        shapes = {"attn_q": (n, width), "attn_k": (n, width_kv), "attn_v": (n, width_kv), "attn_output": (width, n)}
        vectors = {"attn_norm": n, "post_attention_norm": n, "attn_sinks": hp.n_head}
        out = ends(self.file, n, self.n_vocab)
        for i in range(hp.n_layer):
            b = f"blk.{i}."
            out += [Spec(f"{b}{name}.weight", shape) for name, shape in shapes.items()]
            out += [Spec(f"{b}{name}.weight", (size,), VECTOR) for name, size in vectors.items()]
            out.append(Spec(f"{b}attn_output.bias", (n,), VECTOR, of=f"{b}attn_output.weight"))
            out += self.experts.specs(self.file, b, n)
        return out

    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(self.hp.n_head_kv, self.hp.head_size, sliding) for sliding in self.hp.sliding]

    # -- the graph

    def _attention(self, g: Graph, rows: Rows, h: Tensor, i: int) -> Tensor:
        hp, w, b, size = self.hp, self.weights, f"blk.{i}.", self.hp.head_size
        rope, seen = (hp.rope_sliding, rows.of_sliding) if hp.sliding[i] else (hp.rope, rows)
        q, k, v = project(g, w.group(f"{b}mixer"), h)
        q = rope(g, g.heads(q, size, hp.n_head), rows.positions)
        k = rope(g, g.heads(k, size, hp.n_head_kv), rows.positions)
        v, sinks = g.heads(v, size, hp.n_head_kv), w[f"{b}attn_sinks.weight"]
        out = attend(g, q, k, v, rows.kv[i], seen.kv_rows, seen.mask, seen.span, hp.n_head_kv, inverse_root(size), sinks)
        return product(g, w.matrix(f"{b}attn_output.weight"), out)

    def _ffn(self, g: Graph, n: Tensor, i: int) -> Tensor:
        return self.experts(g, self.weights, f"blk.{i}.", n)
