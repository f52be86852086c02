"""Incremental detokenisation: whole characters only, and never part of a stop string."""

import codecs
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import SamplingError

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True)
class LineLimits:
    """Limits of completions for editors.

    Attributes:
        indent: stop at a line, not the first, with a smaller indent; 0 for no limit.
        seconds: stop at the first line break this long after the first token; 0 for no limit.
    """

    indent: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.indent > 0 or self.seconds > 0


def stop_texts(stop: Sequence[str]) -> tuple[str, ...]:
    """``stop`` checked to be a list of texts."""
    if isinstance(stop, (str, bytes)) or not isinstance(stop, Iterable) or not all(isinstance(text, str) for text in stop):
        raise SamplingError(f"stop is {stop!r}; give a list of texts, like ['\\n\\n']")
    return tuple(stop)


ANY_LINES = LineLimits()


class TextStream:
    """Detokenises incrementally: ``push`` returns text that may be shown, ``finish`` the rest. Text that may be the start of a stop string is held back;
    ``stopped`` is set at a complete stop string, and the text ends before it.

    With stop strings or line limits ``completes`` detokenises each token before the next is sampled, and returns why the text ends with it: STOP, LENGTH
    or ""; else it is None. ``take`` returns the text of the next block of tokens either way.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = (), lines: LineLimits = ANY_LINES):
        self._piece = piece
        self.stops = [s for s in stops if s]
        self._lines = _Lines(lines) if lines else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        self._completed: deque[str] = deque()  # text of tokens passed to ``completes`` and not yet taken
        self.completes = self._completes if self.stops or lines else None

    def _completes(self, token: int) -> str:
        self._completed.append(self.push(token))
        return "" if not self.stopped else LENGTH if self._lines is not None and self._lines.over else STOP

    def take(self, block: Sequence[int]) -> str:
        return self.push(*block) if self.completes is None else "".join(self._completed.popleft() for _ in block)

    def push(self, *tokens: int) -> str:
        return self._more(b"".join(map(self._piece, tokens)))

    def finish(self) -> str:
        return self._more(b"", final=True)

    def _more(self, data: bytes, final: bool = False) -> str:
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(data, final)
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text) if final else begins_at(text, self.stops)
        text, self._held = text[:end], "" if found else text[end:]
        if self._lines is not None:
            text = self._lines.cut(text)
            self.stopped |= self._lines.over
        return text


def begins_at(text: str, markers: Sequence[str]) -> int:
    """Start of the longest suffix of ``text`` that one of ``markers`` may begin with."""
    for n in range(min(max(map(len, markers), default=1) - 1, len(text)), 0, -1):
        if any(m.startswith(text[-n:]) for m in markers):
            return len(text) - n
    return len(text)


class _Lines:
    """Applies ``LineLimits``. ``over``: a limit is reached."""

    def __init__(self, limits: LineLimits) -> None:
        self._limits, self.over = limits, False
        self._until = 0.0
        self._indent = -1  # of the current line; -1 if sufficient, or in the first line

    def cut(self, text: str) -> str:
        """The part of ``text`` within the limits."""
        now = time.monotonic() if self._limits.seconds else 0.0
        self._until = self._until or now + self._limits.seconds
        for i, character in enumerate(text):
            if self._indent >= 0 and character in " \t":
                self._indent += 1
                continue
            if 0 <= self._indent < self._limits.indent:
                self.over = True
                return text[:i]
            self._indent = 0 if character == "\n" else -1
            self.over |= character == "\n" and now > self._until
        return text
