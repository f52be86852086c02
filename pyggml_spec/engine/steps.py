"""One forward pass: which graph, its inputs, the run, and what it brought each slot. What it is asked for has been checked."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ..cache.slots import SlotRange
from ..errors import DeviceError, EngineError
from ..ggml.step_io import StepTimes
from ..multi_device.lanes import Flight
from .batch import BatchItem, Draft, Prefill, StepOutput, Verify
from .commits import Commits
from .graph_cache import Step
from .graph_prebuilder import GraphPrebuilder
from .graphs import STREAMED, StepGraphs
from .inputs import InputBuilder
from .resources import Resources
from .sequences import Sequences

Meanwhile = Callable[[], object] | None


class Steps:
    """Attributes:
    forwards: passes so far; ``rows_computed`` and ``rows_used``: rows of their graphs, and those that a slot had work for.
    """

    def __init__(
        self, parts: Resources, commits: Commits, sequences: Sequences, ahead: GraphPrebuilder, graphs: StepGraphs | None = None
    ) -> None:
        """``graphs``: a lane's; None: those of the engine."""
        graphs = parts.graphs if graphs is None else graphs
        self._parts, self._commits, self._sequences, self._ahead = parts, commits, sequences, ahead
        self._slots, self._delta, self._graphs, self._fill = parts.slots, parts.delta, graphs, InputBuilder(parts, graphs)
        self.forwards = self.rows_computed = self.rows_used = 0

    def run(
        self, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange, meanwhile: Meanwhile = None, late: bool = True
    ) -> dict[int, StepOutput]:
        """One pass, of whichever kind does for all of the work. ``late``: as in ``blocks``."""
        for slot, n in rows.items():
            if n > 1 and not isinstance(work[slot], Prefill):
                return self.blocks(work, rows, covered, meanwhile, late)
        return self.certain(work, rows, covered, meanwhile)

    def looked_at(
        self, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange, meanwhile: Meanwhile = None
    ) -> dict[int, StepOutput]:
        """Drafts first, and verifies what passes: one row more than that, filled up to a width that there are graphs for."""
        drafting = {slot: item for slot, item in work.items() if isinstance(item, Draft)}
        ids, sums, said = self._drafts(drafting, covered)
        given: dict[int, BatchItem] = dict(work)
        worth = self._worth(drafting, said, covered)
        for slot, item in drafting.items():
            drafts = ids[slot - covered.first, : item.width - 1]
            passed = min(len(drafts) if item.check is None else item.check(drafts), worth.get(slot, len(drafts)))
            rows_of = min(self._graphs.width_for(passed + 1), item.width)
            given[slot], rows = Verify(drafts[: rows_of - 1]), {**rows, slot: rows_of}
        results = self.run(given, rows, covered, meanwhile, late=False)
        for slot, item in drafting.items():
            if not np.isfinite(sums[slot - covered.first, : item.width]).all():
                self._sound(slot, False)
                results[slot] = replace(results[slot], draft_finite=False)
        return results

    @staticmethod
    def _worth(drafting: Mapping[int, Draft], said: np.ndarray | None, covered: SlotRange) -> dict[int, int]:
        """How many drafts of these slots are worth verifying by what the drafter ``said`` of them."""
        asked: dict[Callable, dict[int, np.ndarray]] = {}
        for slot, item in drafting.items():
            if item.weigh is not None and said is not None:
                asked.setdefault(item.weigh, {})[slot] = said[slot - covered.first, : item.width - 1]
        return {slot: most for weigh, of in asked.items() for most in (weigh(of),) for slot in of}

    def _drafts(self, drafting: Mapping[int, Draft], covered: SlotRange) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """I32 [slots, width - 1] drafts of the blocks, F32 [slots, width] sums that are finite if the drafter is sound, and F32 [slots, width - 1]
        what it says of each draft, None if that is nothing."""
        width, method = self._graphs.width_for(max(item.width for item in drafting.values())), self._who(drafting.values())
        self._commits.catch_up(drafting)
        role = self._graphs.role("draft", method)
        step = self._graphs.get(role, width, self._parts.kv.bucket(self._longest(covered) + width), covered)
        self._fill.drafts(step, width, method, drafting, covered)
        step.fields.run()
        order = [self._graphs.draft_order(method, at, width - 1, covered) for at in range(covered.count)]
        said = step.host["confidence"].reshape(covered.count, -1).copy() if "confidence" in step.host else None
        return step.host["drafts"][np.array(order)], step.host["draft_sum"].reshape(covered.count, -1).copy(), said

    def certain(
        self, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange, meanwhile: Meanwhile = None
    ) -> dict[int, StepOutput]:
        """All rows are certain: the recurrent states are written by the step itself."""
        need = max(rows.values())
        # of the only slot one token of a prompt is a chunk, as it is in a longer prompt; among several it may share a step of plain tokens
        chunk = need > 1 or (len(self._slots) == 1 and isinstance(work[0], Prefill))
        role, width = ("prefill", self._graphs.chunk_width(need)) if chunk else ("plain", 1)
        copies = self._graphs.copies(width * covered.count) if chunk else ()
        if copies:
            self._expect(any(isinstance(item, Prefill) and item.more for item in work.values()))
        if self._graphs.split and self._parts.io.lane is None and all(isinstance(item, Prefill) and item.more for item in work.values()):
            return self._ahead_of(role, width, work, rows, covered, meanwhile, *copies)
        step, times = self.rows(role, work, rows, covered, width, meanwhile, *copies)
        results = self._of_certain(step, width, work, rows, covered, times)
        if copies:
            self._agree(covered, copies)
        return results

    def _of_certain(
        self, step: Step, width: int, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange, times: StepTimes
    ) -> dict[int, StepOutput]:
        ids, sound, tokens, out = step.ids(), step.finite(), step.host["tokens"], {}
        for slot, n in rows.items():
            s, at = self._slots[slot], slot - covered.first
            s.cursor.advance(n, int(ids[at]))
            s.folded()
            s.open_rows, s.row = 0 if isinstance(work[slot], Prefill) else 1, at
            finite = sound or self._sound(slot, step.finite_rows(at, 1))
            out[slot] = StepOutput(tokens[at * width : at * width + n].copy(), ids[at : at + 1], True, finite, times)
        return out

    def _agree(self, covered: SlotRange, more: tuple[Any, ...]) -> None:
        """What the guests of a step left counts now."""
        if (guests := self._parts.guests) is not None and STREAMED in more:
            for slot in covered.slots:
                guests.agree(slot, self._slots[slot].cursor)

    def _expect(self, more: bool) -> None:
        """Whether another chunk of a prompt comes behind the next one."""
        for stream in self._parts.target.weights.streams:
            stream.expect(more)

    def _ahead_of(
        self,
        role: str,
        width: int,
        work: Mapping[int, BatchItem],
        rows: Mapping[int, int],
        covered: SlotRange,
        meanwhile: Meanwhile,
        *more: str,
    ) -> dict[int, StepOutput]:
        """Prompts that go on in the next step, which is launched behind this one. What is not finite stays so until their ends."""
        _, times = self.rows(role, work, rows, covered, width, meanwhile, *more, ahead=True)
        out = {}
        for slot, n in rows.items():
            s = self._slots[slot]
            s.cursor.advance(n, None)
            s.folded()
            s.row = 0
            out[slot] = StepOutput(np.empty(0, np.int32), np.empty(0, np.int32), True, True, times)
        self._agree(covered, more)
        return out

    def rows(
        self,
        role: str,
        work: Mapping[int, BatchItem],
        rows: Mapping[int, int],
        covered: SlotRange,
        width: int,
        meanwhile: Meanwhile = None,
        *more: Any,
        ahead: bool = False,
    ) -> tuple[Step, StepTimes]:
        """Computes rows that are certain, ``width`` of each slot. Cursors stay where they are. ``ahead``: nobody waits for them,
        unless guests have to go home."""
        step, longest = self._rows(role, work, rows, covered, width, *more)
        guests = self._parts.guests if STREAMED in more else None
        if guests is None:
            times = self._run(step, role, width, covered, longest, meanwhile, *more, ahead=ahead)
        else:
            had = [(slot, self._slots[slot].cursor.committed) for slot in covered.slots]
            self._parts.synchronize()
            for slot in covered.slots:
                guests.bring(slot, self._slots[slot].cursor)
            times = self._run(step, role, width, covered, longest, meanwhile, *more)
            for slot, n in had:
                guests.take_back(slot, n, rows.get(slot, 0))
        self._after_rows(step, role, width, rows, covered)
        return step, times

    def _rows(
        self, role: str, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange, width: int, *more: Any
    ) -> tuple[Step, int]:
        """What is to be run, and the length of the longest sequence."""
        longest = self._longest(covered)
        self._commits.before_rows(rows, covered, role == "plain")
        step = self._graphs.get(role, width, self._graphs.certain_span(role, longest + width), covered, *more)
        self._fill.certain(step, width, work, rows, covered)
        return step, longest

    def _after_rows(self, step: Step, role: str, width: int, rows: Mapping[int, int], covered: SlotRange) -> None:
        self._count(width * covered.count, rows)
        if self._delta is not None:
            self._delta.after_rows(int(role == "plain"))
        if self._parts.last_hidden is not None:
            self._leave(step, rows)
        if "ring_rows" in step.host:
            self._store(step, width, rows, covered)

    def _store(self, step: Step, width: int, rows: Mapping[int, int], covered: SlotRange, ready: str = "") -> None:
        """What a step left for drafters other than the one that is ``ready``."""
        assert self._parts.ring is not None
        for slot, n in rows.items():
            if (s := self._slots[slot]).drafting:
                first = (slot - covered.first) * width
                self._parts.ring.stored(s.cursor.committed, step.host["tokens"][first : first + n], (ready,), slot)

    def blocks(
        self, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange, meanwhile: Meanwhile = None, late: bool = True
    ) -> dict[int, StepOutput]:
        """Some rows may turn out wrong: nothing is written into the recurrent states but what the steps before left uncommitted. ``late`` False: somebody
        drafted these blocks just now, and its rows are computed with them."""
        step, role, width, longest, more = self._block(work, rows, covered, late)
        times = self._run(step, role, width, covered, longest, meanwhile, *more)
        return self._of_blocks(step, width, work, rows, covered, times)

    def _block(
        self, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange, late: bool = True
    ) -> tuple[Step, str, int, int, tuple[Any, ...]]:
        """What is to be run: its role, rows per slot, the length of the longest sequence, and what else its graph differs in."""
        drafting = [item for item in work.values() if isinstance(item, Draft)]
        need = max([*rows.values(), *[item.verified for item in drafting]])
        width = self._graphs.block_width(need)
        if not width:
            raise EngineError(f"a step with drafts has at most {self._parts.options.width} rows per slot, but a prompt has {need}")
        for slot in covered.slots if len(work) < covered.count else ():
            if self._slots[slot].open_rows and slot not in work:
                raise EngineError(f"this step covers slot {slot} and would take its open block away: call accept or rollback there first")
        more: tuple[Any, ...] = ()
        method, role, drafts = "", "verify", 0
        if drafting:
            method = self._who(drafting)
            role, more, drafts = self._graphs.of_drafts("fused", method, width, max([item.width for item in drafting]) - 1)
        else:
            more = self._graphs.late if late else ()
        self._commits.before_block(width, rows, method, bool(method or more))
        longest = self._longest(covered)
        step = self._graphs.get(role, width, self._parts.kv.bucket(longest + width), covered, *more)
        self._fill.block(step, width, method, drafts, work, rows, covered)
        return step, role, width, longest, more

    def _of_blocks(
        self, step: Step, width: int, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange, times: StepTimes
    ) -> dict[int, StepOutput]:
        self._count(width * covered.count, rows)
        for slot in covered.slots:  # whatever was uncommitted there is in the state now
            self._slots[slot].folded()
        if self._delta is not None:
            self._delta.after_block(covered)
        if self._parts.last_hidden is not None:
            self._leave(step, rows)
        if "ring_rows" in step.host:
            ready = next((self._graphs.method_of(item.drafter) for item in work.values() if isinstance(item, Draft)), "")
            self._store(step, width, rows, covered, ready)
        ids, sound = step.ids(), step.finite()
        return {slot: self._of_block(step, ids, sound, width, slot, item, rows[slot], covered, times) for slot, item in work.items()}

    # -- in a lane, beside others

    def launch(self, work: Mapping[int, BatchItem], rows: Mapping[int, int], covered: SlotRange) -> Flight:
        """Begins a pass of plain tokens and blocks, which is waited for by ``land``."""
        more: tuple[Any, ...] = ()
        block = any(n > 1 for n in rows.values())
        if block:
            step, role, width, longest, more = self._block(work, rows, covered)
        else:
            role, width = "plain", 1
            step, longest = self._rows(role, work, rows, covered, width)
        flight = Flight(step, block, width, work, rows, covered)
        self._parts.flying.update(dict.fromkeys(covered.slots, step))
        try:
            step.fields.launch()
            if self._ahead.overlaps:
                self._ahead.while_computing(role, width, covered, longest, *more)
        except BaseException:  # nobody would land it
            with suppress(DeviceError, EngineError):
                step.fields.wait()
            self.forget(flight)
            raise
        return flight

    def land(self, flight: Flight) -> dict[int, StepOutput]:
        """Waits for a pass, and gives what it brought."""
        step, block, width, work, rows, covered = flight
        try:
            times = step.fields.wait()
        finally:
            self.forget(flight)
        self._parts.last = step
        if block:
            return self._of_blocks(step, width, work, rows, covered, times)
        self._after_rows(step, "plain", width, rows, covered)
        return self._of_certain(step, width, work, rows, covered, times)

    def forget(self, flight: Flight) -> None:
        """Nobody asks any more for what it brings."""
        for slot in flight.covered.slots:
            self._parts.flying.pop(slot, None)

    def _of_block(
        self, step: Step, ids: np.ndarray, sound: bool, width: int, slot: int, item: BatchItem, n: int, covered: SlotRange, times: StepTimes
    ) -> StepOutput:
        """``sound``: everything that the step computed is finite, whatever the slot."""
        s = self._slots[slot]
        first = (slot - covered.first) * width
        s.tokens, s.ids, s.open_rows, s.row = step.host["tokens"][first : first + n].copy(), ids[first : first + n], n, first
        draft_finite = sound or not isinstance(item, Draft) or self._drafts_finite(step, slot - covered.first, covered)
        target_finite = sound or step.finite_rows(first, n)
        if not sound:
            self._sound(slot, draft_finite and target_finite)
        if isinstance(item, Prefill):
            self._sequences.move(slot, s.base + n, int(s.ids[-1]))
            s.row += n - 1
        return StepOutput(s.tokens, s.ids[-1:] if isinstance(item, Prefill) else s.ids, draft_finite, target_finite, times)

    @staticmethod
    def _drafts_finite(step: Step, at: int, covered: SlotRange) -> bool:
        return bool(np.isfinite(step.host["draft_sum"].reshape(covered.count, -1)[at]).all())

    def _who(self, drafting: Iterable[Draft]) -> str:
        """The method of the one drafter of a step.

        Raises:
            EngineError: several are asked for, or one that is not here.
        """
        methods = {self._graphs.method_of(name) for name in {item.drafter for item in drafting}}
        if len(methods) > 1:
            raise EngineError(f"{' and '.join(sorted(methods))} cannot draft in one step: a step has one drafter for all of its slots")
        return methods.pop()

    def _leave(self, step: Step, rows: Mapping[int, int]) -> None:
        """The first of the hidden states that a step leaves is that of the slot's last committed token, until more rows count."""
        if "last_hidden" in step.host:
            assert self._parts.last_hidden is not None
            self._parts.last_hidden.at[list(rows)] = 0

    def _run(
        self, step: Step, role: str, width: int, covered: SlotRange, longest: int, meanwhile: Meanwhile, *more: Any, ahead: bool = False
    ) -> StepTimes:
        self._parts.last = None if ahead else step
        if step.fields.ahead != ahead:
            step.fields.ahead = ahead
        step.fields.launch()
        if ahead:
            self._parts.under_way = step
            if meanwhile is not None:
                meanwhile()
            return StepTimes(0, 0, 0)
        self._parts.under_way = None  # this one is waited for, and so are those before it
        try:
            if meanwhile is not None:
                meanwhile()
            if self._ahead.overlaps:
                self._ahead.while_computing(role, width, covered, longest, *more)
        finally:
            times = step.fields.wait()
        return times

    def _longest(self, covered: SlotRange) -> int:
        if covered.count == 1:
            return self._slots[covered.first].cursor.committed
        return max(s.cursor.committed for s in self._slots[covered.part])

    def _sound(self, slot: int, finite: bool) -> bool:
        """``finite``; if it is not, nothing of the slot is to be reused, and it is cleared before its next sequence: masks do not stop NaN."""
        if not finite:
            self._slots[slot].clean = self._slots[slot].sound = False
            self._parts.epoch += 1
        return finite

    def _count(self, computed: int, rows: Mapping[int, int]) -> None:
        self.forwards += 1
        self.rows_computed += computed
        self.rows_used += sum(rows.values())
