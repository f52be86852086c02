"""The output of one sequence so far: text, reasoning, calls, log probabilities, usage and timings, for every dialect."""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec

from ..engine.stats import Stats
from ..events import StepEvent
from ..sampling.sampler import Sampling, TokenLogprob
from ..sampling.thinking import Thinking
from ..text.parse import Parser, Piece
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from ..text.values import Call
from .http import encode
from .tasks import Task

MIN_LOGPROB = -3.4e38
GREEDY = Sampling(temperature=0.0)  # of a request without sampling
FINISH = {"end": "stop", "stop": "stop", "length": "length", "context": "length", "cancelled": "cancelled"}


@dataclass(frozen=True)
class Delta:
    """What an event adds. ``tokens`` and ``logprobs`` may come before their text, which can be held back. ``drafts``: of the step; ``prompt_read``: in
    deltas that report prefill alone, as of ``StepEvent``."""

    pieces: Sequence[Piece] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()
    prompt_read: int | None = None

    @property
    def content(self) -> str:
        """Its text without reasoning and calls."""
        return "".join(piece.content for piece in self.pieces)


class Output:
    """Of one task. ``parser`` separates reasoning and calls; without one all is content. With log probabilities there is a delta per token, not per
    step."""

    def __init__(self, task: Task, tokenizer: Tokenizer, parser: Parser | None = None) -> None:
        self.task, self._tokenizer, self._parser, self._sampling = task, tokenizer, parser, task.request.sampling or GREEDY
        self._by_token = self._sampling.logprobs is not None
        shown = parser.form.markers() & tokenizer.control_tokens().keys() if parser is not None else ()
        self._stream: TextStream | None = None
        if self._by_token or shown:
            lines = replace(task.request.lines, seconds=0.0)  # its clock is the engine's
            self._stream = TextStream(tokenizer.piece_with(shown), task.request.stop, lines)
        self.text = self.content = self.reasoning = ""
        self.calls: list[Call] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        markers = self._sampling.thinking
        self._thinking = Thinking(replace(markers, tokens=None), tokenizer) if markers is not None else None
        self.stats: Stats = task.stats
        self.prompt_read: int | None = None  # of the latest event; the engine is further
        self._shown = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, event: StepEvent) -> list[Delta]:
        """What ``event`` adds; the last event goes to ``finish``."""
        self.stats = event.stats
        if not event.tokens:
            return []
        self.tokens += event.tokens
        if self._thinking is not None:
            for token in event.tokens:
                self._thinking.push(token)
        if not self.task.stream.streams:
            self.logprobs += event.logprobs
        if self._stream is None:
            return [Delta(self._parsed(event.text), event.tokens, event.logprobs, event.drafts)]
        if not self._by_token:
            return [Delta(self._parsed("".join(map(self._stream.push, event.tokens))), event.tokens, event.logprobs, event.drafts)]
        logprobs = event.logprobs or (None,) * len(event.tokens)
        return [Delta(self._parsed(self._stream.push(t)), (t,), (p,) if p is not None else ()) for t, p in zip(event.tokens, logprobs)]

    def finish(self, event: StepEvent) -> Delta:
        """The last event: what was held back."""
        self.stats = event.stats
        pieces = list(self._parsed(self._stream.finish() if self._stream is not None else event.text))
        if self._parser is not None:
            whole = event.stats.stop_reason == "end" or self._parser.form.closes(self.stopping_word)
            pieces += self._kept(self._parser.finish(cut=not whole))
        return Delta(pieces)

    def _parsed(self, text: str) -> Sequence[Piece]:
        self.text += text
        if not text:
            return ()
        return self._kept(self._parser.push(text) if self._parser is not None else [Piece(content=text)])

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            self.content += piece.content
            self.reasoning += piece.reasoning
            if piece.call is not None:
                self.calls.append(piece.call)
        return pieces

    def shown(self, tokens: Sequence[int]) -> list[str]:
        """Tokens one by one as text; a character whose bytes are in several is the last one's. To be called once for each token, in order."""
        return [self._shown.decode(self._tokenizer.piece(t)) for t in tokens]

    @property
    def reasoning_tokens(self) -> int:
        return self._thinking.count if self._thinking is not None else 0

    @property
    def finish_reason(self) -> str:
        """ "stop", "length", or "tool_calls"."""
        reason = FINISH.get(self.stats.stop_reason, "stop")
        return "tool_calls" if reason == "stop" and self.calls else reason

    @property
    def stopping_word(self) -> str:
        """The stop text that ended it, "" if none did."""
        if self.stats.stop_reason != "stop":
            return ""
        whole = self._tokenizer.decode(self.tokens)
        return min(((at, s) for s in self.task.request.stop if (at := whole.find(s)) >= 0), default=(0, ""))[1]

    def decoded(self, tokens: Sequence[int]) -> str:
        """Their text, control tokens included, but for one that begins every text."""
        return self._tokenizer.decode(tokens[1:] if tokens[:1] == [self._tokenizer.bos] else tokens, special=True)

    def token_text(self, token: int) -> str:
        return self._tokenizer.piece(token).decode("utf-8", "replace")

    def probability(self, entry: TokenLogprob) -> dict[str, Any]:
        """One token's log probability with the most likely ones; after the samplers probabilities, as in llama.cpp's server."""
        piece = self._tokenizer.piece(entry.token)
        name, top = ("prob", "top_probs") if self._sampling.logprobs_after else ("logprob", "top_logprobs")
        shown = {"id": entry.token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), name: self._value(entry.logprob)}
        listed = [b"%b%r}" % (_token_json(name, t, self._tokenizer.piece(t)), self._value(p)) for t, p in entry.top]  # 1,000 in 0.5 ms
        return {**shown, top: msgspec.Raw(b"[%b]" % b",".join(listed))}

    def _value(self, logprob: float) -> float:
        return min(1.0, math.exp(logprob)) if self._sampling.logprobs_after else max(logprob, MIN_LOGPROB)

    def timings(self) -> dict[str, Any]:
        return {**timings(self.stats, self.task, self.prompt_read), "n_reasoning_tokens": self.reasoning_tokens}


@lru_cache(1 << 14)
def _token_json(name: str, token: int, piece: bytes) -> bytes:
    """JSON of a token up to its probability."""
    return encode({"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), name: 0})[:-2]


def usage(outputs: Sequence[Output]) -> dict[str, Any]:
    """OpenAI's usage of all sequences of a request; a prompt with several choices counts once."""
    prompts = {id(o.task.request.ids): o for o in outputs}.values()
    completion, prompt = sum(o.stats.emitted for o in outputs), sum(len(o.task.request.ids) for o in prompts)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": sum(o.stats.reused_tokens for o in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(o.reasoning_tokens for o in outputs)},
    }


def timings(stats: Stats, task: Task, prompt_read: int | None = None) -> dict[str, Any]:
    """llama.cpp's timings, milliseconds, and those of speculation, also where there were no drafts. The first token comes with prefill: the speed of
    decoding is that of the others."""
    prompt_n, prompt_ms = prefill(stats, task, prompt_read)
    predicted_ms = 1000 * stats.seconds.get("decode", 0.0)
    if not stats.stop_reason and task.first is not None and task.latest is not None:
        predicted_ms = 1000 * (task.latest - task.first)
    decoded = max(0, stats.emitted - 1)
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": 1000 * prompt_n / prompt_ms if prompt_ms else 0.0,
        "predicted_n": stats.emitted,
        "predicted_ms": predicted_ms if decoded else 0.0,
        "predicted_per_token_ms": predicted_ms / decoded if decoded else 0.0,
        "predicted_per_second": 1000 * decoded / predicted_ms if decoded and predicted_ms else 0.0,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.matched,
        "draft_rounds": draft_steps(stats),
        "tokens_per_step": stats.tokens_per_step,
        "queued_ms": task.queued_ms,
    }


def draft_steps(stats: Stats) -> int:
    """Steps that verified a draft."""
    return sum(n for width, n in dict(stats.widths).items() if width > 1)


def prefill(stats: Stats, task: Task, prompt_read: int | None = None) -> tuple[int, float]:
    """Tokens of the prompt that were computed so far, up to ``prompt_read`` if it is given, and the milliseconds that it took."""
    if stats.emitted or stats.stop_reason not in ("", "cancelled"):
        return stats.prompt_tokens - stats.reused_tokens, 1000 * stats.seconds.get("prefill", 0.0)
    read = prompt_read if prompt_read is not None else task.handle.prompt_read if task.handle is not None else 0
    done = max(0, read - stats.reused_tokens)
    begun = task.progress_from
    return done, 1000 * (task.latest - begun) if done and begun is not None and task.latest is not None else 0.0


def progress(output: Output, read: int) -> dict[str, Any]:
    """Progress of prefill, as in llama.cpp's server."""
    milliseconds = prefill(output.stats, output.task, output.prompt_read)[1]
    total = len(output.task.request.ids)
    return {"total": total, "cache": output.stats.reused_tokens, "processed": read, "time_ms": round(milliseconds)}


def speculation(stats: Stats) -> dict[str, Any]:
    """Speculation by position: offered and accepted draft tokens, steps by their tokens and by their width, and the reason of the widths."""
    return {
        "mode": stats.mode,
        "accepted_at": stats.matched_at,
        "offered_at": stats.offered_at,
        "steps_by_tokens": {str(n): count for n, count in sorted(stats.block_sizes.items())},
        "steps_by_width": {str(n): count for n, count in sorted(stats.widths.items())},
        "drafters": {name: dict(zip(("steps", "drafts", "accepted"), counts)) for name, counts in stats.drafters.items()},
        "acceptance": stats.acceptance,
        "tokens_per_step": stats.tokens_per_step,
        "reason": reason(stats),
    }


def reason(stats: Stats) -> str:
    """Why drafts were as long as they were, in one sentence."""
    if stats.width_reason:
        return stats.width_reason
    if stats.mode == "plain":
        return "decoded plainly: speculation was off, or there is no drafter"
    if not stats.widths:
        return "no step was needed: the text ended with the prompt's first token"
    width, steps = stats.widths.most_common(1)[0]
    if width == 1:
        return f"{steps} of {stats.steps} steps ran without drafts, where a block would have cost more than it brings, or nothing could be drafted"
    return f"{steps} of {stats.steps} steps had {width} rows, the most tokens per millisecond at the acceptance seen"


def metrics(stats: Stats) -> dict[str, Any]:
    """vLLM's summary of speculation, which load generators read."""
    steps = draft_steps(stats)
    return {
        "speculative_decoding": {
            "num_spec_steps": steps,
            "num_draft_tokens": stats.drafted,
            "num_accepted_tokens": stats.matched,
            "draft_acceptance_rate": stats.acceptance,
            "mean_acceptance_length": 1 + stats.matched / steps if steps else 0.0,
            "acceptance_histogram": {str(n): count for n, count in sorted(stats.block_sizes.items())},
        }
    }
