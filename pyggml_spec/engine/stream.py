"""One sequence as its owner sees it: tokens as they come, its statistics, and the way to end it."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Protocol

from ..ggml.device import cpu_wait_s
from ..speculation.ngram import NgramDrafts
from ..speculation.policy import SpeculationState
from .counters import Counters
from .request import Request
from .stats import Stats


class Driver(Protocol):
    """Who runs its steps: the scheduler."""

    def drive(self, stream: "Stream") -> None: ...

    def end(self, stream: "Stream") -> None: ...

    def look(self) -> None: ...


class Stream:
    """Made by ``Scheduler.submit``. Iterating gives the tokens of each step, the first one alone; ``cancel`` ends it at any time.

    Attributes:
        tokens: everything that came out so far.
        drafts: what the step verified that gave the tokens which the iteration returned last: the accepted drafts, then the rejected ones.
        stats: statistics of this sequence; ``stats.stop_reason`` says why it ended: "end", "length", "context", "stop", "interrupt" or
            "cancelled".
        slot: where it lies, from its admission on; -1 before.
    """

    def __init__(self, scheduler: Driver, request: Request, stats: Stats) -> None:
        self._scheduler, self._request, self._prompt = scheduler, request, request.history[:]
        self.tokens: list[int] = []
        self.stats = stats
        self.slot = -1
        self.ended = False
        self.error: BaseException | None = None
        self.drafts: list[int] = []
        self._blocks: deque[tuple[list[int], list[int]]] = deque()
        self._cancelled = False
        self._stays = False  # in its slot, when it has ended
        self._known = self._filled = 0  # tokens of the prompt that were there before, and that are committed
        self._progress: Callable[[int, int], None] | None = None
        self._interrupted: Callable[[], bool] | None = None
        self._keys: list[bytes] = []  # of the prompt's chunks, for the prefix cache
        self._partings: set[int] = set()  # lengths at which another prompt goes on otherwise
        self._leaders: list[tuple[Stream, int]] = []  # older ones that compute what this prompt begins with, and how much of it
        self._drafted: SpeculationState | None = None  # what width control knows of it
        self._suffix: NgramDrafts | None = None  # what it looks drafts up in, once it decodes
        self._counters: Counters | None = None  # of an engine that it has to itself
        self._since = time.perf_counter_ns()  # the phase began
        self._decoding = False
        self._last_step = 0  # a time of the same clock
        self._rows, self._matched = 1, 0  # of its last block

    def cancel(self) -> None:
        """Ends the sequence before the next step. May be called from any thread, and when it has ended."""
        self._cancelled = True
        self._scheduler.look()

    def close(self) -> None:
        """Ends the sequence now, unless it has ended, and fills in its statistics."""
        if not self.ended and self.error is None:
            self._scheduler.end(self)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        while not self._blocks:
            if self.ended or self.error is not None:
                if self._blocks:  # looked at again: the thread that drives appends the last block before it says so
                    break
                if self.error is not None:
                    raise self.error
                raise StopIteration
            self._scheduler.drive(self)
        block, self.drafts = self._blocks.popleft()
        return block

    def result(self) -> list[int]:
        """Waits for the end and returns all tokens."""
        for _ in self:
            pass
        return self.tokens

    @property
    def filled(self) -> int:
        """Tokens of the prompt that are in the caches."""
        return self._filled

    @property
    def has_news(self) -> bool:
        """Whether the next iteration returns, or ends, without a step."""
        return bool(self._blocks) or self.ended or self.error is not None

    # -- for the scheduler

    @property
    def _left(self) -> int:
        return len(self._prompt) - self._filled

    @property
    def _waits(self) -> bool:
        """Whether somebody else is about to compute what this prompt begins with."""
        self._leaders = [(other, n) for other, n in self._leaders if n > self._filled and other._goes_on_to(n)]
        return bool(self._leaders)

    def _goes_on_to(self, n: int) -> bool:
        return not self.ended and self.error is None and self._filled < n

    def _part(self, rows: int) -> list[int]:
        """What a pass computes of the prompt: ``rows`` tokens at most, and never beyond a parting."""
        end = min([self._filled + rows, *(n for n in self._partings if n > self._filled)])
        return self._prompt[self._filled : end]

    def _phase(self, name: str) -> None:
        now = time.perf_counter_ns()
        self.stats.seconds[name] = self.stats.seconds.get(name, 0.0) + 1e-9 * (now - self._since)
        self._since = now

    def _begin_decoding(self) -> None:
        """The clock of decoding starts; building graphs before it is no step's time."""
        self._decoding = True
        self._since = self._last_step = time.perf_counter_ns()
        self._thread, self._waited = get_ident(), cpu_wait_s()

    def _finish(self) -> None:
        """Fills in the statistics of a sequence that has ended, also of one that was abandoned."""
        self._leaders = []
        self._request.ended()
        if not self._decoding:
            if self._left:
                self._phase("queued" if self.slot < 0 else "prefill")
        elif get_ident() == self._thread:  # another thread may end it
            waited = cpu_wait_s()
            self.stats.waited_s = waited - self._waited if waited is not None and self._waited is not None else None
        if self._counters is not None:
            self._counters.fill(self.stats)
