"""mtp: the additional layer that qwen35, qwen3next, glm4moe and deepseek2 models, and their relatives, were trained with, to predict one more token.

Its row at position p is the pair (x_p, h_{p-1}): a token, and the target's hidden state of the previous token, after output_norm.
    x = eh_proj [rms(E[x_p]; enorm) ; rms(h_{p-1}; hnorm)]
    x += attention(rms(x; attn_norm));  x += FFN(rms(x; post_attention_norm));  h = rms(x; shared_head_norm or output_norm)
    draft = argmax(head h), and h, normalised, is carried to the next draft.
At the first position h is zero. K and V depend on x alone, so that a committed row needs neither attention nor FFN: llama.cpp computes
the whole layer there, which gives the same ids.
The layer is in the target's file, or in one of its own whose architecture is the target's and which has its own embedding and head.
Source of the formulae: llama.cpp, src/models/qwen35.cpp (graph_mtp) and common/speculative.cpp (which rows are paired).
"""

import numpy as np

from ..errors import ModelError, PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.base import AttentionInputs, KVLayer, KVShape
from ..models.decoder import ARCHITECTURES, Decoder
from ..models.layers import QKV, Attention, LayerContext, head_product, product, write_kv
from ..models.mla import MLA
from ..models.model import ATTENTION, SCALED
from ..models.weights import MATMUL, ROWS, VECTOR, Spec, Weights
from .base import ChainInputs, ContextInputs, Drafter

LAYERS = ("deepseek2", "deepseek32", "glm-dsa", "glm4moe", "qwen35", "qwen35moe", "qwen3next")  # architectures whose layer drafts here
EMBEDDING, NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
SHARED_TENSORS = {EMBEDDING: "embed_tokens", NORM: "shared_head_norm", HEAD: "shared_head_head"}
PIECE = 1 << 24  # bytes compared at a time


def has_layer(file: GGUFFile) -> bool:
    """Whether the file has a supported MTP layer; targets whose layer was left out keep its key."""
    arch = file.get("general.architecture", str)
    return arch in LAYERS and file.get(f"{arch}.nextn_predict_layers", int, 0) > 0 and any(".nextn." in name for name in file.tensors)


def is_layer_alone(file: GGUFFile) -> bool:
    """Whether the file has only an MTP layer, by llama.cpp's rule."""
    return has_layer(file) and "blk.0.attn_norm.weight" not in file.tensors


class MTP(Drafter):
    """The drafter, a chain."""

    method = "draft-mtp"
    chained = True
    block_size, n_layer = 16, 1
    scaled = (*SCALED, "eh_proj")
    biased = ATTENTION

    def __init__(self, file: GGUFFile) -> None:
        arch = file.get("general.architecture", str)
        if not has_layer(file):
            raise ModelError(f"{file.path} has no MTP layer ({arch}.nextn_predict_layers is 0): it cannot draft for itself")
        self.file, self.arch = file, arch
        self._model = ARCHITECTURES[arch](file)  # for the layer description
        f, layer = self._model.f, self._model.mtp
        if layer is None:
            raise ModelError(f"{file.path} is a {arch} model whose MTP layers do not draft here")
        assert isinstance(layer.mixer, (Attention, MLA))
        self._layer, self._attention, self.unscaled = layer, layer.mixer, self._model.unscaled
        self.n_embd, self.eps, count = f.n_embd, f.eps, f.n_block - f.n_layer
        if count != 1:
            raise ModelError(f"{file.path} has {count} MTP layers; files with one are supported, here as in llama.cpp")
        self.layer = f.n_layer
        self.prefix, self.alone = f"blk.{self.layer}.", is_layer_alone(file)
        if f.shape(f"{self.prefix}{QKV}.weight"):
            raise ModelError(
                f"{file.path} has q, k and v of its MTP layer in one matrix, which does not draft here; convert the model again"
            )
        # own embedding, norm and head: internal name -> name in the file
        found = {here: f"{self.prefix}nextn.{name}.weight" for here, name in SHARED_TENSORS.items()}
        if self.alone:
            found = {here: name if name in file.tensors else _end(file, here) for here, name in found.items()}
        self._own = {here: name for here, name in found.items() if name in file.tensors}

    @property
    def title(self) -> str:
        return self.file.path.name if self.alone else f"MTP layer of {self.file.path.name}"

    @property
    def weights(self) -> Weights:
        return self._model.weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._model.weights = weights

    # -- tensors

    def tensors(self) -> list[Spec]:
        n, b, model = self.n_embd, self.prefix, self._model
        out = [Spec(f"{b}nextn.eh_proj.weight", (2 * n, n)), *self._layer.tensors(model.f, b)]
        out += [Spec(f"{b}nextn.{name}.weight", (n,), VECTOR) for name in ("enorm", "hnorm")]
        shapes = {EMBEDDING: ((n, model.n_vocab), ROWS), NORM: ((n,), VECTOR), HEAD: ((n, model.n_vocab), MATMUL)}
        return out + [Spec(here, *shapes[here], None if here == name else name) for here, name in self._own.items()]

    def unused(self) -> dict[str, str]:
        ends = (EMBEDDING, NORM, HEAD)
        theirs = [name for name in self.file.tensors if (name in ends if self.alone else not name.startswith(self.prefix))]
        mine = [f"{self.prefix}nextn.{name}.weight" for name in SHARED_TENSORS.values()]  # possibly equal to the target's
        indexer = [name for name in self.file.tensors if name.startswith(f"{self.prefix}indexer.")]
        out = super().unused() | dict.fromkeys(indexer, "the indexer of an MTP layer, which attends to all rows in llama.cpp, too")
        return out | {name: "the target's are used" for name in (*theirs, *mine) if name not in self._own.values()}

    def groups(self) -> dict[str, tuple[str, ...]]:
        """k and v without q, because context rows need no q."""
        b = self.prefix
        own = {name: members for name, members in self._layer.groups(self._model.f, b).items() if name != f"{b}mixer"}
        if isinstance(self._attention, MLA):
            return own
        return {f"{b}kv": tuple(f"{b}{name}.weight" for name in ("attn_k", "attn_v")), **own}

    def kv_shapes(self) -> list[KVShape]:
        return [self._attention.kv]

    def check_pair(self, target: Decoder) -> None:
        pair = f"the MTP layer of {self.file.path.name} cannot draft for {target.file.path.name}"
        if target.arch != self.arch:
            raise PairError(f"{pair}: it belongs to {self.arch} models, and that one is {target.arch}")
        if self.n_embd != target.n_embd:
            raise PairError(f"{pair}: it was made for hidden states of {self.n_embd} values, the target's have {target.n_embd}")
        if self._own and self._model.n_vocab != target.n_vocab:
            raise PairError(f"{pair}: it has {self._model.n_vocab} tokens, the target has {target.n_vocab}")
        if self.file is not target.file:
            self._own = {here: name for here, name in self._own.items() if not _same(self.file, name, target.file, _end(target.file, here))}

    # -- graphs

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        assert rows.tokens is not None and rows.prev_hidden is not None
        c = self._context(g, rows.positions, None, kv)
        h = c.rms_norm(self._pair(g, rows.tokens, rows.prev_hidden, target), self._layer.mixer_norm)
        if isinstance(self._attention, MLA):
            g.kv_write_rows(kv[0].k, self._attention.stored(c, c.product("attn_kv_a_mqa", h)), rows.kv_rows)
            return
        write_kv(g, *self._attention.keys_values(c, *c.project("kv", h)), kv[0], rows.kv_rows)

    def step(self, g: Graph, rows: ChainInputs, target: Decoder) -> tuple[Tensor, Tensor]:
        """The head and the next draft read the same state."""
        c = self._context(g, rows.positions, rows.attention, rows.kv)
        x = self._pair(g, rows.tokens, rows.prev_hidden, target)
        h = c.rms_norm(x, self._layer.mixer_norm)
        g.expand_norm(h)
        x = g.add(self._attend(c, h), x)
        assert self._layer.ffn is not None
        x = g.add(self._layer.ffn(c, c.rms_norm(x, self._layer.ffn_norm)), x)
        h = g.rms_norm(x, (self.weights if NORM in self._own else target.weights)[NORM], self.eps)
        return h, h

    def _attend(self, c: LayerContext, h: Tensor) -> Tensor:
        if not isinstance(self._attention, MLA):
            return self._attention.attend(c, c.product("attn_q", h), *c.project("kv", h))
        assert c.attention is not None
        q = c.rms_norm(c.product("attn_q_a", h), "attn_q_a_norm")
        return self._attention.attend(c, q, c.product("attn_kv_a_mqa", h), c.attention.mask)

    def _context(self, g: Graph, positions: Tensor, attention: AttentionInputs | None, kv: tuple[KVLayer, ...]) -> LayerContext:
        return LayerContext(g, self.weights, self.layer, self.eps, positions, attention, {self.layer: kv[0]})

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        if HEAD in self._own:
            return head_product(g, self.weights.matrix(HEAD), hidden, self.draft_tokens)
        return target.logits(g, hidden, self.draft_tokens)

    def _pair(self, g: Graph, tokens: Tensor, before: Tensor, target: Decoder) -> Tensor:
        """eh_proj of tokens I32 [T] and hidden states F32 [n_embd, T]; F32 [n_embd, T]."""
        w, b, eps = self.weights, self.prefix, self.eps
        e = g.rows(w[EMBEDDING], tokens) if EMBEDDING in self._own else target.embed(g, tokens)
        h = g.rms_norm(before, w[f"{b}nextn.hnorm.weight"], eps)
        joined = g.concat([g.rms_norm(e, w[f"{b}nextn.enorm.weight"], eps), g.reshape(h, e.ne[0], e.ne[1])])
        return product(g, w.matrix(f"{b}nextn.eh_proj.weight"), joined)


def _end(file: GGUFFile, here: str) -> str:
    """Name of the target's embedding, norm or head in its file."""
    return EMBEDDING if here == HEAD and HEAD not in file.tensors else here


def _same(a: GGUFFile, name_a: str, b: GGUFFile, name_b: str) -> bool:
    """Whether two tensors are equal; then one copy is enough (0.7 GB at 27B)."""
    mine, theirs = a.tensors[name_a], b.tensors.get(name_b)
    if theirs is None or (mine.type, mine.shape, mine.nbytes) != (theirs.type, theirs.shape, theirs.nbytes):
        return False
    with a.read(name_a) as x, b.read(name_b) as y:
        pieces = range(0, mine.nbytes, PIECE)
        return all(np.array_equal(np.frombuffer(x[i : i + PIECE], np.uint8), np.frombuffer(y[i : i + PIECE], np.uint8)) for i in pieces)
