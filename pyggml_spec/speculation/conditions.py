"""Costs of steps, apart for each number of threads that computes and for a machine that is busy, so that what was learnt beside other work ends with it.

    condition: ((threads, busy), ...) of the devices, as ``ggml.cores.ThreadCounts`` says it

Under a condition that was not met before, costs begin as those of the one before: what the first steps take more or less than that, kinds of steps that
were not seen yet are taken to take more or less, too. Back under a condition, costs are what they were there: at the second last look, since others may have
come before they were seen.
"""

import copy
from collections.abc import Hashable
from typing import Any, ClassVar, TypeVar

K = TypeVar("K", bound=Hashable)


class Conditioned:
    """What mixes this in has costs by keys, whatever these are.

    ``_apart``: names of the attributes that hold them, and what is known of them. ``_costs_of_now`` is the one with the costs.
    """

    _apart: ClassVar[tuple[str, ...]] = ()
    _condition: Hashable = None

    @property
    def _costs_of_now(self) -> dict[Any, float]:
        raise NotImplementedError

    def under(self, condition: Hashable, looks: int = 0) -> bool:
        """Told of the condition of each step, and how often others were looked at so far; True where it is another one than that of the step before."""
        if self._condition is None:
            self._kept: dict[Hashable, tuple[dict[str, Any], dict[str, Any]]] = {}
            self._base: dict[Any, float] = {}  # costs of another condition, where kinds of steps were not seen under this one
            self._unseen: set[Any] = set()
            self._condition, self._looks = condition, -1
        if condition != self._condition:
            self._turn(condition)
            return True
        if looks != self._looks:
            self._looks, (_, last) = looks, self._kept.get(condition, (None, None))
            now = self._copy()
            self._kept[condition] = (last or now, now)
        return False

    def _turn(self, condition: Hashable) -> None:
        self._condition, self._looks = condition, -1
        if condition in self._kept:
            for name, value in self._kept[condition][0].items():
                setattr(self, name, copy.copy(value))
        else:
            self._base, self._unseen = dict(self._costs_of_now), set(self._costs_of_now)
            self._unmeasured()

    def _copy(self) -> dict[str, Any]:
        return {name: copy.copy(getattr(self, name)) for name in (*self._apart, "_base", "_unseen")}

    def _unmeasured(self) -> None:
        """Nothing is measured under this condition."""

    def _is_new(self, key: Hashable, milliseconds: float) -> bool:
        """Whether a step of this kind is the first one under this condition; then that is what it costs."""
        if self._condition is None or key not in self._unseen:
            return False
        self._unseen.discard(key)
        self._costs_of_now[key] = milliseconds
        return True

    def _like(self, key: Hashable) -> None:
        """What was not seen yet is taken to differ from other conditions as this kind does."""
        if self._condition is None or not self._unseen or key not in self._base:
            return
        ratio = self._costs_of_now[key] / self._base[key]
        for other in self._unseen:
            self._costs_of_now[other] = ratio * self._base[other]
