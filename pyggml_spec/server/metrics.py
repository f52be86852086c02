"""Counters and histograms of /metrics, in the text format of Prometheus: llama.cpp's names unchanged, and ours."""

import time
from bisect import bisect_left
from collections import Counter

from ..engine.scheduler import BatchStats
from .answer import job_prompt
from .jobs import Job, Queue

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PER_STEP = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        out, total = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts):
            total += count
            out.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*out, f"{name}_sum {self.sum:.9g}", f"{name}_count {total}"]


class Metrics:
    """What all requests came to. Counts are of sequences that have ended; those that run are in the gauges."""

    def __init__(self) -> None:
        self.started = time.time()
        self.prompt_tokens = self.cached_tokens = self.predicted = self.most_tokens = 0
        self.prompt_seconds = self.predicted_seconds = 0.0
        self.drafts = self.accepted = self.rounds = 0
        self.accepted_at: Counter[int] = Counter()
        self.finished: Counter[str] = Counter()
        self.widths: Counter[int] = Counter()
        self.requests: Counter[tuple[str, int]] = Counter()
        self.histograms = {
            "queue_seconds": (Histogram(_SECONDS), "Seconds from a request's arrival to its slot"),
            "time_to_first_token_seconds": (Histogram(_SECONDS), "Seconds from a request's arrival to its first token"),
            "time_per_token_seconds": (Histogram(_SHORT), "Seconds between tokens, a mean per sequence"),
            "tokens_per_step": (Histogram(_PER_STEP), "Tokens per decoding step, a mean per sequence"),
            "request_tokens": (Histogram(_TOKENS), "Tokens that came out, per sequence"),
            "prompt_tokens": (Histogram(_TOKENS), "Tokens of the prompt, per sequence"),
        }

    def ended(self, job: Job) -> None:
        """Counts a sequence that is over."""
        stats = job.stats
        computed, prompt_ms = job_prompt(stats, job)
        self.finished[stats.stop_reason or ("cancelled" if job.cancelled else "error")] += 1
        if job.handle is None:
            return
        decode = stats.seconds.get("decode", 0.0)
        self.prompt_tokens += computed
        self.cached_tokens += stats.reused_tokens
        self.predicted += stats.emitted
        self.most_tokens = max(self.most_tokens, len(job.ask.ids) + stats.emitted)
        self.prompt_seconds += prompt_ms / 1000
        self.predicted_seconds += decode
        self.drafts += stats.drafted
        self.accepted += stats.matched
        self.rounds += sum(n for width, n in stats.widths.items() if width > 1)
        for i, n in enumerate(stats.matched_at):
            self.accepted_at[i] += n
        self.widths.update(stats.widths)
        h = {name: histogram for name, (histogram, _) in self.histograms.items()}
        h["queue_seconds"].observe(job.queued_ms / 1000)
        h["prompt_tokens"].observe(len(job.ask.ids))
        if job.first is not None:
            h["time_to_first_token_seconds"].observe(job.first - job.entered)
            h["request_tokens"].observe(stats.emitted)
        if stats.emitted > 1:
            h["time_per_token_seconds"].observe(decode / (stats.emitted - 1))
            h["tokens_per_step"].observe(stats.tokens_per_step)

    def text(self, queue: Queue) -> str:
        """The page of /metrics."""
        batch: BatchStats = queue.engine.stats
        counted = dict(batch.decoding)  # at once: the thread of the steps goes on
        busy = sum(n * steps for n, steps in counted.items())
        decoding = sum(steps for n, steps in counted.items() if n)
        out: list[str] = []

        def put(prefix: str, kind: str, name: str, text: str, *values: tuple[str, float]) -> None:
            out.extend((f"# HELP {prefix}:{name} {text}.", f"# TYPE {prefix}:{name} {kind}"))
            out.extend(f"{prefix}:{name}{labels} {value:.12g}" for labels, value in values)

        def one(value: float) -> tuple[str, float]:
            return "", value

        def by(label: str, counts: dict) -> list[tuple[str, float]]:
            return [(f'{{{label}="{name}"}}', count) for name, count in sorted(counts.items(), key=str)]

        put("llamacpp", "counter", "prompt_tokens_total", "Prompt tokens that were computed", one(self.prompt_tokens))
        put("llamacpp", "counter", "prompt_tokens_cached_total", "Prompt tokens that were reused", one(self.cached_tokens))
        put("llamacpp", "counter", "prompt_seconds_total", "Seconds of reading prompts", one(self.prompt_seconds))
        put("llamacpp", "counter", "tokens_predicted_total", "Tokens that came out", one(self.predicted))
        put("llamacpp", "counter", "tokens_predicted_seconds_total", "Seconds of decoding", one(self.predicted_seconds))
        put("llamacpp", "counter", "n_decode_total", "Forward passes", one(batch.steps))
        put("llamacpp", "counter", "n_tokens_max", "Most tokens that a sequence had", one(self.most_tokens))
        put("llamacpp", "counter", "spec_decode_num_draft_tokens_total", "Drafts that were verified", one(self.drafts))
        put("llamacpp", "counter", "spec_decode_num_accepted_tokens_total", "Drafts that were accepted", one(self.accepted))
        put("llamacpp", "counter", "spec_decode_num_drafts_total", "Blocks that were verified", one(self.rounds))
        put(
            "llamacpp",
            "counter",
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted drafts by their place in the block",
            *by("position", self.accepted_at),
        )
        put(
            "llamacpp",
            "gauge",
            "prompt_tokens_seconds",
            "Prompt tokens per second",
            one(self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0),
        )
        put(
            "llamacpp",
            "gauge",
            "predicted_tokens_seconds",
            "Tokens per second of a sequence",
            one(self.predicted / self.predicted_seconds if self.predicted_seconds else 0),
        )
        put("llamacpp", "gauge", "requests_processing", "Sequences that have a slot", one(len(queue.processing)))
        put("llamacpp", "gauge", "requests_deferred", "Sequences that wait", one(queue.waiting))
        put("llamacpp", "gauge", "n_busy_slots_per_decode", "Sequences per decoding step", one(busy / decoding if decoding else 0))
        for name, (histogram, text) in self.histograms.items():
            out += [f"# HELP pyspec:{name} {text}.", f"# TYPE pyspec:{name} histogram", *histogram.lines(f"pyspec:{name}")]
        put("pyspec", "counter", "sequences_total", "Sequences by why they ended", *by("finish_reason", self.finished))
        put("pyspec", "counter", "steps_by_width_total", "Steps of sequences by the rows of their block", *by("width", self.widths))
        put(
            "pyspec",
            "counter",
            "requests_total",
            "Responses by path and status",
            *[(f'{{path="{path}",status="{status}"}}', n) for (path, status), n in sorted(self.requests.items())],
        )
        put("pyspec", "counter", "rejected_total", "Requests that were turned away, by cause", *by("cause", queue.counts.rejected))
        put("pyspec", "counter", "disconnected_total", "Clients that left before their answer's end", one(queue.counts.disconnected))
        put("pyspec", "gauge", "queue_tokens", "Prompt tokens that wait", one(queue.waiting_tokens))
        put("pyspec", "gauge", "prefix_bytes", "Device bytes of computed prompts that are kept", one(queue.engine.prefix_bytes))
        put("pyspec", "gauge", "longest_wait_seconds", "Longest time between two steps of a decoding sequence", one(batch.longest_wait))
        put("pyspec", "gauge", "last_step_age_seconds", "Seconds since a step ended, while there is work", one(queue.step_age()))
        return "\n".join(out) + "\n"
