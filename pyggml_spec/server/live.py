"""/pyspec/live: the state of every slot, five times a second, for the page."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from .errors import ApiError
from .http import STREAM_HEADERS, Request, Response, event, event_stream
from .native import slot_list
from .reading import Context

EVERY = 0.2  # seconds
MAX_WATCHERS = 16


async def live(context: Context, request: Request) -> Response:
    if request.method == "HEAD":  # the states have no end
        return Response(headers=STREAM_HEADERS)
    if context.watchers >= MAX_WATCHERS:
        raise ApiError(429, f"{MAX_WATCHERS} pages watch this server already; close one of them", headers={"retry-after": "30"})
    context.watchers += 1
    request.on_end.append(lambda: setattr(context, "watchers", context.watchers - 1))
    return event_stream(_states(context))


async def _states(context: Context) -> AsyncIterator[bytes]:
    """Until the server drains, which waits for all readers."""
    emitted, at = context.queue.engine.stats.emitted, time.perf_counter()
    while not context.queue.draining:
        yield event(state(context, emitted, at))
        emitted, at = context.queue.engine.stats.emitted, time.perf_counter()
        await asyncio.sleep(EVERY)


def state(context: Context, emitted: int, at: float) -> dict[str, Any]:
    """``emitted``, ``at``: tokens of all slots at the state before, and its time."""
    queue, now = context.queue, time.perf_counter()
    batch = queue.engine.stats
    return {
        "slots": [
            {
                "id": slot["id"], "phase": slot.get("phase", "idle"), "prompt_tokens": slot.get("n_prompt_tokens", 0),
                "prompt_read": slot.get("n_prompt_tokens_processed", 0), "reused": slot.get("n_prompt_tokens_cache", 0),
                "emitted": slot["next_token"][0]["n_decoded"],
                "tokens_per_step": slot["timings"]["tokens_per_step"] if "timings" in slot else 0,
                "tokens_per_second": slot["timings"]["predicted_per_second"] if "timings" in slot else 0,
            }
            for slot in slot_list(context)
        ],
        "waiting": queue.waiting,
        "tokens_per_second": (batch.emitted - emitted) / max(1e-6, now - at),
        "steps": batch.steps,
        "longest_wait_ms": 1000 * batch.longest_wait,
        "prefix_bytes": queue.engine.prefix_bytes,
    }  # fmt: skip
