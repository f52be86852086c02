"""Routing statistics of a model on a text: which experts are worth their place on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import Session
from ..engine.options import CHUNKS
from ..errors import ContextError, ModelError
from ..models.placement import Routing, hot_count

HELD_OUT = 0.25  # of the text: what the hit rates are measured on, and the hot experts are not chosen by


@dataclass(frozen=True)
class Profile:
    """``routing`` of the whole text; ``seen`` and ``held_out`` are its first part and the rest."""

    routing: Routing
    seen: Routing
    held_out: Routing

    def hit_rate(self, fraction: float) -> float:
        """On the held-out text, with the hot experts chosen by the text before it."""
        return self.seen.hit_rate(fraction, self.held_out)


def profile(session: Session, tokens: Sequence[int], progress: Callable[[int, int], None] = lambda done, total: None) -> Profile:
    """Feeds ``tokens`` to the target and counts what its routers choose. The session has to be loaded with ``ExpertOptions(count=True)``.

    The text is cut where the context ends, and into chunks that need no padding: padding would be counted. Raises ContextError: fewer
    tokens than two chunks; ModelError: the session counts nothing."""
    if session.target.weights.expert_counts() is None:
        raise ModelError(f"{session.target.file.path.name} was loaded without counting its routers' choices")
    chunk = CHUNKS[0]
    total = len(tokens) // chunk * chunk
    if total < 2 * chunk:
        raise ContextError(f"{len(tokens)} tokens are too few to tell hot experts from cold ones; give at least {2 * chunk}, better 10,000")
    split = max(chunk, int(total * (1 - HELD_OUT)) // chunk * chunk)
    start, room, done, seen = _routing(session, 0), session.runner.options.n_ctx // chunk * chunk, 0, None
    if not room:
        raise ContextError(f"a context of {session.runner.options.n_ctx} tokens is too short to profile with; use `n_ctx` {chunk} or more")
    while done < total:
        first = done
        session.runner.reset(drafting=False)
        limit = min(total, first + room, split if done < split else total)
        while done < limit:
            size = next(c for c in reversed(CHUNKS) if c <= limit - done)
            session.runner.prefill(tokens[done : done + size])
            done += size
            progress(done, total)
        if done == split:
            seen = _routing(session, done) - start
    whole = _routing(session, done) - start
    assert seen is not None  # split is a stop on the way
    return Profile(whole, seen, whole - seen)


def _routing(session: Session, tokens: int) -> Routing:
    return Routing(session.target.file.path.name, tokens, session.target.weights.experts_chosen())


def expert_bytes(session: Session, fraction: float) -> int:
    """Bytes on the device of the experts with this residency."""
    target: Any = session.target
    out, n_expert = 0, target.experts.n_expert
    count = hot_count(fraction, n_expert)
    for info in target.file.tensors.values():
        if info.name.endswith("_exps.weight"):
            out += info.nbytes * (count + (0 < count < n_expert)) // n_expert  # one slot more for what is not there
    return out
