"""Teacher-forced acceptance: how many drafts a drafter gets right at many places of a known text, all in one graph.

The text is the target's own greedy one, so a draft is accepted exactly where it equals the text. Every block sees the context rows before
its anchor and itself, as when it is drafted while running; because nothing is verified, a drafter read with other hyper-parameters costs
one graph per text, and the same blocks are compared draft by draft.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..cache.kv import KVCache, padded
from ..drafters.base import ContextInputs
from ..drafters.dflash import BlockInputs, Hparams
from ..ggml.device import Backend
from ..ggml.graph import Graph, GraphAllocator
from ..ggml.step_io import StepFields, StepIO
from .evidence import Passage

JUDGED = 6  # drafts of each block whose likelihood is compared
FLOOR = 1e-6  # smallest probability that is told from 0
BEST = 8  # of a row's choices, whose ranks are looked at
KNOWN = 32  # tokens that are known behind every anchor
MAX_LOGITS = 1 << 26  # values of one graph's draft logits


@dataclass(frozen=True)
class Reading:
    """One way to read a drafter.

    Attributes:
        hp: its hyper-parameters.
        causal: whether a row of the block sees only rows before it.
        feature_scale: what the target's hidden states are multiplied with first.
        features_of: 1 gives every passage the hidden states of the next one.
        capped: whether draft logits are capped as the files say.
        ranked: whether the best choices of every row are looked at, too.
    """

    hp: Hparams
    causal: bool = False
    feature_scale: float = 1.0
    features_of: int = 0
    capped: bool = True
    ranked: bool = False

    def but(self, **changes: Any) -> "Reading":
        """This reading with other hyper-parameters."""
        return replace(self, hp=replace(self.hp, **changes))


@dataclass(frozen=True)
class Measured:
    """Attributes:
    matched: I32 [blocks], accepted drafts of each block.
    drafts: I32 [blocks * (width - 1)], the drafted ids.
    likelihood: F32 [blocks, JUDGED], log of the probability that the drafter gives to what really comes, for the first drafts of each block.
    finite: whether all hidden states of all blocks were finite.
    ranks, behind: I32 [blocks], as ``ranks_of`` gives them, of readings that are ``ranked``; empty otherwise.
    """

    matched: np.ndarray
    drafts: np.ndarray
    likelihood: np.ndarray
    finite: bool
    ranks: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    behind: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def tokens_per_block(self) -> float:
        """Mean tokens that a block yields, the target's own one included."""
        return 1.0 + float(self.matched.mean())


class Probe:
    """Measures readings of one drafter on passages. Owns its graph memory; borrows models, weights and the backend."""

    def __init__(self, backend: Backend, target, drafter, passages: list[Passage], blocks: int = 24):
        self.backend, self.target, self.drafter, self.passages = backend, target, drafter, passages
        self.blocks = max(4, min(blocks, MAX_LOGITS // (target.n_vocab * drafter.hp.block_size)))
        self.allocator = GraphAllocator(backend, "probe")

    def measure(self, reading: Reading, passages: slice = slice(None)) -> Measured:
        """Reads the drafter as ``reading`` says, at the same anchors for every reading; ``passages`` restricts it to some.

        Raises:
            EngineError: no memory for the blocks of one passage.
        """
        parts = [self._passage(reading, i) for i in range(len(self.passages))[passages]]
        matched, drafts, likelihood, ranks, behind = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("matched", "drafts", "likelihood", "ranks", "behind")
        )
        return Measured(matched, drafts, likelihood, all(part.finite for part in parts), ranks, behind)

    def anchors(self, passage: Passage) -> np.ndarray:
        """Positions of last tokens, spread over the continuation as far as the longest block's drafts are known."""
        last = max(passage.n_prompt, len(passage.tokens) - 1 - KNOWN)
        return np.unique(np.linspace(passage.n_prompt, last, self.blocks).astype(int))

    def _passage(self, reading: Reading, index: int) -> Measured:
        hp, passage = reading.hp, self.passages[index]
        anchors = self.anchors(passage)
        n_context, n_rows = int(anchors.max()), hp.block_size * len(anchors)
        features = self._features(reading, index, n_context)
        span = padded(n_context + n_rows)
        room = features.nbytes + 8 * BEST * n_rows + 2 * span * n_rows * len(set(hp.window)) + 64 * (n_context + n_rows) + 8192
        with ExitStack() as stack:
            kv = stack.enter_context(closing(KVCache(self.backend, self.drafter.kv_shapes(), span, 1)))
            io = stack.enter_context(closing(StepIO(self.backend, room)))
            graph = stack.enter_context(closing(Graph(self.allocator)))
            fields = StepFields(io, graph)
            self._build(graph, fields, reading, n_context, n_rows, features.shape[1], span, kv)
            graph.plan()
            fields.host["features"][:] = features.ravel()
            fields.host["at"][:] = fields.host["rows"][:] = np.arange(n_context)
            self._fill_blocks(fields.host, reading, passage, anchors, n_context, span)
            fields.run()
            drafts = fields.host["drafts"].reshape(len(anchors), hp.block_size)[:, 1:].copy()
            chances = fields.host["chances"].reshape(len(anchors), hp.block_size)[:, 1 : 1 + JUDGED]
            likelihood = np.log(np.maximum(np.nan_to_num(chances), FLOOR))
            finite = bool(np.isfinite(fields.host["sum"]).all())
            ranks = behind = np.empty(0, np.int32)
            if reading.ranked:
                ids, values = (fields.host[name].reshape(len(anchors), hp.block_size, -1)[:, 1:] for name in ("best", "best_logits"))
                best = np.take_along_axis(ids, np.argsort(-values, axis=-1, kind="stable"), -1)
                ranks, behind = ranks_of(best, drafts, passage.tokens, anchors)
        return Measured(_matched(drafts, passage.tokens, anchors), drafts.ravel(), likelihood, finite, ranks, behind)

    def _features(self, reading: Reading, index: int, n_context: int) -> np.ndarray:
        """F32 [n_context, n_embd * layers]."""
        source = self.passages[(index + reading.features_of) % len(self.passages)].features
        parts = [np.resize(source[v], (n_context, source[v].shape[1])) for v in reading.hp.target_layers]
        return np.concatenate(parts, axis=1) * np.float32(reading.feature_scale)

    def _build(
        self, g: Graph, f: StepFields, reading: Reading, n_context: int, n_rows: int, n_features: int, span: int, kv: KVCache
    ) -> None:
        hp, model = reading.hp, _as_read(self.drafter, reading.hp)
        context = f.input("features", "f32", n_features, n_context)
        at, rows = f.input("at", "i32", n_context), f.input("rows", "i64", n_context)
        block, block_at, block_rows = (
            f.input("block", "i32", n_rows),
            f.input("block_at", "i32", n_rows),
            f.input("block_rows", "i64", n_rows),
        )
        coming = f.input("coming", "i32", n_rows)
        masks = {window: f.input(f"mask_{window}", "f16", span, n_rows) for window in set(hp.window)}
        model.context_rows(g, ContextInputs(None, [context], None, at, rows), kv.layers, self.target)
        hidden = model.denoise(
            g, BlockInputs(block, block_at, block_rows, tuple(masks[w] for w in hp.window), span, kv.layers), self.target
        )
        f.output("sum", "f32", g.sum_rows(hidden))
        logits = self._logits(g, model, hidden, reading.capped)
        f.output("drafts", "i32", g.argmax(logits))
        if reading.ranked:
            best, values = g.top_k_unordered(logits, min(BEST, logits.ne[0]))
            f.output("best", "i32", best)
            f.output("best_logits", "f32", values)
        f.output("chances", "f32", g.rows(g.reshape(g.softmax(logits), 1, logits.ne[0] * n_rows), coming))

    def _logits(self, g: Graph, model, hidden, capped: bool):
        if capped:
            return model.logits(g, hidden, self.target)
        target = copy(self.target)
        target.softcap = 0.0
        return _as_read(model, replace(model.hp, softcap=0.0)).logits(g, hidden, target)

    def _fill_blocks(self, host: dict, reading: Reading, passage: Passage, anchors: np.ndarray, n_context: int, span: int) -> None:
        width = reading.hp.block_size
        positions = anchors[:, None] + np.arange(width)
        ids = np.full(positions.shape, reading.hp.mask_token)
        ids[:, 0] = passage.tokens[anchors]
        host["block"][:], host["block_at"][:] = ids.ravel(), positions.ravel()
        host["block_rows"][:] = n_context + np.arange(ids.size)
        expected = passage.tokens[np.minimum(positions, len(passage.tokens) - 1)]
        host["coming"][:] = expected.ravel() + np.arange(ids.size) * self.target.n_vocab
        for window in set(reading.hp.window):
            host[f"mask_{window}"][:] = _mask(anchors, width, n_context, span, window, reading.causal).ravel()

    def close(self) -> None:
        self.allocator.close()


def _as_read(model, hp):
    """The model with other hyper-parameters over the same weights."""
    out = copy(model)
    out.hp = hp
    return out


def _mask(anchors: np.ndarray, width: int, n_context: int, span: int, window: int, causal: bool) -> np.ndarray:
    """F16 [rows, span]: 0 where a block row sees a cache row. Row n_context + b width + j holds row j of block b."""
    n_rows = width * len(anchors)
    block, inside = np.divmod(np.arange(n_rows), width)
    query = anchors[block] + inside
    key = np.concatenate([np.arange(n_context), query])
    seen = np.zeros((n_rows, span), bool)
    seen[:, :n_context] = key[None, :n_context] < anchors[block][:, None]
    own = block[:, None] == block[None, :]
    seen[:, n_context : n_context + n_rows] = own & (inside[None, :] <= inside[:, None]) if causal else own
    if window:
        seen[:, : n_context + n_rows] &= query[:, None] - key[None, :] < window
    return np.where(seen, np.float16(0), np.float16(-np.inf))


def _matched(drafted: np.ndarray, tokens: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """How long the prefix of each block's drafts is that equals the text behind its anchor."""
    out = np.zeros(len(anchors), np.int32)
    for b, anchor in enumerate(anchors):
        known = tokens[anchor + 1 : anchor + 1 + drafted.shape[1]]
        wrong = np.flatnonzero(drafted[b, : len(known)] != known)
        out[b] = wrong[0] if wrong.size else len(known)
    return out


def ranks_of(
    best: np.ndarray, drafts: np.ndarray, tokens: np.ndarray, anchors: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of each block, I32 [blocks] each: the target's token's rank among the drafter's ``best``, I32 [blocks, drafts, BEST] from the best on, at
    the first wrong one of its ``drafts``, I32 [blocks, drafts]: 2 to BEST, 0 if it is none of them, -1 if none was wrong where the text is
    known; and whether the draft behind that one is right, -1 if nobody knows. ``tokens``: the text, ``anchors``: where blocks begin in it."""
    ranks, behind = np.full(len(anchors), -1, np.int32), np.full(len(anchors), -1, np.int32)
    for b, anchor in enumerate(anchors):
        known = tokens[anchor + 1 : anchor + 1 + drafts.shape[1]]
        wrong = np.flatnonzero(drafts[b, : len(known)] != known)
        if not wrong.size:
            continue
        at = int(wrong[0])
        place = np.flatnonzero(best[b, at] == known[at])
        ranks[b] = place[0] + 1 if place.size else 0
        if at + 1 < len(known):
            behind[b] = drafts[b, at + 1] == known[at + 1]
    return ranks, behind
