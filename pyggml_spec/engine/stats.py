"""Statistics of one generation. Slot 0 of a block is the last token itself and is never counted as drafted or accepted.

emitted = 1 (from the prompt) + steps + matched, where matched counts accepted drafts.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Self

LEAST_WAITED = 0.1  # seconds
COLD, ENOUGH_PLAIN = 4, 8  # plain steps behind blocks and prompts that find caches cold; that say what they take
MUCH_WAITING = 0.1  # share; 0.00 to 0.02 on idle cores; 0.76, at a seventieth of the speed, with two threads on two cores that are in use


@dataclass
class Stats:
    """Counts and times of one generation; ``as_dict`` is what ``--stats`` writes.

    Attributes:
        reused_tokens: tokens of the prompt that were not computed, because an earlier prompt began alike.
        reused_from: how many chunks of them were in place, copied from memory, and read from disk.
        notes: what could not be used and was done without, one sentence each.
        emitted: tokens that came out, an end token included.
        steps: decode steps, that is target forwards after the prompt.
        drafted: drafts that were verified, per step the block's width - 1.
        matched: drafts that the target agreed with, up to where the generation ended.
        matched_at: how often the draft at position i (1-based, index i - 1) was accepted.
        offered_at: how often there was a draft at position i.
        block_sizes: how many steps emitted n tokens.
        widths: how many steps ran at each width.
        width_reason: why width control chose as it did, in one sentence; empty where the width was pinned, and for
            requests that share steps unless no block can pay.
        seed, sampling: of the random numbers (None if there are none), and what the tokens were chosen by, in words.
        forced, forced_matched: of the drafts, those that a constraint left no choice about, and how many of them were accepted.
        cut: whether a constraint ended before its text was whole: at the token limit, at the end of the context, or by the caller.
        drafters: who drafted what, by name: [steps, drafts verified, drafts accepted]. Names are those of `--spec-type`; "constraint" drafts what a
            constraint leaves no choice about, "script" what a caller gave.
        nan_drafts: blocks whose drafter produced NaN or Inf.
        graphs_built_after_warmup: graphs that a step after the second had to wait for unforeseen; graphs_built_ahead: those that were announced, and
            built one per step while a GPU computed, or on a CPU when their step came.
        experts: with routed experts in host memory, chosen (choices of routers), hits (of those, on the device), host_us (computing the rest).
        cuda_graphs: on a CUDA device, how steps were launched: warmup (first two calls of a graph), captured (graphs), replayed, eager; and of graphs
            ahead (captured before their first call), ahead_us (microseconds for that), inside (captured within their second call although asked for ahead).
        seconds: wall-clock time by phase: load, prefill, decode.
        threads: how many steps were computed by n threads of the CPU; empty where it computes none.
        most_threads, threads_follow: threads where no other work needs its cores, and whether there are fewer where it does.
        beside_s: of the decode time, when other work had cores of those threads.
        plain_steps, plain_s: plain steps behind others, and what they took, all that the host does between steps included.
        waited_s: of the decode time, when other work had the core of the thread that decodes; None where the system does not say.
        host_us: host microseconds per phase of a step, summed: upload, compute (launch), read (includes waiting), host (the rest).
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
    beside_s: float = 0.0
    plain_steps: int = 0
    plain_s: float = 0.0
    waited_s: float | None = None
    memory: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    versions: dict = field(default_factory=dict)
    cuda_graphs: dict | None = None
    experts: dict | None = None
    _in_a_row: int = 0  # plain steps

    def add_block(self, width: int, matched: int, drafted_by_model: bool, drafts: int | None = None) -> None:
        """Counts one decode step over ``width`` rows whose first ``matched`` drafts were accepted.

        ``drafts``: rows that were drafts, where others are filler (reference mode: 0); None: all behind the first.
        """
        drafts = width - 1 if drafts is None else drafts
        self.steps += 1
        self.target_forwards += 1
        self.draft_forwards += drafted_by_model
        self.widths[width] += 1
        self.block_sizes[matched + 1] += 1
        self.emitted += matched + 1
        if drafts:
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

    def count_step(self, rows: int, nanoseconds: int, threads: int, calm: bool) -> None:
        """Counts what one step took. A plain step says what such steps take only where more than COLD of them came before it."""
        if threads:
            self.threads[threads] += 1
        if not calm:
            self.beside_s += 1e-9 * nanoseconds
        self._in_a_row = self._in_a_row + 1 if rows == 1 else 0
        if self._in_a_row > COLD:
            self.plain_steps += 1
            self.plain_s += 1e-9 * nanoseconds

    def credit(self, who: str, drafted: int, matched: int) -> None:
        """Counts a step's drafts for whoever made them."""
        steps, drafts, accepted = self.drafters.get(who, (0, 0, 0))
        self.drafters[who] = (steps + 1, drafts + drafted, accepted + matched)

    def snapshot(self) -> Self:
        """A copy that later steps leave alone; what does not change while a sequence runs is shared. One is made per event: 2 us, where
        ``copy.copy`` takes 8."""
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
        """Share of the routers' choices whose expert was on the device; None where all experts are."""
        return self.experts["hits"] / self.experts["chosen"] if self.experts and self.experts["chosen"] else None

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of a plain step of this very text; None where it had too few to say."""
        return 1000 * self.plain_s / self.plain_steps if self.plain_steps >= ENOUGH_PLAIN else None

    @property
    def waited_share(self) -> float:
        """Share of the decode time that was spent waiting for a core that other work had."""
        return self.waited_s / self.seconds["decode"] if self.waited_s and self.seconds["decode"] > 0 else 0.0

    @property
    def beside_others(self) -> bool:
        """Whether other work had so much of the processor that the speeds are not those of an idle machine."""
        waited = self.waited_s is not None and self.waited_share > MUCH_WAITING and self.waited_s >= LEAST_WAITED
        return waited or (self.beside_s >= LEAST_WAITED and self.beside_s > MUCH_WAITING * self.seconds["decode"])

    @property
    def matched_per_position(self) -> list[float]:
        """Accepted per offered draft, by position in the block from 1 on."""
        return [m / o if o else 0.0 for m, o in zip(self.matched_at, self.offered_at)]

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first, per second of decoding."""
        return (self.emitted - 1) / self.seconds["decode"] if self.seconds["decode"] > 0 and self.emitted > 1 else 0.0

    def as_dict(self) -> dict:
        """Plain values, JSON-ready, with the derived figures."""
        out = {k: v for k, v in self.__dict__.items() if k not in ("block_sizes", "widths", "threads", "_in_a_row")}
        out["block_sizes"] = {str(k): v for k, v in sorted(self.block_sizes.items())}
        out["widths"] = {str(k): v for k, v in sorted(self.widths.items())}
        out["threads"] = {str(k): v for k, v in sorted(self.threads.items())}
        out["drafters"] = {name: list(counts) for name, counts in self.drafters.items()}
        out["tokens_per_step"] = self.tokens_per_step
        out["acceptance"] = self.acceptance
        out["replay_rate"] = self.replay_rate
        out["expert_hit_rate"] = self.expert_hit_rate
        out["matched_per_position"] = self.matched_per_position
        out["tokens_per_second"] = self.tokens_per_second
        return out


def _copied(counts: Counter) -> Counter:
    out: Counter = Counter.__new__(Counter)
    dict.update(out, counts)
    return out


@dataclass
class BatchStats:
    """Counts of an engine with several slots, over all sequences.

    Attributes:
        steps: forward passes; ``prompt_steps`` of them computed prompts only.
        prompt_tokens, reused_tokens: tokens of prompts that were computed, and those that were not because another prompt began alike.
        emitted: tokens that came out.
        finished: sequences by why they ended.
        rows_computed, rows_used: rows of the target's graphs, and those that a sequence had work for.
        decoding: how many steps ran with n sequences decoding.
        widths: how many steps with drafts ran at each width.
        grouped: how many were those of a group of sequences, beside another group's (devices that share the layers).
        longest_wait: most seconds that a decoding sequence had between two of its steps.
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
    grouped: int = 0
    longest_wait: float = 0.0
    seconds: float = 0.0

    def as_dict(self) -> dict:
        """Plain values, JSON-ready."""
        counters = {k: {str(n): c for n, c in sorted(v.items())} for k, v in self.__dict__.items() if isinstance(v, Counter)}
        return {**self.__dict__, **counters}
