"""Tokens to text: never half a character, never a part of a stop string, never a lost byte."""

import random

import pytest

from pyggml_spec.text.stream import TextStream

BYTES = "é€😀".encode()
WIDE = "ok終わり".encode()
# (pieces, stops, what each push returns, what finish returns, stopped)
CASES = {
    "a character over several tokens": ([BYTES[i : i + 1] for i in range(9)], (), ["", "é", "", "", "€", "", "", "", "😀"], "", False),
    "half a character at the end": ([b"a", "😀".encode()[:3]], (), ["a", ""], "\ufffd", False),
    "no UTF-8": ([b"\xff", b"a"], (), ["\ufffd", "a"], "", False),
    "a cut character before another": ([b"\xe2", b"a"], (), ["", "\ufffda"], "", False),
    "only the beginning of a stop": ([b"<", b"|e", b"nx"], ["<|end|>"], ["", "", "<|enx"], "", False),
    "the beginning of a stop at the end": ([b"a<|e"], ["<|end|>"], ["a"], "<|e", False),
    "an empty stop": ([b"a", b"b"], [""], ["a", "b"], "", False),
    "nothing after a stop": ([b"ab", b"c"], ["b"], ["a", ""], "", True),
}
# (pieces, stops, text)
STOPPED = {
    **{f"over tokens: {stop!r}": ([b"x E", b"N", b"D", b"\n", b"never"], [stop], text) for stop, text in (("END", "x "), ("N", "x E"), ("ND\n", "x E"))},
    # a matcher that starts again after the failure misses 'aab' in 'aaab'
    **{f"inside a failed one {i}": (pieces, ["aab"], "a") for i, pieces in enumerate(([b"aaab"], [b"a", b"a", b"a", b"b"], [b"aa", b"ab"], [b"aaa", b"b"]))},
    "the earliest of two": ([b"abcde"], ["cd", "bcde"], "a"),
    "the earliest of two, in the other order": ([b"abcde"], ["bcde", "cd"], "a"),
    "of several bytes per character": ([WIDE[i : i + 2] for i in range(0, len(WIDE), 2)], ["終わり"], "ok"),
}  # fmt: skip


def run(pieces, stops=()):
    """(what each push returned, what finish returned, stopped)"""
    stream = TextStream(lambda i: pieces[i], stops)
    shown = [stream.push(i) for i in range(len(pieces))]
    return shown, stream.finish(), stream.stopped


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pushes(case):
    pieces, stops, *expected = case
    assert [*run(pieces, stops)] == expected


@pytest.mark.parametrize("pieces, stops, text", STOPPED.values(), ids=STOPPED)
def test_a_stop_string_ends_the_text_before_it(pieces, stops, text):
    shown, rest, stopped = run(pieces, stops)
    assert stopped and "".join(shown) + rest == text


def test_any_split_of_any_bytes_gives_the_same_text():
    """Against the definition: decode everything, cut at the first stop string."""
    rng = random.Random(3)
    for _ in range(4000):
        alphabet = rng.choice([b"ab", b"a\xe2\x82\xac", bytes(range(256))])
        data = bytes(rng.choice(alphabet) for _ in range(rng.randint(0, 14)))
        stops = ["".join(rng.choice("ab€") for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(0, 2))]
        cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 5)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
        whole = data.decode("utf-8", "replace")
        found = [at for stop in stops if stop and (at := whole.find(stop)) >= 0]
        shown, rest, stopped = run(pieces, stops)
        assert "".join(shown) + rest == whole[: min(found, default=len(whole))], (pieces, stops)
        assert stopped == bool(found)
