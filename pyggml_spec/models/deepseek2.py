"""deepseek2: multi-head latent attention and routed experts beside shared ones (DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash).

Per layer, with rms(x; w) = x / sqrt(mean x^2 + eps) * w:
    h = rms(x; attn_norm);  q = W_qb rms(W_qa h; attn_q_a_norm), or W_q h in small models;  [c ; p] = W_kva h, c the latent part
    c = rms(c; attn_kv_a_norm);  each head of q is [n ; r], r and p are rotated (pairs of neighbours)
    K row = [c ; p], V row = c, one for all heads;  head i of q attends as [W_kb,i n ; r] and gives W_vb,i sum_j a_j c_j
    x += W_o (all heads);  n = rms(x; ffn_norm);  x += W_down(silu(W_gate n) * W_up n) in leading layers, experts(n) + shared(n) in the others
W_kb and W_vb are the two halves of what would make keys and values out of c: multiplied with q and with the sum, rows stay as they are stored (the
absorbed form). Scores are divided by sqrt(D) of a whole head [n ; r] and, under yarn, multiplied with the square of its magnitude.
Source of the formulae: llama.cpp, src/models/deepseek2.cpp.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .base import KVShape, Rows
from .blocks import product, project, swiglu_ffn
from .hparams import ends, epsilon, positive, vocabulary
from .model import EXPERT, FFN, SHARED
from .moe import SIGMOID, SOFTMAX, Experts
from .qwen3 import Qwen3
from .rope import Rope
from .weights import HEADS, VECTOR, Spec

SMALL = (26, 27)  # layers of models that project q directly, whatever their keys say
KANANA = (48, 128256)  # layers and tokens of one more
GLM_FLASH = ((47, 48), 154880)  # its first files do not say that its router is a sigmoid


@dataclass(frozen=True)
class Hparams:
    """Hyper-parameters as the GGUF keys give them; sizes in values. ``n_lora_q`` is 0 where q is projected directly."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_lora_q: int
    n_latent: int
    head_size: int
    head_size_v: int
    eps: float
    rope: Rope
    scale: float
    n_dense: int
    experts: Experts | None
    n_ff_shared: int
    context_length: int

    @property
    def n_plain(self) -> int:
        """Values of a head that are not rotated."""
        return self.head_size - self.rope.n_rot

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str) -> "Hparams":
        n_layer = positive(file, f"{arch}.block_count", limit=1024) - file.get(f"{arch}.nextn_predict_layers", int, 0)
        if n_layer < 1:
            raise ModelError(f"{file.path}: nextn_predict_layers leaves {n_layer} layers of block_count")
        n_latent, n_head = positive(file, f"{arch}.attention.kv_lora_rank", limit=4096), positive(file, f"{arch}.attention.head_count")
        size, size_v = cls._sizes(file, arch, n_latent)
        rope = cls._rope(file, arch, size)
        if rope.n_rot == size:
            raise ModelError(
                f"{file.path}: rope.dimension_count is {rope.n_rot}, which leaves nothing of heads of {size} that is not rotated"
            )
        n_dense = file.get(f"{arch}.leading_dense_block_count", int, 0)
        if not 0 <= n_dense <= n_layer:
            raise ModelError(f"{file.path}: leading_dense_block_count is {n_dense}, but the model has {n_layer} layers")
        experts = cls._experts(file, arch, n_layer, n_dense) if n_dense < n_layer else None
        return cls(
            n_layer,
            positive(file, f"{arch}.embedding_length"),
            positive(file, f"{arch}.feed_forward_length") if n_dense else 0,
            n_head,
            cls._lora_of_q(file, arch, n_layer),
            n_latent,
            size,
            size_v,
            epsilon(file, arch),
            rope,
            cls._scale(file, arch, rope, size),
            n_dense,
            experts,
            experts.n_ff * positive(file, f"{arch}.expert_shared_count", limit=64) if experts is not None else 0,
            positive(file, f"{arch}.context_length", limit=1 << 31),
        )

    @staticmethod
    def _lora_of_q(file: GGUFFile, arch: str, n_layer: int) -> int:
        small = n_layer in SMALL or (n_layer, vocabulary(file)) == KANANA
        return 0 if small else positive(file, f"{arch}.attention.q_lora_rank")

    @staticmethod
    def _sizes(file: GGUFFile, arch: str, n_latent: int) -> tuple[int, int]:
        """Values of a head of q and of v, before and behind what is latent."""
        names = ("attention.key_length_mla", "attention.value_length_mla")
        if not all(file.get(f"{arch}.{name}", int, 0) for name in names):
            raise ModelError(
                f"{file.path} has no {' and '.join(names)}: its K/V rows would be those of every head, the layout of files from before "
                "latent rows; convert the model again"
            )
        size, size_v = (positive(file, f"{arch}.{name}", limit=4096) for name in names)
        if file.get(f"{arch}.attention.temperature_scale", float, 0.0):
            raise ModelError(f"{file.path} scales queries by their position (attention.temperature_scale), which {arch} models here do not")
        stored = n_latent + file.get(f"{arch}.rope.dimension_count", int, 0)
        for name, expected in (("key_length", stored), ("value_length", n_latent), ("head_count_kv", 1)):
            if file.get(f"{arch}.attention.{name}", int, expected) != expected:
                raise ModelError(f"{file.path}: attention.{name} is not the {expected} that latent rows of {n_latent} values call for")
        return size, size_v

    @staticmethod
    def _log_multiplier(file: GGUFFile, arch: str) -> float:
        """`mscale_all_dim` of the checkpoint, which its converter writes as a tenth of that."""
        return float(np.float32(file.get(f"{arch}.rope.scaling.yarn_log_multiplier", float, 0.0)) / np.float32(0.1))

    @classmethod
    def _rope(cls, file: GGUFFile, arch: str, size: int) -> Rope:
        rope = Rope.from_gguf(file, arch, size, neox=False, yarn=True)
        if rope.yarn[0] and cls._log_multiplier(file, arch):
            # mscale and mscale_all_dim are taken to be equal, so that rows keep their length: only what ggml multiplies them with is cancelled
            magnitude = np.float32(file.get(f"{arch}.rope.scaling.attn_factor", float, 1.0)) * (np.float32(1) / _grown(rope.scale))
            return Rope(rope.n_rot, rope.base, rope.scale, False, (rope.yarn[0], float(magnitude), *rope.yarn[2:]), rope.n_ctx_orig)
        return rope

    @classmethod
    def _scale(cls, file: GGUFFile, arch: str, rope: Rope, size: int) -> float:
        """What scores are multiplied with, every step in single precision as llama.cpp takes it."""
        magnitude = np.float32(rope.yarn[1]) * _grown(rope.scale) * _grown(rope.scale, cls._log_multiplier(file, arch))
        return float(magnitude * magnitude / np.sqrt(np.float32(size)))

    @staticmethod
    def _router(file: GGUFFile, n_layer: int) -> int:
        """Of a file that does not say which."""
        return SIGMOID if n_layer in GLM_FLASH[0] and vocabulary(file) == GLM_FLASH[1] else SOFTMAX

    @classmethod
    def _experts(cls, file: GGUFFile, arch: str, n_layer: int, n_dense: int) -> Experts:
        gating = file.get(f"{arch}.expert_gating_func", int, 0) or cls._router(file, n_layer)
        if gating not in (SOFTMAX, SIGMOID):
            raise ModelError(f"{file.path}: expert_gating_func is {gating}; {SOFTMAX} (softmax) and {SIGMOID} (sigmoid) are supported")
        return Experts.from_gguf(
            file,
            arch,
            n_layer,
            gating=gating,
            normalise=file.get(f"{arch}.expert_weights_norm", bool, False),
            scale=file.get(f"{arch}.expert_weights_scale", float, 0.0),
            biased=f"blk.{n_dense}.exp_probs_b.bias" in file.tensors,
        )


def _grown(scale: float, multiplier: float = 1.0) -> np.float32:
    """1 + 0.1 m ln(1 / scale), the magnitude of yarn, in single precision."""
    stretch = np.float32(1) / np.float32(scale)
    return np.float32(1) + np.float32(0.1) * np.float32(multiplier) * np.float32(math.log(stretch))


class DeepSeek2(Qwen3):
    """The deepseek2 target: the frame of qwen3 with its own attention and FFN."""

    arch = "deepseek2"
    hp: Hparams
    hparams = Hparams
    biased = ()
    unscaled = frozenset(("attn_q", "output", *FFN, *SHARED, *EXPERT))

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.hp = file, self.hparams.from_gguf(file, self.arch)
        self.n_embd, self.n_layer, self.context_length = self.hp.n_embd, self.hp.n_layer, self.hp.context_length
        self.n_vocab = vocabulary(file)

    @property
    def experts(self) -> Experts | None:
        return self.hp.experts

    # -- what it reads

    def tensors(self) -> list[Spec]:
        hp, n = self.hp, self.n_embd
        wide, stored = hp.n_head * hp.head_size, hp.n_latent + hp.rope.n_rot
        shapes = {"attn_q_a": (n, hp.n_lora_q), "attn_q_b": (hp.n_lora_q, wide)} if hp.n_lora_q else {"attn_q": (n, wide)}
        shapes |= {"attn_kv_a_mqa": (n, stored), "attn_output": (hp.n_head * hp.head_size_v, n)}
        heads = {"attn_k_b": (hp.n_plain, hp.n_latent, hp.n_head), "attn_v_b": (hp.n_latent, hp.head_size_v, hp.n_head)}
        vectors = {"attn_norm": n, "attn_kv_a_norm": hp.n_latent, "ffn_norm": n} | ({"attn_q_a_norm": hp.n_lora_q} if hp.n_lora_q else {})
        out = ends(self.file, n, self.n_vocab)
        for i in range(hp.n_layer):
            b, (gate, up, down) = f"blk.{i}.", self._ffn_names(i)
            n_ff = hp.n_ff if i < hp.n_dense else hp.n_ff_shared
            out += [Spec(f"{b}{name}.weight", s) for name, s in (shapes | {gate: (n, n_ff), up: (n, n_ff), down: (n_ff, n)}).items()]
            out += [Spec(f"{b}{name}.weight", shape, HEADS) for name, shape in heads.items()]
            out += [Spec(f"{b}{name}.weight", (size,), VECTOR) for name, size in vectors.items()]
            if hp.experts is not None and i >= hp.n_dense:
                out += hp.experts.specs(self.file, b, n)
        return out

    def idle(self) -> dict[str, str]:
        layers = tuple(f"blk.{i}." for i in range(self.n_layer, self.n_layer + self.file.get(f"{self.arch}.nextn_predict_layers", int, 0)))
        own = [name for name in self.file.tensors if layers and name.startswith(layers)]
        return super().idle() | dict.fromkeys(own, "an MTP layer, which drafts for targets of other architectures only")

    def _ffn_names(self, i: int) -> tuple[str, ...]:
        return FFN if i < self.hp.n_dense else SHARED

    def groups(self) -> dict[str, tuple[str, ...]]:
        out = {}
        for i in range(self.n_layer):
            out[f"blk.{i}.mixer"] = tuple(
                f"blk.{i}.{name}.weight" for name in ("attn_q_a" if self.hp.n_lora_q else "attn_q", "attn_kv_a_mqa")
            )
            out[f"blk.{i}.ffn"] = tuple(f"blk.{i}.{name}.weight" for name in self._ffn_names(i)[:2])
        return out

    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(1, self.hp.n_latent + self.hp.rope.n_rot, latent=self.hp.n_latent)] * self.n_layer

    # -- the graph

    def _attention(self, g: Graph, rows: Rows, h: Tensor, i: int) -> Tensor:
        q, made = self._projected(g, h, i)
        return self._attend(g, rows, q, made, rows.mask, i)

    def _projected(self, g: Graph, h: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """What q is made of, or q itself in small models, and what rows are made of."""
        q, made = project(g, self.weights.group(f"blk.{i}.mixer"), h)
        return g.rms_norm(q, self.weights[f"blk.{i}.attn_q_a_norm.weight"], self.hp.eps) if self.hp.n_lora_q else q, made

    def _attend(self, g: Graph, rows: Rows, q: Tensor, made: Tensor, mask: Tensor, i: int) -> Tensor:
        """F32 [n_embd, T] of what ``_projected`` gave, over the rows that the mask shows."""
        hp, w, b, kv = self.hp, self.weights, f"blk.{i}.", rows.kv[i]
        if hp.n_lora_q:
            q = product(g, w.matrix(f"{b}attn_q_b.weight"), q)
        plain, turned = g.parts_of_heads(q, hp.head_size, hp.n_plain)
        absorbed = g.permute(g.matmul(w[f"{b}attn_k_b.weight"], g.permute(plain, 0, 2, 1, 3)), 0, 2, 1, 3)
        q = g.concat([absorbed, hp.rope(g, turned, rows.positions)])
        latent = g.rms_norm(g.columns(made, hp.n_latent), w[f"{b}attn_kv_a_norm.weight"], hp.eps)
        key = hp.rope(g, g.heads(made, hp.rope.n_rot, 1, first=hp.n_latent), rows.positions)
        g.expand(q)
        g.kv_write_rows(kv.k, g.concat([g.shaped(latent, hp.n_latent, 1, latent.ne[1]), key]), rows.kv_rows)
        out = g.shaped(g.fa_span(q, kv.k, kv.v, mask, 1, rows.span, hp.scale), hp.n_latent, hp.n_head, made.ne[1])
        out = g.permute(g.matmul(w[f"{b}attn_v_b.weight"], g.permute(out, 0, 2, 1, 3)), 0, 2, 1, 3)
        return product(g, w.matrix(f"{b}attn_output.weight"), g.packed(out))

    def _ffn(self, g: Graph, n: Tensor, i: int) -> Tensor:
        w, b = self.weights, f"blk.{i}."
        routed = self.hp.experts(g, w, b, n) if self.hp.experts is not None and i >= self.hp.n_dense else None
        dense = swiglu_ffn(g, w.group(f"{b}ffn"), w.matrix(f"{b}{self._ffn_names(i)[2]}.weight"), n)
        return dense if routed is None else g.add(routed, dense)
