"""Well-formed GGUFs whose metadata or tensors contradict each other: each is refused with one line that names the value, none aborts."""

import struct

import pytest
from gguf_io.batch import load_all
from gguf_io.build import ARR, BOOL, F32, I32, STR, U16, U32, U64, Model
from gguf_io.small import SMALL


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
    "rope scaling unknown": (put(T + "rope.scaling.type", STR, "longrope"), "longrope"),
    "ssm state_size 0": (put(T + "ssm.state_size", U32, 0), "state_size"),
    "ssm group_count 3": (put(T + "ssm.group_count", U32, 3), "group_count"),
    "ssm conv_kernel 1": (put(T + "ssm.conv_kernel", U32, 1), "ssm_conv1d"),
    "full_attention_interval 0": (put(T + "full_attention_interval", U32, 0), "full_attention_interval"),
    "full_attention_interval 1": (put(T + "full_attention_interval", U32, 1), "recurrent"),
    "recurrent_layers too short": (put(T + "attention.recurrent_layers", ARR, (BOOL, [True])), "recurrent"),
    "recurrent_layers a number": (put(T + "attention.recurrent_layers", U32, 1), "recurrent_layers"),
    "recurrent_layers strings": (put(T + "attention.recurrent_layers", ARR, (STR, ["a", "b"])), "recurrent_layers"),
    "recurrent_layers the other way round": (put(T + "attention.recurrent_layers", ARR, (BOOL, [False, True])), "attn_q"),
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


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [("target", n) for n in LYING_TARGETS] + [("drafter", n) for n in LYING_DRAFTERS])
def test_a_file_that_lies_is_refused_by_name(outcomes, kind, name):
    words = (LYING_TARGETS if kind == "target" else LYING_DRAFTERS)[name][1]
    found = outcomes[kind, name]
    assert found is not None, "it was accepted"
    assert found[0] == "PyspecError", found
    assert words in found[1] and "\n" not in found[1] and len(found[1]) < 700, found[1]
