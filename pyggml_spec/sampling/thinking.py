"""The budget of thinking: tokens within reasoning are counted, and its end is forced at a limit."""

from collections import deque
from dataclasses import dataclass

from ..text.tokenizer import Tokenizer

THINKING_LIMIT = 1 << 31


@dataclass(frozen=True)
class ThinkingBudget:
    """Attributes:
    begin, end: markers around reasoning.
    tokens: limit of each reasoning; None: tokens are counted only.
    forced: text that ends it at the limit, the marker included.
    inside: whether the prompt has opened it.
    """

    begin: str
    end: str
    tokens: int | None = None
    forced: str = ""
    inside: bool = False


class Thinking:
    """Follows the tokens of one generation.

    Attributes:
        count: tokens within reasoning so far, markers excluded.
    """

    def __init__(self, budget: ThinkingBudget, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._limit, self._inside = tokenizer, budget.tokens, budget.inside
        self._begin, self._end = budget.begin.encode(), budget.end.encode()
        self._keep = max(len(self._begin), len(self._end)) - 1  # bytes in which a marker may begin
        self._forced = tokenizer.encode(budget.forced, special=True, bos=False) if self._limit is not None else []
        self._left: deque[int] = deque()  # tokens of it that are to come
        self._text, self._used, self.count = b"", 0, 0
        self._check()

    @property
    def forced(self) -> int | None:
        """The next token where the limit is reached."""
        return self._left[0] if self._left else None

    def push(self, token: int) -> None:
        forcing = bool(self._left)
        if forcing:
            self._left.popleft()
        text = self._text + self._tokenizer.piece(token, special=True)
        at = text.find(marker := self._end if self._inside else self._begin)
        if at >= 0:
            text, self._inside, self._used = text[at + len(marker) :], not self._inside, 0
        elif self._inside:
            self._used, self.count = self._used + 1, self.count + 1
        self._text = text[-self._keep :]
        if not forcing:
            self._check()

    def _check(self) -> None:
        if self._inside and self._limit is not None and self._used >= self._limit and _whole(self._text):
            self._left = deque(self._forced)


def _whole(data: bytes) -> bool:
    """Whether ``data`` does not end within a character."""
    for n, byte in enumerate(reversed(data[-3:]), 1):
        if byte >= 0xC0:
            return n >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
