"""The engine: one target, perhaps a drafter, one sequence. It runs single steps; which steps to run is the loop's business.

Order of life: ``load`` -> ``prefill`` -> any number of ``plain_step`` / ``fused_step`` / ``verify_step``, each followed by ``accept``
-> ``reset`` for the next sequence -> ``close``.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from ..cache.cursor import Cursor
from ..cache.features import RING, FeatureRing
from ..cache.kv import SPAN, padded
from ..cache.recurrent import DeltaState
from ..cache.snapshot import Snapshot
from ..checks import token_ids, whole
from ..errors import ContextError, DeviceError, EngineError
from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.library import ffi, lib
from ..models.base import DeltaShape, Target
from ..models.dflash import DFlash
from .graphs import MOST_CANDIDATES, Step, StepGraphs
from .parts import EngineOptions, EngineParts, StepResult, candidate_widths

PREPARE_TOKENS = 2048


class Engine(EngineParts):
    """Runs steps of one sequence."""

    graphs_class, row_bytes = StepGraphs, 64

    def __init__(self, backend: Backend, target: Target, drafter: DFlash | None, options: EngineOptions) -> None:
        whole(options.slots, "the slots of an engine for one sequence", 1, 1)
        super().__init__(backend, target, drafter, options)
        self.cursor = Cursor(options.n_ctx)
        self._soiled = False  # whether the caches may hold NaN
        self.epoch = 0  # sequences begun so far: whoever remembers what lies in the caches can tell whether it still does
        self._open_block: int | None = None  # rows of the last block until accept says how many count
        self._kinds: tuple[tuple[str, int], ...] = ()  # steps that are expected, see prepare
        self._last_span = 0
        self.built_ahead = 0  # graphs built while the device computed

    def _allocate(self) -> None:
        super()._allocate()
        if self.drafter is not None:
            self.ring = self._own(FeatureRing(self.backend, self.target.n_embd * len(self.drafter.hp.target_layers)))
        blocks = candidate_widths(self.options.width)
        widths = {"prefill": self.chunks, "logits": (self.options.chunk,), "plain": (1,), "verify": blocks, "fused": blocks}
        self.graphs = self._own(
            self.graphs_class(self.backend, self.io, self.target, self.drafter, self.kv, self.draft_kv, self.delta, self.ring, widths)
        )

    def _recurrent(self, shape: DeltaShape) -> DeltaState:
        return DeltaState(self.backend, shape, self.target.delta_row(), self.options.width, self.planned)

    def _reserve(self) -> None:
        """Plans the largest graph of every role that a generation uses: what does not fit is said now, and no buffer grows later."""
        live = self.kv.live
        self.graphs.get("prefill", self.options.chunk, live)
        self.graphs.get("plain", 1, live)
        if self.drafter is not None:
            self.graphs.get("catchup", RING, 0)
        if self.drafter is not None and self.options.width > 1:
            self.graphs.get("fused", self.options.width, live)
        if self.delta is not None:
            width = self.options.width
            self.graphs.get("commit", width, 0, 0, width > 1)

    def prepare(self, kinds: Sequence[tuple[str, int]], tokens: int) -> None:
        """Announces the (role, width) of the steps that the next ``tokens`` tokens will take, so that none of them waits for its graph.

        What is needed at once is built here. The graphs of the next span are built one per step, while the device computes; the CPU has no
        such time to spare and builds the spans of PREPARE_TOKENS tokens here.
        """
        self._kinds, self._last_span = tuple(kinds), self.kv.span(self.cursor.committed + tokens)
        ahead = min(tokens, PREPARE_TOKENS if self.backend.device.kind == "cpu" else SPAN // 4)
        for role, width in self._kinds:
            span, last = 0, self.kv.span(self.cursor.committed + ahead + width)
            while span < last:
                span = max(self._span(width), self.kv.span(span + 1))
                self.graphs.get(role, width, span)

    def _build_ahead(self) -> None:
        """Builds one graph of the next span, if one is missing."""
        for role, width in self._kinds:
            span = self.kv.span(self._span(width) + 1)
            if span <= self._last_span and not self.graphs.has(role, width, span):
                self.graphs.get(role, width, span)
                self.built_ahead += 1
                return

    def prepare_transitions(self, widths: Sequence[int]) -> None:
        """Builds the commit graphs between blocks of these widths, and from prefill into them: ten nodes each."""
        if self.delta is None:
            return
        for left in (0, *widths):
            for entered in widths:
                if left != entered:
                    self.graphs.get("commit", left, 0, entered, left > 1)

    # -- sequence

    def reset(self, drafting: bool = True) -> None:
        """Forgets the sequence. K/V rows stay as they are, unless NaN came up: nothing below the cursor is theirs any more.

        ``drafting`` False: the next sequence will not be drafted for, and its drafter rows are not computed.
        """
        self._check_open()
        if self._soiled:
            for cache in (self.kv, self.draft_kv):
                if cache is not None:
                    cache.fill(0)
            self._soiled = False
        self.cursor.reset()
        self.epoch += 1
        self._open_block = None
        self._kinds = ()
        self.graphs.drafting = drafting and self.drafter is not None
        if self.ring is not None:
            self.ring.waiting = 0
        if self.delta is not None:
            self.delta.clear()

    def settle(self) -> None:
        """Commits what the last block left pending and computes the drafter rows that are due: the caches hold the whole sequence then."""
        self._check_open()
        if self._open_block is not None:
            raise EngineError(f"the last block of {self._open_block} rows is neither accepted nor given up: call accept first")
        self._catch_up()
        self._enter(0, pending=False)

    def resume(self, committed: int, pending: int | None = None) -> None:
        """Goes on behind ``committed`` tokens whose rows and state somebody has put into the caches since the last reset."""
        committed = whole(committed, "the length of the sequence", 0, self.options.n_ctx)
        if self.cursor.committed:
            raise EngineError(f"there is a sequence of {self.cursor.committed} tokens already: reset first")
        pending = None if pending is None else self._token(pending)
        self.cursor.advance(committed, pending)
        if self.delta is not None:
            self.delta.reset_cursor()

    def snapshot(self) -> Snapshot:
        """A copy of the sequence as it stands, on the device. ``restore`` it any number of times; ``close`` it.

        Raises:
            DeviceError: the device has no memory for it.
        """
        self.settle()
        n, drafting = self.cursor.committed, self.graphs.drafting
        with self.sequence.whole(n, drafting) as pieces:
            copy = pieces.copy(self.backend)
        if copy is None:
            raise DeviceError(
                f"no memory on {self.backend.device.name} for a snapshot of {n} tokens; close another one or use a smaller `n_ctx`"
            )
        return Snapshot(copy, n, self.cursor.pending, drafting, self)

    def restore(self, snapshot: Snapshot) -> None:
        """Makes ``snapshot`` of this engine the sequence: the next step gives what it would have given then.

        Raises:
            EngineError: it was closed, or taken of another engine.
        """
        if not isinstance(snapshot, Snapshot) or snapshot.engine is not self or snapshot.pieces.closed:
            raise EngineError("this is no open snapshot of this engine: take one with snapshot()")
        self.reset(snapshot.drafting)
        with self.sequence.whole(snapshot.committed, snapshot.drafting) as pieces:
            snapshot.pieces.write_to(pieces, self.backend)
        self.resume(snapshot.committed, snapshot.pending)

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None, stop: Callable[[], bool] | None = None
    ) -> int | None:
        """Computes ``tokens`` behind what is already there and returns the greedy next token, which becomes pending.

        Args:
            tokens: at least one token id.
            progress: called with (done, total) after each chunk.
            stop: asked before each chunk; True ends the prefill early with None, the chunks done so far stay committed.

        Raises:
            ContextError: empty, too long for the context, or an id outside the vocabulary.
        """
        ids = self._checked_tokens(tokens)
        self._catch_up()
        self._enter(0, pending=False)
        done, pending = 0, None
        while done < ids.size:
            if stop is not None and stop():
                return None
            part = ids[done : done + self.options.chunk]
            pending = self._prefill_chunk(part)
            done += part.size
            self.cursor.advance(part.size, pending)
            if progress is not None:
                progress(done, ids.size)
        return pending

    def _prefill_chunk(self, part: np.ndarray) -> int:
        real = part.size
        width = next(c for c in self.chunks if real <= c)
        step = self.graphs.get("prefill", width, self.kv.span(self.cursor.committed + width, SPAN))
        self._fill_rows(step, width, real)
        step.host["tokens"][:real] = part
        step.host["tokens"][real:] = part[-1]  # padding rows are real tokens: a NaN in a padded row would leak through 0 * NaN
        step.host["out_row"][0] = real - 1
        self._fill_chunk_delta(step, real)
        step.fields.run()
        self._check_target(step)
        self._last = step
        return int(step.ids()[0])

    def _fill_chunk_delta(self, step: Step, real: int) -> None:
        if self.delta is not None:
            step.host["on"][:] = np.arange(step.host["on"].size) < real
            step.host["last"][:] = real + np.arange(self.delta.history_rows)
            self.delta.after_step(0, 0, False)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of all ``tokens`` in graphs of exactly their number of rows (chunked by the prefill chunk). F32 [T, n_vocab].

        This is llama.cpp's batch shape, so results can be compared bit for bit. Commits the tokens; no drafter rows are written.
        """
        ids = self._checked_tokens(tokens)
        self._enter(0, pending=False)
        out = np.empty((ids.size, self.target.n_vocab), np.float32)
        for first in range(0, ids.size, self.options.chunk):
            part = ids[first : first + self.options.chunk]
            step = self.graphs.get("logits", part.size, self._exact_span(part.size))
            self._fill_rows(step, part.size, part.size)
            step.host["tokens"][:] = part
            self._fill_chunk_delta(step, part.size)
            step.fields.run()
            block = out[first : first + part.size]
            lib.ggml_backend_tensor_get(step.extra["logits"], ffi.from_buffer(block), 0, block.nbytes)
            self.cursor.advance(part.size, int(block[-1].argmax()))
        return out

    def capture(self, tokens: Sequence[int], layers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Greedy ids after each of ``tokens``, I32 [T], and the inputs of the target ``layers``, F32 [len(layers), T, n_embd].

        Layer v means what it does in a drafter's ``target_layers``: n_layer is the last layer's output. Commits the tokens; no drafter rows
        are written.

        Raises:
            ContextError: as ``prefill``.
            EngineError: a layer that the target does not have.
        """
        layers = [whole(v, "a captured layer", 0, self.target.n_layer) for v in layers]
        ids = self._checked_tokens(tokens)
        self._enter(0, pending=False)
        chosen = np.empty(ids.size, np.int32)
        out = np.empty((len(layers), ids.size, self.target.n_embd), np.float32)
        for first in range(0, ids.size, self.options.chunk):
            part = ids[first : first + self.options.chunk]
            step = self.graphs.get("capture", part.size, self._exact_span(part.size), tuple(layers))
            self._fill_rows(step, part.size, part.size)
            step.host["tokens"][:] = part
            self._fill_chunk_delta(step, part.size)
            step.fields.run()
            chosen[first : first + part.size] = step.ids()
            for block, feature in zip(out[:, first : first + part.size], step.extra["features"]):
                lib.ggml_backend_tensor_get(feature, ffi.from_buffer(block), 0, block.nbytes)
            self.cursor.advance(part.size, int(chosen[first + part.size - 1]))
        return chosen, out

    # -- steps

    def plain_step(self) -> StepResult:
        """Computes the pending token alone. Follow with ``accept(1, ids[0])``."""
        if self.ring is not None and self.graphs.drafting and self.ring.waiting == RING:
            self._catch_up()
        self._enter(1, pending=False)
        step = self.graphs.get("plain", 1, self._span(1))
        step.host["tokens"][0] = self._pending()
        if self.ring is not None and self.graphs.drafting:
            step.host["ring_row"][0] = self.ring.waiting
        return self._run_block(step, 1, pending=False)

    def _catch_up(self) -> None:
        """Computes the drafter's K/V rows of the tokens that were decoded plainly since it last had any."""
        if self.ring is None or not self.graphs.drafting or not self.ring.waiting:
            return
        assert self.draft_kv is not None
        step = self.graphs.get("catchup", RING, 0)
        first, count = self.cursor.committed - self.ring.waiting, self.ring.waiting
        np.add(self._iota[:RING], first, out=step.host["positions"])
        self.draft_kv.rows_for(first, RING, count, step.host["kv_rows"])
        step.fields.run()
        self.ring.waiting = 0

    def fused_step(self, width: int | None = None, masks: np.ndarray | None = None) -> StepResult:
        """Drafts a block behind the pending token and verifies it, in one graph. Follow with ``accept``.

        ``masks``: I32 [width - 1] ids to draft from instead of mask tokens; the drafts are then worth nothing, but varied.
        """
        if self.drafter is None:
            raise EngineError("there is no drafter: use plain_step or verify_step")
        if not self.graphs.drafting:
            raise EngineError("this sequence was started without drafting: the drafter has not seen it")
        width = self._block_width(width)
        self._catch_up()
        self._enter(width, pending=True)
        step = self.graphs.get("fused", width, self._span(width))
        n = self.cursor.committed
        step.host["block"][1:] = self.drafter.hp.mask_token if masks is None else masks
        step.host["block"][0] = step.host["tokens"][0] = self._pending()
        step.host["draft_last"][:] = self.drafter.last_seen(n, width)
        for window in set(self.drafter.hp.window) - {0}:
            step.host[f"draft_first_{window}"][:] = n + np.arange(width) - window + 1
        return self._run_block(step, width, pending=True)

    def verify_step(self, drafts: Sequence[int]) -> StepResult:
        """Verifies given ids behind the pending token: a block of len(drafts) + 1 rows. Follow with ``accept``."""
        ids = token_ids(drafts, self.target.n_vocab, "the block of drafts")
        width = self._block_width(ids.size + 1)
        self._catch_up()
        self._enter(width, pending=True)
        step = self.graphs.get("verify", width, self._span(width))
        step.host["tokens"][0] = self._pending()
        step.host["tokens"][1:] = ids
        return self._run_block(step, width, pending=True)

    def read_candidates(self, count: int | None) -> None:
        """What ``candidates`` gives from the next step on: so many of a row's largest logits, None for all; 0 if nobody will ask.

        On the CPU all logits lie in host memory, and nothing has to be read.
        """
        count = count if count is None else whole(count, "the number of candidates", 0, MOST_CANDIDATES)
        self.graphs.candidates = 0 if self.backend.device.kind == "cpu" else count

    def candidates(self, row: int) -> tuple[np.ndarray | None, np.ndarray]:
        """What may come after ``row`` of the last block (0 after ``prefill``): I32 token ids (None: all of the vocabulary) and F32 logits.

        Valid until ``accept`` or the next step.
        """
        if self._last is None or self.graphs.closed:
            raise EngineError("no step has been computed whose candidates could be read")
        return self._last.candidates(row)

    def accept(self, rows: int, pending: int) -> None:
        """Commits the first ``rows`` rows of the last block; ``pending`` is the token chosen after them."""
        if self._open_block is None:
            raise EngineError("rows cannot be accepted without a block: run a step first")
        rows, pending = whole(rows, "the number of accepted rows", 1, self._open_block), self._token(pending)
        if self.delta is not None:
            self.delta.after_step(self._open_block, rows, self._open_block > 1)
        if self.ring is not None and self._open_block == 1 and self.graphs.drafting:
            self.ring.waiting += 1
        self._open_block = None
        self.cursor.advance(rows, pending)
        if self.backend.device.kind == "cpu":  # computing keeps the host busy, and building may move the logits that were read until now
            self._build_ahead()

    def _run_block(self, step: Step, width: int, pending: bool) -> StepResult:
        self._fill_rows(step, width, width)
        if self.delta is not None:
            self.delta.fill_tail(step.host["tail"])
            if pending:
                self.delta.fill_keep(step.host["keep"])
        step.fields.launch()
        if self.backend.device.kind != "cpu":
            self._build_ahead()
        times = step.fields.wait()
        self._open_block, self._last = width, step
        if self.delta is not None:  # until accept says more: the block is there, none of it counts
            self.delta.after_step(width, 0, pending)
        host = step.host
        draft_finite = "draft_sum" not in host or bool(np.isfinite(host["draft_sum"]).all())
        if not (draft_finite and step.finite):
            self._soil()
        return StepResult(host["tokens"].copy(), step.ids(), draft_finite, step.finite, times)

    def flush(self) -> None:
        """Commits what was accepted of the last block into the recurrent state now; the next step would otherwise do it first."""
        self._enter(0, pending=False)

    # -- helpers

    def _pending(self) -> int:
        if self.cursor.pending is None:
            raise EngineError("there is no pending token: prefill a prompt first")
        if self.cursor.room < 1:
            raise ContextError(f"the context of {self.cursor.n_ctx} tokens is full; raise `n_ctx`")
        return self.cursor.pending

    def _checked_tokens(self, tokens: Sequence[int]) -> np.ndarray:
        """``tokens`` as I64 [T], if they are ids of the vocabulary that fit behind what is there."""
        ids = token_ids(tokens, self.target.n_vocab)
        self.cursor.check_fits(ids.size)
        self._check_open()
        self._open_block = None  # nothing of it was accepted
        return ids

    def _block_width(self, width: int | None) -> int:
        return whole(self.options.width if width is None else width, "the width of the block", 2, self.options.width)

    def step_graph(self, role: str, width: int) -> Graph:
        """The graph that a step of this role and width would compute now."""
        return self.graphs.get(role, width, self._span(width)).graph

    def _span(self, width: int) -> int:
        return self.kv.span(self.cursor.committed + width)

    def _exact_span(self, width: int) -> int:
        """What llama.cpp would read: where a sum over rows is split depends on their number."""
        return min(padded(self.cursor.committed + width), self.kv.live)

    def _fill_rows(self, step: Step, width: int, real: int) -> None:
        n, host = self.cursor.committed, step.host
        np.add(self._iota[:width], n, out=host["positions"])
        host["q_last"][:] = host["positions"]
        if self.target.window:
            host["q_first"][:] = host["positions"]
            host["q_first"] -= self.target.window - 1
        if self.kv.ring:
            self.kv.fill_ring(n, width, real, host["sliding_rows"], host["sliding_near"])
        self.kv.rows_for(n, width, real, step.host["kv_rows"])

    def _check_target(self, step: Step) -> None:
        if not step.finite:
            self._soil()
            raise EngineError(
                f"{self.target.file.path.name} produced NaN or Inf at position {self.cursor.committed}; the weights are damaged or overflow "
                "on this device"
            )

    def _soil(self) -> None:
        """NaN came up: nothing in the caches is to be reused, and they are cleared before the next sequence, as masks do not stop NaN."""
        self._soiled = True
        self.epoch += 1

    def _enter(self, width: int, pending: bool) -> None:
        """Lays the recurrent state out for blocks of ``width``, committing what is still pending, unless it is so already."""
        d = self.delta
        if d is None or ((d.width == width and d.pending in (pending, False)) and not (width == 0 and d.accepted)):
            return
        step = self.graphs.get("commit", d.width, 0, width, d.pending)
        d.fill_tail(step.host["tail"])
        if d.pending:
            d.fill_keep(step.host["keep"])
        step.fields.run()
        d.after_step(width, 0, False)

    def expert_counts(self) -> dict[str, int] | None:
        """Choices of routed experts so far, hits among them, and the host's microseconds; None where all experts are on the device."""
        host = self.target.weights.host_experts
        return asdict(host.counts()) if host is not None else None
