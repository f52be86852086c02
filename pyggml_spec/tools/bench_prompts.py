"""AcceptanceTracker and speed on real prompts, by category and thinking mode, over several runs.

Plain and speculative decoding alternate per prompt, against drift of the machine. Generations stop at the end token. Prompts are encoded as
in `pyspec chat`.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from ..api import GREEDY, Session
from ..engine.sequence import PLAIN, SPECULATIVE
from ..engine.stats import Stats
from ..errors import ContextError, PairError, TemplateError
from ..sampling.sampler import RANDOM_SEED, Sampling
from ..text.template import ChatTemplate
from .prompts import Prompt

Pair = tuple[Stats, Stats]
"""Statistics of one prompt: plain, speculative."""


@dataclass(frozen=True)
class PromptsOptions:
    """Attributes:
    tokens: limit per generation.
    repetitions: runs over all prompts.
    sampling: run i uses ``seed + i``.
    thinking: modes to measure, if the template supports thinking; None for the template's default.
    """

    tokens: int = 128
    repetitions: int = 3
    sampling: Sampling = GREEDY
    thinking: tuple[bool | None, ...] = (True, False)

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs; none for greedy decoding."""
        first = self.sampling.seed
        return [] if first is None else [(first + run) % RANDOM_SEED for run in range(self.repetitions)]


@dataclass
class PromptsRow:
    """One category in one thinking mode; ``runs``: per run, the statistics of each prompt."""

    category: str
    thinking: bool | None
    prompts: int
    runs: list[list[Pair]] = field(default_factory=list)

    @property
    def acceptance(self) -> list[float]:
        """Accepted per verified draft, for runs that verified any."""
        return self._ratios(lambda plain, spec: (spec.matched, spec.drafted))

    @property
    def tokens_per_step(self) -> list[float]:
        """Of speculative decoding, with the target's own token."""
        return self._ratios(lambda plain, spec: (spec.steps + spec.matched, spec.steps))

    @property
    def plain_speed(self) -> list[float]:
        """Tokens per second of plain decoding."""
        return self._ratios(lambda plain, spec: (plain.emitted - 1, plain.seconds["decode"]))

    @property
    def speed(self) -> list[float]:
        """Tokens per second of speculative decoding."""
        return self._ratios(lambda plain, spec: (spec.emitted - 1, spec.seconds["decode"]))

    @property
    def speedup(self) -> list[float]:
        """Speculative over plain speed."""
        rows = [replace(self, runs=[run]) for run in self.runs]
        return [row.speed[0] / row.plain_speed[0] for row in rows if row.speed and row.plain_speed and row.plain_speed[0]]

    def _ratios(self, parts: Callable[[Stats, Stats], tuple[float, float]]) -> list[float]:
        """Of each run, the sums of both parts over its prompts as one fraction; without runs whose lower part is 0."""
        sums = [tuple(map(sum, zip(*(parts(*pair) for pair in run)))) for run in self.runs]
        return [above / below for above, below in sums if below]

    def as_dict(self) -> dict:
        """JSON-ready: mean, deviation and values of each figure; accepted and offered drafts by position."""
        spec = [spec for run in self.runs for _, spec in run]
        figures = {name: summary(getattr(self, name)) for name in ("acceptance", "tokens_per_step", "plain_speed", "speed", "speedup")}
        return {
            "category": self.category, "thinking": self.thinking, "prompts": self.prompts, **figures,
            "matched_at": _by_position([s.matched_at for s in spec]), "offered_at": _by_position([s.offered_at for s in spec]),
            "tokens": sum(s.emitted for s in spec), "ended_by": {r: sum(s.stop_reason == r for s in spec) for r in sorted({s.stop_reason for s in spec})},
        }  # fmt: skip


def summary(values: Sequence[float]) -> dict:
    """Mean and sample deviation; None where undefined."""
    return {
        "mean": statistics.fmean(values) if values else None,
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
        "runs": list(values),
    }


def _by_position(counts: list[list[int]]) -> list[int]:
    return [sum(c[i] for c in counts if i < len(c)) for i in range(max(map(len, counts), default=0))]


class _Leg(NamedTuple):
    prompt: Prompt
    thinking: bool | None
    ids: list[int]

    @property
    def key(self) -> tuple[str, bool | None]:
        return self.prompt.category, self.thinking


def bench_prompts(
    session: Session,
    prompts: Sequence[Prompt],
    options: PromptsOptions,
    template: ChatTemplate,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[PromptsRow]:
    """One row per category and thinking mode, and one per mode for all categories.

    After an interrupt, rows hold the complete runs.

    Raises:
        PairError: the session has no drafting method.
        ContextError: a prompt and its tokens exceed the context.
        TemplateError: the template refuses messages, or lacks a requested thinking mode.
    """
    if not session.methods:
        raise PairError("acceptance needs a drafting method: give a drafter with `draft`, or a method with `spec`")
    if options.thinking in ((True,), (False,)) and not template.can_think:
        raise TemplateError("a thinking mode is selected, but the chat template has none; leave out `thinking`")
    legs = list(_legs(session, prompts, options, template))
    need, room = max(len(leg.ids) for leg in legs) + options.tokens, session.runner.options.n_ctx
    if need > room:
        raise ContextError(f"the longest prompt and its answer need {need} tokens of context, but there are {room}; use `n_ctx` {need}")
    rows = {key: PromptsRow(*key, count) for key, count in Counter(leg.key for leg in legs).items()}

    def measured(leg: _Leg, run: int) -> Pair | None:
        sampling = replace(options.sampling, seed=options.seeds[run]) if options.seeds else options.sampling
        if session.lookup is not None:  # otherwise runs would start from the last run's state
            session.lookup.pool.forget()
        plain, spec = (
            session.generate(leg.ids, options.tokens, mode=mode, sampling=sampling, interrupted=interrupted)[1]
            for mode in (PLAIN, SPECULATIVE)
        )
        return None if "interrupt" in (plain.stop_reason, spec.stop_reason) else (plain, spec)

    for of in (min, max):  # builds the graphs
        measured(of(legs, key=lambda leg: len(leg.ids)), 0)
    for run in range(options.repetitions):
        pairs: dict[tuple, list[Pair]] = {key: [] for key in rows}
        for i, leg in enumerate(legs):
            progress("prompts", run * len(legs) + i, len(legs) * options.repetitions)
            if (pair := measured(leg, run)) is None:
                return _with_totals(rows)
            pairs[leg.key].append(pair)
        for key, row in rows.items():
            row.runs.append(pairs[key])
    return _with_totals(rows)


def _legs(session: Session, prompts: Sequence[Prompt], options: PromptsOptions, template: ChatTemplate) -> Iterator[_Leg]:
    for prompt in prompts:
        if prompt.text is not None:
            yield _Leg(prompt, None, session.tokenizer.encode(prompt.text))
            continue
        for thinking in options.thinking if template.can_think else (None,):
            try:
                ids = template.encode(session.tokenizer, prompt.messages or (), thinking=thinking)
            except TemplateError as error:
                raise TemplateError(f"prompt {prompt.name!r}: {error}") from None
            yield _Leg(prompt, thinking, ids)


def _with_totals(rows: dict[tuple, PromptsRow]) -> list[PromptsRow]:
    out = list(rows.values())
    for thinking in dict.fromkeys(row.thinking for row in out):
        parts = [row for row in out if row.thinking == thinking]
        if len(parts) > 1:
            runs = [list(chain.from_iterable(pairs)) for pairs in zip(*(row.runs for row in parts))]
            out.append(PromptsRow("all", thinking, sum(row.prompts for row in parts), runs))
    return out
