"""Constraints that begin at a trigger: until a word or a token of its own comes, the text is free; from there on it has to match.

    "Let me look that up. <tool_call>{"name": "weather", ..."
     free, may end                 ^ from here on

What the constraint holds begins with the trigger itself, as in llama.cpp. A token that ends a trigger and goes on in a way that the constraint does
not allow is forbidden, so that the text behind a trigger always fits.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from ..errors import EngineError, SamplingError
from ..text.tokenizer import Tokenizer
from .grammar import KINDS, Grammar, Vocabulary, allows, first_set

MOST_TRIGGERS, MOST_WORD = 64, 256


class LazyGrammar:
    """One generation's position before and behind a trigger; it is asked what ``Grammar`` is asked.

    Attributes:
        ended: whether an end token was accepted.
    """

    def __init__(self, kind: str, text: str, triggers: Sequence[str | int], tokenizer: Tokenizer) -> None:
        """
        Args:
            kind, text: of the constraint, which begins with the trigger.
            triggers: words, or tokens by their ids.

        Raises:
            SamplingError: the constraint is wrong, or does not begin with a trigger.
        """
        self.kind, self.ended = kind, False
        self._vocabulary = Vocabulary.of(tokenizer)
        self._inner, self._begun = Grammar(kind, text, tokenizer), False
        self._tokens = {t for t in triggers if isinstance(t, int)}
        self._words = tuple(t.encode() for t in triggers if isinstance(t, str))
        self._longest = max(map(len, self._words), default=1)
        self._tail = b""  # the last bytes, of which a word may be the end
        self._free = np.packbits(np.ones(8 * self._vocabulary.n_bytes, bool), bitorder="little")
        self._free[-(-self._vocabulary.n_vocab // 8) :] = 0
        if self._vocabulary.n_vocab % 8:
            self._free[self._vocabulary.n_vocab // 8] = (1 << self._vocabulary.n_vocab % 8) - 1
        for trigger in triggers:
            begins = [trigger] if isinstance(trigger, int) else self._vocabulary.tokens_of(trigger.encode())
            if self._inner.fits(begins) < len(begins):
                raise SamplingError(
                    f"the {KINDS[kind]} does not begin with its trigger {trigger!r}; let it begin with it, or drop the trigger"
                )

    @property
    def complete(self) -> bool:
        """Whether an end token may come."""
        return self.ended or not self._begun or self._inner.complete

    def fits(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` may come next, one after the other."""
        if self._begun:
            return self._inner.fits(tokens)
        tail = self._tail
        for i, token in enumerate(tokens):
            if token in self._vocabulary.ends:
                return i + 1
            if (fed := self._fed(tail, int(token))) is not None:
                passed = self._inner.fits([*fed, *tokens[i + 1 :]]) - len(fed)
                return i + 1 + passed if passed >= 0 else i
            tail = self._after(tail, int(token))
        return len(tokens)

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        return self.fits([token]) == 1

    def bits(self) -> np.ndarray:
        """As of ``Grammar.bits``."""
        if self._begun:
            return self._inner.bits()
        bits = self._free.copy()
        for token in _over_the_end(self._vocabulary, self._words):
            if not self.allows(token):
                bits[token >> 3] &= 255 ^ 1 << (token & 7)
        return bits

    def mask(self) -> np.ndarray:
        """Bool [n_vocab]: the tokens that may come next."""
        return np.unpackbits(self.bits(), count=self._vocabulary.n_vocab, bitorder="little").view(bool)

    def ahead(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """As of ``Grammar.ahead``."""
        left = iter(tokens)
        return self._inner.ahead(tokens) if self._begun else self._walk(lambda bits: next(left, None))[1]

    def some(self, most: int) -> tuple[list[int], list[np.ndarray]]:
        """As of ``Grammar.some``."""
        if self._begun:
            return self._inner.some(most)
        ends = self._vocabulary.ends
        return self._walk(lambda bits: next((token for token in first_set(bits) if token not in ends), None), most)

    def _walk(self, follow: Callable[[np.ndarray], int | None], most: int | None = None) -> tuple[list[int], list[np.ndarray]]:
        """A copy moves along the tokens that ``follow`` names while they may come."""
        path: list[int] = []
        copy = self._copy()
        out = [copy.bits()]
        while len(path) != most and (token := follow(out[-1])) is not None:
            if token in self._vocabulary.ends or not allows(out[-1], token):
                break
            copy.accept(token)
            path.append(int(token))
            out.append(copy.bits())
        return path, out

    def _copy(self) -> "LazyGrammar":
        copy = LazyGrammar.__new__(LazyGrammar)
        copy.__dict__.update(self.__dict__)
        copy._inner = self._inner.copy()
        return copy

    def forced(self, most: int) -> list[int]:
        """The tokens that certainly come next."""
        return self._inner.forced(most) if self._begun else []

    def accept(self, token: int) -> None:
        """Moves past ``token``.

        Raises:
            EngineError: it is not allowed here.
        """
        if self._begun or token in self._vocabulary.ends:
            if self._begun:
                self._inner.accept(token)
            self.ended = token in self._vocabulary.ends
            return
        fed = self._fed(self._tail, int(token))
        if fed is None:
            self._tail = self._after(self._tail, int(token))
            return
        if self._inner.fits(fed) < len(fed):
            raise EngineError(f"the {KINDS[self.kind]} does not allow what comes with its trigger")
        self._begun = True
        for part in fed:
            self._inner.accept(part)

    def _fed(self, tail: bytes, token: int) -> list[int] | None:
        """What the constraint is given if ``token`` ends a trigger behind ``tail``: the trigger and what the token has behind it; None if not."""
        if token in self._tokens:
            return [token]
        text = tail + self._vocabulary.pieces[token]
        found = [at for at in map(text.find, self._words) if at >= 0]
        if not found:
            return None
        at = min(found)
        return [token] if at == len(tail) and not self._vocabulary.is_special(token) else self._vocabulary.tokens_of(text[at:])

    def _after(self, tail: bytes, token: int) -> bytes:
        text = tail + self._vocabulary.pieces[token]
        return text[max(0, len(text) - self._longest + 1) :] if self._longest > 1 else b""


@lru_cache(maxsize=64)
def _over_the_end(vocabulary: Vocabulary, words: tuple[bytes, ...]) -> tuple[int, ...]:
    """Tokens that can end one of ``words`` and go on behind it."""
    ends = tuple(word[-k:] for word in words for k in range(1, len(word) + 1))
    return tuple(
        i
        for i, piece in enumerate(vocabulary.pieces)
        if any(0 <= piece.find(word) < len(piece) - len(word) for word in words)
        or (piece.startswith(ends) and any(len(piece) > len(end) and piece.startswith(end) for end in ends))
    )
