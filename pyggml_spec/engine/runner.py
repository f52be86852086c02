"""Runs forward passes of one target, and perhaps drafters, over 1 to 64 sequences in slots.

A slot is admitted (``admit``), takes part in any number of steps (``forward``, then ``accept`` after blocks), and is released. What each slot does
in a step is independent: a part of a prompt, a plain token, given drafts or drafting, of any width; slots without an item are left as they are.

The only slot of a runner need not be admitted; ``reset``, ``prefill``, ``plain_step``, ``fused_step`` and ``verify_step`` are its steps by name.

A step: ``forward`` checks the batch (state.py), chooses the graph (graphs.py), fills its inputs (inputs.py), runs it, and returns a
``StepOutput`` for each slot.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import monotonic
from typing import Any, cast

import numpy as np

from ..cache.slots import NOTHING, Cursor, SlotRange
from ..checks import token_ids, whole
from ..drafters.multi import AnyDrafter
from ..errors import EngineError
from ..ggml.cores import CORE_MONITOR, ThreadCounts
from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.step_io import StepTimes
from ..models.decoder import Decoder
from .batch import FIRST, NO_KEY, Batch, BatchItem, Draft, GraphKey, Prefill, StepOutput, Verify
from .exact import ExactSteps
from .graph_cache import Step
from .graph_prebuilder import GraphPrebuilder
from .graphs import StepGraphs
from .inputs import InputBuilder
from .masked import MaskedRows, masked_rows
from .options import MOST_CANDIDATES, MOST_WIDTH, EngineOptions
from .prompt import Prompt
from .resources import Resources
from .state import StateManager

Meanwhile = Callable[[], object] | None
Choice = tuple[int, int, np.ndarray]
"""A slot, a row of its last block, and U8 bits of the tokens to choose from, the lowest one of each byte first."""


@dataclass
class Totals:
    """Forward passes so far, rows of their graphs, and rows that counted."""

    forwards: int = 0
    rows_computed: int = 0
    rows_used: int = 0


class ModelRunner(ExactSteps):
    """Owns its caches and graphs; borrows models (with their weights) and the backend.

    Attributes:
        unmasked: why constrained choices on the device are impossible here, in one sentence; empty where they work or nothing needed them.
    """

    def __init__(self, backend: Backend, target: Decoder, drafter: AnyDrafter | None, options: EngineOptions) -> None:
        self.resources = r = Resources(backend, target, drafter, options)
        self.backend, self.target, self.drafter, self.options, self.slots = backend, target, drafter, options, r.slots
        self.devices, self.io, self.sequence = r.devices, r.io, r.sequence
        self.kv, self.draft_kv, self.recurrent, self.hidden_states = r.kv, r.draft_kv, r.recurrent, r.hidden_states
        self.totals = Totals()
        try:
            self.graphs = r.own(StepGraphs(r))
            self.inputs, self.state = InputBuilder(r), StateManager(r, self.graphs)
            self.prebuilder = GraphPrebuilder(r, self.graphs)
            self.threads = ThreadCounts(r.thread_rules())
            self.graphs.plan_largest()
            if (adapters := target.weights.adapters) is not None and not backend.counting:
                every = adapters.chosen(dict.fromkeys(range(len(adapters.all)), 1.0))
                self.graphs.build(self.graphs.key("plain", 1, r.kv.live, adapters=every))
                adapters.check(target.weights.adapted)
            self.devices.attach(self)
        except BaseException:
            r.close()
            raise
        self.unmasked, self._tried_masked = "", False
        self._repeated: tuple[tuple, Batch] = (), Batch({})  # the last step by name
        s = self.state
        self.release, self.accept, self.choose, self.resume = s.release, s.accept, s.choose, s.resume
        self.rollback, self.rollback_range, self.settle, self.flush = s.rollback, s.rollback_range, s.settle, s.flush
        self.snapshot, self.restore, self.reset, self.commit = s.snapshot, s.restore, s.reset, s.commit

    def admit(self, drafting: bool = True, candidates: int | None = 0, masked: bool = False) -> int | None:
        """Takes the lowest free slot for a new sequence; None if there is none.

        Args:
            drafting: whether the sequence may be drafted for. If not, its drafter rows are not computed.
            candidates, masked: as in ``read_candidates``.
        """
        slot = next((index for index, slot in enumerate(self.slots) if not slot.used), None)
        self.state.check_open()
        if slot is not None:
            self.read_candidates(candidates, slot, masked)
            self.reset(drafting, slot)
        return slot

    # -- steps

    def step(self, items: Mapping[int, BatchItem], meanwhile: Meanwhile = None) -> dict[int, StepOutput]:
        """``forward`` of a batch of these items, by slot."""
        return self.forward(Batch(cast(Any, items)), meanwhile)

    def forward(self, batch: Batch, meanwhile: Meanwhile = None) -> dict[int, StepOutput]:
        """One forward pass over the slots that have an item in ``batch``. Outputs by slot; a prompt's has its last row only.

        ``meanwhile`` is called while the device computes.

        Raises:
            ContextError: a prompt that is empty, does not fit the context or has ids outside the vocabulary.
            EngineError: a slot without a sequence, a block that was not accepted yet, a width that was not planned for.
        """
        devices, state, threads = self.devices, self.state, self.threads
        if devices.flying:
            raise EngineError("a group's step is still under way: land it first")
        if monotonic() >= CORE_MONITOR.due or threads.polls != CORE_MONITOR.polls:
            threads.refresh()
        if batch.checked is not batch.items or batch.version != state.version:
            self.choose_graph(batch)
        step = self.graph_of(batch)
        if batch.kind == "prefill":
            times, read = devices.run_chunk(self, step, batch, meanwhile)
            outputs = self.after_rows(step, batch, times, read)
            if batch.streamed:
                devices.agree(batch)
        else:
            outputs = self.after(step, batch, self.run(step, batch, meanwhile))
        for slot in batch.proposed:
            if not batch.proposed[slot]:
                state.check_finite(slot, False)
                outputs[slot] = replace(outputs[slot], draft_finite=False)
        return outputs

    def choose_graph(self, batch: Batch) -> None:
        """Checks the items, has drafts proposed that the host reads, and chooses the graph that computes the step."""
        self.state.check(batch)
        graphs, prompts, drafting = self.graphs, [], {}
        for slot, item in batch.items.items():
            if isinstance(item, Prefill):
                prompts.append(item)
            elif isinstance(item, Draft):
                drafting[slot] = item
        if self.devices.under_way is not None and len(prompts) < len(batch.items):
            self.resources.synchronize()
        if drafting and any(item.proposes for item in drafting.values()):
            self._propose(batch, drafting)
            drafting = {}
        rows = max(batch.rows.values())
        batch.method, batch.n_drafts, batch.streamed, batch.deferred, batch.key = "", -1, False, False, NO_KEY
        batch.is_block = rows > 1 and (
            not prompts
            or any(item.scored for item in prompts)
            or any(n > 1 and not isinstance(batch.items[slot], Prefill) for slot, n in batch.rows.items())
        )
        if batch.is_block:
            width = batch.verify_len = graphs.block_width(max([rows, *[item.padded_len for item in drafting.values()]]))
            if not width:
                raise EngineError(f"a step with drafts has at most {self.options.width} rows per slot, but a prompt has {rows}")
            if drafting:
                batch.kind, batch.method = "fused", self._method(drafting)
                batch.n_drafts = graphs.drafts_of(batch.method, width, max([item.verify_len for item in drafting.values()]) - 1)
            else:
                batch.kind, batch.deferred = "verify", graphs.deferred(batch.drafting) and not batch.proposed
        # the only slot computes one token of a prompt as a chunk, as in a longer prompt; of several it may share a step of plain tokens
        elif rows == 1 and not batch.pictures and not (prompts and len(self.slots) == 1):
            batch.kind, batch.verify_len = "plain", 1
        else:
            batch.kind, batch.verify_len = "prefill", graphs.chunk_width(rows)
            batch.streamed = graphs.streams(batch.verify_len * batch.slots.count)
            for stream in self.target.weights.streams if batch.streamed else ():
                stream.expect(any(item.more for item in prompts))
        batch.checked, batch.version = None if prompts or batch.proposed else batch.items, self.state.version

    # -- drafts that the host reads before they are verified

    def _propose(self, batch: Batch, drafting: Mapping[int, Draft]) -> None:
        """Computes drafts that the host reads, and verifies those that are worth it as given ones (``Batch.computed``), padded to a width that is
        planned for."""
        method = self._method(drafting)
        ids, sums, confidence = self._drafts(batch, drafting, method)
        batch.drafted = self._drafted(method, drafting)
        worth = self._worth(drafting, confidence, batch.slots)
        items = dict(batch.items)
        for slot, item in drafting.items():
            at = slot - batch.slots.first
            drafts = ids[at, : item.verify_len - 1]
            passed = min(len(drafts) if item.check is None else item.check(drafts), worth.get(slot, len(drafts)))
            rows = batch.rows[slot] = min(self.graphs.width_for(passed + 1), item.verify_len)
            items[slot] = Verify(drafts[: rows - 1])
            batch.proposed[slot] = bool(np.isfinite(sums[at, : item.verify_len]).all())
        batch.computed = items

    @staticmethod
    def _worth(drafting: Mapping[int, Draft], confidence: np.ndarray | None, slots: SlotRange) -> dict[int, int]:
        """How many drafts are worth verifying by the drafter's confidence, by slot."""
        by_call: dict[Callable, dict[int, np.ndarray]] = {}
        for slot, item in drafting.items():
            if item.weigh is not None and confidence is not None:
                by_call.setdefault(item.weigh, {})[slot] = confidence[slot - slots.first, : item.verify_len - 1]
        return {slot: most for weigh, of in by_call.items() for most in (weigh(of),) for slot in of}

    def _drafts(self, batch: Batch, drafting: Mapping[int, Draft], method: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """I32 [slots, width - 1] drafts, F32 [slots, width] sums that are finite if the drafter is sound, and F32 [slots, width - 1] its confidence."""
        width = self.graphs.width_for(max(item.verify_len for item in drafting.values()))
        self.state.check_covered(batch)
        self.state.catch_up(drafting, self.hidden_states.others if self.hidden_states is not None else ())
        self.state.prepare_drafting(drafting, method)
        draft = Batch(dict(drafting), computed=drafting, slots=batch.slots, kind="draft", verify_len=width, method=method, drafting=True)
        draft.kv_bucket = self.kv.bucket(batch.context + width)
        step = self.graphs.get(draft.make_key())
        self.inputs.draft(step, draft)
        step.fields.run()
        host, count, of = step.host, batch.slots.count, self.resources.drafting[method]
        order = np.array([of.order(at, width - 1, count) for at in range(count)])
        confidence = host["confidence"].reshape(count, -1).copy() if "confidence" in host else None
        return host["drafts"][order], host["draft_sum"].reshape(count, -1).copy(), confidence

    def _method(self, drafting: Mapping[int, Draft]) -> str:
        """The one drafting method of a step.

        Raises:
            EngineError: several, or an unknown one.
        """
        methods = {self.resources.method_of(name) for name in {item.drafter for item in drafting.values()}}
        if len(methods) > 1:
            raise EngineError(f"{' and '.join(sorted(methods))} cannot draft in one step: a step has one drafter for all of its slots")
        return methods.pop()

    # -- one graph

    def graph_of(self, batch: Batch) -> Step:
        """The graph of a batch, with its inputs."""
        self.state.begin(batch)
        graphs, tokens = self.graphs, batch.context + batch.verify_len
        if batch.key is NO_KEY or not batch.kv_from <= tokens <= batch.kv_bucket:
            batch.kv_from, batch.kv_bucket = tokens, graphs.kv_bucket(batch.kind, tokens)
            batch.make_key()
        step = graphs.last if batch.key is graphs.last_key else graphs.get(batch.key)
        (self.inputs.block if batch.is_block else self.inputs.certain)(step, batch)
        return step

    def after(self, step: Step, batch: Batch, times: StepTimes) -> dict[int, StepOutput]:
        """Outputs of a step that was computed and read."""
        return (self.after_block if batch.is_block else self.after_rows)(step, batch, times)

    def after_rows(self, step: Step, batch: Batch, times: StepTimes, read: bool = True) -> dict[int, StepOutput]:
        """Outputs of rows that are certain, and committed. ``read`` False: its ids were not read; what is not finite stays so until the last chunk."""
        self.stored(step, batch)
        width, out = batch.verify_len, {}
        if not read:
            for slot, n in batch.rows.items():
                s = self.slots[slot]
                s.cursor.advance(n, None)
                s.commit()
                s.row = 0
                out[slot] = StepOutput(NOTHING, NOTHING, True, True, times)
            return out
        ids, sound, tokens = step.chosen, step.sound, step.host["tokens"]
        for slot, n in batch.rows.items():
            s, at = self.slots[slot], slot - batch.slots.first
            s.cursor.advance(n, int(ids[at]))
            s.commit()
            s.open_rows, s.row = 0 if isinstance(batch.computed[slot], Prefill) else 1, at
            finite = sound or self.state.check_finite(slot, step.finite_rows(at, 1))
            out[slot] = StepOutput(tokens[at * width : at * width + n].copy(), ids[at : at + 1], True, finite, times)
        return out

    def after_block(self, step: Step, batch: Batch, times: StepTimes) -> dict[int, StepOutput]:
        """Outputs of blocks, none of whose rows counts before ``accept``; the blocks before are committed."""
        ids, sound, width, rows, tokens, out = step.chosen, step.sound, batch.verify_len, batch.rows, step.host["tokens"], {}
        if len(rows) < batch.slots.count:
            for slot in batch.slots.slots:
                if slot not in rows:
                    self.slots[slot].commit()
        self.stored(step, batch)
        for slot, item in batch.computed.items():
            s, n, at = self.slots[slot], rows[slot], slot - batch.slots.first
            first, s.base = at * width, s.cursor.committed
            s.tokens, s.ids, s.open_rows, s.row = tokens[first : first + n].copy(), ids[first : first + n], n, first
            draft_finite = target_finite = True
            if not sound:
                if isinstance(item, Draft):
                    draft_finite = bool(np.isfinite(step.host["draft_sum"].reshape(batch.slots.count, -1)[at]).all())
                target_finite = step.finite_rows(first, n)
                self.state.check_finite(slot, draft_finite and target_finite)
            chosen = s.ids
            if isinstance(item, Prefill):
                self.state.move(slot, s.base + n, int(s.ids[-1]))
                s.row += n - 1
                chosen = s.ids[-1:]
            out[slot] = StepOutput(s.tokens, chosen, draft_finite, target_finite, times)
        return out

    def run(self, step: Step, batch: Batch, meanwhile: Meanwhile, read: bool = True) -> StepTimes:
        """Launches a graph, waits for it and reads its choices."""
        self.resources.last = step
        if not self.prebuilder.overlaps and self.devices.under_way is None:
            return step.run(meanwhile, read)

        def during() -> None:
            self.devices.under_way = None  # steps before this one are waited for with it
            if meanwhile is not None:
                meanwhile()
            if self.prebuilder.overlaps:
                self.prebuilder.while_computing(batch)

        return step.run(during, read)

    def stored(self, step: Step, batch: Batch) -> None:
        """Counts a step, and notes which states and hidden states it has stored."""
        totals, rows, recurrent = self.totals, batch.rows, self.recurrent
        totals.forwards += 1
        totals.rows_computed += batch.verify_len * batch.slots.count
        totals.rows_used += sum(rows.values())
        if recurrent is not None and batch.is_block:
            recurrent.accepted[batch.slots.part], recurrent.uncommitted = 0, True
        elif recurrent is not None:
            recurrent.after_rows(int(batch.kind == "plain"))
        if "draft_on" in step.host and batch.kind == "prefill" and (states := self.resources.draft_state) is not None:
            for slot, n in rows.items():
                states.written(slot, self.slots[slot].cursor.committed + n)
        if "last_hidden" in step.host and (last_hidden := self.resources.last_hidden) is not None:
            last_hidden.at[list(rows)] = 0  # the first hidden state is that of the last committed token until more rows count
        buffer = self.hidden_states
        if buffer is not None and ("hidden_rows" in step.host or (buffer.whole_model and batch.kind in ("plain", "verify", "fused"))):
            ready = (batch.method,) if "hidden_rows" in step.host else buffer.others
            drafted = self._drafted(batch.method, batch.computed) if batch.method else batch.drafted
            for slot, n in rows.items():
                if (s := self.slots[slot]).drafting:
                    first = (slot - batch.slots.first) * batch.verify_len
                    buffer.stored(
                        s.cursor.committed, step.host["tokens"][first : first + n], ready, slot, drafted.get(slot, 0) if drafted else 0
                    )

    def _drafted(self, method: str, items: Mapping[int, BatchItem]) -> dict[int, int]:
        """K/V rows that the passes of a whole model have written, by slot."""
        if self.hidden_states is None or method != self.hidden_states.whole_model:
            return {}
        return {slot: item.verify_len - 1 for slot, item in items.items() if isinstance(item, Draft)}

    @property
    def rows_alike(self) -> bool:
        """Whether a row has the same bits in steps of every shape: on CPUs, where native kernels compute all of the target."""
        target = self.target
        levels = [segment.backend.level for segment in self.resources.segments]
        return (
            None not in levels and not target.weights.other_matrix_bytes and not target.ggml_attention and target.weights.adapters is None
        )

    def chunk_width(self, rows: int) -> int:
        """Rows of the graph that computes ``rows`` certain rows of one of several slots."""
        return self.graphs.chunk_width(rows) if rows > 1 else 1

    # -- steps of one slot, by name

    def prefill(
        self,
        tokens: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] | None = None,
        slot: int = 0,
    ) -> int | None:
        """Appends ``tokens`` to the sequence and returns the greedy next token, which becomes the last token. An open block is given up.

        Args:
            tokens: at least one token id.
            progress: called with (done, total) after each chunk.
            stop: called before each chunk; True ends the prefill early with None, the chunks done so far stay committed.

        Raises:
            ContextError: empty, too long for the context, or an id outside the vocabulary.
            EngineError: NaN or Inf came out.
        """
        ids, last_token, done = self.state.next_tokens(tokens, slot), None, 0
        prompt = tokens if isinstance(tokens, Prompt) else Prompt()
        if prompt.pictures:  # a prompt with pictures is the whole sequence
            self.slots[slot].lag = prompt.lag
        while done < ids.size:
            if stop is not None and stop():
                return None
            end = prompt.chunk_end(done, min(done + self.options.chunk, ids.size))
            result = self.step({slot: Prefill(ids[done:end], end < ids.size, pictures=prompt.rows_of(done, end - done))})[slot]
            if not result.target_finite:
                raise EngineError(self.not_finite(slot))
            last_token, done = int(result.ids[0]) if result.ids.size else None, end
            if progress is not None:
                progress(done, ids.size)
        return last_token

    def plain_step(self, slot: int = 0) -> StepOutput:
        """Computes the last token alone, and commits it. Follow with ``accept(1, ids[0])``."""
        return self._by_name(slot, Verify(), (1,))

    def fused_step(
        self, width: int | None = None, masks: np.ndarray | None = None, slot: int = 0, drafter: str = "", verified: int = 0
    ) -> StepOutput:
        """Drafts after the last token and verifies, in one graph. Follow with ``accept``. Arguments as of ``Draft``."""
        item = Draft(self.options.width if width is None else width, masks, padded_len=verified, drafter=drafter)
        return self._by_name(
            slot, item, (item.verify_len, drafter, verified) if masks is None and type(item.verify_len) is type(verified) is int else ()
        )

    def verify_step(self, drafts: Sequence[int], slot: int = 0) -> StepOutput:
        """Verifies given ids after the last token: a block of len(drafts) + 1 rows. Follow with ``accept``."""
        return self._by_name(slot, Verify(token_ids(drafts, self.target.n_vocab, "the block of drafts")))

    def _by_name(self, slot: int, item: BatchItem, again: tuple = ()) -> StepOutput:
        """``again``: what distinguishes this step from others, where it may be repeated as it is."""
        self.state.give_up(slot)
        if not again or self._repeated[0] != (slot, *again):
            self._repeated = (slot, *again) if again else (), Batch({slot: item})
        return self.forward(self._repeated[1])[slot]

    # -- what may come after a row

    def read_candidates(self, count: int | None, slot: int = 0, masked: bool = False) -> None:
        """Sets what ``candidates`` returns from the next step on: so many of a row's largest logits, None for all, 0 for none.

        ``masked``: ``likeliest`` and ``largest`` will be called, too, if ``Slot.masked`` is set afterwards. If it is not, because the device lacks an
        operation or memory for it, ``candidates`` returns all. On the CPU all logits lie in host memory, and nothing has to be read.
        """
        self.resources.synchronize()
        slot = self.state.number(slot)
        count = count if count is None else whole(count, "the number of candidates", 0, MOST_CANDIDATES)
        if self.backend.device.kind == "cpu":
            count, masked = 0, False
        self._expect(count, slot, masked)

    def _expect(self, count: int | None, slot: int, masked: bool) -> None:
        s, r = self.slots[slot], self.resources
        self.state.version += 1
        if masked and not self._tried_masked:  # logits that stay on the device
            self._tried_masked = True
            rows, self.unmasked = masked_rows(r.backend, r.target.n_vocab, len(r.slots) * r.options.width, MOST_CANDIDATES)
            r.masked = r.own(rows) if rows is not None else None
        s.masked = masked and r.masked is not None
        s.candidates = None if masked and not s.masked else count

    def candidates(self, row: int, slot: int = 0) -> tuple[np.ndarray | None, np.ndarray]:
        """What may come after ``row`` of the slot's last block (of a prompt, after its last row): I32 token ids (None: all of the vocabulary)
        and F32 logits. Valid until ``accept`` and the next step."""
        row = self._row(slot, row)
        if self.resources.last is None or self.graphs.closed:
            raise EngineError("no step has been computed whose candidates could be read")
        return self.resources.last.candidates(row)

    def row_logits(self, slot: int, rows: int) -> Iterator[np.ndarray]:
        """F32 [n_vocab] logits after each of the ``rows`` rows of a scored part of a prompt. Valid until the next step."""
        last = self._row(slot, 0)
        assert self.resources.last is not None
        for row in range(last - rows + 1, last + 1):
            yield self.resources.last.candidates(row)[1]

    def likeliest(self, choices: Sequence[Choice]) -> list[int]:
        """The likeliest tokens among some, for rows as ``candidates`` takes them; any token where no bit is set. Valid until the next step.

        Raises:
            EngineError: a slot for which ``read_candidates`` kept no logits.
        """
        return self._masked([slot for slot, *_ in choices]).likeliest([(self._row(slot, row), bits) for slot, row, bits in choices])

    def largest(self, row: int, bits: np.ndarray, slot: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Like ``candidates``, but of the tokens whose bits are set (as of ``Choice``); -inf where there are not as many."""
        return self._masked([slot]).largest(self._row(slot, row), bits, self.slots[slot].candidates or 1)

    def _masked(self, slots: Sequence[int]) -> MaskedRows:
        r = self.resources
        if r.masked is None or r.last is None or self.graphs.closed or not all(self.slots[slot].masked for slot in slots):
            raise EngineError("no logits were kept to choose from: call read_candidates with `masked` before the step")
        return r.masked

    def _row(self, slot: int, row: int) -> int:
        """Its place among the rows of the last step."""
        s = self.state.slot(slot)
        return s.row + whole(row, f"the row of slot {slot}", 0, max(0, s.ids.size - 1))

    # -- graphs ahead of their steps

    def drafting_key(self, kind: str, method: str, width: int, rows: int) -> GraphKey:
        """For ``prepare``: steps in which ``method`` drafts ``width`` - 1 tokens, in a graph of ``rows`` rows. ``kind``: "fused", or "draft" for the
        drafts alone."""
        method = self.resources.method_of(method)
        n_drafts = self.graphs.drafts_of(method, rows, width - 1)
        return self._key(kind, rows, method=method, n_drafts=n_drafts)

    def verify_key(self, width: int, deferred: bool = True) -> GraphKey:
        """For ``prepare``: steps of ``width`` rows that verify given ids, or plain ones if that is 1. ``deferred`` False: of drafts that were proposed."""
        if width == 1:
            return self._key("plain", 1)
        return self._key("verify", width, deferred=deferred and self.graphs.deferred(self.slots[0].drafting))

    def _key(self, kind: str, verify_len: int, **more: Any) -> GraphKey:
        """A graph of the first slot's sequence, whatever its K/V bucket."""
        s = self.slots[0]
        sampling = (
            {"drafting": True}
            if kind == "draft"
            else {"drafting": s.drafting, "candidates": s.candidates, "masked": s.masked, "adapters": s.adapters}
        )
        return self.graphs.key(kind, verify_len, **sampling, **more)

    def prepare(self, keys: Sequence[GraphKey], tokens: int) -> None:
        """Announces the graphs (``drafting_key``, ``verify_key``) of the steps that the next ``tokens`` tokens of the first slot take, so that no step
        waits for its graph; with the commit graphs between their blocks, and from prompts into them.

        What is needed at once is built here; graphs of the next K/V bucket are built one per step, while a GPU computes. A CPU plans for the
        largest of each role here and builds each when its step comes (``waited_us``).
        """
        self.resources.synchronize()
        self.prebuilder.prepare(keys, tokens)

    def step_graph(self, kind: str, verify_len: int, method: str = "") -> Graph:
        """The graph that a step of the first slot would compute now."""
        key = self._key(kind, whole(verify_len, f"the width of a {kind} step", 0, MOST_WIDTH), method=method)
        return self.graphs.get(key.at(self.kv.bucket(self.cursor.committed + verify_len), FIRST)).graph

    # -- properties

    @property
    def cursor(self) -> Cursor:
        """Of the first slot."""
        return self.slots[0].cursor

    @property
    def epoch(self) -> int:
        """Sequences begun so far; while it stays the same, the caches hold the same sequences."""
        return self.resources.epoch

    def counts(self) -> dict[str, Any]:
        """All counters so far, by the names that they have in ``Stats``. graphs_built_ahead: announced graphs that no measured time includes: built before
        their steps, or on a CPU when those came."""
        io, counters = self.io, self.graphs.counters().values()
        out: dict[str, Any] = {name: sum(getattr(c, name) for c in counters) for name in ("graphs_built", "buffer_growths", "computes")}
        out |= {name: getattr(io, name) for name in ("uploads", "upload_bytes", "reads", "read_bytes")}
        out["graphs_built_ahead"] = self.prebuilder.built + self.graphs.built_as_announced
        if (experts := self.expert_counts()) is not None:
            out["experts"] = experts
        return {**out, "cuda_graphs": asdict(io.replay)} if io.replay is not None else out

    def not_finite(self, slot: int = 0) -> str:
        """The error text for a slot whose target produced NaN or Inf."""
        return (
            f"{self.target.file.path.name} produced NaN or Inf after {self.slots[slot].cursor.committed} tokens; the weights are damaged or "
            "overflow on this device"
        )

    def expert_counts(self) -> dict[str, int] | None:
        """Choices of routed experts so far, hits among them, and the host's microseconds; None where all experts are on the device."""
        counts = self.target.weights.expert_counts()
        return counts._asdict() if counts is not None else None

    def memory(self) -> dict[str, int]:
        """Bytes on the device by purpose."""
        self.state.check_open()
        out = self.resources.memory()
        out["compute"] += sum(graphs.compute_bytes for graphs in self.all_graphs)
        return out

    def memory_by_segment(self) -> list[dict[str, int]]:
        """The same, of each device that has some of the layers, in their order."""
        r, whole, last = self.resources, self.memory(), len(self.resources.segments) - 1
        weights, kv = getattr(self.target.weights, "nbytes_by_segment", [self.target.weights.nbytes]), self.kv.nbytes_by_home
        states = self.recurrent.nbytes_by_segment if self.recurrent is not None else {}
        out = []
        for index, segment in enumerate(r.segments):
            compute = sum(graphs.compute_bytes_on(segment.backend) for graphs in self.all_graphs)
            compute += r.pictures[index].nbytes if r.pictures and index < last else 0
            mine = {"weights": weights[index], "kv": kv[index], "compute": compute}
            if index in states or (last == 0 and states):
                mine["recurrent"] = sum(states.values()) if last == 0 else states[index]
            for purpose, nbytes in self.devices.memory(index).items():
                mine[purpose] = mine.get(purpose, 0) + nbytes
            out.append(mine)
        out[last] |= {name: nbytes for name, nbytes in whole.items() if name.startswith("draft_")}
        out[last]["compute"] += whole["compute"] - sum(mine["compute"] for mine in out)  # logits for constrained choices
        return out

    @property
    def all_graphs(self) -> list[StepGraphs]:
        """Also those of micro-batches."""
        return [self.graphs, *self.devices.graphs]

    def abandon(self) -> None:
        """Waits for every step in flight and drops its output: its slots can only be released."""
        self.devices.abandon()

    def close(self) -> None:
        self.abandon()
        self.state.version += 1
        self.resources.close()
