"""Tokens to text: never half a character, never a part of a stop string, never a lost byte."""

import random

import pytest

from pyggml_spec.text.stream import TextStream


def run(pieces, stops=()):
    """(what each push returned, what finish returned, stopped)"""
    stream = TextStream(lambda i: pieces[i], stops)
    shown = [stream.push(i) for i in range(len(pieces))]
    return shown, stream.finish(), stream.stopped


def test_a_character_split_over_tokens_comes_out_whole():
    data = "é€😀".encode()
    shown, rest, _ = run([data[i : i + 1] for i in range(len(data))])
    assert shown == ["", "é", "", "", "€", "", "", "", "😀"] and rest == ""


def test_half_a_character_at_the_end_is_shown_as_a_replacement_character():
    assert run([b"a", "😀".encode()[:3]]) == (["a", ""], "\ufffd", False)


def test_bytes_that_are_no_utf8_do_not_hold_the_rest_back():
    assert run([b"\xff", b"a"]) == (["\ufffd", "a"], "", False)
    assert "".join(run([b"\xe2", b"a"])[0]) == "\ufffda"


@pytest.mark.parametrize("stop", ["END", "N", "ND\n"])
def test_a_stop_string_across_tokens_ends_the_text_before_it(stop):
    shown, rest, stopped = run([b"x E", b"N", b"D", b"\n", b"never"], [stop])
    assert stopped and "".join(shown) + rest == "x END\n".split(stop, maxsplit=1)[0]


def test_what_only_begins_like_a_stop_string_is_shown_when_it_is_not_one():
    shown, rest, stopped = run([b"<", b"|e", b"nx"], ["<|end|>"])
    assert (shown, rest, stopped) == (["", "", "<|enx"], "", False)


def test_what_begins_like_a_stop_string_at_the_end_is_not_lost():
    assert run([b"a<|e"], ["<|end|>"]) == (["a"], "<|e", False)


def test_a_stop_string_that_begins_inside_a_failed_one():
    """'aab' in 'aaab': a matcher that starts again behind the failure misses it."""
    for pieces in ([b"aaab"], [b"a", b"a", b"a", b"b"], [b"aa", b"ab"], [b"aaa", b"b"]):
        shown, rest, stopped = run(pieces, ["aab"])
        assert stopped and "".join(shown) + rest == "a"


def test_the_earliest_of_two_stops_wins():
    for stops in (["cd", "bcde"], ["bcde", "cd"]):
        shown, rest, stopped = run([b"abcde"], stops)
        assert stopped and "".join(shown) + rest == "a"


def test_an_empty_stop_stops_nothing():
    assert run([b"a", b"b"], [""]) == (["a", "b"], "", False)


def test_a_stop_of_several_bytes_per_character_split_inside_a_character():
    data = "ok終わり".encode()
    shown, rest, stopped = run([data[i : i + 2] for i in range(0, len(data), 2)], ["終わり"])
    assert stopped and "".join(shown) + rest == "ok"


def test_nothing_comes_out_after_a_stop():
    stream = TextStream(lambda token: token, ["b"])
    assert [stream.push(b"ab"), stream.push(b"c"), stream.finish()] == ["a", "", ""]


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
