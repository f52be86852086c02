"""Bytes that an engine takes, counted without allocating them, and the longest context that fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cache.kv import KV_BUCKET
from ..drafters.multi import AnyDrafter
from ..errors import ContextError
from ..ggml.device import Backend
from ..models.decoder import Decoder
from .options import EngineOptions
from .runner import ModelRunner

SHARED = ("weights", "draft_weights")  # purposes that the engines of a session share


@dataclass(frozen=True)
class MemoryCount:
    """Bytes of one engine.

    Attributes:
        by_purpose: as ``ModelRunner.memory``.
        compute: of ``by_purpose``, compute buffers by kind of step.
        devices: by purpose on each device.
    """

    by_purpose: dict[str, int]
    compute: dict[str, int]
    devices: list[dict[str, int]]

    def caches(self) -> dict[str, int]:
        """By purpose, without the weights."""
        return {name: nbytes for name, nbytes in self.by_purpose.items() if name not in SHARED}

    def totals(self, weights: bool = True) -> list[int]:
        """All purposes combine, on each device."""
        return [sum(n for name, n in device.items() if weights or name not in SHARED) for device in self.devices]


def count_memory(backend: Backend, target: Decoder, drafter: AnyDrafter | None, options: EngineOptions) -> MemoryCount:
    """What an engine with these options takes. The models have weights, allocated or counted.

    Raises:
        ContextError: a device cannot count the values of the masks.
    """
    runner = ModelRunner(backend.counted(), target, drafter, options)
    try:
        compute = {name: role.buffer_bytes for name, role in runner.graphs.roles.items()}
        return MemoryCount(runner.memory(), compute, runner.memory_by_segment())
    finally:
        runner.close()


def longest(
    taken: Callable[[int], Sequence[int]], rooms: Sequence[int], most: int, step: int = KV_BUCKET, least: int = 0, exact: bool = True
) -> int:
    """The longest context up to ``most`` whose bytes ``taken`` fit ``rooms``, device by device: a multiple of ``step``, or ``most``;
    0 where none from ``least`` on fits.

    Two counts give bytes per token; what they predict is returned, or where it has to be ``exact`` counted too, with its neighbours. A context for which
    ``taken`` raises ContextError does not fit.
    """

    def count(n_ctx: int) -> tuple[Sequence[int] | None, bool]:
        try:
            bytes_there = taken(n_ctx)
        except ContextError:
            return None, False
        return bytes_there, all(n <= room for n, room in zip(bytes_there, rooms, strict=True))

    above, fits = count(most)
    if fits:
        return most
    low, high, counts = min(max(step, least), most), most, 2
    below, fits = count(low) if low < most else (None, False)
    if not fits or below is None:
        return 0
    while (top := (high - 1) // step * step) > low:
        share = 0.5
        if above is not None and counts < 6:
            share = min((room - a) / (b - a) for a, b, room in zip(below, above, rooms, strict=True) if b > a and b > room)
        guess = min(top, int(low + share * (high - low)) // step * step)
        if above is not None and not exact:
            return max(low, guess)
        guess, counts = max(guess, low + step), counts + 1
        there, fits = count(guess)
        low, below, high, above = (guess, there, high, above) if fits and there is not None else (low, below, guess, there)
    return low
