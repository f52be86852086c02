"""Hidden states of the served file: by torch from dequantised weights, or by the engine where torch lacks a verb of the architecture."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..api import Session
from ..models.base import AttentionInputs, TargetInputs
from .ops import Ops, caches, empty, node
from .recurrent import DeltaRule
from .weights import read_weights

PROOF_TOKENS = 1000
LIKELY, TEMPERATURE = 32, 0.7  # tokens of the target's distribution that drafts learn, and its temperature: what a sampler chooses from
NOTHING: Any = None  # in place of rows of caches, which follow from the order of writes
POOLED = 0.5  # share of the free memory for states of texts
POOL_VALUES = 1 << 25  # of a hidden state of all tokens in one pass of the target
LABEL_VALUES = {"cuda": 1 << 28, "cpu": 1 << 25}  # logits at once
WORST_DISTANCE, LEAST_AGREEMENT = 0.05, 0.97  # beyond these torch computes another model than the engine


class States(NamedTuple):
    """Of tokens [B, T]: ``hidden`` [B, T, n_embd] for the head, ``features`` [B, T, n_embd] of the captured layers. ``likely``, ``odds``: [B, T, LIKELY], the
    likeliest next tokens and their probabilities."""

    hidden: Tensor
    features: list[Tensor]
    likely: Tensor
    odds: Tensor


class Target(Protocol):
    """What the trainer needs of a target. ``decoder`` has torch weights of at least embedding, last norm and head."""

    decoder: Any

    def states(self, tokens: Tensor) -> States: ...


class Pool:
    """States of texts, computed once and kept in the memory of torch's device."""

    def __init__(self, target: Target, texts: Sequence[Sequence[int]], device: torch.device) -> None:
        order, rows = sorted(range(len(texts)), key=lambda i: len(texts[i])), POOL_VALUES // target.decoder.n_embd
        self._first, at, part = [0] * len(texts), 0, list[int]()
        self._kept: list[Tensor] = []
        for i in order:
            if part and (len(part) + 1) * len(texts[i]) > rows:
                at, part = self._add(target, texts, part, at, device), []
            part.append(i)
        self._add(target, texts, part, at, device)

    def _add(self, target: Target, texts: Sequence[Sequence[int]], part: list[int], at: int, device: torch.device) -> int:
        tokens = padded([texts[i] for i in part], max(len(texts[i]) for i in part), device)
        lengths = torch.tensor([len(texts[i]) for i in part], device=device)
        states = target.states(tokens)
        live = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        wide = torch.bfloat16 if device.type == "cuda" else torch.float32
        new = [x[live].to(wide) for x in (states.hidden, *states.features)] + [states.likely[live].int(), states.odds[live].to(wide)]
        if not self._kept:
            total = sum(len(text) for text in texts)
            self._kept = [x.new_empty(total, x.shape[-1]) for x in new]
        rows = int(lengths.sum())
        for kept, x in zip(self._kept, new, strict=True):
            kept[at : at + rows] = x
        for i in part:
            self._first[i], at = at, at + len(texts[i])
        return at

    @staticmethod
    def capacity(target: Target, layers: int, device: torch.device) -> int:
        """How many tokens' states take POOLED of the memory that is free."""
        size = 2 if device.type == "cuda" else 4
        return int(POOLED * free_memory(device)) // ((layers + 1) * target.decoder.n_embd * size + LIKELY * (4 + size))

    def states(self, chosen: Sequence[int], length: int) -> States:
        """Of the ``chosen`` texts, [B, length]; rows behind a text are another's."""
        first = torch.tensor([self._first[i] for i in chosen], device=self._kept[0].device)
        at = (first[:, None] + torch.arange(length, device=first.device)).clamp(max=len(self._kept[0]) - 1)
        hidden, *features, likely, odds = (x[at] for x in self._kept)
        return States(hidden, features, likely.long(), odds)


def free_memory(device: torch.device) -> int:
    """Bytes that nothing uses, torch's own reserves included."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def padded(texts: Sequence[Sequence[int]], length: int, device: torch.device) -> Tensor:
    """I64 [B, length]."""
    out = np.zeros((len(texts), length), np.int64)
    for row, text in zip(out, texts):
        row[: len(text)] = text
    return torch.from_numpy(out).to(device)


def with_labels(decoder: Any, hidden: Tensor, features: list[Tensor]) -> States:
    flat, likely, odds = hidden.flatten(0, 1), [], []
    for rows in flat.split(max(1, LABEL_VALUES.get(flat.device.type, 1 << 25) // decoder.n_vocab)):
        best = logits_of(decoder, rows).float().topk(min(LIKELY, decoder.n_vocab), sorted=False)
        likely.append(best.indices)
        odds.append((best.values / TEMPERATURE).softmax(-1))
    return States(hidden, features, *(torch.cat(x).unflatten(0, hidden.shape[:2]) for x in (likely, odds)))


@dataclass(frozen=True)
class Agreement:
    """Of torch and engine on the same ``tokens``: ``distance`` is the relative L2 of the logits, ``greedy`` the share of equal argmaxes."""

    distance: float
    greedy: float
    tokens: int


def visible(rows: Tensor, columns: Tensor, window: int) -> Tensor:
    """Causal visibility, booleans; of a ``window`` of positions unless 0."""
    seen = columns[None] <= rows[:, None]
    return seen & (columns[None] > rows[:, None] - window) if window else seen


class TorchTarget:
    """The target's own description, computed by torch. Raises NotImplementedError, AttributeError at the first ``states`` of an architecture with verbs that
    ``Ops`` lacks."""

    def __init__(self, decoder: Any, layers: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        self.decoder, self.layers = decoder, tuple(layers)
        self.device, self.dtype = device, dtype
        self._ops: Any = Ops()
        read_weights(decoder, device, dtype)

    @torch.no_grad()
    def states(self, tokens: Tensor) -> States:
        hidden, features = self._forward(tokens)
        return with_labels(self.decoder, hidden.value, [f.value for f in features])

    def _forward(self, tokens: Tensor) -> tuple[Any, list[Any]]:
        d: Any = self.decoder
        length, shape = tokens.shape[1], d.recurrent_shape()
        at = torch.arange(length, device=tokens.device)
        near = visible(at, at, d.window)[None] if d.window else None
        kv = caches(d.kv_shapes(), empty(tokens.shape[0], torch.empty(0, device=tokens.device)))
        return self._layers(tokens, at[None], None, near, kv, DeltaRule(shape) if shape is not None else None)

    def forward(self, tokens: Tensor, columns: Tensor, first: Tensor, kv: Any) -> Tensor:
        """Hidden states for the head of ``tokens`` [B, T], in ``columns`` [T] of the caches ``kv``, of texts that begin in column ``first`` [B]."""
        seen, window = torch.arange(kv[0].k.value.shape[1], device=tokens.device), self.decoder.window

        def mask(near: int) -> Tensor:
            """A row before its text sees itself: a softmax of nothing is not a number."""
            return (visible(columns, seen, near) & (seen >= first[:, None, None])) | (seen == columns[:, None])

        positions = (columns - first[:, None]).clamp(min=0)
        return self._layers(tokens, positions, mask(0), mask(window) if window else None, kv, None)[0].value

    def _layers(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, near: Tensor | None, kv: Any, states: Any
    ) -> tuple[Any, list[Any]]:
        d: Any = self.decoder
        if d.temperature[0] or d.chunked:
            raise NotImplementedError("queries scaled by position, or chunked attention")
        length, none = tokens.shape[1], NOTHING
        sliding = AttentionInputs(none, node(near), length) if near is not None else None
        seen = node(mask) if mask is not None else none
        rows = TargetInputs(none, seen, length, node(tokens), node(positions), sliding, kv, states, length)
        return d.forward(self._ops, rows, self.layers)


class EngineTarget:
    """Hidden states from the engine's own steps; torch has the embedding, the last norm and the head."""

    def __init__(self, session: Session, decoder: Any, layers: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        self.decoder, self._session, self._layers, self._device = decoder, session, (*layers, decoder.n_layer), device
        self._ops: Any = Ops()
        read_weights(decoder, device, dtype, ends=True)

    @torch.no_grad()
    def states(self, tokens: Tensor) -> States:
        runner, out = self._session.runner, []
        for row in tokens.cpu().numpy():
            runner.reset()
            out.append(runner.capture(row, self._layers)[1])
        captured = torch.from_numpy(np.stack(out, 1)).to(self._device)  # [layers, B, T, n_embd]
        hidden = self.decoder.normed(self._ops, node(captured[-1]), None)
        return with_labels(self.decoder, hidden.value, list(captured[:-1]))


@torch.no_grad()
def agreement(session: Session, target: TorchTarget, tokens: Sequence[int]) -> Agreement:
    """Compares torch with the engine on at most PROOF_TOKENS of ``tokens``."""
    ids = np.asarray(tokens[: min(PROOF_TOKENS, session.runner.options.n_ctx)], np.int64)
    session.runner.reset()
    theirs = session.runner.logits(ids.tolist())
    session.runner.reset()
    device = target.decoder.weights["output_norm.weight"].value.device
    mine = logits_of(target.decoder, target.states(torch.from_numpy(ids)[None].to(device)).hidden[0]).float().cpu().numpy()
    distance = float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))
    return Agreement(distance, float((mine.argmax(-1) == theirs.argmax(-1)).mean()), len(ids))


def logits_of(decoder: Any, hidden: Tensor) -> Tensor:
    """[..., n_embd] -> [..., n_vocab]."""
    return decoder.logits(Ops(), node(hidden[None])).value[0]
