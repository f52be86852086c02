"""One sequence: a request from submission to its end.

    waiting --> prefill --> decoding --> ended

It holds the prompt and output, options, limits, constraint, drafts of the last step and statistics, and is the handle that its reader iterates.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from ..checks import token_ids, whole
from ..constraints.jump_forward import JumpForward
from ..errors import ContextError, EngineError
from ..ggml.device import cpu_wait_s
from ..models.adapters import Chosen
from ..sampling.sampler import Sampler
from ..speculation.ngram import NgramDrafts
from ..speculation.policy import SpeculationState
from ..speculation.synthetic import SyntheticAcceptance
from .constrained import StepConstraint
from .options import candidate_widths
from .prompt import PictureRows, Prompt
from .stats import Stats

SPECULATIVE, PLAIN, REFERENCE = "speculative", "plain", "reference"
STOP, END, LENGTH, CONTEXT = "stop", "end", "length", "context"  # stop reasons
CONSTRAINT, SCRIPT = "constraint", "script"  # draft sources other than drafting methods

DraftFunction = Callable[[Tokens[int], int], Tokens[int]]
"""A scripted drafter: (all tokens so far, count) -> at most that many draft ids."""


@dataclass(frozen=True)
class GenerationOptions:
    """Options of one sequence.

    Attributes:
        max_tokens: limit of emitted tokens; None for the rest of the context.
        mode: SPECULATIVE, PLAIN, or REFERENCE (plain decoding on the verify graph of ``width`` rows: text equal to the speculative text, byte by byte).
        width: rows of the widest verify step.
        is_end: whether a token ends the text.
        ignore_end: continue after end tokens.
        synthetic: synthetic acceptance, for benchmarks.
        sampler: of this sequence alone; None for greedy tokens.
        completes: called once per emitted token, in order; returns the stop reason "stop" or "length", or "" to continue.
        drafts: drafts in place of a drafter's.
        jump_forward: whether tokens that the constraint leaves no choice about are drafted, ahead of other methods.
        reuse: whether the prompt may reuse the prefix cache.
        scored: whether the sampler gets the logits of the prompt's rows, too; without ``reuse``.
        owner: key of the tenant; prefixes and n-grams are never shared between owners.
        adapters: of the target; None for those of ``Adapters.default``.
    """

    max_tokens: int | None = None
    mode: str = SPECULATIVE
    width: int = 16
    is_end: Callable[[int], bool] = lambda token: False
    ignore_end: bool = False
    synthetic: SyntheticAcceptance | None = None
    sampler: Sampler | None = None
    completes: Callable[[int], str] | None = None
    drafts: DraftFunction | None = None
    jump_forward: bool = False
    reuse: bool = True
    scored: bool = False
    owner: str = ""
    adapters: Chosen | None = None

    def __post_init__(self) -> None:
        if self.mode not in (SPECULATIVE, PLAIN, REFERENCE):
            raise EngineError(f"the mode is {self.mode!r}; use {SPECULATIVE}, {PLAIN} or {REFERENCE}")
        if self.max_tokens is not None:
            whole(self.max_tokens, "the number of tokens", 0, 1 << 62)

    def check(self, drafter: object | None) -> None:
        """Raises EngineError for speculative mode without a drafting method (``drafter`` None)."""
        if self.mode == SPECULATIVE and drafter is None and self.drafts is None:
            raise EngineError(f"there is no drafter: use {PLAIN} mode, or load one")

    @property
    def candidates(self) -> int | None:
        """``count`` of ``ModelRunner.read_candidates``."""
        return self.sampler.sampling.candidates() if self.sampler is not None else 0

    @property
    def constrained(self) -> bool:
        return self.sampler is not None and self.sampler.grammar is not None


class Limits:
    """Where a sequence ends: stop texts, end token, token limit, end of the context. Consulted once per emitted token, in order, so that a text ends at the same
    token whatever a step verifies.

    Attributes:
        emitted: tokens so far.
        reason: STOP, END, LENGTH or CONTEXT, the first that holds; empty while it goes on.
    """

    def __init__(self, max_tokens: int | None, is_end: Callable[[int], bool], completes: Callable[[int], str] | None = None):
        """
        Args:
            max_tokens: limit; None for the rest of the context.
            is_end: whether a token ends the text.
            completes: STOP or LENGTH where the text ends with this token, or "".
        """
        self._max_tokens, self._is_end, self._completes = max_tokens, is_end, completes
        self._most = 1  # tokens that the context has room for; the last one is never computed
        self.emitted = 0
        self.reason = LENGTH if max_tokens is not None and max_tokens < 1 else ""

    def begin(self, room: int) -> None:
        """The prompt is in the context, which has ``room`` positions left."""
        self._most = room + 1

    @property
    def left(self) -> int:
        """Tokens that can still be emitted."""
        return (self._most if self._max_tokens is None else min(self._most, self._max_tokens)) - self.emitted

    def take(self, tokens: Tokens[int]) -> int:
        """Counts ``tokens`` up to the one that ends the sequence; returns how many those are."""
        for count, token in enumerate(tokens, 1):
            self.emitted += 1
            if self._completes is not None and (why := self._completes(token)):
                self.reason = why
            elif self._is_end(token):
                self.reason = END
            elif self.emitted == self._max_tokens:
                self.reason = LENGTH
            elif self.emitted >= self._most:
                self.reason = CONTEXT
            if self.reason:
                return count
        return len(tokens)


class Sequence:
    """Made by ``Engine.submit``, whose ``engine`` runs its steps. Iterate it for the tokens of each step, the first token alone; ``cancel`` it at any time.

    Attributes:
        tokens: output so far.
        drafts: drafts verified by the step whose tokens the iteration returned last: accepted ones first.
        stats: ``stats.stop_reason`` is "end", "length", "context", "stop", "interrupt" or "cancelled" once it has ended.
        slot: cache slot, -1 before admission.
        error: what ended it, if it failed.
        history: prompt and output.
        cached, computed: prompt tokens in the caches at submission, and now.
        speculating: whether its next step may draft.
        source: where the last step's drafts came from: a drafting method, CONSTRAINT, SCRIPT, or "" for none.
        by_drafter: whether a drafter made them within the step.
        planned_rows: rows of its graph, 0 where that is not known before the step.
        offered: drafts of the last step.
        rows, matched: rows of the last step, and accepted drafts.
        failure: error of its constraint or scripted drafter before a step; it ends with it after the step.
    """

    def __init__(
        self, engine: Any, prompt: Prompt, options: GenerationOptions, stats: Stats, n_vocab: int, width: int, speculating: bool
    ) -> None:
        self._engine, self._n_vocab = engine, n_vocab
        self.prompt, self.history, self.options, self.stats = prompt, list(prompt), options, stats
        self.limits = Limits(options.max_tokens, (lambda token: False) if options.ignore_end else options.is_end, options.completes)
        # life
        self.slot, self.keeps_slot, self.ended, self.cancelled = -1, False, False, False
        self.decoding = False
        self.error: BaseException | None = None
        self.interrupted: Callable[[], bool] | None = None
        self.tokens: list[int] = []
        self.drafts: list[int] = []
        self.outputs: deque[tuple[list[int], list[int]]] = deque()  # (tokens, drafts) per step that the reader has not taken
        # prompt
        self.cached = self.computed = 0
        self.on_progress: Callable[[int, int], None] | None = None
        self.prefix_keys: list[bytes] = []
        self.split_points: set[int] = set()  # prompt lengths at which a chunk has to end
        self.shares: list[tuple[Sequence, int]] = []  # older sequences that compute the first n tokens of this prompt
        # speculation
        sampler, constrained = options.sampler, options.constrained
        self.speculating = speculating and options.mode == SPECULATIVE and options.width > 1
        self.verify_len = width  # of reference steps
        self.pinned_len = 0  # rows of every verify step; 0 where they may differ
        self.acceptance: SpeculationState | None = None
        self.ngram: NgramDrafts | None = None
        self.constraint = StepConstraint(sampler, options.synthetic) if constrained and sampler is not None else None
        self.jump_forward: JumpForward | None = None
        if options.jump_forward and options.mode != REFERENCE and constrained and sampler is not None:
            self.jump_forward = JumpForward(sampler, candidate_widths(options.width))
        # last step
        self.source, self.by_drafter, self.planned_rows = "", False, 0
        self.offered: list[int] = []
        self.failure: Exception | None = None
        self.rows, self.matched = 1, 0
        # clocks, in nanoseconds
        self.since = time.perf_counter_ns()  # start of the phase
        self.last_step = 0

    # -- reader

    def cancel(self) -> None:
        """Ends the sequence before the next step. From any thread, also after its end."""
        self.cancelled = True
        self._engine.wake()

    def close(self) -> None:
        """Ends the sequence now, unless it has ended, and fills in its statistics."""
        if not self.ended and self.error is None:
            self._engine.end(self)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        while not self.outputs:
            if self.ended or self.error is not None:
                if self.outputs:  # the driving thread appends the last tokens before it sets the end
                    break
                if self.error is not None:
                    raise self.error
                raise StopIteration
            self._engine.drive(self)
        tokens, self.drafts = self.outputs.popleft()
        return tokens

    def result(self) -> list[int]:
        """Waits for the end and returns all tokens."""
        for _ in self:
            pass
        return self.tokens

    @property
    def ready(self) -> bool:
        """Whether the next iteration returns, or ends, without a step."""
        return bool(self.outputs) or self.ended or self.error is not None

    # -- prompt

    @property
    def remaining(self) -> int:
        """Prompt tokens that are not computed."""
        return len(self.prompt) - self.computed

    @property
    def waits_for_prefix(self) -> bool:
        """Whether an older sequence still computes tokens that this prompt shares."""
        self.shares = [(other, n) for other, n in self.shares if n > self.computed and other.will_compute(n)]
        return bool(self.shares)

    def will_compute(self, n: int) -> bool:
        """Whether its next chunks complete the first ``n`` prompt tokens."""
        return not self.ended and self.error is None and self.computed < n

    def chunk(self, rows: int) -> list[int]:
        """The next at most ``rows`` prompt tokens, up to a split point."""
        end = min([self.computed + rows, *(n for n in self.split_points if n > self.computed)])
        return self.prompt[self.computed : self.prompt.chunk_end(self.computed, end)]

    def rows_of_pictures(self, count: int) -> PictureRows | None:
        """Those among the next ``count`` prompt tokens."""
        return self.prompt.rows_of(self.computed, count) if self.prompt.pictures else None

    # -- speculation

    def pin_verify_len(self, width: int) -> None:
        """Every verify step has ``width`` rows, whatever the constraint forbids: other shapes of steps round differently."""
        if self.constraint is None or width == 1 or not self.speculating:
            return
        self.constraint.widths, self.pinned_len = (width,), width
        if self.jump_forward is not None and self.options.sampler is not None:
            self.jump_forward = JumpForward(self.options.sampler, [width])

    def offer(self, source: str, drafts: list[int], by_drafter: bool = False, planned_rows: int = 0) -> None:
        """The drafts of the next step, as far as they are known before it."""
        self.source, self.offered, self.by_drafter, self.planned_rows = source, drafts, by_drafter, planned_rows
        if self.constraint is not None:
            self.constraint.begin(drafts)

    def scripted(self, count: int) -> list[int]:
        """At most ``count`` drafts of ``options.drafts``.

        Raises:
            ContextError: the function returned something else.
        """
        assert self.options.drafts is not None
        drafts = self.options.drafts(self.history, count)
        ids = token_ids(drafts, self._n_vocab, "what the scripted drafter gave").tolist() if len(drafts) else []
        if len(ids) > count:
            raise ContextError(f"the scripted drafter gave {len(ids)} ids where {count} were asked for")
        return ids

    # -- clocks

    def end_phase(self, name: str) -> None:
        now = time.perf_counter_ns()
        self.stats.seconds[name] = self.stats.seconds.get(name, 0.0) + 1e-9 * (now - self.since)
        self.since = now

    def begin_decoding(self) -> None:
        self.decoding = True
        self.since = self.last_step = time.perf_counter_ns()
        self._thread, self._waited = get_ident(), cpu_wait_s()

    def finish(self) -> None:
        """Fills in the final statistics."""
        self.shares = []
        self.stats.cut = self.options.sampler is not None and self.options.sampler.incomplete
        if not self.decoding:
            if self.remaining:
                self.end_phase("queued" if self.slot < 0 else "prefill")
        elif get_ident() == self._thread:  # the wait is per thread
            waited = cpu_wait_s()
            self.stats.waited_s = waited - self._waited if waited is not None and self._waited is not None else None
