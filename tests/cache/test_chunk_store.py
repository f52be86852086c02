"""ChunkStore of parts of prompts never take more than their budget, whatever is kept in whatever order."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from pyggml_spec.cache.chunk_store import ROWS, STATE, ChunkStore, chunk_keys, end_keys


@dataclass
class Copied:
    nbytes: int
    closed: bool = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Part:
    """What can be copied: ``nbytes`` of it; ``memory`` False where the device has none for the copy."""

    def __init__(self, nbytes: int, memory: bool = True):
        self.nbytes, self.memory, self.made = nbytes, memory, []

    def copy(self, wait):
        if not self.memory:
            return None
        self.made.append(Copied(self.nbytes))
        return self.made[-1]


def kept(copies: ChunkStore, number: int, nbytes: int, kind: str = ROWS, **more) -> bool:
    return copies.keep(copies.chunk(bytes([number]), number, 1), kind, Part(nbytes), **more)


def held(copies: ChunkStore) -> set[int]:
    return {key[0] for key, chunk in copies.chunks.items() if chunk.data}


def test_a_key_depends_on_every_token_before_it_and_on_the_seed():
    """Equal chunks after different ones have other K/V rows. Without this every test of reuse passed: few prompts have a chunk in common only."""
    a, b = np.arange(12), np.r_[np.arange(3), 99, np.arange(4, 12)]
    one, other = chunk_keys(a, 4, b"seed"), chunk_keys(b, 4, b"seed")
    assert len(set(one + other)) == 6 and chunk_keys(a[:8], 4, b"seed") == one[:2] != chunk_keys(a[:8], 4, b"other")
    assert len({*end_keys(a[:3], one[0]), *end_keys(a[:3], other[0])}) == 6


def test_what_is_kept_stays_within_the_budget():
    """With the budget ignored the whole suite passed."""
    copies = ChunkStore(100)
    assert kept(copies, 0, 60) and kept(copies, 1, 40) and copies.used_bytes == 100
    assert kept(copies, 2, 30) and copies.used_bytes <= 100 and 2 in held(copies)
    assert not kept(copies, 3, 101) and 2 in held(copies)  # what never fits drives nothing out


def test_the_longest_unused_goes_first_and_of_equals_the_deepest():
    copies = ChunkStore(100)
    for number in range(4):
        assert kept(copies, number, 25)
    copies.chunks[b"\0"].used[ROWS] = copies.chunks[b"\3"].used[ROWS] = 5
    assert kept(copies, 4, 25) and held(copies) == {0, 1, 3, 4}
    assert kept(copies, 5, 25) and held(copies) == {0, 1, 3, 5}


def test_what_is_spared_stays_even_if_the_new_part_does_not_fit_then():
    copies = ChunkStore(100)
    assert kept(copies, 0, 50) and kept(copies, 1, 50)
    spared = [copies.chunks[b"\0"], copies.chunks[b"\1"]]
    assert not kept(copies, 2, 10, spare=spared) and held(copies) == {0, 1} and copies.used_bytes == 100


def test_a_device_without_memory_costs_no_account():
    copies = ChunkStore(100)
    assert not copies.keep(copies.chunk(b"a", 0, 1), ROWS, Part(10, memory=False)) and copies.used_bytes == 0


def test_what_was_forgotten_is_known_again_with_a_copy(monkeypatch):
    """A copy of a forgotten chunk was in the account for ever: nothing that makes room would find it."""
    monkeypatch.setattr("pyggml_spec.cache.chunk_store.REMEMBERED", 2)
    copies = ChunkStore(100)
    first = copies.chunk(b"a", 0, 1)
    for number in range(3):
        copies.chunk(bytes([number]), number, 1)
    copies.forget()
    assert b"a" not in copies.chunks and copies.keep(first, ROWS, Part(60))
    assert copies.chunks[b"a"] is first
    assert kept(copies, 9, 80) and held(copies) == {9} and copies.used_bytes == 80
    for number in (20, 21):
        copies.chunk(bytes([number]), number, 1)
    copies.forget()
    copies.chunk(b"a", 0, 1)  # another prompt, which begins alike
    assert not copies.keep(first, ROWS, Part(10)) and copies.used_bytes == 80


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_keeping_and_using(seed):
    """The account is what is held, it never passes the budget, and everything that was dropped was freed once."""
    rng, parts = random.Random(seed), []
    copies = ChunkStore(budget := rng.choice([0, 50, 300, 1000]))
    for clock in range(200):
        copies.clock = clock
        chunk, kind = copies.chunk(bytes([number := rng.randrange(12)]), number, 1), rng.choice([ROWS, STATE])
        if kind in chunk.data:
            chunk.used[kind] = clock
            continue
        parts.append(part := Part(rng.choice([0, 1, 30, 60, 200])))
        spare = rng.sample(list(copies.chunks.values()), rng.randrange(min(3, len(copies.chunks) + 1)))
        before = {id(c): dict(c.data) for c in spare}
        assert copies.keep(chunk, kind, part, spare) == bool(part.made)
        assert copies.used_bytes == sum(c.nbytes for one in copies.chunks.values() for c in one.data.values()) <= budget
        assert all(before[id(c)].items() <= c.data.items() for c in spare)
    copies.clear()
    assert copies.used_bytes == 0 and all(copy.closed for part in parts for copy in part.made)
