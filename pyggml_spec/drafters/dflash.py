"""dflash: the block-diffusion drafter. It denoises a whole block in one forward pass over the target's own hidden states.

Context row at position p, from the target's captured hidden states f: c = rms(fc(concat f); enc.output_norm); per layer
K = rope(rms_head(W_k c; k_norm), p), V = W_v c. c does not pass attn_norm.
Block: rows [last token, MASK, ...] at n .. n + B - 1; h = rms(x; attn_norm); q, k, v from h; attention over the committed rows and the whole
block, both directions (causal layers: a row sees those before it only); x += W_o(attn); x += FFN(rms(x; ffn_norm));
logits = head(rms(x; output_norm)).
Where the file says so: V = rms_head(W_k c) without weight in layers without attn_v; W_o(attn) * attention.value_scale; norms after
attention (post_attention_norm, which is the FFN's norm in files without ffn_norm) and after the FFN (post_ffw_norm); x *=
layer_output_scale; GELU instead of SiLU; rope frequencies divided by rope_freqs; logits capped, c tanh(l / c); attn_sinks in the softmax.
attention.causal is of all layers. Where a file does not have it and only some layers have a window, these are causal: so the makers train
(z-lab/dflash, dflash/model.py; vLLM, models/qwen3_dflash.py). llama.cpp runs them bidirectional.
Drafters of Laguna targets: c = rms(fc(concat rms(f; enc.aux_norm)); enc.output_norm), and c does pass attn_norm; attn * softplus(attn_gate h).
Source of the formulae: llama.cpp, src/models/dflash.cpp; for Laguna's, vLLM, models/laguna_dflash.py.
"""

from dataclasses import dataclass

from ..errors import ModelError, PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models import hparams
from ..models.base import AttentionInputs, KVLayer, KVShape
from ..models.decoder import Decoder
from ..models.layers import attend, gated_ffn, head_gated, head_product, product, project, write_kv
from ..models.model import SCALED
from ..models.rope import Rope
from ..models.weights import MATMUL, ROWS, VECTOR, Spec
from .base import TOKEN_MAP, ContextInputs, Drafter, DraftOutput, check_tokens

F16_MAX = 65504.0
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
GELU = ("gelu", "gelu_pytorch_tanh")
FACTORS, FEATURE_NORMS = "rope_freqs.weight", "enc.aux_norm.weight"


@dataclass(frozen=True)
class BlockInputs:
    """A draft block of each slot: ``tokens`` I32 [B] = [last token, MASK, ...]; others as in ``models.base.TargetInputs``; ``attention`` per layer.

    ``zeros``: F32 [n_embd, slots], the row before each block of a convolution.
    """

    tokens: Tensor
    positions: Tensor
    attention: tuple[AttentionInputs, ...]
    kv: tuple[KVLayer, ...]
    slots: int = 1
    zeros: Tensor | None = None


@dataclass(frozen=True)
class Hparams:
    """Hyper-parameters. ``target_layers``: v is the input of target layer v. ``window`` per layer, 0 for none; ``causal`` per layer."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_size: int
    eps: float
    rope: Rope
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    attention_scale: float
    value_scale: float
    embedding_scale: float
    softcap: float
    gelu: bool
    causal: tuple[bool, ...]
    window: tuple[int, ...]

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str) -> "Hparams":
        f = hparams.Hparams(file, arch)
        n_layer, head_size = f.positive("block_count", limit=256), f.head_dim()
        layers = file.array(f"{arch}.target_layers", "iu")
        if layers is None or len(layers) == 0:
            raise ModelError(
                f"{file.path} has no {arch}.target_layers: a drafter that does not say which hidden states it reads is unusable"
            )
        if "tokenizer.ggml.mask_token_id" not in file.metadata:
            raise ModelError(f"{file.path} has no tokenizer.ggml.mask_token_id, which the block is made of; convert the drafter again")
        act = f.get("hidden_activation", str, "silu")
        if act not in ("silu", *GELU):
            raise ModelError(f"{file.path} uses the activation {act!r}; dflash drafters with silu, {' or '.join(GELU)} are supported")
        softcap = f.get("final_logit_softcapping", float, 0.0)
        if softcap < 0 or f.get("logit_scale", float, 1.0) < 0:  # a positive scale does not change which logit is largest
            raise ModelError(f"{file.path}: final_logit_softcapping or logit_scale is below 0; convert the drafter again")
        block = f.positive("block_size", 16, 1024)
        if block < 2:
            raise ModelError(f"{file.path}: block_size is {block}, and a block of one row holds no draft")
        window = cls._windows(file, arch, n_layer)
        some = len({*map(bool, window)}) > 1
        one = f.get("attention.causal", bool, False) if not some or f"{arch}.attention.causal" in file.metadata else None
        rope = f.rope(head_size, yarn=False)
        f.by_axis(rope, interleaved=False)
        if FACTORS in file.tensors and file.array(f"{arch}.rope.dimension_sections") is not None:
            raise ModelError(f"{file.path} has {FACTORS} and rope.dimension_sections, which exclude each other; convert the drafter again")
        return cls(
            n_layer,
            f.n_embd,
            f.ff,
            f.heads,
            f.kv_heads,
            head_size,
            f.eps,
            rope,
            block,
            file.get("tokenizer.ggml.mask_token_id", int),
            tuple(int(v) for v in layers),
            f.get("attention.scale", float, 0.0) or hparams.inverse_root(head_size),
            f.get("attention.value_scale", float, 0.0) or 1.0,
            f.get("embedding_scale", float, 0.0),
            softcap,
            act in GELU,
            (one,) * n_layer if one is not None else tuple(map(bool, window)),
            window,
        )

    @staticmethod
    def _windows(file: GGUFFile, arch: str, n_layer: int) -> tuple[int, ...]:
        window = file.get(f"{arch}.attention.sliding_window", int, 0)
        pattern = file.array(f"{arch}.attention.sliding_window_pattern")
        if window < 0 or window >= 1 << 31:
            raise ModelError(f"{file.path}: attention.sliding_window is {window}, but it has to be between 0 and {(1 << 31) - 1}")
        if window and (pattern is None or len(pattern) < n_layer):
            raise ModelError(f"{file.path} has a sliding window of {window} but no sliding_window_pattern that says which layers use it")
        return tuple(window if window and pattern is not None and bool(pattern[i]) else 0 for i in range(n_layer))


class DFlash(Drafter):
    """The drafter. ``weights`` has to be set before graphs are built; embedding and head come from the target unless the file has them.

    Attributes:
        by_position: whether each position has a node with the ids of all slots, instead of one node slot by slot.
    """

    arch, method = "dflash", "draft-dflash"
    by_position = False
    scaled = tuple(name for name in (*SCALED, "fc") if name != "attn_gate")  # as in llama.cpp

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.hp = file, Hparams.from_gguf(file, self.arch)
        self.block_size, self.n_layer, self.captures = self.hp.block_size, self.hp.n_layer, self.hp.target_layers
        self.window = max(self.hp.window)

    # -- tensors

    def tensors(self) -> list[Spec]:
        hp, n = self.hp, self.hp.n_embd
        width, width_kv = hp.head_size * hp.n_head, hp.head_size * hp.n_head_kv
        out = [
            Spec("fc.weight", (n * len(hp.target_layers), n)),
            Spec("enc.output_norm.weight", (n,), VECTOR),
            Spec("output_norm.weight", (n,), VECTOR),
        ]
        tensors = self.file.tensors
        if FEATURE_NORMS in tensors:
            out.append(Spec(FEATURE_NORMS, (n, len(hp.target_layers)), VECTOR))
        out += self.token_map_specs()
        if EMBEDDING in tensors:
            out.append(Spec(EMBEDDING, (n, tensors[EMBEDDING].shape[-1]), ROWS))
        head = next((name for name in (HEAD, EMBEDDING) if name in tensors), None)
        if head is not None:  # an embedding without a head is the head too, as in llama.cpp
            out.append(Spec(HEAD, (n, tensors[head].shape[-1]), MATMUL, head))
        if FACTORS in tensors:
            out.append(Spec(FACTORS, (hp.rope.n_rot // 2,), VECTOR))
        for i in range(hp.n_layer):
            shapes = {
                "attn_q": (n, width),
                "attn_k": (n, width_kv),
                **({"attn_v": (n, width_kv)} if self._has(i, "attn_v") else {}),
                "attn_output": (width, n),
                "ffn_gate": (n, hp.n_ff),
                "ffn_up": (n, hp.n_ff),
                "ffn_down": (hp.n_ff, n),
            }
            if (gate := tensors.get(f"blk.{i}.attn_gate.weight")) is not None:
                shapes["attn_gate"] = (n, width if gate.shape[-1] == width else hp.n_head)
            vectors = {"attn_norm": n, "attn_q_norm": hp.head_size, "attn_k_norm": hp.head_size, self._ffn_norm(i): n}
            more = {"post_attention_norm": n, "post_ffw_norm": n, "layer_output_scale": 1}
            more["attn_sinks"] = hp.n_head
            vectors |= {name: size for name, size in more.items() if self._has(i, name)}
            out += [Spec(f"blk.{i}.{name}.weight", shape) for name, shape in shapes.items()]
            out += [Spec(f"blk.{i}.{name}.weight", (size,), VECTOR) for name, size in vectors.items()]
        return out

    def _has(self, i: int, name: str) -> bool:
        return f"blk.{i}.{name}.weight" in self.file.tensors

    def _ffn_norm(self, i: int) -> str:
        return "ffn_norm" if self._has(i, "ffn_norm") else "post_attention_norm"

    def groups(self) -> dict[str, tuple[str, ...]]:
        """k and v without q, because context rows need no q."""
        out = {}
        for i in range(self.hp.n_layer):
            names = ("attn_k", "attn_v") if self._has(i, "attn_v") else ("attn_k",)
            out[f"blk.{i}.kv"] = tuple(f"blk.{i}.{name}.weight" for name in names)
            out[f"blk.{i}.ffn"] = (f"blk.{i}.ffn_gate.weight", f"blk.{i}.ffn_up.weight")
        return out

    def kv_shapes(self) -> list[KVShape]:
        hp = self.hp
        return [KVShape(hp.n_head_kv, hp.head_size, sliding=window > 0, queries=hp.n_head // hp.n_head_kv) for window in hp.window]

    def check_pair(self, target: Decoder) -> None:
        hp, pair = self.hp, f"{self.file.path.name} cannot draft for {target.file.path.name}"
        if hp.n_embd != target.n_embd:
            raise PairError(f"{pair}: it was made for hidden states of {hp.n_embd} values, the target's have {target.n_embd}")
        bad = [v for v in hp.target_layers if not 0 <= v <= target.n_layer]
        if bad:
            raise PairError(f"{pair}: it reads the input of layer {bad[0]}, but the target has layers 0 to {target.n_layer - 1}")
        for name, tokens in self.vocab_sizes().items():
            if tokens != target.n_vocab:
                raise PairError(f"{pair}: its {name} has {tokens} tokens, the target has {target.n_vocab}")
        if TOKEN_MAP in self.file.tensors:
            known = self.file.tensors[TOKEN_MAP].shape[0]
            for name, chosen in ({HEAD: target.n_vocab} | self.head_sizes()).items():
                if chosen != known:
                    raise PairError(f"{pair}: its {name} has {chosen} tokens, but {TOKEN_MAP} has {known}")
            check_tokens(self.file, target.n_vocab)
        if not 0 <= hp.mask_token < target.n_vocab:
            raise PairError(f"{pair}: its mask token is {hp.mask_token}, but the target's vocabulary has {target.n_vocab} tokens")

    def vocab_sizes(self) -> dict[str, int]:
        """Vocabulary sizes of tensors over the target's whole vocabulary."""
        names = (EMBEDDING,) if TOKEN_MAP in self.file.tensors else (EMBEDDING, HEAD)
        return {name: self.file.tensors[name].shape[-1] for name in names if name in self.file.tensors}

    def head_sizes(self) -> dict[str, int]:
        """Vocabulary sizes of tensors over the reduced vocabulary, if the file has one."""
        return {HEAD: self.file.tensors[HEAD].shape[-1]} if HEAD in self.file.tensors else {}

    def block_rows(self, width: int) -> int:
        """Rows of the block that drafts for ``width`` verified rows, including the last token's; with fewer, that row drafts too."""
        return width

    # -- graphs

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        hp, w = self.hp, self.weights
        f, normed = g.concat(rows.features), FEATURE_NORMS in w
        if normed:
            f = g.flat(g.rms_norm(g.heads(f, hp.n_embd, len(hp.target_layers)), w[FEATURE_NORMS], hp.eps))
        else:  # some targets have activations beyond F16; Inf would spread to all later drafts
            f = g.clamp(f, -F16_MAX, F16_MAX)
        c = g.rms_norm(product(g, w.matrix("fc.weight"), f), w["enc.output_norm.weight"], hp.eps)
        for i in range(hp.n_layer):
            x = g.rms_norm(c, w[f"blk.{i}.attn_norm.weight"], hp.eps) if normed else c
            kv_rows = rows.sliding_rows if hp.window[i] and rows.sliding_rows is not None else rows.kv_rows
            write_kv(g, *self._keys_values(g, i, x, rows.positions), kv[i], kv_rows)

    def _keys_values(self, g: Graph, i: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        hp, w = self.hp, self.weights
        k, *own_v = (g.heads(y, hp.head_size, hp.n_head_kv) for y in project(g, w.group(f"blk.{i}.kv"), x))
        v = own_v[0] if own_v else g.rms_norm(k, None, hp.eps)
        return self._rotate(g, g.rms_norm(k, w[f"blk.{i}.attn_k_norm.weight"], hp.eps), positions), v

    def _rotate(self, g: Graph, x: Tensor, positions: Tensor) -> Tensor:
        return self.hp.rope(g, x, positions, self.weights.get(FACTORS))

    def denoise(self, g: Graph, rows: BlockInputs, target: Decoder) -> Tensor:
        """The block's hidden states before the head, F32 [n_embd, B]."""
        hp, w = self.hp, self.weights
        own = EMBEDDING in w
        x = g.rows(w[EMBEDDING], rows.tokens) if own else target.embed(g, rows.tokens)
        scale = hp.embedding_scale or (target.embedding_scale if target.scales_borrowed_embedding and not own else 1.0)
        if scale != 1.0:
            x = g.scale(x, scale)
        rows = self.prepared(g, x, rows)
        for i in range(hp.n_layer):
            h, state = self._into(g, i, "attn", g.rms_norm(x, w[f"blk.{i}.attn_norm.weight"], hp.eps), rows)
            q = g.heads(product(g, w.matrix(f"blk.{i}.attn_q.weight"), h), hp.head_size, hp.n_head)
            q = self._rotate(g, g.rms_norm(q, w[f"blk.{i}.attn_q_norm.weight"], hp.eps), rows.positions)
            k, v = self._keys_values(g, i, h, rows.positions)
            out = attend(g, q, k, v, rows.kv[i], rows.attention[i], hp.attention_scale, w.get(f"blk.{i}.attn_sinks.weight"))
            if self._has(i, "attn_gate"):
                out = head_gated(g, out, g.matmul(w[f"blk.{i}.attn_gate.weight"], h), hp.head_size, g.softplus)
            out = product(g, w.matrix(f"blk.{i}.attn_output.weight"), out)
            if hp.value_scale != 1.0:
                out = g.scale(out, hp.value_scale)
            out = self._out_of(g, i, "attn", out, state, rows)
            if self._ffn_norm(i) == "ffn_norm":
                out = self._norm_if_any(g, out, i, "post_attention_norm")
            x = g.add(out, x)
            n, state = self._into(g, i, "ffn", g.rms_norm(x, w[f"blk.{i}.{self._ffn_norm(i)}.weight"], hp.eps), rows)
            ffn = gated_ffn(g, "geglu" if hp.gelu else "swiglu", w.group(f"blk.{i}.ffn"), w.matrix(f"blk.{i}.ffn_down.weight"), n)
            ffn = self._out_of(g, i, "ffn", ffn, state, rows)
            x = g.add(self._norm_if_any(g, ffn, i, "post_ffw_norm"), x)
            if self._has(i, "layer_output_scale"):
                x = g.mul(x, w[f"blk.{i}.layer_output_scale.weight"])
        return g.rms_norm(x, w["output_norm.weight"], hp.eps)

    def prepared(self, g: Graph, x: Tensor, rows: BlockInputs) -> BlockInputs:
        """Hook: inputs of the layers, from x F32 [n_embd, B], the first layer's input."""
        return rows

    def _into(self, g: Graph, i: int, part: str, x: Tensor, rows: BlockInputs) -> tuple[Tensor, Tensor | None]:
        """Hook: the input of attention or FFN (``part``: attn, ffn) from its normalised input, and state for ``_out_of``."""
        return x, None

    def _out_of(self, g: Graph, i: int, part: str, x: Tensor, state: Tensor | None, rows: BlockInputs) -> Tensor:
        """Hook: the output of attention or FFN."""
        return x

    def drafts(self, g: Graph, hidden: Tensor, block: Tensor, slots: int, target: Decoder, draws: Tensor | None) -> DraftOutput:
        """Drafts of each slot's drafting rows of the ``block`` I32, whose hidden states are ``hidden``, F32 [n_embd, T].

        ``draws``: I32 [8, T] in the order of the ids, as ``Graph.draw`` takes them; None for argmaxes.
        """
        logits = self.logits(g, hidden, target)
        return DraftOutput((self.choose(g, logits, draws),), logits)

    def _norm_if_any(self, g: Graph, x: Tensor, i: int, name: str) -> Tensor:
        return g.rms_norm(x, self.weights[f"blk.{i}.{name}.weight"], self.hp.eps) if self._has(i, name) else x

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        """From the drafter's head or the target's, capped once."""
        own = HEAD in self.weights
        n = self.draft_tokens
        logits = head_product(g, self.weights.matrix(HEAD), hidden, n) if own else target.logits(g, hidden, n)
        return g.soft_cap(logits, self.hp.softcap if own or not target.softcap else 0.0)
