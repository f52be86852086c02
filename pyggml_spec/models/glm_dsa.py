"""glm-dsa: deepseek2 with an indexer that picks the rows which attention reads (GLM 5, 5.1, 5.2).

Per layer, beside what deepseek2 computes, with a = rms(W_qa h; attn_q_a_norm) and n_H heads of D values:
    key = norm(W_ik h; k_norm), one for all heads, stored per position;  u = W_iq a, [D, n_H];  the first values of both are rotated
    key and u are multiplied by an orthonormal Hadamard matrix (which changes no product, but how rows are quantised)
    score_j = sum over heads of (W_p h)_i / sqrt(D n_H) * max(u_i . key_j, 0);  attention sees the top_k visible positions of the largest score
Where a span has no more rows than top_k, all of them are chosen, and no score is computed. Layers that are not full have no indexer: they see what
the last full layer before them chose (GLM 5.2).
Source of the formulae: llama.cpp, src/models/glm-dsa.cpp.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from . import deepseek2
from .base import KVShape, Rows
from .blocks import product
from .hparams import inverse_root, positive
from .model import ATTENTION, SCALED
from .moe import SIGMOID
from .weights import VECTOR, Spec

NORM_EPS = 0.0  # llama.cpp's graph of this architecture sets none
SIZES = (64, 128, 256, 512)  # of rows that one Hadamard matrix of llama.cpp's turns
LONG = 1 << 20  # tokens from which a file without a list of full layers is one of GLM 5.2
LAYERS_52 = 78


@dataclass(frozen=True)
class Hparams(deepseek2.Hparams):
    """Those of deepseek2; ``index_heads`` heads of ``index_size`` values choose ``top_k`` positions; ``full``: the layers that have an indexer."""

    index_heads: int = 0
    index_size: int = 0
    top_k: int = 0
    full: tuple[bool, ...] = ()

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str) -> "Hparams":
        hp = super().from_gguf(file, arch)
        assert isinstance(hp, cls)
        size = positive(file, f"{arch}.attention.indexer.key_length", limit=4096)
        if size not in SIZES or size < hp.rope.n_rot:
            raise ModelError(
                f"{file.path}: attention.indexer.key_length is {size}, but it has to be one of {', '.join(map(str, SIZES))}, "
                f"and no less than the {hp.rope.n_rot} values that are rotated (rope.dimension_count)"
            )
        return replace(
            hp,
            index_heads=positive(file, f"{arch}.attention.indexer.head_count", limit=1024),
            index_size=size,
            top_k=positive(file, f"{arch}.attention.indexer.top_k", limit=(1 << 31) - 1),
            full=cls._full(file, arch, hp.n_layer, hp.context_length),
        )

    @staticmethod
    def _full(file: GGUFFile, arch: str, n_layer: int, context_length: int) -> tuple[bool, ...]:
        key = f"{arch}.attention.indexer.types"
        if isinstance(file.metadata.get(key), np.ndarray):
            listed = file.array(key)
            assert listed is not None
            full = tuple(bool(v) for v in listed)
        elif key in file.metadata:
            full = (bool(file.get(key, int)),) * n_layer
        elif context_length < LONG:
            full = (True,) * n_layer
        else:
            full = tuple(i < 2 or (i < LAYERS_52 and i % 4 == 2) for i in range(n_layer))
        if len(full) != n_layer:
            raise ModelError(f"{file.path}: attention.indexer.types names {len(full)} of {n_layer} layers; convert the model again")
        if not full[0]:
            raise ModelError(
                f"{file.path}: attention.indexer.types gives layers an earlier one's choice, but the first layer has none to see"
            )
        return full

    @staticmethod
    def _lora_of_q(file: GGUFFile, arch: str, n_layer: int) -> int:
        return positive(file, f"{arch}.attention.q_lora_rank")

    @staticmethod
    def _router(file: GGUFFile, n_layer: int) -> int:
        return SIGMOID

    @staticmethod
    def _log_multiplier(file: GGUFFile, arch: str) -> float:
        return 0.0  # which llama.cpp does not read for this architecture


class GlmDsa(deepseek2.DeepSeek2):
    """The glm-dsa target."""

    arch = "glm-dsa"
    hp: Hparams
    hparams = Hparams
    scaled = tuple(name for name in SCALED if name not in ATTENTION)  # an indexer's attn_k has none
    unscaled = frozenset(("output",))

    # -- what it reads

    def tensors(self) -> list[Spec]:
        hp, out = self.hp, super().tensors()
        shapes = {
            "attn_k": (self.n_embd, hp.index_size),
            "attn_q_b": (hp.n_lora_q, hp.index_heads * hp.index_size),
            "proj": (self.n_embd, hp.index_heads),
        }
        for i in (i for i, full in enumerate(hp.full) if full):
            out += [Spec(f"blk.{i}.indexer.{name}.weight", shape) for name, shape in shapes.items()]
            out += [Spec(f"blk.{i}.indexer.k_norm.{kind}", (hp.index_size,), VECTOR) for kind in ("weight", "bias")]
        return out

    def idle(self) -> dict[str, str]:
        shared = tuple(f"blk.{i}.indexer." for i, full in enumerate(self.hp.full) if not full)
        own = [name for name in self.file.tensors if shared and name.startswith(shared)]
        return super().idle() | dict.fromkeys(own, "the indexer of a layer that sees what another one's chose (attention.indexer.types)")

    def kv_shapes(self) -> list[KVShape]:
        hp = self.hp
        return [
            replace(shape, index=hp.index_size, index_heads=hp.index_heads) if full else shape
            for shape, full in zip(super().kv_shapes(), hp.full, strict=True)
        ]

    # -- the graph

    def forward(self, g: Graph, rows: Rows, capture: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        hp, w = self.hp, self.weights
        x, seen, captured = self._first(g, rows.tokens), None, {}
        for i in range(hp.n_layer):
            rows, x, seen = rows.at(i, x, None if hp.full[i] else seen)
            captured[i] = x
            h = g.rms_norm(x, w[f"blk.{i}.attn_norm.weight"], hp.eps)
            q, made = self._projected(g, h, i)
            if hp.full[i]:
                seen = self._chosen(g, rows, h, q, i)
            x = g.add(self._attend(g, rows, q, made, rows.mask if seen is None else seen, i), x)
            x = g.add(self._ffn(g, g.rms_norm(x, w[f"blk.{i}.{self.ffn_norm}.weight"], hp.eps), i), x)
        captured[hp.n_layer] = x
        return g.rms_norm(x, w["output_norm.weight"], hp.eps), [captured[v] for v in capture]

    def _chosen(self, g: Graph, rows: Rows, h: Tensor, q: Tensor, i: int) -> Tensor | None:
        """Stores the indexer's keys, and gives the mask of the positions that it chooses; None where these are all of the span."""
        hp, w, b, kv = self.hp, self.weights, f"blk.{i}.indexer.", rows.kv[i]
        assert kv.indexer is not None and kv.rotation_indexer is not None
        key = product(g, w.matrix(f"{b}attn_k.weight"), h)
        key = g.layer_norm(key, w[f"{b}k_norm.weight"], w[f"{b}k_norm.bias"], NORM_EPS)
        key = g.turned(hp.rope(g, g.heads(key, hp.index_size, 1), rows.positions), kv.rotation_indexer)
        g.kv_write_rows(kv.indexer, key, rows.kv_rows)
        if rows.span <= hp.top_k:
            return None
        asked = g.heads(product(g, w.matrix(f"{b}attn_q_b.weight"), q), hp.index_size, hp.index_heads)
        asked = g.turned(hp.rope(g, asked, rows.positions), kv.rotation_indexer)
        weights = g.scale(product(g, w.matrix(f"{b}proj.weight"), h), inverse_root(hp.index_size * hp.index_heads))
        return g.best_of_mask(rows.mask, g.index_scores(asked, kv.indexer, weights, rows.mask, rows.span), hp.top_k)
