"""qwen35: the hybrid of Qwen3.5 and Qwen3.6. Three gated delta-net layers, then one gated full-attention layer, and so on.

Per layer, with rms(x; w) = x / sqrt(mean x^2 + eps) * w (the file's norm weights already carry the +1):
    h = rms(x; attn_norm);  x += mix(h);  n = rms(x; post_attention_norm);  x += W_down(silu(W_gate n) * W_up n)
Source of the formulae: llama.cpp, src/models/qwen35.cpp.
"""

from dataclasses import dataclass

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .base import DeltaShape, KVLayer, KVShape, Rows, Seen
from .blocks import attend, head_product, product, project, swiglu_ffn
from .hparams import ends, epsilon, inverse_root, kv_heads, positive, size_of_heads, vocabulary
from .model import ATTENTION, Model
from .rope import Rope
from .weights import VECTOR, Spec, Weights


@dataclass(frozen=True)
class Hparams:
    """Hyper-parameters as the GGUF keys give them; sizes in values, ``recurrent`` per layer; ``n_block`` layers with those of MTP."""

    n_block: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_size: int
    eps: float
    rope: Rope
    delta: DeltaShape
    recurrent: tuple[bool, ...]
    context_length: int

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str, grouped: bool = False) -> "Hparams":
        """``grouped``: neighbouring v-heads share a head of q and k (``DeltaShape``), and the rope has no axes."""
        n_block = positive(file, f"{arch}.block_count", limit=1024)
        n_layer = n_block - file.get(f"{arch}.nextn_predict_layers", int, 0)
        n_embd, n_head = positive(file, f"{arch}.embedding_length"), positive(file, f"{arch}.attention.head_count")
        head_size = size_of_heads(file, arch, n_embd // n_head)
        inner, state = positive(file, f"{arch}.ssm.inner_size"), positive(file, f"{arch}.ssm.state_size", limit=1024)
        heads_v, heads_k = positive(file, f"{arch}.ssm.time_step_rank"), positive(file, f"{arch}.ssm.group_count")
        if inner != heads_v * state or heads_v % heads_k:
            raise ModelError(
                f"{file.path}: ssm.inner_size {inner}, time_step_rank {heads_v}, group_count {heads_k} and state_size {state} contradict each "
                "other (inner = rank * state, rank a multiple of group_count)"
            )
        every = positive(file, f"{arch}.full_attention_interval", 4)
        flags = file.array(f"{arch}.attention.recurrent_layers")
        recurrent = tuple((i + 1) % every != 0 for i in range(n_layer)) if flags is None else tuple(bool(flag) for flag in flags)[:n_layer]
        if n_layer < 1 or len(recurrent) != n_layer or not any(recurrent):
            raise ModelError(f"{file.path}: {n_layer} layers with {sum(recurrent)} recurrent ones is not a {arch} model")
        rope = Rope.from_gguf(file, arch, head_size, yarn=True)
        if not grouped:
            rope.check_sections(file, arch, interleaved=True)
        return cls(
            n_block,
            n_layer,
            n_embd,
            n_head,
            kv_heads(file, arch, n_head),
            head_size,
            epsilon(file, arch),
            rope,
            DeltaShape(sum(recurrent), state, heads_k, heads_v, positive(file, f"{arch}.ssm.conv_kernel", limit=16), grouped),
            recurrent,
            positive(file, f"{arch}.context_length", limit=1 << 31),
        )


class Qwen35(Model):
    """The qwen35 target. ``weights`` has to be set before ``forward``."""

    arch = "qwen35"
    weights: Weights
    biased = ATTENTION
    grouped = False  # neighbouring v-heads share a head of q and k
    window = 0
    embedding_scale, softcap = 1.0, 0.0

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.hp = file, Hparams.from_gguf(file, self.arch, self.grouped)
        self.n_embd, self.n_layer, self.context_length = self.hp.n_embd, self.hp.n_layer, self.hp.context_length
        self.n_vocab = vocabulary(file)
        self._read_ffn(file)

    def _read_ffn(self, file: GGUFFile) -> None:
        self.n_ff = positive(file, f"{self.arch}.feed_forward_length")

    # -- what it reads

    def tensors(self) -> list[Spec]:
        hp, n = self.hp, self.n_embd
        out = ends(self.file, n, self.n_vocab)
        for i in range(hp.n_layer):
            out += self._recurrent_specs(i) if hp.recurrent[i] else self._attention_specs(i)
            out += self._other_specs(i)
        return out

    def attention_layer(self, i: int) -> list[Spec]:
        """The tensors of a layer with attention, also of the one that drafts (``models.mtp``)."""
        return self._attention_specs(i) + self._other_specs(i)

    def _other_specs(self, i: int) -> list[Spec]:
        norms = [Spec(f"blk.{i}.{name}.weight", (self.n_embd,), VECTOR) for name in ("attn_norm", "post_attention_norm")]
        return norms + self._ffn_specs(i)

    def idle(self) -> dict[str, str]:
        own = [f"blk.{i}." for i in range(self.n_layer, self.hp.n_block)]
        return super().idle() | dict.fromkeys(
            (name for name in self.file.tensors if name.startswith(tuple(own))), "the model's own MTP layers"
        )

    def _attention_specs(self, i: int) -> list[Spec]:
        hp, n = self.hp, self.n_embd
        width, width_kv = hp.head_size * hp.n_head, hp.head_size * hp.n_head_kv
        return [
            Spec(f"blk.{i}.attn_q.weight", (n, 2 * width)),
            Spec(f"blk.{i}.attn_k.weight", (n, width_kv)),
            Spec(f"blk.{i}.attn_v.weight", (n, width_kv)),
            Spec(f"blk.{i}.attn_output.weight", (width, n)),
            Spec(f"blk.{i}.attn_q_norm.weight", (hp.head_size,), VECTOR),
            Spec(f"blk.{i}.attn_k_norm.weight", (hp.head_size,), VECTOR),
        ]

    def _recurrent_specs(self, i: int) -> list[Spec]:
        d, n = self.hp.delta, self.n_embd
        inner = d.head_size * d.n_head_v
        return [
            Spec(f"blk.{i}.attn_qkv.weight", (n, d.channels)),
            Spec(f"blk.{i}.attn_gate.weight", (n, inner)),
            Spec(f"blk.{i}.ssm_beta.weight", (n, d.n_head_v)),
            Spec(f"blk.{i}.ssm_alpha.weight", (n, d.n_head_v)),
            Spec(f"blk.{i}.ssm_conv1d.weight", (d.conv, d.channels), VECTOR),
            Spec(f"blk.{i}.ssm_dt.bias", (d.n_head_v,), VECTOR),
            Spec(f"blk.{i}.ssm_a", (d.n_head_v,), VECTOR),
            Spec(f"blk.{i}.ssm_norm.weight", (d.head_size,), VECTOR),
            Spec(f"blk.{i}.ssm_out.weight", (inner, n)),
        ]

    def _ffn_specs(self, i: int) -> list[Spec]:
        n, n_ff = self.n_embd, self.n_ff
        shapes = {"ffn_gate": (n, n_ff), "ffn_up": (n, n_ff), "ffn_down": (n_ff, n)}
        return [Spec(f"blk.{i}.{name}.weight", shape) for name, shape in shapes.items()]

    def _recurrent_members(self) -> tuple[str, ...]:
        return ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")

    def ffn_members(self) -> tuple[str, ...]:
        """The matrices that read the input of an FFN of every token."""
        return ("ffn_gate", "ffn_up")

    def groups(self) -> dict[str, tuple[str, ...]]:
        out = {}
        for i in range(self.n_layer):
            mixer = self._recurrent_members() if self.hp.recurrent[i] else ("attn_q", "attn_k", "attn_v")
            out[f"blk.{i}.mixer"] = tuple(f"blk.{i}.{name}.weight" for name in mixer)
            out[f"blk.{i}.ffn"] = tuple(f"blk.{i}.{name}.weight" for name in self.ffn_members())
        return out

    def fused_alike(self) -> list[tuple[str, ...]]:
        """Groups of which the same number of matrices is fused: the recurrent state keeps rows of one width for every layer."""
        return [tuple(f"blk.{i}.mixer" for i in range(self.n_layer) if self.hp.recurrent[i])]

    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(self.hp.n_head_kv, self.hp.head_size) for recurrent in self.hp.recurrent if not recurrent]

    def delta_shape(self) -> DeltaShape:
        return self.hp.delta

    def delta_row(self, first: int = 0) -> int:
        """Floats per projected row that the recurrent states keep from layer ``first`` on: a fused projection is kept whole, the channels come
        first in it."""
        group = self.weights.group(f"blk.{self.hp.recurrent.index(True, first)}.mixer")
        return sum(group.runs[0].rows)

    def caches_before(self, layer: int) -> tuple[int, int]:
        recurrent = sum(self.hp.recurrent[:layer])
        return layer - recurrent, recurrent

    def last_cut(self) -> int:
        return self.n_layer - 1

    # -- the graph

    def embed(self, g: Graph, tokens: Tensor) -> Tensor:
        return g.rows(self.weights["token_embd.weight"], tokens)

    def forward(self, g: Graph, rows: Rows, capture: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Adds all layers. Returns (F32 [n_embd, T] normalised for the head, captured inputs of the layers named by ``capture``).

        A value v in ``capture`` is the input of layer v, that is the output of layer v - 1; v = n_layer is the last layer's output.
        """
        hp, w = self.hp, self.weights
        x, captured, n_delta, n_attn = self.embed(g, rows.tokens), {}, 0, 0
        for i in range(hp.n_layer):
            rows, x = rows.at(i, x)
            captured[i] = x
            h = g.rms_norm(x, w[f"blk.{i}.attn_norm.weight"], hp.eps)
            g.norm_first(h)
            if hp.recurrent[i]:
                mixed = self._delta_net(g, rows, h, i, n_delta)
                n_delta += 1
            else:
                mixed = self._attention(g, rows, h, i, n_attn)
                n_attn += 1
            x = g.add(mixed, x)
            x = g.add(self.ffn(g, g.rms_norm(x, w[f"blk.{i}.post_attention_norm.weight"], hp.eps), i), x)
        captured[hp.n_layer] = x
        return g.rms_norm(x, w["output_norm.weight"], hp.eps), [captured[v] for v in capture]

    def logits(self, g: Graph, hidden: Tensor, tokens: int = 0) -> Tensor:
        """F32 [n_embd, T] -> F32 [n_vocab, T]; of the first ``tokens`` only unless that is 0."""
        return head_product(g, self.weights.matrix("output.weight"), hidden, tokens)

    def _attention(self, g: Graph, rows: Rows, h: Tensor, i: int, n: int) -> Tensor:
        qg, k, v = project(g, self.weights.group(f"blk.{i}.mixer"), h)
        return self.attention(g, i, qg, k, v, rows.positions, Seen(rows.kv_rows, rows.mask, rows.span), rows.kv[n])

    def attention(self, g: Graph, i: int, qg: Tensor, k: Tensor, v: Tensor, positions: Tensor, seen: Seen, kv: KVLayer) -> Tensor:
        """Of layer i: its projections F32 [.., T] -> F32 [n_embd, T], K and V written into their rows."""
        hp, w, size = self.hp, self.weights, self.hp.head_size
        q = g.heads(qg, size, hp.n_head, stride=2 * size)  # each head holds [q | gate]
        gate = g.heads(qg, size, hp.n_head, stride=2 * size, first=size)
        q = hp.rope(g, g.rms_norm(q, w[f"blk.{i}.attn_q_norm.weight"], hp.eps), positions)
        k, v = self.keys_values(g, i, k, v, positions)
        out = attend(g, q, k, v, kv, seen.kv_rows, seen.mask, seen.span, hp.n_head_kv, inverse_root(size))
        return product(g, w.matrix(f"blk.{i}.attn_output.weight"), g.sigmoid_gated(out, gate))

    def keys_values(self, g: Graph, i: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of layer i: projections F32 [.., T] -> K and V as they are stored, F32 [head_size, n_head_kv, T]."""
        hp, size = self.hp, self.hp.head_size
        k = g.rms_norm(g.heads(k, size, hp.n_head_kv), self.weights[f"blk.{i}.attn_k_norm.weight"], hp.eps)
        return hp.rope(g, k, positions), g.heads(v, size, hp.n_head_kv)

    def _delta_net(self, g: Graph, rows: Rows, h: Tensor, i: int, n: int) -> Tensor:
        hp, w = self.hp, self.weights
        proj, z, beta, alpha = self._projections(g, h, i)
        names = ("ssm_conv1d.weight", "ssm_dt.bias", "ssm_a")
        conv_w, dt, a = (w[f"blk.{i}.{name}"] for name in names)
        assert rows.delta is not None
        o = rows.delta.layer(g, n, proj, beta, alpha, conv_w, dt, a, hp.eps)
        return product(g, w.matrix(f"blk.{i}.ssm_out.weight"), g.gated_norm(o, w[f"blk.{i}.ssm_norm.weight"], hp.eps, z))

    def _projections(self, g: Graph, h: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """F32 rows that begin with q | k | v, ``delta_row`` long; z [S * H_v, T]; beta and alpha [H_v, T]."""
        proj, z, beta, alpha = project(g, self.weights.group(f"blk.{i}.mixer"), h)
        return g.whole(proj), z, beta, alpha

    def ffn(self, g: Graph, n: Tensor, i: int) -> Tensor:
        """Of layer i: F32 [n_embd, T], behind its norm -> F32 [n_embd, T]."""
        return swiglu_ffn(g, self.weights.group(f"blk.{i}.ffn"), self.weights.matrix(f"blk.{i}.ffn_down.weight"), n)
