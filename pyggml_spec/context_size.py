"""The default context: the trained one, or as much of it as memory has room for."""

from collections.abc import Callable, Sequence

from .cache.kv import KV_BUCKET
from .drafters.multi import AnyDrafter
from .engine.memory import longest
from .engine.options import EngineOptions
from .models.decoder import Decoder

LEAST_CONTEXT = 4096  # tokens that the default context has even where memory has no room for them
CONTEXT_STEP = 1024  # a context that memory limits is a multiple of it
RESERVE = 4 << 30  # bytes of a device, and at most a quarter of what is free, that the default context leaves
ROUGH_BUFFERS = 1 << 30  # bytes, more than all buffers that do not grow with the context


def room(free: int) -> int:
    """Bytes of those that are free that the default context may use."""
    return free - min(free // 4, RESERVE)


def default_context(taken: Callable[[int], Sequence[int]], rooms: Sequence[int], most: int) -> int:
    """The longest context up to ``most`` whose bytes ``taken`` fit ``rooms``; LEAST_CONTEXT fits by definition."""
    least = min(LEAST_CONTEXT, most)
    return least if most == least else max(least, longest(taken, rooms, most, CONTEXT_STEP, least, exact=False))


def rough_bytes(target: Decoder, drafter: AnyDrafter | None, options: EngineOptions) -> int:
    """An upper bound of the bytes of caches and graphs on one device, without counting graphs."""
    sequences = options.slots + (options.slots > 1)
    masks = 8 * options.chunk
    return (options.n_ctx + KV_BUCKET) * (token_bytes(target, drafter, options) * sequences + masks) + ROUGH_BUFFERS


def token_bytes(target: Decoder, drafter: AnyDrafter | None, options: EngineOptions) -> int:
    """Bytes of K/V of one token of context, the drafter's included."""
    shapes = drafter.kv_shapes() if drafter is not None else ()
    return sum(map(options.kv.row_bytes, target.kv_shapes())) + sum(map(options.draft_kv.row_bytes, shapes))
