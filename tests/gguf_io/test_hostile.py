"""Malformed GGUFs: each ends in GGUFError, one line that names what is wrong. ggml would end the interpreter on some of them."""

import contextlib
import os
import struct
import tracemalloc

import pytest
from gguf_io.build import ARR, BOOL, F32, F64, I32, STR, U8, U32, U64, gguf, header, info, key, string

import pyggml_spec as ps
from pyggml_spec.gguf_io import GGUFFile

HUGE = 1 << 40


def raw_key(name: str, kind: int, encoded: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + encoded


def array(item: int, count: int, encoded: bytes = b"") -> bytes:
    return struct.pack("<IQ", item, count) + encoded


def alignment(kind: int, v) -> bytes:
    return gguf([key("general.alignment", kind, v)])


ROW = bytes(128)  # 32 values of F32

BROKEN = {
    # name: (bytes, words of the message)
    "empty file": (b"", "not a GGUF"),
    "37 bytes": (header(1, 1)[:24] + bytes(13), "cut short"),
    "wrong magic": (header(magic=b"GGML"), "not a GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (header(version=1), "version 1"),
    "version 99": (header(version=99), "version 99"),
    "tensor count": (header(n_tensors=HUGE), str(HUGE)),
    "tensor count of 2^64 - 1": (header(n_tensors=(1 << 64) - 1), str((1 << 64) - 1)),
    "key count": (header(n_keys=HUGE), str(HUGE)),
    "more keys than the file holds": (header(n_keys=60000), "cut short"),
    "key length past the end": (header(n_keys=1) + struct.pack("<Q", 5000) + b"general", "5000"),
    "key length of 2^63": (header(n_keys=1) + struct.pack("<Q", 1 << 63) + b"general", str(1 << 63)),
    "string past the end": (gguf([raw_key("general.name", STR, struct.pack("<Q", HUGE))]), "general.name"),
    "string array of 2^40": (gguf([raw_key("a", ARR, array(STR, HUGE))]), str(HUGE)),
    "string array of 2^64 - 1": (gguf([raw_key("a", ARR, array(STR, (1 << 64) - 1))]), str((1 << 64) - 1)),
    "number array of 2^61": (gguf([raw_key("a", ARR, array(F64, 1 << 61))]), str(1 << 61)),
    "second string of an array past the end": (gguf([raw_key("a", ARR, array(STR, 2, string("x") + struct.pack("<Q", 99)))]), "string 1"),
    "array of arrays": (gguf([raw_key("a", ARR, array(ARR, 1, array(U32, 1, bytes(4))))]), "unsupported type 9"),
    "value type 13": (gguf([raw_key("a", 13, bytes(8))]), "type 13"),
    "value type 2^32 - 1": (gguf([raw_key("a", (1 << 32) - 1, bytes(8))]), str((1 << 32) - 1)),
    "array of unknown type": (gguf([raw_key("a", ARR, array(77, 1, bytes(8)))]), "77"),
    "duplicate key": (gguf([key("a.b", U32, 1), key("a.b", U32, 2)]), "'a.b' appears twice"),
    "alignment 0": (alignment(U32, 0), "alignment is 0"),
    "alignment 48": (alignment(U32, 48), "alignment is 48"),
    "alignment 2^31": (alignment(U32, 1 << 31), "alignment is"),
    "alignment negative": (alignment(I32, -32), "alignment is -32"),
    "alignment a float": (alignment(F32, 32.0), "alignment is 32.0"),
    "alignment a bool": (alignment(BOOL, True), "alignment is True"),
    "alignment a string": (alignment(STR, "32"), "alignment is '32'"),
    "alignment an array": (alignment(ARR, (U32, [32])), "alignment is [32]"),
    "tensor name of 64 bytes": (gguf([], [info("n" * 64)], ROW), "64"),
    "tensor name length 2^62": (header(n_tensors=1) + struct.pack("<Q", 1 << 62), str(1 << 62)),
    "0 dimensions": (gguf([], [info("t", ())], ROW), "0 dimensions"),
    "5 dimensions": (gguf([], [info("t", (1, 1, 1, 1, 32))], ROW), "5 dimensions"),
    "2^32 - 1 dimensions": (header(n_tensors=1) + string("t") + b"\xff" * 4, "4294967295 dimensions"),
    "dimension 0": (gguf([], [info("t", (32, 0))], ROW), "[32, 0]"),
    "dimensions whose product passes 2^63": (gguf([], [info("t", (1 << 31, 1 << 31, 4))], ROW), "2147483648"),
    "dimensions whose product is 0 modulo 2^64": (gguf([], [info("t", (1 << 32, 1 << 32))], ROW), "4294967296"),
    "dimension 2^64 - 1": (gguf([], [info("t", ((1 << 64) - 1,))], ROW), str((1 << 64) - 1)),
    **{f"tensor type {n}": (gguf([], [info("t", (32,), n)], ROW), f"type {n}") for n in (4, 5, 31, 32, 33, 36, 37, 38, 99, (1 << 32) - 1)},
    "row not a multiple of the block": (gguf([], [info("t", (48,), 8)], ROW), "rows of 48"),
    "row smaller than the block": (gguf([], [info("t", (32, 8), 12)], ROW), "rows of 32"),
    "misaligned offset": (gguf([], [info("t", (8,), 0, 8)], ROW), "aligned to 32"),
    "offset past the end": (gguf([], [info("t", (32,), 0, HUGE)], ROW), "ends at byte"),
    "offset that wraps around": (gguf([], [info("t", (32,), 0, (1 << 64) - 32)], ROW), "ends at byte"),
    "data before the end of the infos": (gguf([], [info("t", (32,))]), "ends at byte"),
    "overlapping tensors": (gguf([], [info("a", (32,)), info("b", (32,), 0, 96)], ROW * 2), "overlap"),
    "the same data twice": (gguf([], [info("a", (32,)), info("b", (32,))], ROW), "overlap"),
    "duplicate tensor": (gguf([], [info("a", (32,)), info("a", (32,), 0, 128)], ROW * 2), "'a' appears twice"),
    "cut in the magic": (b"GG", "not a GGUF"),
    "cut in the version": (header()[:6], "version"),
    "cut in the header": (header()[:20], "key count"),
    "cut in a key": (header(0, 1) + key("general.name", STR, "abc")[:14], "a key"),
    "cut in a value": (header(0, 1) + key("general.name", STR, "abc")[:-1], "general.name"),
    "cut in an array": (header(0, 1) + key("a", ARR, (U32, [1, 2, 3]))[:-1], "array 'a' of 3 values"),
    "cut in a tensor info": (header(1) + info("t")[:-9], "tensor 't'"),
    "cut in the data": (gguf([], [info("t")], ROW[:100]), "ends at byte"),
    "last byte missing": (gguf([], [info("t")], ROW[:-1]), "ends at byte"),
    "too much text": (gguf([key(f"k{i}", STR, b"x" * (1 << 20)) for i in range(14)]), "text of all keys"),
}


def refused(path) -> str:
    """The message of the refusal, after checking that it is one line of bearable length."""
    with pytest.raises(ps.GGUFError) as caught:
        GGUFFile(path).close()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600, message
    return message


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_broken_structure_is_refused_by_name(name, tmp_path):
    content, words = BROKEN[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    message = refused(path)
    assert words in message and "x.gguf" in message, message


def test_paths_that_are_no_files_are_refused(tmp_path):
    """open() of a named pipe waits for a writer that never comes."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        assert "not a file" in refused(path)
    assert "does not exist" in refused(tmp_path / "none") and "cannot be read" in refused("a\0b")


def test_errors_stay_short_whatever_the_file_calls_its_keys(tmp_path):
    path = tmp_path / "x.gguf"
    long = "k" * 60000
    path.write_bytes(gguf([key(long, U8, 1), key(long, U8, 1)]))
    assert "appears twice" in refused(path)
    path.write_bytes(gguf([key("\x1b[2J\n" * 10, U8, 1), key("\x1b[2J\n" * 10, U8, 1)]))
    assert "\x1b" not in refused(path)


# -- memory


N, MANY = 8000, 1 << 16  # how many are tried, and how many a file may have: the allowance is for as many as are tried
SHARE = (64 << 20) * N // MANY
MEMORY = {
    # name: (bytes, what may be allocated besides the file's size)
    "counts that are not there": (header(60000, 60000), SHARE),
    "a string array of 2^34": (gguf([raw_key("a", ARR, array(STR, 1 << 34))]), SHARE),
    "a number array of 2^34": (gguf([raw_key("a", ARR, array(U64, 1 << 34))]), SHARE),
    "empty strings, whose positions are as large as they": (gguf([raw_key("a", ARR, array(STR, 1 << 17, bytes(8 << 17)))]), 64 << 10),
    "many keys": (gguf([key(f"{i}", U8, 1) for i in range(N)]), SHARE),
    "many arrays": (gguf([key(f"{i}", ARR, (U8, [1])) for i in range(N)]), SHARE),
    "many string arrays": (gguf([key(f"{i}", ARR, (STR, ["a"])) for i in range(N)]), SHARE),
    "many tensors": (gguf([], [info(f"{i}", (8,), 0, 32 * i) for i in range(N)], bytes(32 * N)), SHARE),
    "text with wide characters": (gguf([key(f"k{i}", STR, b"x" * ((1 << 20) - 4) + "😀".encode()) for i in range(11)]), 64 << 20),
    "a string of 32 MiB": (gguf([key("tokenizer.json", STR, b"x" * (32 << 20))]), 64 << 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORY)
def test_reading_allocates_no_more_than_the_file_and_64_mib(name, tmp_path):
    path = tmp_path / "x.gguf"
    content, allowance = MEMORY[name]
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with contextlib.suppress(ps.GGUFError):
            GGUFFile(path).close()
        assert tracemalloc.get_traced_memory()[1] < len(content) + allowance
    finally:
        tracemalloc.stop()
