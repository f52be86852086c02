"""What one sequence has brought so far, told apart and counted: text, tokens, log probabilities, usage and timings of every dialect."""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec

from ..engine.stats import Stats
from ..events import StepEvent
from ..sampling.sampler import TokenLogprob
from ..text.parse import Parser, Piece
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from ..text.values import Call
from .http import encode
from .jobs import Job

LEAST_LOGPROB = -3.4e38
FINISH = {"end": "stop", "stop": "stop", "length": "length", "context": "length", "cancelled": "cancelled"}


@dataclass(frozen=True)
class Delta:
    """What an event adds to an answer. ``tokens`` and ``logprobs`` may come before their text, which can be held back. ``drafts``: of the
    step; ``prompt_read``: in deltas about the progress of the prompt alone, as of ``StepEvent``."""

    pieces: Sequence[Piece] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()
    prompt_read: int | None = None


class Answer:
    """Of one job. ``parser`` tells reasoning and calls apart; without one all is content. ``by_token``: a delta per token, not per step."""

    def __init__(self, job: Job, tokenizer: Tokenizer, parser: Parser | None = None, by_token: bool = False) -> None:
        self.job, self._tokenizer, self._parser, self._by_token = job, tokenizer, parser, by_token
        control = tokenizer.control_tokens() if parser is not None else {}
        kept = {control[text] for text in parser.form.markers() if text in control} if parser is not None else set()
        own = by_token or bool(kept)
        self._stream = (
            TextStream(lambda t: tokenizer.piece(t, special=t in kept), job.ask.stop, replace(job.ask.lines, seconds=0.0)) if own else None
        )
        self.text = ""
        self.content = ""
        self.reasoning = ""
        self.calls: list[Call] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.keeps_logprobs = True  # whoever streams tells them as they come
        self.stats: Stats = job.stats
        self.prompt_read: int | None = None  # by the latest event about it: the engine is further
        self._shown = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, event: StepEvent) -> list[Delta]:
        """What ``event`` adds. Its last one comes with ``finish``."""
        self.stats = event.stats
        if not event.tokens:
            return []
        self.tokens += event.tokens
        if self.keeps_logprobs:
            self.logprobs += event.logprobs
        if self._stream is None:
            return [Delta(self._told_apart(event.text), event.tokens, event.logprobs, event.drafts)]
        if not self._by_token:
            return [Delta(self._told_apart("".join(map(self._stream.push, event.tokens))), event.tokens, event.logprobs, event.drafts)]
        told = event.logprobs or (None,) * len(event.tokens)
        return [Delta(self._told_apart(self._stream.push(t)), (t,), (p,) if p is not None else ()) for t, p in zip(event.tokens, told)]

    def finish(self, event: StepEvent) -> Delta:
        """The last event: what was held back."""
        self.stats = event.stats
        pieces = list(self._told_apart(self._stream.finish() if self._stream is not None else event.text))
        if self._parser is not None:
            whole = event.stats.stop_reason == "end" or self._parser.form.closes(self.stopping_word)
            pieces += self._kept(self._parser.finish(cut=not whole))
        return Delta(pieces)

    def _told_apart(self, text: str) -> Sequence[Piece]:
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
        """Tokens one by one as text: a character whose bytes are in several is the last one's. Call it once for each that came out."""
        return [self._shown.decode(self._tokenizer.piece(t)) for t in tokens]

    def shown_drafts(self, drafts: Sequence[int], accepted: int, told: Sequence[str]) -> list[str]:
        """The same of a step's drafts, the first ``accepted`` of which are the tokens ``told``."""
        return [*told[:accepted], *(self._tokenizer.piece(t).decode("utf-8", "replace") for t in drafts[accepted:])]

    # -- what is said at its end

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
        found = min(((at, s) for s in self.job.ask.stop if (at := whole.find(s)) >= 0), default=None)
        return found[1] if found is not None else ""

    def token_text(self, token: int) -> str:
        return self._tokenizer.piece(token).decode("utf-8", "replace")

    def probability(self, told: TokenLogprob) -> dict[str, Any]:
        """One token's log probability with the most likely ones; behind the samplers, probabilities, as llama.cpp's server says them."""
        top = "top_probs" if self._after else "top_logprobs"
        return {**self._named(told.token, told.logprob), top: msgspec.Raw(self._listed(told.top))}

    def _listed(self, top: Sequence[tuple[int, float]]) -> bytes:
        """The same as the JSON of ``_named`` of each: a thousand of them in 0.5 ms instead of 3."""
        name, piece = "prob" if self._after else "logprob", self._tokenizer.piece
        values = (min(1.0, math.exp(p)) if self._after else max(p, LEAST_LOGPROB) for _, p in top)
        return b"[%b]" % b",".join([b"%b%r}" % (_head(name, token, piece(token)), value) for (token, _), value in zip(top, values)])

    @property
    def _after(self) -> bool:
        return self.job.ask.sampling is not None and self.job.ask.sampling.logprobs_after

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.piece(token)
        value = {"prob": min(1.0, math.exp(logprob))} if self._after else {"logprob": max(logprob, LEAST_LOGPROB)}
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), **value}

    def timings(self) -> dict[str, Any]:
        return timings(self.stats, self.job, self.prompt_read)


@lru_cache(1 << 14)
def _head(name: str, token: int, piece: bytes) -> bytes:
    """The JSON of a token up to its probability."""
    return encode({"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), name: 0})[:-2]


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """OpenAI's usage of all sequences of a request; the prompt of several answers to it counts once."""
    prompts = {id(a.job.ask.ids): a for a in answers}.values()
    completion, prompt = sum(a.stats.emitted for a in answers), sum(len(a.job.ask.ids) for a in prompts)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": sum(a.stats.reused_tokens for a in prompts)},
    }


def timings(stats: Stats, job: Job, prompt_read: int | None = None) -> dict[str, Any]:
    """llama.cpp's timings, milliseconds, and what speculation did: the drafts are there also where there were none. The speed of decoding is
    that of the tokens behind the first, which comes with the prompt."""
    prompt_n, prompt_ms = job_prompt(stats, job, prompt_read)
    predicted_ms = 1000 * stats.seconds.get("decode", 0.0)
    if not stats.stop_reason and job.first is not None and job.latest is not None:
        predicted_ms = 1000 * (job.latest - job.first)
    predicted, behind = stats.emitted, max(0, stats.emitted - 1)
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": 1000 * prompt_n / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms if behind else 0.0,
        "predicted_per_token_ms": predicted_ms / behind if behind else 0.0,
        "predicted_per_second": 1000 * behind / predicted_ms if behind and predicted_ms else 0.0,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.matched,
        "draft_rounds": sum(n for width, n in dict(stats.widths).items() if width > 1),
        "tokens_per_step": stats.tokens_per_step,
        "queued_ms": job.queued_ms,
    }


def job_prompt(stats: Stats, job: Job, prompt_read: int | None = None) -> tuple[int, float]:
    """Tokens of the prompt that were computed so far, up to ``prompt_read`` if it is given, and the milliseconds that it took."""
    if stats.emitted or stats.stop_reason:
        return stats.prompt_tokens - stats.reused_tokens, 1000 * stats.seconds.get("prefill", 0.0)
    read = prompt_read if prompt_read is not None else job.handle.prompt_read if job.handle is not None else 0
    done = max(0, read - stats.reused_tokens)
    begun = job.progress_from
    return done, 1000 * (job.latest - begun) if done and begun is not None and job.latest is not None else 0.0


def speculation(stats: Stats) -> dict[str, Any]:
    """What speculation did, position by position: accepted and offered drafts, steps by the tokens that they gave and by their width, and why."""
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
    """Why the blocks were as wide as they were, in one sentence."""
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
    steps = sum(n for width, n in dict(stats.widths).items() if width > 1)
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
