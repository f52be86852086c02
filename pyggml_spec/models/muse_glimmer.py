"""muse-glimmer: a dense transformer whose sliding-window layers are rotated and whose full ones are not, with a gate behind attention.

With rms(x; w) = x / sqrt(mean x^2 + eps) * w (the file's norm weights already carry the +1), x = rms(E[t]; 1), and per layer:
    h = rms(x; attn_norm);  q, k rms-normalised per head, in sliding layers then rotated (pairs 2 i, 2 i + 1)
    x += rms'(W_o (attention(q, k, v) * sigmoid(W_gate h)); post_attention_norm)
    n = rms(x; ffn_norm);  x += rms'(SwiGLU(n); post_ffw_norm)
rms' has an epsilon of 1e-8. Logits are multiplied by a number of the file, then capped: c tanh(l / c).
Source of the formulae: llama.cpp, src/models/muse-glimmer.cpp.
"""

from dataclasses import dataclass, replace

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .base import KVShape, Rows
from .blocks import attend, product, project
from .hparams import OF_SLIDING, ends, inverse_root, vocabulary, windowed_layers
from .model import ATTENTION, FFN
from .qwen3 import Hparams as Qwen3Hparams
from .qwen3 import Qwen3
from .weights import VECTOR, Spec

EPS_BEHIND = 1e-8  # of the norms behind attention and FFN


@dataclass(frozen=True)
class Hparams(Qwen3Hparams):
    """Hyper-parameters as the GGUF keys give them; ``sliding`` per layer, ``rope`` that of the sliding ones."""

    window: int
    sliding: tuple[bool, ...]
    logit_scale: float
    softcap: float

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str, neox: bool = False, routed: bool = False) -> "Hparams":
        common = cls.common(file, arch, neox, routed, yarn=False, asks=False, alike=OF_SLIDING)
        window, sliding = windowed_layers(file, arch, common["n_layer"], full_last=True)
        base = file.get(f"{arch}.rope.freq_base_swa", float, common["rope"].base)
        # 30 without the key, as llama.cpp has it
        scale, softcap = file.get(f"{arch}.logit_scale", float), file.get(f"{arch}.final_logit_softcapping", float, 30.0)
        if base <= 0 or scale <= 0 or softcap < 0:
            raise ModelError(
                f"{file.path}: rope.freq_base_swa {base}, logit_scale {scale} or final_logit_softcapping {softcap} is out of range"
            )
        # positions are stretched in full layers only, and these have none
        common["rope"] = replace(common["rope"], base=base, scale=1.0)
        return cls(**common, window=window, sliding=sliding, logit_scale=scale, softcap=softcap)


class MuseGlimmer(Qwen3):
    """The muse-glimmer target: the frame of qwen3 with its own attention, and norms behind both parts of a layer."""

    arch = "muse-glimmer"
    hp: Hparams
    biased = ATTENTION
    unscaled = frozenset(("attn_gate", *FFN))

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.hp = file, Hparams.from_gguf(file, self.arch)
        self.n_embd, self.n_layer, self.context_length = self.hp.n_embd, self.hp.n_layer, self.hp.context_length
        self.window, self.n_vocab, self.softcap = self.hp.window, vocabulary(file), self.hp.softcap

    # -- what it reads

    def tensors(self) -> list[Spec]:
        hp, n = self.hp, self.n_embd
        width, width_kv = hp.head_size * hp.n_head, hp.head_size * hp.n_head_kv
        shapes = {
            "attn_q": (n, width),
            "attn_k": (n, width_kv),
            "attn_v": (n, width_kv),
            "attn_gate": (n, width),
            "attn_output": (width, n),
        }
        shapes |= {"ffn_gate": (n, hp.n_ff), "ffn_up": (n, hp.n_ff), "ffn_down": (hp.n_ff, n)}
        vectors = dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), n)
        vectors |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), hp.head_size)
        out = ends(self.file, n, self.n_vocab)
        for i in range(hp.n_layer):
            out += [Spec(f"blk.{i}.{name}.weight", shape) for name, shape in shapes.items()]
            out += [Spec(f"blk.{i}.{name}.weight", (size,), VECTOR) for name, size in vectors.items()]
        return out

    def groups(self) -> dict[str, tuple[str, ...]]:
        out = super().groups()
        return out | {f"blk.{i}.mixer": (*out[f"blk.{i}.mixer"], f"blk.{i}.attn_gate.weight") for i in range(self.n_layer)}

    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(self.hp.n_head_kv, self.hp.head_size, sliding) for sliding in self.hp.sliding]

    # -- the graph

    def _first(self, g: Graph, tokens: Tensor) -> Tensor:
        return g.norm(self.embed(g, tokens), self.hp.eps)

    def logits(self, g: Graph, hidden: Tensor, tokens: int = 0) -> Tensor:
        """F32 [n_embd, T] -> F32 [n_vocab, T], scaled, and capped where the file says so."""
        return g.soft_cap(g.scale(super().logits(g, hidden, tokens), self.hp.logit_scale), self.softcap)

    def _attention(self, g: Graph, rows: Rows, h: Tensor, i: int) -> Tensor:
        hp, w, b, size = self.hp, self.weights, f"blk.{i}.", self.hp.head_size
        seen = rows.of_sliding if hp.sliding[i] else rows
        q, k, v, gate = project(g, w.group(f"{b}mixer"), h)
        q = g.rms_norm(g.heads(q, size, hp.n_head), w[f"{b}attn_q_norm.weight"], hp.eps)
        k = g.rms_norm(g.heads(k, size, hp.n_head_kv), w[f"{b}attn_k_norm.weight"], hp.eps)
        if hp.sliding[i]:
            q, k = hp.rope(g, q, rows.positions), hp.rope(g, k, rows.positions)
        v = g.heads(v, size, hp.n_head_kv)
        out = attend(g, q, k, v, rows.kv[i], seen.kv_rows, seen.mask, seen.span, hp.n_head_kv, inverse_root(size))
        # part of a fused product is a view, and ggml-cuda has elementwise functions for contiguous tensors only
        gate = g.sigmoid(gate if g.whole(gate) == gate else g.cont(gate))
        out = product(g, w.matrix(f"{b}attn_output.weight"), g.mul(out, gate))
        return g.rms_norm(out, w[f"{b}post_attention_norm.weight"], EPS_BEHIND)

    def _ffn(self, g: Graph, n: Tensor, i: int) -> Tensor:
        return g.rms_norm(super()._ffn(g, n, i), self.weights[f"blk.{i}.post_ffw_norm.weight"], EPS_BEHIND)
