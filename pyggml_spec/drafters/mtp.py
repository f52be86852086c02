"""mtp: the additional layers that models of LAYERS were trained with, to predict one more token each; most have one.

A layer's row at position p is the pair (x_p, h_{p-1}): a token, and the target's hidden state of the previous token, after output_norm or, of step35
and mimo2, before it.
    x = eh_proj [rms(E[x_p]; enorm) ; rms(h_{p-1}; hnorm)]
    x += attention(rms(x; attn_norm));  x += FFN(rms(x; post_attention_norm));  h = rms(x; shared_head_norm or output_norm)
    draft = argmax(head h), and h (or the x before it) is carried to the next draft.
At the first position h is zero. K and V depend on x alone, so that a committed row needs neither attention nor FFN: llama.cpp computes
the whole layer there, which gives the same ids. With several layers the i-th draft is the i-th layer's, and there are no more drafts than layers;
each layer has K/V of its own of every row, the drafts' included.
The layers are in the target's file, or in one of their own whose architecture is the target's and which has its own embedding and head.
Source of the formulae: llama.cpp, src/models/qwen35.cpp (graph_mtp) and common/speculative.cpp (which rows are paired).
"""

from collections.abc import Iterator

import numpy as np

from ..errors import ModelError, PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.base import AttentionInputs, KVLayer, KVShape, PictureInputs
from ..models.decoder import ARCHITECTURES, Decoder
from ..models.layers import QKV, ROPE_FREQS, Attention, Layer, LayerContext, head_product, product, write_kv
from ..models.mla import MLA
from ..models.model import ATTENTION, SCALED
from ..models.weights import MATMUL, ROWS, VECTOR, Spec, Weights
from .base import ChainInputs, ContextInputs, Drafter

# architectures whose layers draft here
LAYERS = ("deepseek2", "deepseek32", "glm-dsa", "glm4moe", "hy_v3", "mimo2", "qwen35", "qwen35moe", "qwen3next", "step35")
EMBEDDING, NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
SHARED_TENSORS = {
    EMBEDDING: ("nextn.embed_tokens",),
    NORM: ("nextn.shared_head_norm", "layer_output_norm"),
    HEAD: ("nextn.shared_head_head",),
}
PIECE = 1 << 24  # bytes compared at a time


def has_layer(file: GGUFFile) -> bool:
    """Whether the file has a supported MTP layer; targets whose layer was left out keep its key."""
    arch = file.get("general.architecture", str)
    return arch in LAYERS and file.get(f"{arch}.nextn_predict_layers", int, 0) > 0 and any(".nextn." in name for name in file.tensors)


def is_layer_alone(file: GGUFFile) -> bool:
    """Whether the file has only an MTP layer, by llama.cpp's rule."""
    return has_layer(file) and "blk.0.attn_norm.weight" not in file.tensors


class MTP(Drafter):
    """The drafter, a chain. ``prefix``: of the first layer's tensors."""

    method = "draft-mtp"
    chained = True
    block_size, n_layer = 16, 1  # instances of several layers have as many drafts
    scaled = (*SCALED, "eh_proj")
    biased = ATTENTION

    def __init__(self, file: GGUFFile) -> None:
        arch = file.get("general.architecture", str)
        if not has_layer(file):
            raise ModelError(f"{file.path} has no MTP layer ({arch}.nextn_predict_layers is 0): it cannot draft for itself")
        self.file, self.arch = file, arch
        self._model = ARCHITECTURES[arch](file)  # for the descriptions of the layers
        f, layers = self._model.f, self._model.mtp
        self.n_embd, self.eps, count = f.n_embd, f.eps, f.n_block - f.n_layer
        if not layers:
            raise ModelError(f"{file.path} is a {arch} model whose MTP layers do not draft here")
        if count != len(layers):
            raise ModelError(f"{file.path} has {count} MTP layers; {arch} files with {len(layers)} are supported")
        self._layers, self.unscaled, self.n_layer, self.alone = layers, self._model.unscaled, count, is_layer_alone(file)
        self.prefix = f"blk.{f.n_layer}."
        self._first, self.window = f.n_layer, self._model.window if any(layer.mixer.sliding for layer in layers) else 0
        if count > 1:
            self.block_size = 1 + count
        if self._model.mtp_before_norm:
            self.captures = (f.n_layer,)
        self._own = [self._found(i) for i in range(count)]

    def _found(self, i: int) -> dict[str, str]:
        """The own embedding, norm and head of a layer: common name -> name in the file."""
        tensors, found = self.file.tensors, dict[str, str]()
        for here, ends in SHARED_TENSORS.items():
            names = [name for end in ends if (name := f"{self._prefix(i)}{end}.weight") in tensors]
            name = next(iter(names), _end(self.file, here) if self.alone else "")
            if name in tensors:
                found[here] = name
        return found

    def _prefix(self, i: int) -> str:
        return f"blk.{self._first + i}."

    def _parts(self) -> Iterator[tuple[int, str, Layer, Attention | MLA]]:
        for i, layer in enumerate(self._layers):
            assert isinstance(layer.mixer, (Attention, MLA))
            yield i, self._prefix(i), layer, layer.mixer

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
        n, model = self.n_embd, self._model
        shapes = {EMBEDDING: ((n, model.n_vocab), ROWS), NORM: ((n,), VECTOR), HEAD: ((n, model.n_vocab), MATMUL)}
        out: dict[str, Spec] = {}
        for i, b, layer, _ in self._parts():
            specs = [Spec(f"{b}nextn.eh_proj.weight", (2 * n, n)), *layer.tensors(model.f, b)]
            specs += [Spec(f"{b}nextn.{name}.weight", (n,), VECTOR) for name in ("enorm", "hnorm")]
            specs += [Spec(self._name(i, here), *shapes[here], name) for here, name in self._own[i].items()]
            out |= {spec.name: spec for spec in specs}
        return [*out.values()]

    def _name(self, i: int, here: str) -> str:
        """Of a tensor of SHARED_TENSORS among the weights; a head may be the embedding of a file of its own."""
        return HEAD if here == HEAD and self._own[i][here] == EMBEDDING else self._own[i][here]

    def unused(self) -> dict[str, str]:
        ends, prefixes = (EMBEDDING, NORM, HEAD), tuple(self._prefix(i) for i in range(self.n_layer))
        theirs = [name for name in self.file.tensors if (name in ends if self.alone else not name.startswith(prefixes))]
        mine = [
            f"{b}{end}.weight" for b in prefixes for names in SHARED_TENSORS.values() for end in names
        ]  # possibly equal to the target's
        indexer = [name for name in self.file.tensors if name.startswith(tuple(f"{b}indexer." for b in prefixes))]
        out = super().unused() | dict.fromkeys(indexer, "the indexer of an MTP layer, which attends to all rows in llama.cpp, too")
        if self.alone:
            out |= dict.fromkeys([ROPE_FREQS], "the target's are used")
        used = {name for own in self._own for name in own.values()}
        return out | {name: "the target's are used" for name in (*theirs, *mine) if name not in used}

    def groups(self) -> dict[str, tuple[str, ...]]:
        """k and v without q, because context rows need no q."""
        out: dict[str, tuple[str, ...]] = {}
        for _, b, layer, mixer in self._parts():
            out |= {name: members for name, members in layer.groups(self._model.f, b).items() if name != f"{b}mixer"}
            if isinstance(mixer, Attention) and not mixer.is_packed(self._model.f, b):
                out[f"{b}kv"] = tuple(f"{b}{name}.weight" for name in ("attn_k", "attn_v"))
        return out

    def kv_shapes(self) -> list[KVShape]:
        return [mixer.kv for *_, mixer in self._parts()]

    def check_pair(self, target: Decoder) -> None:
        pair = f"the MTP layer of {self.file.path.name} cannot draft for {target.file.path.name}"
        if target.arch != self.arch:
            raise PairError(f"{pair}: it belongs to {self.arch} models, and that one is {target.arch}")
        if self.n_embd != target.n_embd:
            raise PairError(f"{pair}: it was made for hidden states of {self.n_embd} values, the target's have {target.n_embd}")
        if any(self._own) and self._model.n_vocab != target.n_vocab:
            raise PairError(f"{pair}: it has {self._model.n_vocab} tokens, the target has {target.n_vocab}")
        if self.file is not target.file:
            self._own = [
                {here: name for here, name in own.items() if not _same(self.file, name, target.file, _end(target.file, here))}
                for own in self._own
            ]

    # -- graphs

    def carry(self, g: Graph, hidden: Tensor, features: list[Tensor], target: Decoder) -> Tensor:
        return features[0] if self.captures else hidden

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        assert rows.tokens is not None and rows.prev_hidden is not None
        for i, layer in enumerate(self._layers):
            kv_rows = rows.sliding_rows if layer.mixer.sliding and rows.sliding_rows is not None else rows.kv_rows
            self._write(g, i, rows.tokens, rows.prev_hidden, rows.positions, kv_rows, kv, target, rows.pictures)

    def _write(
        self, g: Graph, i: int, tokens: Tensor, before: Tensor, positions: Tensor, kv_rows: Tensor, kv: tuple[KVLayer, ...], target: Decoder,
        pictures: PictureInputs | None = None,
    ) -> None:  # fmt: skip
        """The K/V rows of a layer."""
        c, layer, mixer = self._context(g, i, positions, None, kv, target), self._layers[i], self._layers[i].mixer
        h = c.rms_norm(self._pair(g, i, tokens, before, target, pictures), layer.mixer_norm)
        if isinstance(mixer, MLA):
            g.kv_write_rows(kv[i].k, mixer.stored(c, c.product("attn_kv_a_mqa", h)), kv_rows)
            return
        assert isinstance(mixer, Attention)
        inputs = mixer.unpacked(c, c.product(QKV, h))[1:] if QKV in c else c.project("kv", h)
        write_kv(g, *mixer.keys_values(c, *inputs), kv[i], kv_rows)

    def step(self, g: Graph, rows: ChainInputs, target: Decoder) -> tuple[Tensor, Tensor]:
        """The next draft reads the state that the head reads, or the one before its norm."""
        i = rows.number if self.n_layer > 1 else 0
        seen = [rows.sliding if layer.mixer.sliding and rows.sliding is not None else rows.attention for layer in self._layers]
        for later in range(i + 1, min(rows.drafts, self.n_layer)):
            self._write(g, later, rows.tokens, rows.prev_hidden, rows.positions, seen[later].kv_rows, rows.kv, target)
        layer, c = self._layers[i], self._context(g, i, rows.positions, seen[i], rows.kv, target)
        x = self._pair(g, i, rows.tokens, rows.prev_hidden, target)
        h = c.rms_norm(x, layer.mixer_norm)
        g.expand_norm(h)
        x = g.add(self._attend(c, layer, h), x)
        assert layer.ffn is not None
        x = g.add(layer.ffn(c, c.rms_norm(x, layer.ffn_norm)), x)
        h = g.rms_norm(x, self.weights[self._name(i, NORM)] if NORM in self._own[i] else target.weights[NORM], self.eps)
        return h, x if self.captures else h

    def _attend(self, c: LayerContext, layer: Layer, h: Tensor) -> Tensor:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            if QKV in c:
                return mixer.attend(c, *mixer.unpacked(c, c.product(QKV, h)), *self._gate(c, h))
            return mixer.attend(c, c.product("attn_q", h), *c.project("kv", h), *self._gate(c, h))
        assert isinstance(mixer, MLA) and c.attention is not None
        q = c.rms_norm(c.product("attn_q_a", h), "attn_q_a_norm")
        return mixer.attend(c, q, c.product("attn_kv_a_mqa", h), c.attention.mask)

    def _gate(self, c: LayerContext, h: Tensor) -> list[Tensor]:
        return [c.product("attn_gate", h)] if "attn_gate" in c else []

    def _context(
        self, g: Graph, i: int, positions: Tensor, attention: AttentionInputs | None, kv: tuple[KVLayer, ...], target: Decoder
    ) -> LayerContext:
        caches, layer = {self._first + i: kv[i]}, self._first + i
        return LayerContext(g, self.weights, layer, self.eps, positions, attention, caches, factors=target.weights.get(ROPE_FREQS))

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        return self.draft_logits(g, hidden, target, 0)

    def draft_logits(self, g: Graph, hidden: Tensor, target: Decoder, number: int) -> Tensor:
        i = number if self.n_layer > 1 else 0
        if HEAD in self._own[i]:
            return head_product(g, self.weights.matrix(self._name(i, HEAD)), hidden, self.draft_tokens)
        return target.logits(g, hidden, self.draft_tokens)

    def _pair(self, g: Graph, i: int, tokens: Tensor, before: Tensor, target: Decoder, pictures: PictureInputs | None = None) -> Tensor:
        """eh_proj of tokens I32 [T] and hidden states F32 [n_embd, T]; F32 [n_embd, T]."""
        w, b, eps = self.weights, self._prefix(i), self.eps
        e = g.rows(w[self._name(i, EMBEDDING)], tokens) if EMBEDDING in self._own[i] else target.embed(g, tokens)
        e = e if pictures is None else pictures.mixed(g, e)
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
