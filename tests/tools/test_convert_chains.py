"""Conversion of EAGLE-3 and DSpark checkpoints: nothing changes on the way, and what cannot be right is a sentence."""

import numpy as np
import pytest
from random_gguf.archs import write_llama
from random_gguf.dflash2 import write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.model import Shape, write_qwen35
from tools.checkpoint import apart, as_dspark, export, export_eagle3, floats

import pyggml_spec as ps
from pyggml_spec.errors import ConvertError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.tools.convert import convert_drafter

SMALL = Shape(n_layer=6, n_embd=64, n_ff=128, head_size=32, draft_head_size=32, draft_ff=128, target_layers=(1, 2, 3))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("target") / "t.gguf", SMALL)


def text(target, draft, width=4):
    """What a pair says, and which drafts were right."""
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, draft_width=width) as session:
        said, stats = session.generate("def f(", 12)
        return said, stats.drafted, stats.matched


def assert_same(before, after, *ignored):
    """Every tensor and key of two drafters, but keys that say nothing of what is computed."""
    left, right = floats(before), floats(after)
    assert left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
    with GGUFFile(before) as a, GGUFFile(after) as b:
        assert ("d2t" in a.tensors) == ("d2t" in b.tensors)
        if "d2t" in a.tensors:
            assert b.tensors["d2t"].type_name == "i64" and bytes(a.read("d2t")) == bytes(b.read("d2t"))
        arch = a.get("general.architecture", str)
        keys = [
            key for key in {*a.metadata, *b.metadata} if key.startswith((f"{arch}.", "tokenizer.")) and key.split(".", 1)[1] not in ignored
        ]
        for key in keys:
            one, other = a.metadata[key], b.metadata[key]
            if hasattr(one, "raw"):
                assert [one.raw(i) for i in range(len(one))] == [other.raw(i) for i in range(len(other))], key
            else:
                assert np.array_equal(one, other), key


EAGLES = [
    ("midlayer", {"tokens": 100}),
    ("midlayer", {"own": ("head", "embedding"), "norm_before_fc": True}),
    ("layers.0", {"own": ("head", "embedding"), "tokens": 60, "norm_before_residual": True, "n_embd": 32}),
    ("layers.0", {"own": ()}),
]


@pytest.mark.slow
@pytest.mark.parametrize("layer, options", EAGLES)
def test_an_eagle3_comes_back_bit_by_bit(tmp_path, target, layer, options):
    """Tensors, keys, and so the text and what was accepted; the ids of such files equal llama.cpp's (tests/drafters/test_parity.py)."""
    before = write_eagle3(tmp_path / "d.gguf", SMALL, **options)
    source = export_eagle3(before, tmp_path / "checkpoint", layer=layer)
    done = convert_drafter(source, target, tmp_path / "o.gguf", "f32")
    assert (done.block_size, done.mask_token, done.target_layers, done.draft_vocab) == (None, None, (1, 2, 3), options.get("tokens"))
    assert_same(before, tmp_path / "o.gguf")
    assert text(target, before) == text(target, tmp_path / "o.gguf")
    done = convert_drafter(source, target, tmp_path / "q.gguf", "q8_0")
    assert done.types == {"q8_0": done.types["q8_0"], "f32": done.types["f32"]} | ({"i64": 1} if "tokens" in options else {})


def test_rotated_halves_become_pairs(tmp_path, target):
    """Products of rotated q and k are what the checkpoint's rotation gives: rows in another order would draft what is never accepted."""
    before, size = write_eagle3(tmp_path / "d.gguf", SMALL), 32
    convert_drafter(export_eagle3(before, tmp_path / "checkpoint"), target, tmp_path / "o.gguf", "f32")
    rows = {name: floats(tmp_path / "o.gguf")[f"blk.0.attn_{name}.weight"][:size] for name in ("q", "k")}
    x = np.random.default_rng(0).standard_normal((2, rows["q"].shape[1]))
    turns = np.array([[7.0], [3.0]]) / 1e4 ** (np.arange(0, size, 2) / size)

    def rotated(values, turn, halves):
        a, b = (values[: size // 2], values[size // 2 :]) if halves else (values[::2], values[1::2])
        return np.concatenate([a * np.cos(turn) - b * np.sin(turn), a * np.sin(turn) + b * np.cos(turn)])

    pairs = [rotated(rows[name] @ x[i], turns[i], False) for i, name in enumerate("qk")]
    halves = [rotated(apart(rows[name], size) @ x[i], turns[i], True) for i, name in enumerate("qk")]
    unchanged = [rotated(rows[name] @ x[i], turns[i], True) for i, name in enumerate("qk")]
    assert np.isclose(pairs[0] @ pairs[1], halves[0] @ halves[1]) and not np.isclose(pairs[0] @ pairs[1], unchanged[0] @ unchanged[1])


def meta(tmp_path, target, change):
    before = write_eagle3(tmp_path / "d.gguf", SMALL)
    done = convert_drafter(export_eagle3(before, tmp_path / "checkpoint", change), target, tmp_path / "o.gguf", "q8_0", replace=True)
    with GGUFFile(tmp_path / "o.gguf") as file:
        return {key.removeprefix("eagle3."): value for key, value in file.metadata.items()}, done


def _set(**values):
    return lambda config, tensors: config.update(values)


def test_layers_that_an_eagle3_reads_when_it_does_not_say(tmp_path, target):
    found, done = meta(tmp_path, target, _set(eagle_aux_hidden_state_layer_ids=None))
    assert [int(v) for v in found["target_layers"]] == [2, 3, 3] == list(done.target_layers)
    found, _ = meta(
        tmp_path, target, _set(eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]})
    )
    assert [int(v) for v in found["target_layers"]] == [0, 2, 4]


def test_an_eagle3_by_another_name(tmp_path, target):
    """Some call themselves by their target's class; the layer's name says what they are."""
    found, _ = meta(tmp_path, target, _set(architectures=["LlamaForCausalLM"]))
    assert found["general.architecture"] == "eagle3"


def test_stretched_positions(tmp_path, target):
    """llama3: factors of frequencies, from 1 for short waves to the whole factor for long ones; yarn: the keys of llama.cpp's converter."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    meta(tmp_path, target, _set(rope_scaling=rope, rope_theta=500000.0))
    factors = floats(tmp_path / "o.gguf")["rope_freqs.weight"]
    waves = 2 * np.pi * 500000.0 ** (np.arange(0, 32, 2) / 32)
    assert factors.shape == (16,) and (factors[waves < 2048] == 1).all() and (factors[waves > 8192] == 8).all()
    between = factors[(waves >= 2048) & (waves <= 8192)]
    assert between.size and ((between > 1) & (between < 8)).all()
    assert text(target, tmp_path / "o.gguf")[1] > 0
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
    found, _ = meta(tmp_path, target, _set(rope_scaling=yarn))
    scaling = {key.removeprefix("rope.scaling."): value for key, value in found.items() if key.startswith("rope.scaling.")}
    assert scaling == {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 32.0}
    assert text(target, tmp_path / "o.gguf")[1] > 0


# -- DSpark


@pytest.mark.slow
@pytest.mark.parametrize(
    "nested, options",
    [
        (False, {"confidence": True, "from_anchor": True}),
        (False, {"own": ("head", "embedding"), "from_anchor": True}),
        (True, {"own": ("head",), "tokens": 100, "from_anchor": False}),
    ],
)
def test_a_dspark_comes_back_bit_by_bit(tmp_path, nested, options):
    """The ids of such files equal llama.cpp's (tests/drafters/test_parity.py)."""
    target = write_qwen35(tmp_path / "t.gguf", SMALL)
    before = write_dspark(tmp_path / "d.gguf", SMALL, **options)
    source = export(before, tmp_path / "checkpoint", as_dspark(before, nested))
    done = convert_drafter(source, target, tmp_path / "o.gguf", "f32")
    assert (done.block_size, done.target_layers, done.draft_vocab) == (8, (1, 2, 3), options.get("tokens"))
    assert_same(before, tmp_path / "o.gguf")
    assert text(target, before) == text(target, tmp_path / "o.gguf")


# -- refusals


def _drop(name):
    return lambda config, tensors: tensors.pop(name)


def _add(name, shape=(4, 4)):
    return lambda config, tensors: tensors.__setitem__(name, np.zeros(shape, np.float32))


def _ids(change):
    def apply(config, tensors):
        tensors["d2t"] = change(tensors["d2t"].copy())

    return apply


REFUSED = [
    (_drop("fc.weight"), "no tensor 'fc.weight'"),
    (_drop("midlayer.hidden_norm.weight"), "no tensor 'midlayer.hidden_norm.weight'"),
    (_drop("lm_head.weight"), "no tensor 'lm_head.weight'"),
    (_drop("d2t"), "no tensor 'd2t'"),
    (_ids(lambda ids: ids + 320), "names the token [0-9]+, but the target has 320"),
    (_ids(lambda ids: ids * 0 - (np.arange(ids.size) > 0)), "names a token twice"),
    (_ids(lambda ids: ids - (1 << 62)), "names the token -"),
    (_ids(lambda ids: ids[:-1]), r"'d2t' has the shape \[99\]"),
    (_ids(lambda ids: ids.astype(np.float32)), "stored as F32, but it holds whole numbers"),
    (_set(draft_vocab_size=321), "draft_vocab_size is 321"),
    (_set(draft_vocab_size="many"), "draft_vocab_size is 'many'"),
    (_add("midlayer.self_attn.q_proj.bias", (128,)), "unknown tensor"),
    (_add("mask_hidden", (1, 64)), "unknown tensor"),
    (_set(parallel_drafting=True), "all drafts in one pass"),
    (_set(num_hidden_layers=2), "2 layers"),
    (_set(hidden_act="gelu"), "activation 'gelu'"),
    (_set(attention_bias=True), "biases"),
    (_set(target_hidden_size=128), "hidden states of 128"),
    (_set(vocab_size=319), "vocabulary of 319"),
    (_set(eagle_aux_hidden_state_layer_ids=[1, 2]), "has 2 entries"),
    (_set(eagle_aux_hidden_state_layer_ids=[1, 2, 7]), "holds 7"),
    (_set(eagle_aux_hidden_state_layer_ids=[1, 2, "3"]), "holds '3'"),
    (_set(eagle_config=3), "eagle_config is 3"),
    (_set(eagle_config={"use_aux_hidden_state": False}), "one hidden state"),
    (_set(transformer_layer_config=[]), "transformer_layer_config is"),
    (_set(norm_before_fc="no"), "norm_before_fc is 'no'"),
    (_set(norm_before_fc=True), "no tensor 'input_norm.weight'"),
    (_set(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (_set(head_dim=31), "31 of the 31 values"),
    (_set(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
    (_set(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "no original_max_position_embeddings"),
    (_set(rope_scaling={"rope_type": "llama3", "factor": 0}), "factor is 0"),
    (_set(rope_scaling={"rope_type": "llama3", "low_freq_factor": 4.0}), "both 4"),
]


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory):
    return write_eagle3(tmp_path_factory.mktemp("eagle3") / "d.gguf", SMALL, tokens=100)


@pytest.mark.parametrize("change, names", REFUSED, ids=[str(i) + " " + n[:20] for i, (_, n) in enumerate(REFUSED)])
def test_refused_by_name_and_nothing_is_written(tmp_path, target, eagle3, change, names):
    source = export_eagle3(eagle3, tmp_path / "source", change)
    with pytest.raises(ConvertError, match=names) as error:
        convert_drafter(source, target, tmp_path / "out.gguf")
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    "change, names",
    [
        (_drop("markov_head.markov_w2.weight"), "no tensor 'markov_head.markov_w2.weight'"),
        (_drop("confidence_head.proj.bias"), None),
        (_add("confidence_head.proj.weight", (1, 64)), r"shape \[1, 64\]"),
        (_set(markov_rank=16), r"calls for \[320, 16\]"),
        (_set(markov_head_type="gated"), "markov_head_type is 'gated'"),
        (_set(sample_from_anchor=1), "sample_from_anchor is 1"),
        (_set(draft_vocab_size=100), "no tensor 'd2t'"),
        (_set(architectures=["Gemma4DSparkModel"]), "Gemma 4 DSpark"),
        (_set(architectures=["DeepseekV4DSparkModel"]), "DeepSeek V4"),
        (_set(aux_hidden_state_layer_ids=[0, 1, 2]), "target_layer_ids holds -1"),
    ],
)
def test_dsparks_that_are_refused(tmp_path, target, change, names):
    before = write_dspark(tmp_path / "d.gguf", SMALL, confidence=True)

    def both(config, tensors):
        as_dspark(before, False)(config, tensors)
        change(config, tensors)

    source = export(before, tmp_path / "source", both)
    if names is None:  # an offset is not needed
        convert_drafter(source, target, tmp_path / "out.gguf")
        return
    with pytest.raises(ConvertError, match=names):
        convert_drafter(source, target, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
