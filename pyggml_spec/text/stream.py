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
    """Detokenises incrementally: ``push`` returns text that may be shown, ``finish`` the rest.
    Text that may be the start of a stop string is held back; ``stopped`` is set at a complete stop string, and the text ends before it."""

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = (), lines: LineLimits = ANY_LINES):
        self._piece = piece
        self.stops = [s for s in stops if s]
        self._lines = _Lines(lines) if lines else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    @property
    def ended(self) -> str:
        """Why the text ended: STOP, LENGTH (line limits), or "" if it has not."""
        return "" if not self.stopped else LENGTH if self._lines is not None and self._lines.over else STOP

    def push(self, *tokens: int) -> str:
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"".join(map(self._piece, tokens)))
        return self._within(self._release(final=False))

    def finish(self) -> str:
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._within(self._release(final=True))

    def _within(self, text: str) -> str:
        if self._lines is None:
            return text
        text = self._lines.cut(text)
        self.stopped |= self._lines.over
        return text

    def _release(self, final: bool) -> str:
        if not self.stops:
            out, self._held = self._held, ""
            return out
        found = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = 0 if final else self._possible_stop()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def _possible_stop(self) -> int:
        """Length of the longest suffix that is a prefix of a stop string."""
        longest = max((len(s) for s in self.stops), default=0)
        for n in range(min(longest - 1, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self.stops):
                return n
        return 0


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


class BlockText:
    """Detokenises a sequence block by block. With stop strings or line limits ``completes`` detokenises each token before the next is
    sampled; otherwise ``take`` does it per block.

    Attributes:
        completes: (token) -> why the text ends with it, STOP, LENGTH or ""; None if nothing can end it.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = (), lines: LineLimits = ANY_LINES):
        self._text = TextStream(piece, stops, lines)
        self._completed: deque[str] = deque()  # text of tokens passed to ``completes`` and not yet taken
        self.completes = self._completes if self._text.stops or lines else None

    def _completes(self, token: int) -> str:
        self._completed.append(self._text.push(token))
        return self._text.ended

    def take(self, block: Sequence[int]) -> str:
        """Text that may be shown after the next ``block`` of tokens."""
        if self.completes is None:
            return self._text.push(*block)
        return "".join(self._completed.popleft() for _ in block)

    def finish(self) -> str:
        """The text held back."""
        return self._text.finish()
