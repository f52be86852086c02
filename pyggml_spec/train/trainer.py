"""The loop of training: batches, schedule by minutes, validation by simulated acceptance, the best state, and resuming."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import TrainingError
from .features import Pool, padded
from .methods import Batch, Method, simulate
from .muon import Muon
from .texts import Text

WARM = 0.03  # share of the time in which the learning rate rises
FLOOR = 0.02  # of the learning rate at the end
DECAY = 0.05  # of matrices
TABLES = "token_embd", "output.", "d2t"  # matrices that are steps of AdamW, as vectors are
PATIENCE, RISE = 3, 0.1  # validations below the best, once it has risen by so much: these texts are learnt
ANNEAL, COOL = 0.05, 0.1  # then the best state goes on for this share of the time, from this share of the learning rate to none
VALIDATIONS = 20  # of a whole training, besides the last
AT_VALIDATION = 96  # texts, unless all are asked for
SAVE_EVERY = 60.0  # seconds
PADDED = 32  # lengths of batches are multiples of it


@dataclass(frozen=True)
class Schedule:
    """``minutes`` of training, by the clock, with the peak ``rate`` and batches of about ``batch_tokens``."""

    minutes: float
    rate: float = 2e-3
    batch_tokens: int = 1024


@dataclass
class Score:
    """Of simulated decoding: ``tokens_per_step`` over all texts, by category, and by (category, temperature); ``steps`` counted."""

    tokens_per_step: float
    steps: int
    categories: dict[str, float] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)  # by temperature, and "text" for texts by others


@dataclass
class Report:
    """While it runs. ``done``: share of the time."""

    done: float
    tokens_per_second: float
    loss: float
    score: Score | None
    best: float


@dataclass
class State:
    """What resuming needs, and what was best. ``annealing``: the second from which the best state is annealed."""

    seconds: float = 0.0
    step: int = 0
    tokens: int = 0
    best: float = 0.0
    best_values: dict[str, Tensor] = field(default_factory=dict)
    curve: list[tuple[float, float, float]] = field(default_factory=list)  # minutes, tokens per step, loss
    annealing: float | None = None


class Trainer:
    """Trains the values of ``method.drafter`` in place."""

    def __init__(
        self, method: Method, values: dict[str, Tensor], train: Sequence[Text], held: Sequence[Text], schedule: Schedule, device: torch.device,
        seed: int = 0, saved: Path | None = None,
    ) -> None:  # fmt: skip
        self.method, self.values, self.schedule, self.device, self.saved = method, values, schedule, device, saved
        self.train, self.held = sorted(train, key=lambda t: len(t.tokens)), list(held)
        self._rng, self._generator = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
        self.names = [name for name, value in values.items() if value.is_floating_point()]
        seen: dict[int, Tensor] = {id(values[name]): values[name].requires_grad_() for name in self.names}
        tables = {id(values[name]) for name in self.names if name.startswith(TABLES)}
        matrices, others = ([v for i, v in seen.items() if (v.dim() == 2 and i not in tables) == wide] for wide in (True, False))
        self._optimizers = [
            Muon(matrices, schedule.rate, DECAY),
            torch.optim.AdamW(others, schedule.rate, (0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"),
        ]
        self._parameters = [*seen.values()]
        self.state = State()
        texts = [*self.train, *self.held]
        tokens, layers = [t.tokens for t in texts], len(method.drafter.captures)
        self._at = {id(text): i for i, text in enumerate(texts)}
        fits = sum(map(len, tokens)) <= Pool.capacity(method.target, layers, device)
        self._pool = Pool(method.target, tokens, device) if fits else None

    @property
    def pooled(self) -> bool:
        """Whether states of all texts are kept in memory."""
        return self._pool is not None

    # -- state

    def save(self) -> None:
        """What ``resume`` reads."""
        if self.saved is not None:
            s, part = self.state, self.saved.with_suffix(".part")
            torch.save(
                {
                    "state": vars(s),
                    "values": {n: self.values[n].detach() for n in self.names},
                    "optimizers": [o.state_dict() for o in self._optimizers],
                },
                part,
            )
            part.replace(self.saved)

    def resume(self) -> None:
        """Goes on from ``saved``. Raises TrainingError: it is of another drafter."""
        assert self.saved is not None
        kept: dict[str, Any] = torch.load(self.saved, map_location=self.device, weights_only=True)
        if {n: v.shape for n, v in kept["values"].items()} != {n: self.values[n].shape for n in self.names}:
            raise TrainingError(f"{self.saved} is the state of a drafter of another shape; use the options of that training, or remove it")
        with torch.no_grad():
            for name, value in kept["values"].items():
                self.values[name].copy_(value)
        for optimizer, was in zip(self._optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(was)
        self.state = State(**kept["state"])
        self.state.curve = [(minutes, mean, loss) for minutes, mean, loss in self.state.curve]

    # -- batches

    def batch(self, texts: Sequence[Text]) -> Batch:
        """Padded, on the device."""
        length = -(-max(len(t.tokens) for t in texts) // PADDED) * PADDED
        first, ends = [min(max(t.prompt_tokens, 1), len(t.tokens) - 2) for t in texts], [len(t.tokens) for t in texts]
        states = self._pool.states([self._at[id(t)] for t in texts], length) if self._pool is not None else None
        tokens = padded([t.tokens for t in texts], length, self.device)
        return Batch(tokens, torch.tensor(first, device=self.device), torch.tensor(ends, device=self.device), states)

    def _next(self) -> Batch:
        """Texts of about the same length: a random one and its neighbours."""
        at = int(self._rng.integers(len(self.train)))
        longest = len(self.train[at].tokens)
        count = max(1, self.schedule.batch_tokens // longest)
        spread = self.train[max(0, at - 4 * count) : at + 1]  # no longer than it
        chosen = self._rng.choice(len(spread), min(count, len(spread)), replace=False)
        return self.batch([spread[i] for i in chosen])

    # -- the loop

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def score(self, texts: Sequence[Text] | None = None) -> Score:
        """Simulates decoding of held-out texts, at most AT_VALIDATION of them unless ``texts`` are given."""
        texts = self.held[:: max(1, len(self.held) // AT_VALIDATION)] if texts is None else texts
        texts, walked = sorted(texts, key=lambda t: len(t.tokens)), defaultdict[str, list[int]](list)
        size, drafts = max(1, self.schedule.batch_tokens // max(len(t.tokens) for t in texts)), self.method.drafts
        for at in range(0, len(texts), size):
            batch = self.batch(texts[at : at + size])
            with self._autocast():
                matched = self.method.matched(batch).cpu().numpy()
            for row, text, first, length in zip(matched, texts[at : at + size], batch.first.tolist(), batch.length.tolist()):
                steps = simulate(row, first, length, drafts)
                for key in ("", f"c{text.category}", f"t{'text' if text.temperature is None else f'{text.temperature:g}'}"):
                    walked[key] += steps
        means = {key: 1 + sum(steps) / max(1, len(steps)) for key, steps in walked.items()}
        of = [{key[1:]: round(mean, 3) for key, mean in means.items() if key.startswith(kind)} for kind in "ct"]
        return Score(means[""], len(walked[""]), *of)

    def run(self, report: Callable[[Report], None], interrupted: Callable[[], bool] = lambda: False) -> State:
        """Trains until the time is over, the texts are learnt and the best state is annealed, or ``interrupted``; the values are the best ones then.

        Raises:
            TrainingError: the loss is not finite.
        """
        s, total = self.state, 60 * self.schedule.minutes
        every, at_start = total / VALIDATIONS, s.seconds
        began = saved = time.monotonic()
        score, losses = None, list[Tensor]()
        due = (math.floor(s.seconds / every) + 1) * every if s.step else 0.0
        while True:
            s.seconds = at_start + time.monotonic() - began
            ends = self._share() >= 1 or interrupted()
            if ends or s.seconds >= due:
                loss = torch.stack(losses).mean().item() if losses else 0.0
                if not math.isfinite(loss):
                    raise TrainingError(
                        f"the loss is {loss} at step {s.step}: use a lower `rate`; the best state so far is kept in {self.saved}"
                    )
                score, due = self.score(), due + every
                s.curve.append((round(s.seconds / 60, 3), round(score.tokens_per_step, 4), round(loss, 4)))
                if score.tokens_per_step > s.best or not s.best_values:
                    s.best, s.best_values = score.tokens_per_step, {n: self.values[n].detach().cpu().clone() for n in self.names}
                report(Report(self._done(), s.tokens / max(s.seconds, 1e-9), loss, score, s.best))
                losses = []
                if not ends and self._learnt():
                    self._restore()
                    s.annealing = s.seconds
                    for optimizer in self._optimizers:
                        optimizer.state.clear()
            if ends:
                break
            losses.append(self._step(self._share()))
            s.step, s.tokens = s.step + 1, s.tokens + self._taken
            if s.step % 20 == 0:
                report(Report(self._done(), s.tokens / s.seconds if s.seconds else 0.0, losses[-1].item(), score, s.best))
            if time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()
        self.save()
        self._restore()
        return s

    def _share(self) -> float:
        """Of the time, or of annealing."""
        s, total = self.state, 60 * self.schedule.minutes
        return s.seconds / total if s.annealing is None else (s.seconds - s.annealing) / (ANNEAL * total)

    def _done(self) -> float:
        share = min(1.0, self._share())
        return share if self.state.annealing is None else 1 - ANNEAL * (1 - share)

    def _learnt(self) -> bool:
        """Whether acceptance has risen, no longer does, and there is time to anneal."""
        s, scores = self.state, [score for _, score, _ in self.state.curve]
        late = s.annealing is not None or self._share() > 1 - ANNEAL
        return not late and max(scores) > scores[0] + RISE and max(scores) not in scores[-PATIENCE:]

    def _restore(self) -> None:
        with torch.no_grad():
            for name, value in self.state.best_values.items():
                self.values[name].copy_(value)

    def _step(self, share: float) -> Tensor:
        peak = self.schedule.rate * (1 if self.state.annealing is None else COOL)
        rate = peak * min(1.0, (share + 1e-3) / WARM) * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        batch = self._next()
        self._taken = int(batch.length.sum())
        with self._autocast():
            loss = self.method.loss(batch, self._generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()
