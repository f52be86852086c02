"""Malformed GGUFs: each ends in GGUFError, one line that names what is wrong. ggml would end the interpreter on some of them."""

import contextlib
import os
import random
import struct
import tracemalloc
from dataclasses import replace

import pytest
from fuzz.mutate import header_places, mutated
from gguf_io.build import ARR, BOOL, F32, F64, I32, SMALL, STR, U8, U16, U32, U64, Model, aligned, gguf, header, info, key, load_all, string
from random_gguf.model import write_qwen35

import pyggml_spec as ps
from pyggml_spec.ggml.library import lib
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.tools.inspect import inspect_file

pytestmark = pytest.mark.slow
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


@pytest.mark.parametrize("name", BROKEN)
def test_broken_structure_is_refused_by_name(name, tmp_path):
    content, words = BROKEN[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    message = refused(path)
    assert words in message and "x.gguf" in message, message


def test_paths_and_long_keys(tmp_path):
    """open() of a named pipe waits for a writer that never comes."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        assert "not a file" in refused(path)
    assert "does not exist" in refused(tmp_path / "none") and "cannot be read" in refused("a\0b")
    path, long = tmp_path / "x.gguf", "k" * 60000
    path.write_bytes(gguf([key(long, U8, 1), key(long, U8, 1)]))
    assert "appears twice" in refused(path)
    path.write_bytes(gguf([key("\x1b[2J\n" * 10, U8, 1), key("\x1b[2J\n" * 10, U8, 1)]))
    assert "\x1b" not in refused(path)


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


def put(name: str, kind: int, v):
    def change(model: Model) -> None:
        model.keys[name] = (kind, v)

    return change


def drop(name: str):
    def change(model: Model) -> None:
        del (model.keys if name in model.keys else model.tensors)[name]

    return change


def reshape(name: str, shape, kind: int = 0, size: int | None = None):
    def change(model: Model) -> None:
        data = model.tensors[name][2]
        model.tensors[name] = [shape, kind, (data + bytes(size or 0))[: size or len(data)]]

    return change


def fill(name: str, bits: bytes):
    def change(model: Model) -> None:
        model.tensors[name][2] = bits * (len(model.tensors[name][2]) // len(bits))

    return change


def tokens(edit):
    def change(model: Model) -> None:
        kind, (item, values) = model.keys["tokenizer.ggml.tokens"]
        values = list(values)
        edit(values)
        model.keys["tokenizer.ggml.tokens"] = (kind, (item, values))

    return change


def both(*changes):
    def change(model: Model) -> None:
        for one in changes:
            one(model)

    return change


T, D = "qwen35.", "dflash."
NAN, INF = float("nan"), float("inf")
TOKENS = SMALL.n_vocab
LYING_TARGETS = {
    # name: (change, words of the message)
    "architecture a number": (put("general.architecture", U32, 1), "general.architecture"),
    "architecture missing": (drop("general.architecture"), "general.architecture"),
    "architecture unknown": (put("general.architecture", STR, "llama5\n\x1b[2J"), "supported targets"),
    "block_count a string": (put(T + "block_count", STR, "2"), "block_count"),
    "block_count an array": (put(T + "block_count", ARR, (U32, [2, 2])), "block_count"),
    "block_count a bool": (put(T + "block_count", BOOL, True), "block_count"),
    "block_count 0": (put(T + "block_count", U32, 0), "block_count is 0"),
    "block_count 1000": (put(T + "block_count", U32, 1000), "blk.2."),
    "block_count 2^32 - 1": (put(T + "block_count", U32, (1 << 32) - 1), "block_count"),
    "block_count missing": (drop(T + "block_count"), "block_count"),
    "nextn_predict_layers negative": (put(T + "nextn_predict_layers", I32, -5), "nextn_predict_layers leaves 7 layers"),
    "nextn_predict_layers more than layers": (put(T + "nextn_predict_layers", U32, 9), "layers"),
    "head_count 0": (put(T + "attention.head_count", U32, 0), "head_count is 0"),
    "head_count negative": (put(T + "attention.head_count", I32, -2), "head_count is -2"),
    "head_count huge": (put(T + "attention.head_count", U32, 1 << 30), "head_count"),
    "head_count more than the tensors": (put(T + "attention.head_count", U32, 4), "attn_q"),
    "head_count_kv 3": (put(T + "attention.head_count_kv", U32, 3), "3 K/V heads"),
    "key_length 0": (put(T + "attention.key_length", U32, 0), "key_length"),
    "key_length odd": (put(T + "attention.key_length", U32, 15), "15"),
    "value_length another": (put(T + "attention.value_length", U32, 8), "value_length"),
    "embedding_length 2^40": (put(T + "embedding_length", U64, 1 << 40), "embedding_length"),
    "context_length 0": (put(T + "context_length", U32, 0), "context_length"),
    "epsilon a string": (put(T + "attention.layer_norm_rms_epsilon", STR, "1e-6"), "epsilon"),
    "epsilon negative": (put(T + "attention.layer_norm_rms_epsilon", F32, -1.0), "epsilon"),
    "epsilon NaN": (put(T + "attention.layer_norm_rms_epsilon", F32, NAN), "epsilon"),
    "epsilon missing": (drop(T + "attention.layer_norm_rms_epsilon"), "epsilon"),
    "rope dimension odd": (put(T + "rope.dimension_count", U32, 7), "dimension_count"),
    "rope dimension above the head": (put(T + "rope.dimension_count", U32, 64), "dimension_count"),
    "rope base Inf": (put(T + "rope.freq_base", F32, INF), "freq_base"),
    "rope base negative": (put(T + "rope.freq_base", F32, -1.0), "freq_base"),
    "rope sections a number": (put(T + "rope.dimension_sections", U32, 1), "dimension_sections"),
    "rope sections strings": (put(T + "rope.dimension_sections", ARR, (STR, ["a"])), "dimension_sections"),
    "rope scaling unknown": (put(T + "rope.scaling.type", STR, "dynamic"), "dynamic"),
    "ssm state_size 0": (put(T + "ssm.state_size", U32, 0), "state_size"),
    "ssm group_count 3": (put(T + "ssm.group_count", U32, 3), "group_count"),
    "ssm conv_kernel 1": (put(T + "ssm.conv_kernel", U32, 1), "ssm_conv1d"),
    "full_attention_interval 0": (put(T + "full_attention_interval", U32, 0), "full_attention_interval"),
    "full_attention_interval 1": (put(T + "full_attention_interval", U32, 1), "recurrent"),
    "recurrent_layers too short": (put(T + "attention.recurrent_layers", ARR, (BOOL, [True])), "recurrent"),
    "recurrent_layers a number": (put(T + "attention.recurrent_layers", U32, 1), "recurrent_layers"),
    "recurrent_layers strings": (put(T + "attention.recurrent_layers", ARR, (STR, ["a", "b"])), "recurrent_layers"),
    "recurrent_layers the other way round": (put(T + "attention.recurrent_layers", ARR, (BOOL, [False, True])), "blk.0.attn_gate"),
    "a part of a split model": (put("split.count", U16, 3), "3 parts"),
    "split count a string": (put("split.count", STR, "3"), "split.count"),
    "alignment of another type than llama.cpp reads": (put("general.alignment", U64, 32), "alignment"),
    # the vocabulary, of which llama.cpp asserts several things
    "tokenizer missing": (drop("tokenizer.ggml.model"), "tokenizer.ggml.model"),
    "tokenizer none": (put("tokenizer.ggml.model", STR, "none"), "'none'"),
    "tokenizer of another family": (put("tokenizer.ggml.model", STR, "rwkv"), "'rwkv'"),
    "tokenizer llama without byte tokens": (put("tokenizer.ggml.model", STR, "llama"), "byte"),
    "pre-tokenizer unknown": (put("tokenizer.ggml.pre", STR, "qwen99"), "qwen99"),
    "pre-tokenizer a number": (put("tokenizer.ggml.pre", U32, 2), "tokenizer.ggml.pre"),
    "tokens not strings": (put("tokenizer.ggml.tokens", ARR, (I32, [1, 2, 3])), "token list"),
    "tokens a string": (put("tokenizer.ggml.tokens", STR, "abc"), "token list"),
    "tokens empty": (put("tokenizer.ggml.tokens", ARR, (STR, [])), "token list"),
    "tokens missing": (drop("tokenizer.ggml.tokens"), "token list"),
    "tokens fewer than rows of the embedding": (
        both(tokens(lambda v: v.pop(5)), put("tokenizer.ggml.token_type", ARR, (I32, [1] * (TOKENS - 1))),
             put("tokenizer.ggml.eos_token_id", U32, 0), drop("tokenizer.ggml.mask_token_id")), "rows",
    ),
    "tokens the same twice": (tokens(lambda v: v.__setitem__(7, v[9])), "tokens 7 and 9"),
    "tokens the same up to a zero byte": (tokens(lambda v: v.__setitem__(9, v[7] + b"\0x")), "tokens 7 and 9"),
    "tokens the same as the name of an empty one": (
        both(tokens(lambda v: v.__setitem__(3, b"")), tokens(lambda v: v.__setitem__(9, b"[EMPTY_3]"))), "tokens 3 and 9",
    ),
    "tokens that are no code points": (tokens(lambda v: v.__setitem__(7, b"\xf7\xbf\xbf\xbf")), "vocabulary"),
    "token types too few": (put("tokenizer.ggml.token_type", ARR, (I32, [1, 1])), "token_type"),
    "token types floats": (put("tokenizer.ggml.token_type", ARR, (F32, [1.0] * TOKENS)), "token_type"),
    "token types all bytes": (
        both(tokens(lambda v: v.__setitem__(7, b"zz")), put("tokenizer.ggml.token_type", ARR, (I32, [6] * TOKENS))), "vocabulary",
    ),
    "scores too few": (put("tokenizer.ggml.scores", ARR, (F32, [0.0])), "scores"),
    "scores strings": (put("tokenizer.ggml.scores", ARR, (STR, ["a"] * TOKENS)), "scores"),
    "merges numbers": (put("tokenizer.ggml.merges", ARR, (I32, [1])), "merges"),
    "merges missing": (drop("tokenizer.ggml.merges"), "merges"),
    "eos out of range": (put("tokenizer.ggml.eos_token_id", U32, TOKENS), f"eos_token_id is {TOKENS}"),
    "eos negative": (put("tokenizer.ggml.eos_token_id", I32, -1), "eos_token_id is -1"),
    "eos a string": (put("tokenizer.ggml.eos_token_id", STR, "2"), "eos_token_id"),
    "adds a begin token that is not there": (
        both(put("tokenizer.ggml.tokens", ARR, (STR, [bytes([97 + i]) for i in range(8)])), put("tokenizer.ggml.add_bos_token", BOOL, True),
             drop("tokenizer.ggml.token_type"), put("tokenizer.ggml.eos_token_id", U32, 1), drop("tokenizer.ggml.mask_token_id"),
             reshape("token_embd.weight", (32, 8), 0, 1024), reshape("output.weight", (32, 8), 0, 1024)), "bos",
    ),
    "adds a begin token, says a string": (put("tokenizer.ggml.add_bos_token", STR, "yes"), "add_bos_token"),
    # the tensors
    "embedding missing": (drop("token_embd.weight"), "token_embd.weight"),
    "embedding a vector": (reshape("token_embd.weight", (32,), 0, 128), "token_embd.weight"),
    "embedding of integers": (reshape("token_embd.weight", (32, TOKENS), 26), "i32"),
    "weight missing": (drop("blk.1.attn_q.weight"), "blk.1.attn_q.weight"),
    "weight transposed": (reshape("blk.0.ffn_up.weight", (16, 64)), "blk.0.ffn_up.weight"),
    "weight of integers": (reshape("blk.0.ffn_up.weight", (32, 32), 24, 1024), "i8"),
    "weight of a type for activations": (reshape("blk.0.ffn_up.weight", (32, 32), 9, 32 * 36), "q8_1"),
    "vector stored as F16": (reshape("blk.0.attn_norm.weight", (32,), 1, 64), "F32"),
    "tensors not one behind the other": (lambda model: setattr(model, "gap", 32), "vocabulary"),
    "weights all NaN": (fill("blk.0.ffn_down.weight", struct.pack("<f", NAN)), "NaN"),
}  # fmt: skip
LYING_DRAFTERS = {
    "target_layers missing": (drop(D + "target_layers"), "target_layers"),
    "target_layers empty": (put(D + "target_layers", ARR, (I32, [])), "target_layers"),
    "target_layers a number": (put(D + "target_layers", U32, 1), "target_layers"),
    "target_layers strings": (put(D + "target_layers", ARR, (STR, ["1", "2"])), "target_layers"),
    "target_layers negative": (put(D + "target_layers", ARR, (I32, [-1, 2])), "layer -1"),
    "target_layers past the target": (put(D + "target_layers", ARR, (I32, [1, 99])), "layer 99"),
    "target_layers 2^64 - 1": (put(D + "target_layers", ARR, (U64, [1, (1 << 64) - 1])), "layer 18446744073709551615"),
    "target_layers of another length than fc": (put(D + "target_layers", ARR, (I32, [1])), "fc.weight"),
    "mask id missing": (drop("tokenizer.ggml.mask_token_id"), "mask_token_id"),
    "mask id out of range": (put("tokenizer.ggml.mask_token_id", U32, TOKENS), f"mask token is {TOKENS}"),
    "mask id negative": (put("tokenizer.ggml.mask_token_id", I32, -1), "mask token is -1"),
    "mask id a string": (put("tokenizer.ggml.mask_token_id", STR, "1"), "mask_token_id"),
    "block_size 0": (put(D + "block_size", U32, 0), "block_size is 0"),
    "block_size 2^31": (put(D + "block_size", U32, 1 << 31), "block_size"),
    "block_size 1": (put(D + "block_size", U32, 1), "block_size"),
    "head_count_kv 3": (put(D + "attention.head_count_kv", U32, 3), "3 K/V heads"),
    "head_count 0": (put(D + "attention.head_count", U32, 0), "head_count is 0"),
    "epsilon negative": (put(D + "attention.layer_norm_rms_epsilon", F32, -1e-6), "epsilon"),
    "attention scale NaN": (put(D + "attention.scale", F32, NAN), "attention.scale"),
    "causal an array": (put(D + "attention.causal", ARR, (BOOL, [True, False])), "causal"),
    "window negative": (put(D + "attention.sliding_window", I32, -4), "sliding_window is -4"),
    "window without a pattern": (put(D + "attention.sliding_window", U32, 8), "sliding_window_pattern"),
    "window pattern too short": (
        both(put(D + "attention.sliding_window", U32, 8), put(D + "attention.sliding_window_pattern", ARR, (BOOL, [True]))),
        "sliding_window_pattern",
    ),
    "window pattern a number": (
        both(put(D + "attention.sliding_window", U32, 8), put(D + "attention.sliding_window_pattern", U32, 1)), "sliding_window_pattern",
    ),
    "activation another": (put(D + "hidden_activation", STR, "relu"), "relu"),
    "embedding width another": (put(D + "embedding_length", U32, 64), "64"),
    "vocabulary another": (tokens(lambda v: v.__setitem__(5, b"\xe2\x82\xac")), "token 5"),
    "vocabulary shorter": (tokens(lambda v: v.pop()), "tokens"),
    "own head of another size": (lambda m: m.tensors.__setitem__("output.weight", [(32, 100), 0, bytes(12800)]), "output.weight"),
    "own head a vector": (lambda m: m.tensors.__setitem__("output.weight", [(TOKENS,), 0, bytes(4 * TOKENS)]), "output.weight"),
    "norm missing": (drop("blk.0.attn_norm.weight"), "blk.0.attn_norm.weight"),
    "norm of another size": (reshape("enc.output_norm.weight", (16,), 0, 64), "enc.output_norm.weight"),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(small, tmp_path_factory):
    """What loading (and generating from) every lying file ended in, by name."""
    folder, pairs = tmp_path_factory.mktemp("lying"), {}
    for kind, cases in (("target", LYING_TARGETS), ("drafter", LYING_DRAFTERS)):
        for i, (name, (change, _)) in enumerate(cases.items()):
            model = Model(small[kind == "drafter"])
            change(model)
            path = model.write(folder / f"{kind}{i}.gguf")
            pairs[kind, name] = (path, None) if kind == "target" else (small[0], path)
    pairs["valid"] = small
    return dict(zip(pairs, load_all(list(pairs.values()))))


def test_the_unchanged_pair_loads_and_generates(outcomes):
    assert outcomes["valid"] is None


@pytest.mark.parametrize("kind, name", [("target", n) for n in LYING_TARGETS] + [("drafter", n) for n in LYING_DRAFTERS])
def test_a_file_that_lies_is_refused_by_name(outcomes, kind, name):
    words, found = (LYING_TARGETS if kind == "target" else LYING_DRAFTERS)[name][1], outcomes[kind, name]
    assert found is not None, "it was accepted"
    assert found[0] == "PyspecError", found
    assert words in found[1] and "\n" not in found[1] and len(found[1]) < 700, found[1]


EVERY_VALUE = gguf(
    [key(f"v{kind}", kind, (kind == STR and "text") or 1) for kind in (U8, U16, U32, I32, F32, BOOL, STR, U64, F64)]
    + [key(f"a{kind}", ARR, (kind, ["a", "bc"] if kind == STR else [1, 0, 1])) for kind in (U8, U32, F32, BOOL, STR, U64)]
    + [key("general.alignment", U32, 32)],
    [info("a", (8, 4)), info("b", (256,), 12, 128), info("c", (2, 2, 2, 2), 1, 288)],
    aligned(bytes(320)),
)


def test_mutations_are_read_run_or_refused(small, tmp_path):
    rng, path = random.Random(1), tmp_path / "x.gguf"
    originals = [(EVERY_VALUE, [range(len(EVERY_VALUE))])] + [(p.read_bytes(), header_places(p.read_bytes())) for p in small]
    refusals = 0
    for i in range(2000):
        data, places = originals[i % 3]
        path.write_bytes(mutated(data, rng, places))
        try:
            inspect_file(path).as_dict()
        except ps.GGUFError:
            refusals += 1
        except BaseException as error:
            raise AssertionError(f"mutation {i} raised {error!r}") from error
    assert 500 < refusals < 1950  # neither everything nor nothing was hit
    rng, pairs, originals = random.Random(2), [], [p.read_bytes() for p in small]
    places = [header_places(data) for data in originals]
    for i in range(120):
        which, path = i % 2, tmp_path / f"{i}.gguf"
        path.write_bytes(mutated(originals[which], rng, places[which]))
        pairs.append((small[0], path) if which else (path, small[1]))
    assert not {i: found for i, found in enumerate(load_all(pairs)) if found is not None and found[0] != "PyspecError"}


def test_every_tensor_type_is_computed_or_refused(tmp_path):
    shape = replace(SMALL, n_embd=256, n_ff=256)
    valid, pairs = write_qwen35(tmp_path / "valid.gguf", shape), []
    for kind in range(lib.GGML_TYPE_COUNT):
        for name in ("token_embd.weight", "blk.0.ffn_up.weight") if lib.ggml_blck_size(kind) else ():
            model = Model(valid)
            n_in, rows = model.tensors[name][0]
            model.tensors[name] = [(n_in, rows), kind, bytes(lib.ggml_row_size(kind, n_in) * rows)]
            pairs.append((model.write(tmp_path / f"{kind}{name}.gguf"), None))
    outcomes = load_all(pairs, tokens=2)
    assert all(found[0] == "PyspecError" and "not a type for weights" in found[1] for found in outcomes if found is not None)
    assert sum(found is None for found in outcomes) > 40
