"""Where a sequence ends: one place for stop texts, the end token, the token limit and the end of the context.

However many rows a step verifies, the text ends at the token that completes the end: tokens, log-probabilities and counts are those of
decoding token by token.
"""

from collections.abc import Callable

STOP, END, LENGTH, CONTEXT = "stop", "end", "length", "context"


class Limits:
    """Asked about every token that comes out, once, in order.

    Attributes:
        emitted: tokens that came out.
        reason: why the sequence ended with the last of them: STOP, END, LENGTH or CONTEXT, the first that holds; empty while it goes on.
    """

    def __init__(self, max_tokens: int | None, is_end: Callable[[int], bool], completes: Callable[[int], str] | None = None):
        """
        Args:
            max_tokens: at most so many; None for as many as the context holds.
            is_end: whether a token ends the text.
            completes: why the text ends with this token, behind those that it was asked about before: STOP, LENGTH, or "" where it goes on.
        """
        self._max_tokens, self._is_end, self._completes = max_tokens, is_end, completes
        self._last = 1  # tokens that the context has room for; the last one is never computed
        self.emitted = 0
        self.reason = LENGTH if max_tokens is not None and max_tokens < 1 else ""

    def begin(self, room: int) -> None:
        """The prompt is in the context, and ``room`` positions are left behind it."""
        self._last = room + 1

    @property
    def left(self) -> int:
        """Tokens that can still come out."""
        return (self._last if self._max_tokens is None else min(self._last, self._max_tokens)) - self.emitted

    def passes(self, token: int) -> bool:
        """Counts ``token``; whether another one may follow it."""
        self.emitted += 1
        if self._completes is not None and (why := self._completes(token)):
            self.reason = why
        elif self._is_end(token):
            self.reason = END
        elif self.emitted == self._max_tokens:
            self.reason = LENGTH
        elif self.emitted >= self._last:
            self.reason = CONTEXT
        return not self.reason
