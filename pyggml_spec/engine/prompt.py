"""Prompts with pictures: token ids, among which every row of a picture has an id of its own.

Such an id is negative and made of a hash of picture and encoder, and the row's number: equal ids are equal rows. Whatever compares prompts (prefix cache,
n-grams, rows in place) therefore needs to know nothing of pictures. A model with positions by axis (M-RoPE) counts fewer positions than rows.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..checks import token_ids
from ..errors import ContextError

AXES = 4  # of positions: time, height, width, and one that is 0


@dataclass(frozen=True, eq=False)
class Picture:
    """What an encoder made of a picture, or of a part of it.

    Attributes:
        ids: I64 [n], of ``row_ids``.
        embeddings: F32 [n, n_embd * (1 + deepstack)].
        positions: I64 [AXES, n] relative to its first one, or None: each row is one after the row before.
        n_pos: positions that it takes.
        both_ways: whether its rows see each other, so that one step computes all of them.
    """

    ids: np.ndarray
    embeddings: np.ndarray
    positions: np.ndarray | None = None
    n_pos: int = 0
    both_ways: bool = False

    @property
    def rows(self) -> int:
        return len(self.ids)


def row_ids(identity: bytes, rows: int) -> np.ndarray:
    """Negative ids I64 [rows] of the rows of what ``identity`` names."""
    digests = b"".join(hashlib.sha256(identity + row.to_bytes(4, "little")).digest()[:8] for row in range(rows))
    return np.frombuffer(digests, np.int64) | np.int64(-1 << 63)


def pictures_of(tokens: object) -> list[tuple[int, "Picture"]]:
    """Of a prompt; none of other lists of tokens."""
    return tokens.pictures if isinstance(tokens, Prompt) else []


class PictureRows(NamedTuple):
    """Rows of pictures within a chunk of T rows.

    Attributes:
        at: I64 [P] which rows.
        embeddings: F32 [P, n] of each.
        positions: I64 [AXES, T] of all rows, or None where those are the rows' numbers.
        last: I64 [T] the last row that each row sees; its own but for pictures ``both_ways``.
    """

    at: np.ndarray
    embeddings: np.ndarray
    positions: np.ndarray | None
    last: np.ndarray


class Prompt(list[int]):
    """Token ids, with negative ones where ``pictures`` lie: (first row, picture), ascending."""

    def __init__(self, parts: Iterable[Sequence[int] | Picture] = ()) -> None:
        super().__init__()
        self.pictures: list[tuple[int, Picture]] = []
        for part in parts:
            self.add(part)

    def add(self, part: "Sequence[int] | Picture") -> None:
        """Appends tokens, a picture, or another prompt."""
        if isinstance(part, Picture):
            self.pictures.append((len(self), part))
            self += part.ids.tolist()
            return
        self.pictures += [(len(self) + first, picture) for first, picture in pictures_of(part)]
        self += part

    @classmethod
    def checked(cls, tokens: Sequence[int], n_vocab: int) -> "Prompt":
        """A prompt of ``tokens``, which may be one already. Raises ContextError: ids that are neither tokens nor rows of its pictures."""
        prompt = cls()
        pictures = list(pictures_of(tokens))
        if not pictures:
            prompt.extend(token_ids(tokens, n_vocab).tolist())
            return prompt
        end = 0
        for first, picture in pictures:
            if first > end:
                token_ids(tokens[end:first], n_vocab)
            end = first + picture.rows
            if first < 0 or end > len(tokens) or not np.array_equal(np.asarray(tokens[first:end], np.int64), picture.ids):
                raise ContextError("the prompt's rows of pictures are not those of its pictures; build it of its parts again")
        if end < len(tokens):
            token_ids(tokens[end:], n_vocab)
        prompt.extend(tokens)
        prompt.pictures = pictures
        return prompt

    @property
    def parts(self) -> "list[Sequence[int] | Picture]":
        """Tokens and pictures in turns."""
        out: list[Sequence[int] | Picture] = []
        end = 0
        for first, picture in self.pictures:
            out += [self[end:first], picture] if first > end else [picture]
            end = first + picture.rows
        return [*out, self[end:]] if end < len(self) else out

    def lag(self, n: int) -> int:
        """Rows minus positions of the first ``n`` tokens, which end outside of pictures."""
        return sum(picture.rows - picture.n_pos for first, picture in self.pictures if first < n and picture.positions is not None)

    def chunk_end(self, first: int, end: int) -> int:
        """``end``, moved out of a picture whose rows see each other: to its start, or to its end where it is what comes first."""
        for begins, picture in self.pictures:
            if picture.both_ways and begins < end < begins + picture.rows:
                return begins if begins > first else begins + picture.rows
        return end

    def rows_of(self, first: int, count: int) -> PictureRows | None:
        """Those among the rows [first, first + count); None without any."""
        end = first + count
        found = [(begins, p) for begins, p in self.pictures if begins < end and begins + p.rows > first]
        if not found:
            return None
        rows = np.arange(first, end)
        last, positions = rows.copy(), None
        if any(picture.positions is not None for _, picture in self.pictures):
            positions = np.zeros((AXES, count), np.int64)
            lags = np.array([self.lag(int(row)) for row in rows])
            positions[:-1] = rows - lags
        at, embeddings = [], []
        for begins, picture in found:
            low, high = max(begins, first), min(begins + picture.rows, end)
            at.append(np.arange(low - first, high - first))
            embeddings.append(picture.embeddings[low - begins : high - begins])
            if positions is not None and picture.positions is not None:
                positions[:, low - first : high - first] = begins - self.lag(begins) + picture.positions[:, low - begins : high - begins]
                positions[-1, low - first : high - first] = 0
            if picture.both_ways:
                last[low - first : high - first] = high - 1
        return PictureRows(np.concatenate(at), np.concatenate(embeddings), positions, last)
