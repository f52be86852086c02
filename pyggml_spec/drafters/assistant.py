"""gemma4-assistant: a few small layers that attend to the K/V rows of the target's last two layers.

    x = pre_projection [E_target[t] sqrt(n) ; h], h the target's hidden state after output_norm, n its width
per layer, over the rows of the target's last sliding or full layer, by its own kind:
    x += rms(W_o attention(rope(rms_head(W_q rms(x; attn_norm); attn_q_norm))); post_attention_norm), with unscaled scores
    x += rms(GEGLU(rms(x; ffn_norm)); post_ffw_norm);  x *= layer_output_scale
    y = rms(x; output_norm);  draft = argmax(E y), E the drafter's own embedding;  h = post_projection y, for the next draft
All drafts of a block have the position of the last token and see committed tokens only, so nothing is written or computed for committed tokens.
Source: llama.cpp, src/models/gemma4-assistant.cpp and common/speculative.cpp (positions).
"""

from ..errors import ModelError, PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.archs.gemma4 import Gemma4, Kind, kinds
from ..models.base import KVLayer, KVShape
from ..models.blocks import attend, geglu_ffn, head_product, product
from ..models.decoder import Decoder
from ..models.keys import epsilon, per_layer, positive, sliding_layers, vocabulary
from ..models.layers import ROPE_FREQS
from ..models.weights import MATMUL, VECTOR, Spec
from .base import ChainInputs, ContextInputs, Drafter

EMBEDDING, NORM = "token_embd.weight", "output_norm.weight"
PRE_PROJECTION, POST_PROJECTION = "nextn.pre_projection.weight", "nextn.post_projection.weight"
UNREAD = ("masked_embd_centroids.weight", "masked_embd_ordering", "masked_embd_ordering.weight")


class Gemma4Assistant(Drafter):
    """The drafter: a chain of drafts over the target's K/V."""

    arch, method = "gemma4-assistant", "draft-mtp"
    chained = shares_kv = True
    block_size = 16
    scaled = ()  # as in llama.cpp

    def __init__(self, file: GGUFFile) -> None:
        a = self.arch
        self.file, self.n_embd, self.n_vocab = file, positive(file, f"{a}.embedding_length"), vocabulary(file)
        self.n_layer = positive(file, f"{a}.block_count", limit=64)
        self.n_embd_target, self.eps = positive(file, f"{a}.embedding_length_out"), epsilon(file, a)
        if file.get(f"{a}.nextn_predict_layers", int, 0) != self.n_layer:
            raise ModelError(f"{file.path}: nextn_predict_layers is not block_count {self.n_layer}; all layers of a {a} file draft")
        if self.n_embd == self.n_embd_target:
            raise ModelError(f"{file.path}: embedding_length_out is the drafter's own {self.n_embd}, but it has to be the target's")
        self.n_head = per_layer(file, f"{a}.attention.head_count", self.n_layer)
        self.n_ff = per_layer(file, f"{a}.feed_forward_length", self.n_layer)
        self.window, self.sliding = sliding_layers(file, a, self.n_layer)
        if not self.window:
            raise ModelError(f"{file.path} has no attention.sliding_window, which every {a} model has; convert it again")
        self.full, self.slide = kinds(file, a, self.n_embd // self.n_head[0])

    # -- tensors

    def tensors(self) -> list[Spec]:
        n, wide = self.n_embd, self.n_embd_target
        out = [
            Spec(EMBEDDING, (n, self.n_vocab), MATMUL),
            Spec(NORM, (n,), VECTOR),
            Spec(PRE_PROJECTION, (2 * wide, n)),
            Spec(POST_PROJECTION, (n, wide)),
        ]
        if not all(self.sliding):
            out.append(Spec(ROPE_FREQS, (self.full.size // 2,), VECTOR))
        for i in range(self.n_layer):
            size, n_ff = self._kind(i).size, self.n_ff[i]
            width = size * self.n_head[i]
            shapes = {"attn_q": (n, width), "attn_output": (width, n), "ffn_gate": (n, n_ff), "ffn_up": (n, n_ff), "ffn_down": (n_ff, n)}
            vectors = dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), n)
            vectors |= {"attn_q_norm": size, "layer_output_scale": 1}
            out += [Spec(f"blk.{i}.{name}.weight", shape) for name, shape in shapes.items()]
            out += [Spec(f"blk.{i}.{name}.weight", (length,), VECTOR) for name, length in vectors.items()]
        return out

    def unused(self) -> dict[str, str]:
        return super().unused() | dict.fromkeys(UNREAD, "a table for a reduced vocabulary, which llama.cpp does not use either")

    def groups(self) -> dict[str, tuple[str, ...]]:
        return {f"blk.{i}.ffn": (f"blk.{i}.ffn_gate.weight", f"blk.{i}.ffn_up.weight") for i in range(self.n_layer)}

    def kv_shapes(self) -> list[KVShape]:
        return []

    def check_pair(self, target: Decoder) -> None:
        pair = f"{self.file.path.name} cannot draft for {target.file.path.name}"
        if not isinstance(target, Gemma4):
            raise PairError(f"{pair}: it reads the K/V of gemma4 models, and that one is {target.arch}")
        if self.n_embd_target != target.n_embd:
            raise PairError(f"{pair}: it was made for hidden states of {self.n_embd_target} values, the target's have {target.n_embd}")
        if self.n_vocab != target.n_vocab:
            raise PairError(f"{pair}: it has {self.n_vocab} tokens, the target has {target.n_vocab}")
        if target.n_layer < 2 or not target.mixer(-2).sliding or target.mixer(-1).sliding:
            raise PairError(f"{pair}: it reads the K/V of a sliding layer and of a full one after it, which are not the target's last two")
        if any(self.sliding) and self.window != target.window:
            raise PairError(f"{pair}: its window is {self.window}, the target's {target.window}")
        for i in range(self.n_layer):
            theirs = target.mixer(self._read(i, target.n_layer))
            if self._kind(i).size != theirs.kind.size or self.n_head[i] % theirs.kv_heads:
                raise PairError(
                    f"{pair}: layer {i} has {self.n_head[i]} heads of {self._kind(i).size}, the rows that it reads are of {theirs.kv_heads} "
                    f"of {theirs.kind.size}"
                )

    def _kind(self, i: int) -> Kind:
        return self.slide if self.sliding[i] else self.full

    def _read(self, i: int, n_layer: int) -> int:
        """The target's layer whose K/V layer i reads."""
        return n_layer - (2 if self.sliding[i] else 1)

    # -- graphs

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        """Nothing: the target writes them."""

    def step(self, g: Graph, rows: ChainInputs, target: Decoder) -> tuple[Tensor, Tensor]:
        w, eps = self.weights, self.eps
        assert isinstance(target, Gemma4) and rows.sliding is not None
        e = g.scale(target.embed(g, rows.tokens), target.embedding_scale)
        x = product(g, w.matrix(PRE_PROJECTION), g.concat([e, rows.prev_hidden]))
        for i in range(self.n_layer):
            kind, theirs, b = self._kind(i), target.mixer(self._read(i, target.n_layer)), f"blk.{i}."
            attention, factors = (rows.sliding, None) if self.sliding[i] else (rows.attention, w[ROPE_FREQS])
            q = product(g, w.matrix(f"{b}attn_q.weight"), g.rms_norm(x, w[f"{b}attn_norm.weight"], eps))
            q = g.rms_norm(g.heads(q, kind.size, self.n_head[i]), w[f"{b}attn_q_norm.weight"], eps)
            q = kind.rope(g, q, rows.positions, factors)
            kv = rows.kv[target.caches_before(theirs.owner)[0]]
            out = attend(g, q, None, None, kv, attention.kv_rows, attention.mask, attention.kv_bucket, theirs.kv_heads, 1.0)
            out = product(g, w.matrix(f"{b}attn_output.weight"), out)
            x = g.add(g.rms_norm(out, w[f"{b}post_attention_norm.weight"], eps), x)
            n = g.rms_norm(x, w[f"{b}ffn_norm.weight"], eps)
            ffn = geglu_ffn(g, w.group(f"{b}ffn"), w.matrix(f"{b}ffn_down.weight"), n)
            x = g.mul(g.add(g.rms_norm(ffn, w[f"{b}post_ffw_norm.weight"], eps), x), w[f"{b}layer_output_scale.weight"])
        y = g.rms_norm(x, w[NORM], eps)
        return y, product(g, w.matrix(POST_PROJECTION), y)

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        return head_product(g, self.weights.matrix(EMBEDDING), hidden, self.draft_tokens)
