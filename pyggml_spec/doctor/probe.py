"""Teacher-forced acceptance: drafts at many positions of a known text in one graph.

The text is the target's greedy output, so a draft is accepted where it equals the text. Each block sees the context before its anchor and
itself, as in decoding. Nothing is verified, so a reading with other hyper-parameters costs one graph per text.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.kv import KVCache, padded
from ..drafters.base import ContextInputs
from ..drafters.dflash import BlockInputs, Hparams
from ..engine.engine import generate
from ..engine.runner import ModelRunner
from ..engine.sequence import PLAIN, GenerationOptions
from ..ggml.device import Backend
from ..ggml.graph import Graph, GraphAllocator
from ..ggml.step_io import StepFields, StepIO
from ..loading import DEMO
from ..models.base import AttentionInputs

JUDGED = 6  # drafts per block whose likelihood is compared
FLOOR = 1e-6  # smallest probability distinguished from 0
BEST = 8  # top choices per row whose rank is recorded
KNOWN = 32  # known tokens after every anchor
MAX_LOGITS = 1 << 26  # draft logits per graph
PROMPTS = DEMO / "prompts.jsonl"


@dataclass(frozen=True)
class Passage:
    """A prompt and the target's greedy continuation.

    Attributes:
        tokens: I32 [T], prompt and continuation.
        n_prompt: tokens of the prompt.
        features: F32 [T, n_embd] by target layer: the layer's input.
    """

    tokens: np.ndarray
    n_prompt: int
    features: dict[int, np.ndarray]


def held_out_prompts(count: int, path: Path = PROMPTS) -> list[str]:
    """The first ``count`` held-out prompts of the embedded set."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines][:count]


def write_passages(engine: ModelRunner, prompts: Sequence[Sequence[int]], layers: Sequence[int], tokens: int) -> list[Passage]:
    """Continues each prompt by ``tokens`` tokens (ignoring end tokens), then captures the inputs of ``layers``."""
    passages = []
    for prompt in prompts:
        engine.reset(drafting=False)
        blocks = generate(engine, prompt, GenerationOptions(tokens, PLAIN, ignore_end=True))
        passages.append(capture(engine, np.array([*prompt, *chain.from_iterable(blocks)], np.int32), len(prompt), layers))
    return passages


def capture(engine: ModelRunner, tokens: np.ndarray, n_prompt: int, layers: Sequence[int]) -> Passage:
    """A passage of ``tokens``, I32 [T], with the inputs of ``layers``."""
    engine.reset(drafting=False)
    _, features = engine.capture(tokens.tolist(), layers)
    return Passage(tokens, n_prompt, dict(zip(layers, features)))


@dataclass(frozen=True)
class Reading:
    """How a drafter is read.

    Attributes:
        hp: hyper-parameters.
        feature_scale: factor on the target's hidden states.
        features_of: 1 uses the hidden states of the next passage.
        capped: apply the logit soft-cap of the files.
        ranked: record the rank of the target's token as well.
    """

    hp: Hparams
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
    matched: I32 [blocks], accepted drafts per block.
    drafts: I32 [blocks * (width - 1)], draft ids.
    likelihood: F32 [blocks, JUDGED], log probability of the true tokens under the drafter.
    finite: all hidden states are finite.
    ranks, next_right: I32 [blocks], as ``ranks_of`` returns them, if ``ranked``; otherwise empty.
    """

    matched: np.ndarray
    drafts: np.ndarray
    likelihood: np.ndarray
    finite: bool
    ranks: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    next_right: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def tokens_per_block(self) -> float:
        """Mean tokens per block, including the target's own."""
        return 1.0 + float(self.matched.mean())

    def expected(self, width: int) -> float:
        """The same of blocks of ``width`` rows."""
        return 1.0 + float(np.minimum(self.matched, width - 1).mean())


class Probe:
    """Measures readings of one drafter on passages. Owns its graph memory; borrows models, weights and backend."""

    def __init__(self, backend: Backend, target, drafter, passages: list[Passage], blocks: int = 24):
        self.backend, self.target, self.drafter, self.passages = backend, target, drafter, passages
        self.blocks = max(4, min(blocks, MAX_LOGITS // (target.n_vocab * drafter.hp.block_size)))
        self.allocator = GraphAllocator(backend, "probe")

    def measure(self, reading: Reading, passages: slice = slice(None)) -> Measured:
        """Measures ``reading`` at the same anchors for every reading; ``passages`` restricts the texts. Raises EngineError: no memory for
        the blocks of one passage."""
        parts = [self._passage(reading, i) for i in range(len(self.passages))[passages]]
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0]) if name != "finite"}
        return Measured(**joined, finite=all(part.finite for part in parts))

    def anchors(self, passage: Passage) -> np.ndarray:
        """Anchor positions, spread over the continuation."""
        last = max(passage.n_prompt, len(passage.tokens) - 1 - KNOWN)
        return np.unique(np.linspace(passage.n_prompt, last, self.blocks).astype(int))

    def _passage(self, reading: Reading, index: int) -> Measured:
        hp, passage = reading.hp, self.passages[index]
        anchors = self.anchors(passage)
        n_context, n_rows = int(anchors.max()), hp.block_size * len(anchors)
        features = self._features(reading, index, n_context)
        span = padded(n_context + n_rows)
        room = (
            features.nbytes + 8 * BEST * n_rows + 2 * span * n_rows * len({*zip(hp.window, hp.causal)}) + 64 * (n_context + n_rows) + 8192
        )
        with ExitStack() as stack:
            kv = stack.enter_context(closing(KVCache(self.backend, self.drafter.kv_shapes(), span, 1)))
            io = stack.enter_context(closing(StepIO(self.backend, room)))
            graph = stack.enter_context(closing(Graph(self.allocator)))
            fields = StepFields(io, graph)
            self._build(graph, fields, reading, n_context, n_rows, features.shape[1], kv, span)
            graph.plan()
            fields.host["features"][:] = features.ravel()
            fields.host["at"][:] = fields.host["rows"][:] = np.arange(n_context)
            self._fill_blocks(fields.host, reading, passage, anchors, n_context, span)
            fields.run()
            drafts = fields.host["drafts"].reshape(len(anchors), hp.block_size)[:, 1:].copy()
            chances = fields.host["chances"].reshape(len(anchors), hp.block_size)[:, 1 : 1 + JUDGED]
            likelihood = np.log(np.maximum(np.nan_to_num(chances), FLOOR))
            finite = bool(np.isfinite(fields.host["sum"]).all())
            ranks = next_right = np.empty(0, np.int32)
            if reading.ranked:
                ids, values = (fields.host[name].reshape(len(anchors), hp.block_size, -1)[:, 1:] for name in ("best", "best_logits"))
                best = np.take_along_axis(ids, np.argsort(-values, axis=-1, kind="stable"), -1)
                ranks, next_right = ranks_of(best, drafts, passage.tokens, anchors)
        matched = np.array([_first_wrong(drafts[b], passage.tokens[anchor + 1 :]) for b, anchor in enumerate(anchors)], np.int32)
        return Measured(matched, drafts.ravel(), likelihood, finite, ranks, next_right)

    def _features(self, reading: Reading, index: int, n_context: int) -> np.ndarray:
        """F32 [n_context, n_embd * layers]."""
        source = self.passages[(index + reading.features_of) % len(self.passages)].features
        parts = [np.resize(source[v], (n_context, source[v].shape[1])) for v in reading.hp.target_layers]
        return np.concatenate(parts, axis=1) * np.float32(reading.feature_scale)

    def _build(
        self, g: Graph, f: StepFields, reading: Reading, n_context: int, n_rows: int, n_features: int, kv: KVCache, span: int
    ) -> None:
        hp, model = reading.hp, _as_read(self.drafter, reading.hp)
        context = f.input("features", "f32", n_features, n_context)
        at, rows = f.input("at", "i32", n_context), f.input("rows", "i64", n_context)
        block, block_at = f.input("block", "i32", n_rows), f.input("block_at", "i32", n_rows)
        block_rows = f.input("block_rows", "i64", n_rows)
        coming = f.input("coming", "i32", n_rows)
        kinds = [*zip(hp.window, hp.causal, strict=True)]
        masks = {kind: f.input(_mask_of(*kind), "f16", span, n_rows) for kind in dict.fromkeys(kinds)}
        model.context_rows(g, ContextInputs(None, [context], None, at, rows), kv.layers, self.target)
        inputs = BlockInputs(block, block_at, tuple(AttentionInputs(block_rows, masks[kind], span) for kind in kinds), kv.layers)
        hidden = model.denoise(g, inputs, self.target)
        f.output("sum", "f32", g.sum_rows(hidden))
        target = self.target
        if not reading.capped:
            target, model = copy(target), _as_read(model, replace(hp, softcap=0.0))
            target.softcap = 0.0
        logits = model.logits(g, hidden, target)
        f.output("drafts", "i32", g.argmax(logits))
        if reading.ranked:
            best, values = g.top_k_unordered(logits, min(BEST, logits.ne[0]))
            f.output("best", "i32", best)
            f.output("best_logits", "f32", values)
        f.output("chances", "f32", g.rows(g.reshape(g.softmax(logits), 1, logits.ne[0] * n_rows), coming))

    def _fill_blocks(self, host: dict, reading: Reading, passage: Passage, anchors: np.ndarray, n_context: int, span: int) -> None:
        width = reading.hp.block_size
        positions = anchors[:, None] + np.arange(width)
        ids = np.full(positions.shape, reading.hp.mask_token)
        ids[:, 0] = passage.tokens[anchors]
        host["block"][:], host["block_at"][:] = ids.ravel(), positions.ravel()
        host["block_rows"][:] = n_context + np.arange(ids.size)
        expected = passage.tokens[np.minimum(positions, len(passage.tokens) - 1)]
        host["coming"][:] = expected.ravel() + np.arange(ids.size) * self.target.n_vocab
        for window, causal in {*zip(reading.hp.window, reading.hp.causal)}:
            host[_mask_of(window, causal)][:] = _mask(anchors, width, n_context, span, window, causal).ravel()

    def close(self) -> None:
        self.allocator.close()


def _as_read(model, hp):
    """The model with other hyper-parameters and the same weights."""
    out = copy(model)
    out.hp = hp
    return out


def _mask_of(window: int, causal: bool) -> str:
    return f"mask_{window}{'_causal' * causal}"


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


def _first_wrong(drafts: np.ndarray, known: np.ndarray) -> int:
    """Length of the accepted prefix of a block's drafts."""
    known = known[: len(drafts)]
    wrong = np.flatnonzero(drafts[: len(known)] != known)
    return int(wrong[0]) if wrong.size else len(known)


def ranks_of(best: np.ndarray, drafts: np.ndarray, tokens: np.ndarray, anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per block, I32 [blocks] each: the rank of the target's token in ``best`` (I32 [blocks, drafts, BEST]) at the first wrong draft (2 to
    BEST, 0 if not among them, -1 if no known draft is wrong); and whether the next draft is right, -1 if unknown. ``tokens``: the text,
    ``anchors``: starts of blocks."""
    ranks, next_right = np.full(len(anchors), -1, np.int32), np.full(len(anchors), -1, np.int32)
    for b, anchor in enumerate(anchors):
        known = tokens[anchor + 1 : anchor + 1 + drafts.shape[1]]
        at = _first_wrong(drafts[b], known)
        if at == len(known):
            continue
        place = np.flatnonzero(best[b, at] == known[at])
        ranks[b] = place[0] + 1 if place.size else 0
        if at + 1 < len(known):
            next_right[b] = drafts[b, at + 1] == known[at + 1]
    return ranks, next_right
