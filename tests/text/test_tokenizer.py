"""The tokenizer: text comes back as it went in, a user's text never becomes a control token, and no text ends the process."""

import importlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import llama_cpp
import pytest
from gguf_io.build import ARR, F32, I32, STR, U32, Model

import pyggml_spec as ps
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.text.stream import TextStream
from pyggml_spec.text.tokenizer import Tokenizer, check_vocabulary, first_difference


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabulary")


@pytest.fixture(scope="module")
def model(pair):
    """The random target with a vocabulary in which two merges happen."""
    out = Model(pair[0])
    names = out.keys["tokenizer.ggml.tokens"][1][1]
    names[300] = b"he"
    out.keys["tokenizer.ggml.merges"] = (ARR, (STR, [b"h e", "Ġ Ġ".encode()]))
    return out


@pytest.fixture(scope="module")
def tokenizer(model, folder):
    with GGUFFile(model.write(folder / "bpe.gguf")) as file:
        loaded = Tokenizer(file)
        yield loaded
        loaded.close()
        loaded.close()  # twice is fine


@pytest.mark.parametrize("text", [
    "def quicksort(items):\n    return items\n", "  two  spaces\t\ttabs \r\n\r\n  ", "Grüße, κόσμε, 日本語, हिन्दी, עברית",
    "emoji 😀 👨‍👩‍👧‍👦 🏳️‍🌈 and a combining e\u0301", "zero\0byte and \x1b[31mescape\x07", "\u2028\u00a0\ufeff\ufffd\U0010ffff",
    "12345678901234567890 'don't' I'LL \"quoted\" <|im_start|> </s>", "a" * 5000, "",
])  # fmt: skip
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_merges_and_control_tokens(tokenizer):
    assert tokenizer.encode("he") == [300] and tokenizer.encode("  ") == [256]
    ids = tokenizer.encode("😀")
    assert len(ids) == 4 and [tokenizer.piece(i) for i in ids] == [bytes([b]) for b in "😀".encode()]
    assert tokenizer.decode(tokenizer.encode(b"a\xffb\xe2\x82")) == "a\ufffdb\ufffd"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    end = tokenizer.n_vocab - 2
    assert tokenizer.encode("a<|end|>b", special=True) == [97, end, 98]
    assert end not in tokenizer.encode("a<|end|>b") and tokenizer.decode(tokenizer.encode("a<|end|>b")) == "a<|end|>b"
    assert tokenizer.is_end(end) and not tokenizer.is_end(97)
    end = tokenizer.n_vocab - 2
    assert (tokenizer.piece(end), tokenizer.piece(end, special=True)) == (b"", b"<|end|>")
    assert tokenizer.decode([97, end, 98]) == "ab" and [tokenizer.piece(i) for i in (-1, tokenizer.n_vocab, 1 << 30)] == [b""] * 3


def test_all_tokens_at_once_are_what_each_one_is(tokenizer):
    ids, pieces = range(tokenizer.n_vocab), tokenizer.pieces()
    assert tokenizer.ends() == [i for i in ids if tokenizer.is_end(i)] != []
    assert tokenizer.longest_piece == max(map(len, pieces))
    assert all(tokenizer.piece(i) == b"" != pieces[i] for i in tokenizer.control_tokens().values())


def test_long_tokens_and_refusals(model, folder):
    long = Model(folder / "bpe.gguf")
    long.keys["tokenizer.ggml.tokens"][1][1][302] = b"x" * 1000
    with GGUFFile(long.write(folder / "long.gguf")) as file:
        tokenizer = Tokenizer(file)
        assert tokenizer.piece(302) == b"x" * 1000 and tokenizer.longest_piece == 1000
        tokenizer.close()
    # Also where the package llama_cpp is imported, which takes the log for itself, and must bring no second copy of the library.
    importlib.reload(llama_cpp._logger)
    if sys.platform == "linux":
        assert len({word for word in Path("/proc/self/maps").read_text().split() if "libllama" in word}) == 1
    other = Model(folder / "bpe.gguf")
    other.keys["tokenizer.ggml.pre"] = (STR, "qwen99")
    with GGUFFile(other.write(folder / "other.gguf")) as file, pytest.raises(ps.ModelError, match="qwen99"):
        Tokenizer(file)


def test_a_sentencepiece_vocabulary_encodes_bytes(pair, folder):
    spm = Model(pair[0])
    n = len(spm.keys["tokenizer.ggml.tokens"][1][1])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a"]
    kinds = [2, 3, 3, *[6] * 256, 1, 1]
    spm.keys["tokenizer.ggml.model"] = (STR, "llama")
    spm.keys["tokenizer.ggml.tokens"] = (ARR, (STR, names + [f"x{i}" for i in range(n - len(names))]))
    spm.keys["tokenizer.ggml.token_type"] = (ARR, (I32, kinds + [1] * (n - len(names))))
    spm.keys["tokenizer.ggml.scores"] = (ARR, (F32, [0.0] * n))
    spm.keys["tokenizer.ggml.eos_token_id"] = (U32, 2)
    with GGUFFile(spm.write(folder / "spm.gguf")) as file:
        assert check_vocabulary(file) == n
        tokenizer = Tokenizer(file)
        assert tokenizer.encode("a\n😀")[0] == 1  # <s> is added
        assert tokenizer.decode(tokenizer.encode("a\n😀")) == " a\n😀"
        tokenizer.close()


def test_no_text_ends_the_process(folder, model):
    """Two ways in which llama.cpp's tokenizer did: bytes that decode to code points above U+10FFFF (an exception through the C call), and
    long runs under the pre-tokenizers that use std::regex (one stack frame per character)."""
    old = Model(folder / "bpe.gguf")
    old.keys["tokenizer.ggml.pre"] = (STR, "default")
    old.write(folder / "regex.gguf")
    script = """if True:
        import sys
        from pyggml_spec.gguf_io import GGUFFile
        from pyggml_spec.text.tokenizer import Tokenizer
        for path in sys.argv[1:]:
            tokenizer = Tokenizer(GGUFFile(path))
            for text in (b"\\xf7\\xbf\\xbf\\xbf", b"\\xf4\\x90\\x80\\x80", b"\\xed\\xa0\\x80", b"!" * 200_000, b"9" * 200_000):
                print(len(tokenizer.encode(text)))
    """
    run = subprocess.run([sys.executable, "-c", script, folder / "bpe.gguf", folder / "regex.gguf"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-1000:]
    assert run.stdout.split() == ["12", "12", "9", "200000", "200000"] * 2


def test_the_first_difference_of_two_vocabularies_is_named(folder, pair):
    with GGUFFile(folder / "bpe.gguf") as a, GGUFFile(pair[0]) as b, GGUFFile(pair[1]) as c:
        assert "token 300 is 'he' in bpe.gguf" in first_difference(a, b) and first_difference(b, c) is None
    fewer = Model(pair[0])
    fewer.keys["tokenizer.ggml.tokens"][1][1].pop()
    without = Model(pair[0])
    del without.keys["tokenizer.ggml.tokens"]
    with GGUFFile(fewer.write(folder / "few.gguf")) as a, GGUFFile(pair[0]) as b, GGUFFile(without.write(folder / "none.gguf")) as c:
        assert "319 tokens" in first_difference(a, b)
        assert first_difference(b, c) is None  # a drafter without a vocabulary uses the target's


def test_long_texts_from_several_threads_leave_the_stack_size_as_it_was(tokenizer, monkeypatch):
    """One took the other's setting for the process's own, and the other started its thread on a stack too small for its text."""
    real, used = threading.stack_size, []

    def slow(size):
        before = real(size)
        time.sleep(0.05)
        return before

    def start(worker, original=threading.Thread.start):
        if worker not in threads:
            used.append(real())
        original(worker)

    threads = [threading.Thread(target=tokenizer.encode, args=("a" * n,)) for n in (5000, 9000, 20000)]
    monkeypatch.setattr(threading, "stack_size", slow)
    monkeypatch.setattr(threading.Thread, "start", start)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert real() == 0 and len(set(used)) == 3


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
    return [stream.push(i) for i in range(len(pieces))], stream.finish(), stream.stopped


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pushes(case):
    pieces, stops, *expected = case
    assert [*run(pieces, stops)] == expected


@pytest.mark.parametrize("pieces, stops, text", STOPPED.values(), ids=STOPPED)
def test_a_stop_string_ends_the_text_before_it(pieces, stops, text):
    shown, rest, stopped = run(pieces, stops)
    assert stopped and "".join(shown) + rest == text


def test_any_split_of_any_bytes_gives_the_same_text():
    rng = random.Random(3)
    for _ in range(4000):
        alphabet = rng.choice([b"ab", b"a\xe2\x82\xac", bytes(range(256))])
        data = bytes(rng.choice(alphabet) for _ in range(rng.randint(0, 14)))
        stops = ["".join(rng.choice("ab€") for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(0, 2))]
        cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 5)))
        pieces, whole = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])], data.decode("utf-8", "replace")
        found = [at for stop in stops if stop and (at := whole.find(stop)) >= 0]
        shown, rest, stopped = run(pieces, stops)
        assert "".join(shown) + rest == whole[: min(found, default=len(whole))], (pieces, stops)
        assert stopped == bool(found)
