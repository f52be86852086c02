"""Statistics of one generation, and of an engine. Row 0 of a verify step is the last token: neither drafted nor accepted.

emitted = 1 (from the prompt) + steps + matched
"""

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from ..ggml.step_io import StepTimes

LEAST_WAITED = 0.1  # seconds
COLD, ENOUGH_PLAIN = 4, 8  # plain steps with cold caches after other steps; plain steps that make a mean
WARMUP_STEPS = 2  # graphs that are built in later steps delay a text
SINCE_LOAD = "graphs_built", "buffer_growths"  # counted since load, not since the generation began
MUCH_WAITING = 0.1  # share of the time; 0.00 to 0.02 on idle cores, 0.76 with two threads on two busy ones


@dataclass
class Stats:
    """Counts and times of one generation; ``as_dict`` is what ``--stats`` writes.

    Attributes:
        reused_tokens: prompt tokens from the prefix cache.
        reused_from: prompt chunks that were in place, copied from memory, and read from disk.
        notes: what was asked for and could not be used, one sentence each.
        emitted: output tokens, an end token included.
        steps: decode steps.
        drafted: drafts that were verified.
        matched: drafts that were accepted.
        matched_at, offered_at: accepted drafts, and drafts, by position in the step (from 1 on; index 0 is position 1).
        block_sizes: steps by emitted tokens.
        widths: steps by verified rows.
        width_reason: why the policy chose as it did, in one sentence; empty where the verify length was pinned, and for sequences that share steps
            unless no verify length can pay.
        seed, sampling: seed (None where nothing is random), and the sampling in words.
        forced, forced_matched: jump-forward drafts, and accepted ones.
        cut: whether the text ended before its constraint was complete.
        drafters: by source: [steps, drafts verified, drafts accepted]. Sources are named as in `--spec-type`; "constraint" is jump-forward, "script" a
            caller's function.
        nan_drafts: steps whose drafter produced NaN or Inf.
        graphs_built_after_warmup: graphs that a step after the second waited for; graphs_built_ahead: graphs built before their steps, or on a CPU when
            their announced step came.
        experts: with routed experts in host memory: chosen (router choices), hits (on the device), host_us (computing the others).
        cuda_graphs: launches on a CUDA device: warmup (first two calls of a graph), captured (graphs), replayed, eager; ahead (captured before their first
            call), ahead_us (microseconds for that), inside (captured within their second call although announced).
        seconds: wall-clock seconds by phase: load, queued, prefill, decode.
        threads: steps by CPU threads; empty where the CPU computes none.
        most_threads, threads_follow: threads on idle cores, and whether busy cores lower them.
        contended_s: decode seconds in which other processes had cores of those threads.
        plain_steps, plain_s: plain steps with warm caches, and their seconds, host time included.
        waited_s: decode seconds in which the decoding thread waited for a core; None where the system does not tell.
        host_us: microseconds by phase of a step, summed: upload, compute (launch), read (with the wait), host (the rest).
    """

    mode: str = "plain"
    width: int = 1
    device: str = ""
    stop_reason: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    reused_from: dict = field(default_factory=dict)
    emitted: int = 0
    steps: int = 0
    drafted: int = 0
    matched: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    forced: int = 0
    forced_matched: int = 0
    drafters: dict = field(default_factory=dict)
    cut: bool = False
    nan_drafts: int = 0
    seed: int | None = None
    sampling: str = "greedy"
    matched_at: list[int] = field(default_factory=list)
    offered_at: list[int] = field(default_factory=list)
    block_sizes: Counter = field(default_factory=Counter)
    widths: Counter = field(default_factory=Counter)
    width_reason: str = ""
    graphs_built: int = 0
    graphs_built_after_warmup: int = 0
    graphs_built_ahead: int = 0
    buffer_growths: int = 0
    buffer_growths_after_warmup: int = 0
    computes: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    seconds: dict = field(default_factory=lambda: {"load": 0.0, "prefill": 0.0, "decode": 0.0})
    host_us: dict = field(default_factory=lambda: {"upload": 0, "compute": 0, "read": 0, "host": 0})
    threads: Counter = field(default_factory=Counter)
    most_threads: int = 0
    threads_follow: bool = False
    contended_s: float = 0.0
    plain_steps: int = 0
    plain_s: float = 0.0
    waited_s: float | None = None
    memory: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    versions: dict = field(default_factory=dict)
    cuda_graphs: dict | None = None
    experts: dict | None = None
    _plain_run: int = 0

    def add_step(
        self, rows: int, matched: int, by_drafter: bool, drafts: int | None = None, source: str = "", timing: tuple | None = None
    ) -> None:
        """Counts one decode step of ``rows`` rows that accepted ``matched`` drafts.

        Args:
            by_drafter: whether a drafter ran.
            drafts: rows that were drafts; None: all but the first.
            source: of the drafts, a name in ``drafters``.
            timing: arguments of ``add_time``.
        """
        if timing is not None:
            self.add_time(*timing)
        drafts = rows - 1 if drafts is None else drafts
        self.steps += 1
        self.target_forwards += 1
        self.draft_forwards += by_drafter
        self.widths[rows] += 1
        self.block_sizes[matched + 1] += 1
        self.emitted += matched + 1
        if not drafts:
            return
        self.drafted += drafts
        self.matched += matched
        matched_at, offered_at = self.matched_at, self.offered_at
        if (grow := drafts - len(offered_at)) > 0:
            matched_at += [0] * grow
            offered_at += [0] * grow
        for i in range(drafts):
            offered_at[i] += 1
        for i in range(min(matched, drafts)):
            matched_at[i] += 1
        if source:
            steps, offered, accepted = self.drafters.get(source, (0, 0, 0))
            self.drafters[source] = (steps + 1, offered + drafts, accepted + matched)

    def add_time(
        self, rows: int, nanoseconds: int, threads: int, calm: bool, decode: float = 0.0, spent: int = 0, times: StepTimes | None = None
    ) -> None:
        """Counts the ``nanoseconds`` since the step before, of a step of ``rows`` rows.

        Args:
            threads, calm: CPU threads, and whether no other process had cores of theirs.
            decode: seconds of decoding so far.
            spent: microseconds of the step, ``times`` of them in its phases.
        """
        if threads:
            self.threads[threads] += 1
        if not calm:
            self.contended_s += 1e-9 * nanoseconds
        self._plain_run = self._plain_run + 1 if rows == 1 else 0
        if self._plain_run > COLD:
            self.plain_steps += 1
            self.plain_s += 1e-9 * nanoseconds
        if times is not None:
            host, upload, compute, read = self.host_us, times.upload, times.compute, times.read
            host["upload"] += upload
            host["compute"] += compute
            host["read"] += read
            if (rest := spent - upload - compute - read) > 0:
                host["host"] += rest
            self.seconds["decode"] = decode

    def add_counts(self, before: dict[str, Any], warm: dict[str, Any], now: dict[str, Any]) -> None:
        """Counters of the runner of a lone sequence (``ModelRunner.counts``): at its begin, after WARMUP_STEPS and at its end."""
        for key, value in now.items():
            old: Any = 0 if key in SINCE_LOAD else before[key]
            setattr(self, key, value - old if isinstance(value, int) else {k: v - old[k] for k, v in value.items()})
        built, ahead, self.buffer_growths_after_warmup = (
            now[key] - warm[key] for key in ("graphs_built", "graphs_built_ahead", "buffer_growths")
        )
        self.graphs_built_after_warmup = built - ahead

    def snapshot(self) -> Self:
        """A copy that later steps do not change; constant parts are shared. 2 us, where ``copy.copy`` takes 8."""
        out = object.__new__(type(self))
        out.__dict__.update(self.__dict__)
        out.matched_at, out.offered_at, out.notes = self.matched_at[:], self.offered_at[:], self.notes[:]
        out.seconds, out.host_us = {**self.seconds}, {**self.host_us}
        out.reused_from, out.drafters = {**self.reused_from}, {**self.drafters}
        out.block_sizes, out.widths, out.threads = _copied(self.block_sizes), _copied(self.widths), _copied(self.threads)
        return out

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per decode step, the target's own token included (1.0 for plain decoding)."""
        return (self.steps + self.matched) / self.steps if self.steps else 0.0

    @property
    def tokens_per_draft(self) -> float:
        """Mean tokens of a step of the drafter's, its first ones counted as if half of two drafts were right."""
        steps, _, matched = next((counts for name, counts in self.drafters.items() if name.startswith("draft-")), (0, 0, 0))
        return 1.0 + (4.0 + matched) / (4.0 + steps)

    @property
    def acceptance(self) -> float:
        """Accepted drafts per draft; 0.0 where nothing was drafted."""
        return self.matched / self.drafted if self.drafted else 0.0

    @property
    def replay_rate(self) -> float | None:
        """Share of the steps after each graph's warm-up that were replayed as CUDA graphs; None where nothing can be."""
        c = self.cuda_graphs
        return c["replayed"] / (c["replayed"] + c["eager"]) if c and c["replayed"] + c["eager"] else None

    @property
    def expert_hit_rate(self) -> float | None:
        """Share of router choices whose expert was on the device; None where all experts are."""
        return self.experts["hits"] / self.experts["chosen"] if self.experts and self.experts["chosen"] else None

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of a plain step of this text; None where it had too few."""
        return 1000 * self.plain_s / self.plain_steps if self.plain_steps >= ENOUGH_PLAIN else None

    @property
    def waited_share(self) -> float:
        """Share of the decode time in which the decoding thread waited for a core."""
        return self.waited_s / self.seconds["decode"] if self.waited_s and self.seconds["decode"] > 0 else 0.0

    @property
    def contended(self) -> bool:
        """Whether other processes had so much of the processor that the speeds are not those of an idle machine."""
        waited = self.waited_s is not None and self.waited_share > MUCH_WAITING and self.waited_s >= LEAST_WAITED
        return waited or (self.contended_s >= LEAST_WAITED and self.contended_s > MUCH_WAITING * self.seconds["decode"])

    @property
    def matched_per_position(self) -> list[float]:
        """Accepted per offered draft, by position in the block from 1 on."""
        return [m / o if o else 0.0 for m, o in zip(self.matched_at, self.offered_at)]

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first, per second of decoding."""
        return (self.emitted - 1) / self.seconds["decode"] if self.seconds["decode"] > 0 and self.emitted > 1 else 0.0

    @property
    def beside_s(self) -> float:
        """Deprecated: ``contended_s``."""
        warnings.warn("Stats.beside_s is contended_s now", DeprecationWarning, stacklevel=2)
        return self.contended_s

    @property
    def beside_others(self) -> bool:
        """Deprecated: ``contended``."""
        warnings.warn("Stats.beside_others is contended now", DeprecationWarning, stacklevel=2)
        return self.contended

    def as_dict(self) -> dict:
        """Plain values, JSON-ready, with the derived figures."""
        out = {k: v for k, v in self.__dict__.items() if k not in ("block_sizes", "widths", "threads", "_plain_run")}
        for name in ("block_sizes", "widths", "threads"):
            out[name] = {str(k): v for k, v in sorted(getattr(self, name).items())}
        out["drafters"] = {name: list(counts) for name, counts in self.drafters.items()}
        derived = "tokens_per_step", "acceptance", "replay_rate", "expert_hit_rate", "matched_per_position", "tokens_per_second"
        return out | {name: getattr(self, name) for name in derived}


def _copied(counts: Counter) -> Counter:
    out: Counter = Counter.__new__(Counter)
    dict.update(out, counts)
    return out


@dataclass
class BatchStats:
    """Counts of an engine, over all sequences.

    Attributes:
        steps: forward passes; ``prompt_steps``: those without decoding sequences.
        prompt_tokens, reused_tokens: prompt tokens that were computed, and those from the prefix cache.
        emitted: output tokens.
        finished: sequences by stop reason.
        rows_computed, rows_used: rows of the target's graphs, and those that a sequence used.
        decoding: steps by decoding sequences.
        widths: steps by verified rows.
        pipelined: steps of one of two groups that decode at the same time on several devices.
        longest_wait: longest seconds between two steps of a decoding sequence.
        seconds: spent in steps.
    """

    steps: int = 0
    prompt_steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    emitted: int = 0
    finished: Counter = field(default_factory=Counter)
    rows_computed: int = 0
    rows_used: int = 0
    decoding: Counter = field(default_factory=Counter)
    widths: Counter = field(default_factory=Counter)
    pipelined: int = 0
    longest_wait: float = 0.0
    seconds: float = 0.0

    def as_dict(self) -> dict:
        """Plain values, JSON-ready."""
        counters = {k: {str(n): c for n, c in sorted(v.items())} for k, v in self.__dict__.items() if isinstance(v, Counter)}
        return {**self.__dict__, **counters}

    @property
    def grouped(self) -> int:
        """Deprecated: ``pipelined``."""
        warnings.warn("BatchStats.grouped is pipelined now", DeprecationWarning, stacklevel=2)
        return self.pipelined
