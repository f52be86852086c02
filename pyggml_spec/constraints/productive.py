"""Productive symbols of a grammar: those that derive a finite text. Others are infinite recursion and must never be entered."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

K = TypeVar("K", bound=Hashable)


def productive(parts: Mapping[K, tuple[int, Sequence[K]]]) -> set[K]:
    """The productive symbols. Each is given as (how many, of which others) must be productive: all of a sequence, one of a choice, none of
    a terminal."""
    left = {part: need for part, (need, _) in parts.items()}
    users: dict[K, list[K]] = {}
    for part, (_, others) in parts.items():
        for other in others:
            users.setdefault(other, []).append(part)
    done = {part for part, need in left.items() if need < 1}
    todo = list(done)
    while todo:
        for user in users.get(todo.pop(), ()):
            left[user] -= 1
            if left[user] < 1 and user not in done:
                done.add(user)
                todo.append(user)
    return done


class TokenTable:
    """A vocabulary as llguidance takes it. ``encode``: a text's tokens."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int, special: Sequence[int], encode: Callable[[bytes | str], list[int]]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids, self._encode = tokens, end, special, encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text)


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of single bytes."""
    tokens = [*(bytes([i]) for i in range(256)), b"<end>"]
    return LLTokenizer(
        TokenizerWrapper(TokenTable(tokens, 256, [256], lambda text: list(text.encode() if isinstance(text, str) else text)))
    )


def byte_matcher(grammar: str) -> LLMatcher:
    """A matcher over single bytes, in its start state; its error tells an invalid grammar, and one that no byte can start."""
    matcher = LLMatcher(_bytes(), grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher
