"""The speculative loop of one sequence: which step comes next, until a limit is reached. The sequence: request.py."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from threading import get_ident
from typing import Any

from ..engine.engine import Engine
from ..engine.options import candidate_widths
from ..engine.slot import StepResult
from ..ggml.device import waited_for_core
from .request import PLAIN, REFERENCE, SPECULATIVE, LoopOptions, Request
from .stats import Stats
from .width import WidthControl

__all__ = ["PLAIN", "REFERENCE", "SPECULATIVE", "LoopOptions", "generate"]

WARMUP_STEPS = 2


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
        prompt: list[int],
        progress: Callable[[int, int], None] | None,
        interrupted: Callable[[], bool],
        control: WidthControl | None,
        known: int,
    ) -> None:
        self.progress, self.interrupted, self.known = progress, interrupted, known
        self.engine, self.options, self.stats, self.request = engine, options, stats, Request(prompt, options, stats)
        self.control = control if self.request.speculating else None
        self._before = _counts(engine)
        self._warm: dict | None = None
        self._decode_started: float | None = None

    def tokens(self) -> Iterator[list[int]]:
        engine, stats, request = self.engine, self.stats, self.request
        limits = request.limits
        if not limits.reason:
            engine.read_candidates(self.options.candidates)
            started = time.perf_counter()
            stats.prompt_tokens = len(request.history)
            greedy = engine.prefill(request.history[self.known :], self.progress, self.interrupted)
            stats.seconds["prefill"] += time.perf_counter() - started
            if greedy is None:
                stats.stop_reason = "interrupt"
                return
            yield [request.first(greedy, engine)]
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

    def _step(self) -> list[int]:
        began = time.perf_counter_ns()
        engine, control = self.engine, self.control
        request = self.request
        item = request.forced_work() or request.work(control.next() if control is not None else self.options.width)
        result = engine.step({0: item})[0]
        block = request.take(item, result, engine)
        spent = time.perf_counter_ns() - began
        if control is not None and not request.forced:
            control.observe(item.rows, len(block) - 1, spent / 1e6)
            if not request.speculating:  # the drafter has failed
                self.control = None
        self._count_time(result, spent)
        if self._warm is None and self.stats.steps >= WARMUP_STEPS:
            self._warm = _counts(engine)
        return block

    def _prepare(self) -> None:
        """Builds every graph that the coming tokens can need, so that no step waits for one."""
        role = "plain"
        if self.options.mode == REFERENCE or (self.request.speculating and self.options.drafts is not None):
            role = "verify"
        elif self.request.speculating:
            role = "fused"
        widths = [1] if role == "plain" else self.control.widths if self.control is not None else [self.options.width]
        kinds = [(role if width > 1 else "plain", width) for width in widths]
        if self.request.may_force:
            kinds += [("verify", width) for width in candidate_widths(self.options.width) if width > 1 and ("verify", width) not in kinds]
        self.engine.prepare_transitions(sorted({width for _, width in kinds}))
        self.engine.prepare(kinds, self.request.limits.left)

    def _count_time(self, result: StepResult, total_ns: int) -> None:
        times, host = result.times, self.stats.host_us
        host["upload"] += times.upload
        host["compute"] += times.compute
        host["read"] += times.read
        host["host"] += max(0, total_ns // 1000 - times.upload - times.compute - times.read)

    def finish(self) -> None:
        """Fills in the counters, also when the generation was abandoned."""
        stats = self.stats
        self.request.ended()
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
