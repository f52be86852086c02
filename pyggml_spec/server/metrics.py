"""/metrics in the text format of Prometheus: llama.cpp's names unchanged, and ours."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from .output import draft_steps, prefill
from .tasks import Queue, Task

__all__ = ["CONTENT_TYPE", "Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PER_STEP = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16)
_HISTOGRAMS = {
    "queue_seconds": (_SECONDS, "Seconds from a request's arrival to its slot"),
    "time_to_first_token_seconds": (_SECONDS, "Seconds from a request's arrival to its first token"),
    "time_per_token_seconds": (_SHORT, "Seconds between tokens, a mean per sequence"),
    "tokens_per_step": (_PER_STEP, "Tokens per decoding step, a mean per sequence"),
    "request_tokens": (_TOKENS, "Generated tokens per sequence"),
    "prompt_tokens": (_TOKENS, "Tokens of the prompt per sequence"),
}
_TOTALS = {
    "prompt_tokens": "Prompt tokens that were computed",
    "prompt_tokens_cached": "Prompt tokens that were reused",
    "prompt_seconds": "Seconds of prefill",
    "tokens_predicted": "Generated tokens",
    "tokens_predicted_seconds": "Seconds of decoding",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted",
    "spec_decode_num_drafts": "Drafts that were verified",
}


class Metrics:
    """Totals of sequences that have ended; those that run are in the gauges."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.started = time.time()
        self.totals = Counter(dict.fromkeys(_TOTALS, 0.0))
        self.max_tokens = 0
        self.accepted_at, self.widths, self.finished = Counter[int](), Counter[int](), Counter[str]()
        self.requests = Counter[tuple[str, int]]()
        self.disconnected = 0  # clients, before their response was complete
        self._registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"pyspec:{name}", f"{text}.", buckets=bounds, registry=self._registry)
            for name, (bounds, text) in _HISTOGRAMS.items()
        }

    def ended(self, task: Task) -> None:
        """Counts a sequence that has ended."""
        stats = task.stats
        computed, prompt_ms = prefill(stats, task)
        self.finished[stats.stop_reason or ("cancelled" if task.cancelled else "error")] += 1
        if task.handle is None:
            return
        decode = stats.seconds.get("decode", 0.0)
        self.totals.update({
            "prompt_tokens": computed, "prompt_tokens_cached": stats.reused_tokens, "prompt_seconds": prompt_ms / 1000,
            "tokens_predicted": stats.emitted, "tokens_predicted_seconds": decode, "spec_decode_num_draft_tokens": stats.drafted,
            "spec_decode_num_accepted_tokens": stats.matched, "spec_decode_num_drafts": draft_steps(stats),
        })  # fmt: skip
        self.max_tokens = max(self.max_tokens, len(task.request.ids) + stats.emitted)
        self.accepted_at.update(dict(enumerate(stats.matched_at)))
        self.widths.update(stats.widths)
        observed: dict[str, float] = {"queue_seconds": task.queued_ms / 1000, "prompt_tokens": len(task.request.ids)}
        if task.first is not None:
            observed |= {"time_to_first_token_seconds": task.first - task.entered, "request_tokens": stats.emitted}
        if stats.emitted > 1:
            observed |= {"time_per_token_seconds": decode / (stats.emitted - 1), "tokens_per_step": stats.tokens_per_step}
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def text(self, queue: Queue | None, more: Iterable[Metric] = ()) -> bytes:
        """The page of /metrics. ``queue``: None where other processes have the engines; ``more``: further families."""
        of_queue = [] if queue is None else [*self._registry.collect(), *self._families(queue)]
        requests = "pyspec:requests", "Responses by path and status", ("path", "status"), self.requests
        gone = "pyspec:disconnected", "Clients that disconnected before their response was complete", (), {(): self.disconnected}
        return generate_latest(SimpleNamespace(collect=lambda: [*of_queue, counter(*gone), counter(*requests), *more]))

    def _families(self, queue: Queue) -> Iterator[Metric]:
        batch, totals = queue.engine.stats, self.totals
        rate = lambda count, seconds: totals[count] / totals[seconds] if totals[seconds] else 0.0  # noqa: E731
        decoding = dict(batch.decoding)  # a copy: the engine's thread goes on
        busy = sum(sequences * count for sequences, count in decoding.items())
        steps = sum(count for sequences, count in decoding.items() if sequences)
        for name, text, value in (
            ("llamacpp:n_tokens_max", "Most tokens of a sequence", self.max_tokens),
            ("llamacpp:prompt_tokens_seconds", "Prompt tokens per second", rate("prompt_tokens", "prompt_seconds")),
            ("llamacpp:predicted_tokens_seconds", "Tokens per second of a sequence", rate("tokens_predicted", "tokens_predicted_seconds")),
            ("llamacpp:requests_processing", "Sequences that have a slot", len(queue.processing)),
            ("llamacpp:requests_deferred", "Sequences that wait", queue.waiting),
            ("llamacpp:n_busy_slots_per_decode", "Sequences per decoding step", busy / (steps or 1)),
            ("pyspec:queue_tokens", "Prompt tokens that wait", queue.waiting_tokens),
            ("pyspec:prefix_bytes", "Device bytes of cached prompt prefixes", queue.engine.prefix_bytes),
            ("pyspec:longest_wait_seconds", "Longest time between two steps of a decoding sequence", batch.longest_wait),
            ("pyspec:last_step_age_seconds", "Seconds since a step ended, while there is work", queue.step_age()),
        ):
            yield GaugeMetricFamily(name, f"{text}.", value=value)
        counters: tuple[tuple[str, str, tuple[str, ...], Mapping[Any, float]], ...] = (
            *((f"llamacpp:{name}", text, (), {(): totals[name]}) for name, text in _TOTALS.items()),
            ("llamacpp:n_decode", "Forward passes", (), {(): batch.steps}),
            ("llamacpp:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position", ("position",), self.accepted_at),
            ("pyspec:sequences", "Sequences by why they ended", ("finish_reason",), self.finished),
            ("pyspec:steps_by_width", "Steps of sequences by verified tokens", ("width",), self.widths),
            ("pyspec:rejected", "Requests that were refused, by cause", ("cause",), queue.rejected),
        )
        yield from (counter(*one) for one in counters)


def counter(name: str, text: str, labels: Sequence[str], counts: Mapping[Any, float]) -> Metric:
    """``counts``: by the values of ``labels``."""
    family = CounterMetricFamily(name, f"{text}.", labels=labels)
    for key, count in sorted(dict(counts).items(), key=str):
        family.add_metric(tuple(map(str, key)) if isinstance(key, tuple) else (str(key),), count)
    return family
