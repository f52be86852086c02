"""Tokens to text as they arrive: never half a character, never a part of a stop string."""

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ..errors import SamplingError


def stop_texts(stop: Sequence[str]) -> tuple[str, ...]:
    """``stop``, if it is texts: of one str, every letter would be one."""
    if isinstance(stop, (str, bytes)) or not isinstance(stop, Iterable) or not all(isinstance(text, str) for text in stop):
        raise SamplingError(f"stop is {stop!r}; give a list of texts, like ['\\n\\n']")
    return tuple(stop)


class TextStream:
    """Turns token bytes into text. ``push`` returns what may be shown; ``finish`` what was held back.

    A character whose bytes are spread over tokens comes out when it is complete. Text that could be the beginning of a stop string is held
    back until it is certain that it is not; ``stopped`` becomes True when a stop string is complete, and the text ends before it.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()):
        self._piece = piece
        self.stops = [s for s in stops if s]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        if self.stopped:
            return ""
        self._held += self._decoder.decode(self._piece(token))
        return self._release(final=False)

    def finish(self) -> str:
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(final=True)

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
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self.stops), default=0)
        for n in range(min(longest - 1, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self.stops):
                return n
        return 0


class BlockText:
    """The text of a sequence that comes out in blocks.

    With stop texts each token's text is made when ``completes`` is asked about it, which is before the next one is chosen; without, when
    ``take`` is asked for the block, which need not hold up the next step (4 us per token).

    Attributes:
        completes: (token) -> whether a stop text is complete with it; None where there are no stop texts.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()):
        self._text = TextStream(piece, stops)
        self._made: deque[str] = deque()  # of tokens that were asked about and not taken yet
        self.completes = self._completes if self._text.stops else None

    def _completes(self, token: int) -> bool:
        self._made.append(self._text.push(token))
        return self._text.stopped

    def take(self, block: Sequence[int]) -> str:
        """What may be shown of the next ``block`` of tokens."""
        if self.completes is None:
            return "".join(self._text.push(token) for token in block)
        return "".join(self._made.popleft() for _ in block)

    def finish(self) -> str:
        """What was held back."""
        return self._text.finish()
