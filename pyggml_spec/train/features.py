"""Hidden states of the served file: by torch from dequantised weights, or by the engine where torch lacks a verb of the architecture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..api import Session
from ..errors import TrainingError
from ..models.base import AttentionInputs, TargetInputs
from .ops import Ops, caches, node
from .recurrent import DeltaRule
from .weights import read_weights

PROOF_TOKENS = 1000
WORST_DISTANCE, LEAST_AGREEMENT = 0.05, 0.97  # beyond these torch computes another model than the engine


class States(NamedTuple):
    """Of tokens [B, T]: ``hidden`` [B, T, n_embd] for the head, ``features`` [B, T, n_embd] of the captured layers."""

    hidden: Tensor
    features: list[Tensor]


class Target(Protocol):
    """What the trainer needs of a target. ``decoder`` has torch weights of at least embedding, last norm and head."""

    decoder: Any

    def states(self, tokens: Tensor) -> States: ...


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
        self._ops: Any = Ops()
        read_weights(decoder, device, dtype)

    @torch.no_grad()
    def states(self, tokens: Tensor) -> States:
        hidden, features = self._forward(tokens)
        return States(hidden.value, [f.value for f in features])

    def _forward(self, tokens: Tensor) -> tuple[Any, list[Any]]:
        d: Any = self.decoder
        if d.temperature[0] or d.chunked:
            raise NotImplementedError("queries scaled by position, or chunked attention")
        length, shape = tokens.shape[1], d.recurrent_shape()
        at = torch.arange(length, device=tokens.device)
        near: Any = node(visible(at, at, d.window)[None]) if d.window else None
        kv = caches(d.kv_shapes(), tokens.shape[0], torch.empty(0, device=tokens.device))
        none: Any = None
        sliding = AttentionInputs(none, near, length) if near is not None else None
        states: Any = DeltaRule(shape) if shape is not None else None
        rows = TargetInputs(none, none, length, node(tokens), node(at[None]), sliding, kv, states, length)
        return d.forward(self._ops, rows, self.layers)


class EngineTarget:
    """Hidden states from the engine's own steps; torch has the embedding, the last norm and the head. Raises TrainingError: the engine is not on a CPU, where
    alone captured states are proven."""

    def __init__(self, session: Session, decoder: Any, layers: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        if session.backend.device.kind != "cpu":
            raise TrainingError(
                f"hidden states are read from the engine on CPUs only, and it runs on {session.backend.device.name}: use `device` CPU"
            )
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
        return States(hidden.value, list(captured[:-1]))


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
