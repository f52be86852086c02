"""The speculative loop of one sequence: which step comes next, until a limit is reached. What a step gives: accept.py; where it ends: limits.py."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from threading import get_ident
from typing import Any

from ..checks import whole
from ..errors import EngineError
from ..ggml.device import waited_for_core
from .accept import choose_block, first_token
from .engine import Engine
from .forced import ForcedDrafts
from .limits import Limits
from .parts import StepResult, candidate_widths
from .sampling import Sampler
from .stats import Stats
from .synthetic import SyntheticAcceptance
from .width import WidthControl

SPECULATIVE, PLAIN, REFERENCE = "speculative", "plain", "reference"
WARMUP_STEPS = 2

Drafts = Callable[[Sequence[int], int], Sequence[int]]
"""A scripted drafter: (all tokens so far, count) -> that many draft ids."""


@dataclass(frozen=True)
class LoopOptions:
    """Attributes:
    max_tokens: tokens to emit; None for as many as the context holds.
    mode: SPECULATIVE, PLAIN, or REFERENCE (plain decoding on the W-wide graph, whose text equals the speculative text byte for byte).
    width: rows per block.
    is_end: whether a token ends the text.
    ignore_end: go on after end tokens.
    sampler: chooses the tokens, of this generation alone; None: the greedy ones.
    completes: whether a stop text is complete with a token; asked once about each that comes out, in order. None: there are none.
    drafts: drafts instead of the drafter.
    forced: whether tokens that the sampler's constraint leaves no choice about are drafts, ahead of the drafter's and without one.
    """

    max_tokens: int | None = None
    mode: str = SPECULATIVE
    width: int = 16
    is_end: Callable[[int], bool] = lambda token: False
    ignore_end: bool = False
    synthetic: SyntheticAcceptance | None = None
    sampler: Sampler | None = None
    completes: Callable[[int], bool] | None = None
    drafts: Drafts | None = None
    forced: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (SPECULATIVE, PLAIN, REFERENCE):
            raise EngineError(f"the mode is {self.mode!r}; use {SPECULATIVE}, {PLAIN} or {REFERENCE}")
        if self.max_tokens is not None:
            whole(self.max_tokens, "the number of tokens", 0, 1 << 62)

    def limits(self) -> Limits:
        """Of one sequence with these options."""
        return Limits(self.max_tokens, (lambda token: False) if self.ignore_end else self.is_end, self.completes)

    def forced_drafts(self) -> ForcedDrafts | None:
        """Of one sequence with these options; None where nothing is forced."""
        if not self.forced or self.mode == REFERENCE or self.sampler is None or self.sampler.grammar is None:
            return None
        return ForcedDrafts(self.sampler, candidate_widths(self.width))

    def check(self, drafter: object | None) -> None:
        """Raises EngineError for a mode that needs a drafter where there is none."""
        if self.mode == SPECULATIVE and drafter is None and self.drafts is None:
            raise EngineError(f"there is no drafter: use {PLAIN} mode, or load one")


def generate(
    engine: Engine,
    prompt: Sequence[int],
    options: LoopOptions,
    stats: Stats | None = None,
    prefill_progress: Callable[[int, int], None] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    control: WidthControl | None = None,
    known: int = 0,
) -> Generator[list[int], None, None]:
    """Yields the tokens of each step: first the one that the prompt leads to, then a block per step.

    ``stats.stop_reason`` says why it ended: "end" (an end token, which is yielded last), "stop" (with the token that completes the text),
    "length", "context", "interrupt" (``interrupted``, asked before every chunk of the prompt and every step, said so). Close the generator to
    stop earlier; the engine then holds exactly the tokens that were committed. The first ``known`` tokens of ``prompt`` are in the caches
    already.

    Raises:
        EngineError: speculative mode without a drafter; NaN or Inf.
    """
    options.check(engine.drafter)
    stats = stats if stats is not None else Stats()
    stats.mode, stats.width = options.mode, options.width if options.mode != PLAIN else 1
    run = _Run(engine, options, stats, list(prompt), prefill_progress, interrupted, control, known)
    try:
        yield from run.tokens()
    finally:
        run.finish()


class _Run:
    """One generation's local state."""

    def __init__(
        self,
        engine: Engine,
        options: LoopOptions,
        stats: Stats,
        history: list[int],
        progress: Callable[[int, int], None] | None,
        interrupted: Callable[[], bool],
        control: WidthControl | None,
        known: int,
    ) -> None:
        self.progress, self.interrupted, self.known = progress, interrupted, known
        self.engine, self.options, self.stats, self.history, self.drafts = engine, options, stats, history, options.drafts
        self.limits = options.limits()
        self.speculating = options.mode == SPECULATIVE and options.width > 1
        self.control = control if self.speculating else None
        self.forced = options.forced_drafts()
        self._before = _counts(engine)
        self._warm: dict | None = None
        self._decode_started: float | None = None

    def tokens(self) -> Iterator[list[int]]:
        engine, stats, limits = self.engine, self.stats, self.limits
        if not limits.reason:
            sampler = self.options.sampler
            engine.read_candidates(sampler.sampling.candidates() if sampler is not None else 0)
            started = time.perf_counter()
            stats.prompt_tokens = len(self.history)
            greedy = engine.prefill(self.history[self.known :], self.progress, self.interrupted)
            stats.seconds["prefill"] += time.perf_counter() - started
            if greedy is None:
                stats.stop_reason = "interrupt"
                return
            yield [self._first(greedy)]
            if not limits.reason:
                self._prepare()
        self._decode_started = started = time.perf_counter()
        self._thread, self._waited = get_ident(), waited_for_core()
        while not limits.reason:
            if self.interrupted():
                stats.stop_reason = "interrupt"
                return
            block = self._step()
            stats.seconds["decode"] = time.perf_counter() - started
            yield block
        stats.stop_reason = limits.reason

    def _first(self, greedy: int) -> int:
        engine, sampler = self.engine, self.options.sampler
        self.limits.begin(engine.cursor.room)
        token = first_token(greedy, self.history, self.limits, engine.candidates, sampler)
        engine.cursor.advance(0, token)
        self.stats.target_forwards += 1
        self.stats.emitted = 1
        self.history.append(token)
        return token

    def _step(self) -> list[int]:
        began = time.perf_counter_ns()
        forced = self.forced.next() if self.forced is not None else []
        result, width, by_model = self._forward() if not forced else self._verify(forced)
        drafts = forced or (result.tokens[1:].tolist() if self.options.mode != REFERENCE else [])
        options, candidates = self.options, self.engine.candidates
        block = choose_block(result.ids.tolist(), drafts, self.limits, candidates, options.sampler, options.synthetic)
        matched = len(block) - 1
        self.engine.accept(len(block), block[-1])
        self.history += block
        self.stats.add_block(width, matched, by_model, len(drafts))
        spent = time.perf_counter_ns() - began
        if self.forced is not None and forced:
            self.forced.observe(len(forced), matched)
            self.stats.forced, self.stats.forced_matched = self.forced.drafted, self.forced.matched
        elif self.forced is not None and width > 1:
            self.forced.observe_drafter(matched)
        if self.control is not None and not forced:
            self.control.observe(width, matched, spent / 1e6)
        self._count_time(result, spent)
        if self._warm is None and self.stats.steps >= WARMUP_STEPS:
            self._warm = _counts(self.engine)
        return block

    def _forward(self) -> tuple[StepResult, int, bool]:
        engine = self.engine
        width = self.control.next() if self.control is not None else self.options.width
        if self.options.mode == REFERENCE:
            return self._checked(engine.verify_step([self.history[-1]] * (width - 1))), width, False
        if not self.speculating or width == 1:
            return self._checked(engine.plain_step()), 1, False
        if self.drafts is not None:
            return self._checked(engine.verify_step(self.drafts(self.history, width - 1))), width, False
        result = self._checked(engine.fused_step(width))
        if not result.draft_finite:
            self.stats.nan_drafts += 1
            self.speculating, self.control = False, None
        return result, width, True

    def _verify(self, forced: list[int]) -> tuple[StepResult, int, bool]:
        """A block of given drafts, filled up to a width that there are graphs for."""
        width = self.forced.width(forced) if self.forced is not None else 1 + len(forced)
        filler = [forced[-1]] * (width - 1 - len(forced))
        return self._checked(self.engine.verify_step([*forced, *filler])), width, False

    def _checked(self, result: StepResult) -> StepResult:
        if not result.target_finite:
            raise EngineError(
                f"{self.engine.target.file.path.name} produced NaN or Inf after {self.engine.cursor.committed} tokens; "
                "the weights are damaged or overflow on this device"
            )
        return result

    def _prepare(self) -> None:
        """Builds every graph that the coming tokens can need, so that no step waits for one."""
        role = "plain"
        if self.options.mode == REFERENCE or (self.speculating and self.drafts is not None):
            role = "verify"
        elif self.speculating:
            role = "fused"
        widths = [1] if role == "plain" else self.control.widths if self.control is not None else [self.options.width]
        kinds = [(role if width > 1 else "plain", width) for width in widths]
        if self.forced is not None:
            kinds += [("verify", width) for width in candidate_widths(self.options.width) if width > 1 and ("verify", width) not in kinds]
        self.engine.prepare_transitions(sorted({width for _, width in kinds}))
        self.engine.prepare(kinds, self.limits.left)

    def _count_time(self, result: StepResult, total_ns: int) -> None:
        times, host = result.times, self.stats.host_us
        host["upload"] += times.upload
        host["compute"] += times.compute
        host["read"] += times.read
        host["host"] += max(0, total_ns // 1000 - times.upload - times.compute - times.read)

    def finish(self) -> None:
        """Fills in the counters, also when the generation was abandoned."""
        stats = self.stats
        stats.cut = self.options.sampler is not None and self.options.sampler.incomplete
        if self.engine.graphs.closed:
            return
        self.engine.read_candidates(0)
        if self.control is not None:
            stats.width_reason = self.control.reason()
        now = _counts(self.engine)
        if self._decode_started is not None:
            stats.seconds["decode"] = time.perf_counter() - self._decode_started
            self._decode_started = None
            waited = waited_for_core() if get_ident() == self._thread else None  # a generator may be closed by another thread
            stats.waited_s = waited - self._waited if waited is not None and self._waited is not None else None
        for key, value in now.items():
            before: Any = 0 if key in ("graphs_built", "buffer_growths") else self._before[key]
            setattr(stats, key, value - before if isinstance(value, int) else {k: v - before[k] for k, v in value.items()})
        warm = self._warm or now
        built, ahead = (now[key] - warm[key] for key in ("graphs_built", "graphs_built_ahead"))
        stats.graphs_built_after_warmup = built - ahead
        stats.buffer_growths_after_warmup = now["buffer_growths"] - warm["buffer_growths"]
        stats.memory = self.engine.memory()


def _counts(engine: Engine) -> dict[str, Any]:
    counters = engine.graphs.counters().values()
    out: dict[str, Any] = {
        "graphs_built": sum(c.graphs_built for c in counters),
        "graphs_built_ahead": engine.built_ahead,
        "buffer_growths": sum(c.buffer_growths for c in counters),
        "computes": sum(c.computes for c in counters),
        "uploads": engine.io.uploads,
        "upload_bytes": engine.io.upload_bytes,
        "reads": engine.io.reads,
        "read_bytes": engine.io.read_bytes,
    }
    if (experts := engine.expert_counts()) is not None:
        out["experts"] = experts
    return {**out, "cuda_graphs": asdict(engine.io.replay)} if engine.io.replay is not None else out
