"""dflash2: DFlash with short convolutions along the block, and a selector that walks from draft to draft.

Convolution, around attention and around the FFN of every layer: with c = W_proj h, h the part's normalised input,
    y_t = sum over taps s of (base_s + c_t,s) * x_{t-s}, nothing left of the block; c has one number per group of neighbouring values
with one base and one set of c before the part (x = h) and another after it (x = the output of W_o or W_down).
Selector: of each row's logits u, scaled and capped, the top_k largest are candidates. From the draft a before it, the last token at first:
    draft = argmax over the candidates b of u(b) + <predecessor(a) * W_h h, successor(b)>, h the row's normalised hidden state
llama.cpp scores every pair of neighbouring candidates and walks on the host; the walk needs the rows of the drafts that were chosen alone, and
stays on the device. Context rows have no convolutions.
Source of the formulae: llama.cpp, src/models/dflash.cpp (build_dflash2_conv, build_dflash2_selector) and common/speculative.cpp (the walk).
"""

from dataclasses import replace

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.decoder import Decoder
from ..models.hparams import Hparams
from ..models.layers import head_product, product
from ..models.weights import ROWS, VECTOR, Spec
from .base import TOKEN_MAP, DraftOutput, clamp_nan
from .dflash import HEAD, BlockInputs, DFlash

PREDECESSOR, SUCCESSOR, GATE = "selector_predecessor.weight", "selector_successor.weight", "selector_hidden.weight"
PARTS = ("attn", "ffn")


class DFlash2(DFlash):
    """The drafter; llama.cpp has one method name for DFlash and DFlash 2."""

    by_position = True

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file)
        n, f = self.hp.n_embd, Hparams(file, self.arch)
        for name in (PREDECESSOR, SUCCESSOR):
            if name not in file.tensors or len(file.tensors[name].shape) != 2:
                raise ModelError(f"{file.path} has no matrix {name!r}, which a drafter with a selector needs; convert it again")
        self.taps = f.positive("conv_kernel_size", limit=64)
        self.group_size = f.positive("conv_group_size", limit=n)
        self.rank = f.positive("selector_rank", limit=1 << 16)
        self.top_k = f.positive("selector_top_k", limit=1024)
        self.logit_scale = f.get("logit_scale", float, 0.0)
        if n % self.group_size:
            raise ModelError(f"{file.path}: hidden states of {n} values do not split into groups of {self.group_size} (conv_group_size)")
        if n < self.top_k * (self.top_k + 1):
            raise ModelError(f"{file.path}: selector_top_k is {self.top_k}, which hidden states of {n} values have no room for")

    @property
    def groups_of_values(self) -> int:
        return self.hp.n_embd // self.group_size

    @property
    def extra_nodes(self) -> int:
        """Per convolution 13 for each tap, 2, and 3 with several slots; 13 per draft."""
        return 4 * self.hp.n_layer * (16 * self.taps + 4) + 16 * self.block_size

    # -- tensors

    def tensors(self) -> list[Spec]:
        n, n_vocab = self.hp.n_embd, self.file.tensors[PREDECESSOR].shape[1]
        out = super().tensors()
        out += [Spec(PREDECESSOR, (self.rank, n_vocab), ROWS), Spec(SUCCESSOR, (self.rank, n_vocab), ROWS), Spec(GATE, (n, self.rank))]
        for i in range(self.hp.n_layer):
            for part in PARTS:
                out.append(Spec(f"blk.{i}.{part}_conv_base", (n, self.taps, 2), VECTOR))
                out.append(Spec(f"blk.{i}.{part}_conv_proj.weight", (n, 2 * self.taps * self.groups_of_values)))
        return out

    def vocab_sizes(self) -> dict[str, int]:
        return super().vocab_sizes() | {name: self.file.tensors[name].shape[1] for name in (PREDECESSOR, SUCCESSOR)}

    # -- graphs

    def prepared(self, g: Graph, x: Tensor, rows: BlockInputs) -> BlockInputs:
        """Adds ``zeros``, the row before each block."""
        width = x.ne[1] // rows.slots
        return replace(rows, zeros=g.scale(g.group_tails(x, width, width - 1), 0.0))

    def _into(self, g: Graph, i: int, part: str, x: Tensor, rows: BlockInputs) -> tuple[Tensor, Tensor | None]:
        moving = product(g, self.weights.matrix(f"blk.{i}.{part}_conv_proj.weight"), x)
        return self.convolved(g, i, part, 0, x, moving, rows), moving

    def _out_of(self, g: Graph, i: int, part: str, x: Tensor, moving: Tensor | None, rows: BlockInputs) -> Tensor:
        assert moving is not None
        return self.convolved(g, i, part, 1, x, moving, rows)

    def convolved(self, g: Graph, i: int, part: str, side: int, x: Tensor, moving: Tensor, rows: BlockInputs) -> Tensor:
        """x F32 [n_embd, T], ``moving`` F32 [2 * taps * groups, T] -> F32 [n_embd, T]."""
        groups, size, total = self.groups_of_values, self.group_size, x.ne[1]
        base = g.pick(self.weights[f"blk.{i}.{part}_conv_base"], 2, side)
        assert rows.zeros is not None
        out, width = None, total // rows.slots
        for tap in range(min(self.taps, width)):
            if tap:
                x = g.slice(g.prepend_row(rows.zeros, x), 1, 0, width)
                x = g.reshape(g.cont(x) if rows.slots > 1 else x, self.hp.n_embd, total)
            of_tap = g.cont(g.slice(moving, 0, groups * (tap + self.taps * side), groups))
            kernel = g.repeat(g.reshape(of_tap, 1, groups, total), size, groups, total)
            kernel = g.add(kernel, g.reshape(g.slice(base, 1, tap, 1) if self.taps > 1 else base, size, groups))
            term = g.mul(g.reshape(kernel, self.hp.n_embd, total), x)
            out = term if out is None else g.add(out, term)
        assert out is not None
        return out

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        """Scaled and capped by this file's parameters, not the target's."""
        logits = head_product(g, (self.weights if HEAD in self.weights else target.weights).matrix(HEAD), hidden, self.draft_tokens)
        if self.logit_scale:
            logits = g.scale(logits, self.logit_scale)
        return g.soft_cap(logits, self.hp.softcap)

    def drafts(self, g: Graph, hidden: Tensor, block: Tensor, slots: int, target: Decoder, draws: Tensor | None) -> DraftOutput:
        w, k, rank, count = self.weights, self.top_k, self.rank, hidden.ne[1] // slots
        logits = clamp_nan(g, self.logits(g, hidden, target))
        candidates, scores = g.top_k_unordered(logits, min(k, logits.ne[0]))
        k = candidates.ne[0]
        if TOKEN_MAP in w:
            candidates = g.reshape(g.rows(w[TOKEN_MAP], g.reshape(candidates, k * count * slots)), k, count * slots)
        scores, gates = g.reshape(scores, k, count * slots), product(g, w.matrix(GATE), hidden)
        successors = g.reshape(g.rows(w[SUCCESSOR], g.reshape(candidates, k * count * slots)), k * rank, count * slots)
        token, ids = g.group_firsts(block, block.ne[0] // slots), []
        for i in range(count):
            wanted = g.mul(g.rows(w[PREDECESSOR], token), g.every_nth(gates, count, i))
            fits = g.matmul(g.heads(g.every_nth(successors, count, i), rank, k), g.reshape(wanted, rank, 1, slots))
            scored, tokens = g.add(g.reshape(fits, k, slots), g.every_nth(scores, count, i)), g.every_nth(candidates, count, i)
            best = g.argmax(clamp_nan(g, scored)) if draws is None else g.draw(scored, draws, i * slots, tokens)
            ids.append(g.gather(tokens, best))
            token = g.reshape(ids[-1], slots)
        return DraftOutput(tuple(ids), logits)
