"""gemma4-assistant: a few small layers that attend to the K/V rows of the target's last two layers.

    x = pre_projection [E_target[t] sqrt(n) ; h], h the target's hidden state after output_norm, n its width
per layer, over the rows of the target's last sliding or full layer, by its own kind:
    x += rms(W_o attention(rope(rms_head(W_q rms(x; attn_norm); attn_q_norm))); post_attention_norm), with unscaled scores
    x += rms(GEGLU(rms(x; ffn_norm)); post_ffw_norm);  x *= layer_output_scale
    y = rms(x; output_norm);  draft = argmax(E y), E the drafter's own embedding;  h = post_projection y, for the next draft
All drafts of a block have the position of the last token and see committed tokens only, so nothing is written or computed for committed tokens.
Source: llama.cpp, src/models/gemma4-assistant.cpp and common/speculative.cpp (positions).
"""

from ..errors import PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.archs.gemma4 import Gemma4, GemmaLayer, SharedAttention, kinds
from ..models.base import KVLayer, KVShape
from ..models.decoder import Decoder
from ..models.hparams import Hparams
from ..models.layers import ROPE_FREQS, GatedMLP, LayerContext, head_product, product
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
        f = Hparams(file, self.arch)
        self.file, self.n_embd, self.n_vocab = file, f.n_embd, f.n_vocab
        self.n_layer = f.n_layer = f.positive("block_count", limit=64)  # all layers draft
        self.n_embd_target, self.eps = f.positive("embedding_length_out"), f.eps
        if f.get("nextn_predict_layers", int, 0) != self.n_layer:
            raise f.refuse(f"nextn_predict_layers is not block_count {self.n_layer}; all layers of a {f.arch} file draft")
        if self.n_embd == self.n_embd_target:
            raise f.refuse(f"embedding_length_out is the drafter's own {self.n_embd}, but it has to be the target's")
        heads, n_ff, (self.window, self.sliding) = f.per_layer("attention.head_count"), f.per_layer("feed_forward_length"), f.window()
        full, local = kinds(f, self.n_embd // heads[0])
        self._f, self.layers = f, list[GemmaLayer]()
        for i, one in enumerate(self.sliding):
            size, rope = local if one else full
            # K/V of the target's last layer of its kind
            mixer = SharedAttention(heads[i], 1, size, rope, factors=not one, sliding=one, owner=-2 if one else -1, owns=False)
            self.layers.append(GemmaLayer(mixer, GatedMLP(n_ff[i], "gelu"), scaled=True))
        self._factors = full[0] // 2

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
            out.append(Spec(ROPE_FREQS, (self._factors,), VECTOR))
        return out + [spec for i, layer in enumerate(self.layers) for spec in layer.tensors(self._f, f"blk.{i}.")]

    def unused(self) -> dict[str, str]:
        return super().unused() | dict.fromkeys(UNREAD, "a table for a reduced vocabulary, which llama.cpp does not use either")

    def groups(self) -> dict[str, tuple[str, ...]]:
        return {name: members for i, layer in enumerate(self.layers) for name, members in layer.groups(self._f, f"blk.{i}.").items()}

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
        for i, layer in enumerate(self.layers):
            mine = layer.mixer
            assert isinstance(mine, SharedAttention)
            theirs = target.mixer(mine.owner)
            if mine.size != theirs.size or mine.heads % theirs.kv_heads:
                raise PairError(
                    f"{pair}: layer {i} has {mine.heads} heads of {mine.size}, the rows that it reads are of {theirs.kv_heads} of {theirs.size}"
                )

    # -- graphs

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        """Nothing: the target writes them."""

    def step(self, g: Graph, rows: ChainInputs, target: Decoder) -> tuple[Tensor, Tensor]:
        w, eps = self.weights, self.eps
        assert isinstance(target, Gemma4) and rows.sliding is not None
        e = g.scale(target.embed(g, rows.tokens), target.embedding_scale)
        x = product(g, w.matrix(PRE_PROJECTION), g.concat([e, rows.prev_hidden]))
        kv = {at: rows.kv[target.caches_before(target.mixer(at).owner)[0]] for at in (-2, -1)}
        for i, layer in enumerate(self.layers):
            attention = rows.sliding if self.sliding[i] else rows.attention
            x = layer(LayerContext(g, w, i, eps, rows.positions, attention, kv, factors=w.get(ROPE_FREQS)), x)
        y = g.rms_norm(x, w[NORM], eps)
        return y, product(g, w.matrix(POST_PROJECTION), y)

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        return head_product(g, self.weights.matrix(EMBEDDING), hidden, self.draft_tokens)
