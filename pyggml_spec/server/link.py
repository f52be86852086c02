"""The pipes between a router and the process of a model: lines of JSON, answers on the process's stdout.

    router: {"free": bytes, or null for what devices report}    process: {"plan": ...}, until it fits
                                                                process: {"progress": [what, done, total]} ...
                                                                process: {"ready": ...}, or {"error": sentence}

The process ends when its stdin does: a router that was killed leaves none behind.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PROGRESS_SECONDS = 0.2


class Link:
    """The end of the process. What else it prints goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock, self._due = threading.Lock(), 0.0

    def send(self, **message: Any) -> None:
        with self._lock:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()

    def agree(self, plan: Callable[[int | None], dict[str, Any]]) -> dict[str, Any]:
        """The first plan that fits what the router leaves free."""
        for line in sys.stdin:
            made = plan(json.loads(line)["free"])
            self.send(plan=made)
            if made["fits"]:
                return made
        sys.exit(0)

    def progress(self, what: str, done: int, total: int) -> None:
        if (now := time.monotonic()) >= self._due or done == total:
            self._due = now + PROGRESS_SECONDS
            self.send(progress=[what, done, total])

    def ready(self, **about: Any) -> None:
        """Requests are taken from here on."""
        self.send(ready=about)
        threading.Thread(target=self._end_with_router, daemon=True).start()

    def _end_with_router(self) -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)
