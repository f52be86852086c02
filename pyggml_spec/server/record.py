"""Answers that are kept for `pyspec train`: off unless a folder is named; a request with ``record`` false is left out.

One file per process, mode 0600: a line of JSON per answer, as ``train.texts.read_texts`` reads it.
"""

import json
import logging
import os
import re
import time
from pathlib import Path

from ..errors import PyspecError
from ..files import make_private
from .tasks import Task

log = logging.getLogger("pyspec.serve")
WHOLE = ("end", "length", "stop", "context")  # reasons of answers that nobody broke off


class Recorder:
    """Writes to a new file in ``folder``, whose records take ``limit`` bytes at most, earlier ones included. ``model``: its name in the file's. Raises
    PyspecError: it cannot be written."""

    def __init__(self, folder: str | Path, model: str, limit: int) -> None:
        folder, name = Path(folder), re.sub(r"[^\w.-]+", "-", model)
        try:
            make_private(folder)
            self._left = limit - sum(path.stat().st_size for path in folder.glob("*.jsonl"))
            self.path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
            self._file = open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise PyspecError(f"answers cannot be kept in {folder}: {error.strerror}; name another folder with `record`") from None
        self._full = False

    def take(self, task: Task) -> None:
        """Keeps the tokens of an answer that has ended."""
        request, stats = task.request, task.stats
        if task.handle is None or not request.record or request.adapters or stats.stop_reason not in WHOLE or self._full:
            return
        tokens = [*request.ids, *task.handle.sequence.tokens]
        if len(tokens) < len(request.ids) + 2 or min(tokens) < 0:  # rows of pictures
            return
        heat = request.sampling.temperature if request.sampling is not None else 0.0
        value = {"tokens": tokens, "prompt_tokens": len(request.ids), "category": "record", "temperature": heat}
        line = json.dumps(value, separators=(",", ":")) + "\n"
        self._left -= len(line)
        if self._left < 0:
            self._full = True
            log.warning("the folder %s has as many records as it may; further answers are not kept", self.path.parent)
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self._full = True
            log.warning("answers are kept no longer: %s: %s", self.path, error.strerror)

    def close(self) -> None:
        self._file.close()
        if not self.path.stat().st_size:
            self.path.unlink()
