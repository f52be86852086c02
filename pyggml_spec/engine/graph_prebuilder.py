"""Graphs that are built before their steps, on a GPU while it computes. On the CPU none is: building takes it as long whenever it is done, and
many graphs of a text are never needed. A file copied by suffix drafts, 2,000 tokens beside the embedded pair's DFlash drafter: 30 of them instead of 57.
A GPU captures them while it computes, too: all of them before the text would keep its first token back (25 ms of the 4B shape on one H200).
"""

from collections.abc import Sequence
from typing import Any

from ..cache.kv import KV_BUCKET
from ..cache.slots import SlotRange
from .graphs import StepGraphs
from .resources import Resources

AHEAD = 64  # tokens, or a whole step, before a span ends the graph of the next one is built


class GraphPrebuilder:
    """Attributes:
    overlaps: whether the host is free while the device computes; the CPU has no time to spare then.
    built: graphs built while the device computed.
    """

    def __init__(self, parts: Resources, graphs: StepGraphs | None = None) -> None:
        """``graphs``: a lane's; None: those of the engine."""
        self._parts, self._graphs = parts, parts.graphs if graphs is None else graphs
        self.overlaps, self.built = parts.backend.device.kind != "cpu", 0
        self._kinds: tuple[tuple, ...] = ()  # steps that are expected, see prepare
        self._epoch = self._last_span = 0
        self._complete_to = -1  # tokens up to which every graph of the next span is there

    @property
    def _committed(self) -> int:
        return self._parts.slots[0].cursor.committed

    def _span(self, width: int) -> int:
        return self._parts.kv.bucket(self._committed + width)

    def prepare(self, kinds: Sequence[tuple], tokens: int) -> None:
        """Announces the (role, width), and what else their graphs differ in, of the steps that the next ``tokens`` tokens of the first slot will take."""
        kv, graphs = self._parts.kv, self._graphs
        self._kinds, self._epoch, self._last_span = tuple(kinds), self._parts.epoch, kv.bucket(self._committed + tokens)
        self._complete_to = -1
        graphs.aim(self._parts.slots[:1])
        if not self.overlaps:
            graphs.announced |= {*self._kinds}
            for role in dict.fromkeys(role for role, *_ in self._kinds):
                graphs.reserve(role)
            return
        ahead = min(tokens, KV_BUCKET // 4)
        for role, width, *more in self._kinds:
            span, last = 0, kv.bucket(self._committed + ahead + width)
            while span < last:
                span = max(self._span(width), kv.bucket(span + 1))
                graphs.build(role, width, span, None, *more)

    def prepare_transitions(self, widths: Sequence[int]) -> None:
        """Announces the commit graphs between blocks of these widths, and from prompts into them, ten nodes each."""
        self._graphs.aim(self._parts.slots[:1])
        self._graphs.plan_catch_ups()
        if self._parts.delta is None or not self._parts.delta.inline:
            return
        kinds = [("commit", left, entered, left > 1) for left in (0, *widths) for entered in widths if left != entered]
        if not self.overlaps:
            self._graphs.announced |= {*kinds}
            return
        for role, left, *more in kinds:
            self._graphs.build(role, left, 0, None, *more)

    def while_computing(self, role: str, width: int, covered: SlotRange, longest: int, *more: Any) -> None:
        """The device computes a step of this kind, whose sequences are at most ``longest`` tokens long."""
        if role in ("logits", "capture"):
            return
        waited = self._graphs.waited_us
        if self._expected:
            if self._committed > self._complete_to:
                self._build_expected()
        elif self._graphs.candidates is not None and self._graphs.reserves(role, width, covered):
            # only where the buffer will do, which is being computed in, and holds the logits that somebody is still to read
            self._graphs.get(role, width, self._parts.kv.bucket(longest + width + max(width, AHEAD)), covered, *more)
        self._graphs.waited_us = waited  # for these no step waits

    @property
    def _expected(self) -> bool:
        return bool(self._kinds) and self._epoch == self._parts.epoch

    def _build_expected(self) -> None:
        """Of the steps that were announced, builds one graph of the next span, or has one of this span or the next captured."""
        graphs, kv, waiting = self._graphs, self._parts.kv, None
        for role, width, *more in self._kinds:
            span = self._span(width)
            after = kv.bucket(span + 1)
            if after <= self._last_span and not graphs.has(role, width, after, None, *more):
                graphs.build(role, width, after, None, *more)
                self.built += 1
                return
            if waiting is None:
                waiting = next((key for s in (span, after) if graphs.waits(*(key := (role, width, s, None, *more)))), None)
        if waiting is not None:
            graphs.get(*waiting)
            return
        self._complete_to = min(self._span(width) - width for _, width, *_ in self._kinds)
