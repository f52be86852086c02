"""Conversion: nothing changes on the way there and back, other layouts are refused by name, and no half-written file is left."""

import numpy as np
import pytest
from compare_convert import differences
from engine.helpers import count_matched
from gguf_io.build import F32, Model
from llama_oracle import LlamaDFlash
from random_gguf.archs import write_llama, write_qwen3
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.model import Shape, write_qwen35
from sessions import fails_with
from tools.checkpoint import apart, as_dflash2, as_dspark, export, export_eagle3, floats

import pyggml_spec as ps
from pyggml_spec.errors import ConvertError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools import convert as module
from pyggml_spec.tools.convert import convert_drafter

pytestmark = pytest.mark.slow
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The embedded drafter as a checkpoint."""
    return export(DEMO_DRAFTER, tmp_path_factory.mktemp("checkpoint") / "demo")


@pytest.fixture(scope="module")
def f32(demo):
    out = demo.parent / "f32.gguf"
    convert_drafter(demo, DEMO_TARGET, out, "f32")
    return out


def _matched(draft, tokens=120):
    """Accepted drafts by position in one greedy text."""
    with ps.load(DEMO_TARGET, draft, device="CPU", threads=1, n_ctx=512, draft_width=16) as session:
        text, stats = session.generate(PROMPT, tokens)
    return text, stats.drafted, stats.matched, list(stats.matched_per_position)


def assert_equal_values(left, right, key):
    raw = hasattr(left, "raw")
    assert [left.raw(i) for i in range(len(left))] == [right.raw(i) for i in range(len(right))] if raw else np.array_equal(left, right), key


def test_f32_round_trips(f32, tmp_path):
    """Every tensor, and every key that decides what is computed."""
    before, after = floats(DEMO_DRAFTER), floats(f32)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name].view(np.uint32), after[name].view(np.uint32)) for name in before)
    with GGUFFile(DEMO_DRAFTER) as a, GGUFFile(f32) as b:
        assert {t.type_name for t in b.tensors.values()} == {"f32"}
        for key in a.metadata:
            if key.startswith(("dflash.", "tokenizer.")):
                assert_equal_values(a.metadata[key], b.metadata[key], key)
        assert [int(v) for v in b.metadata["dflash.target_layers"]] == [1, 4, 6, 7]  # config.json says 0, 3, 5, 6
    model = Model(DEMO_DRAFTER)
    for name, values in floats(DEMO_DRAFTER).items():
        model.tensors[name][1:] = [0, values.tobytes()]
    text, drafted, matched, per_position = _matched(f32)
    assert (text, drafted, matched, per_position) == _matched(model.write(tmp_path / "same.gguf")) and 0 < matched < drafted


def test_llama_cpp_loads_the_result_and_drafts_the_same_ids(f32):
    with ps.load(DEMO_TARGET, f32, device="CPU", threads=1, kernels="ggml", n_ctx=512) as session:
        engine, hp = session.runner, session.drafter.hp
        oracle = LlamaDFlash(DEMO_TARGET, f32, hp.target_layers, hp.mask_token, n_ctx=512, threads=1)
        try:
            prompt = session.tokenizer.encode(PROMPT)
            assert engine.prefill(prompt) == oracle.prefill(prompt)
            for _ in range(12):
                result = engine.fused_step()
                assert result.tokens[1:].tolist() == oracle.draft_logits().argmax(axis=1).tolist()
                _, matched = oracle.verify(result.tokens[1:].tolist())
                assert matched == count_matched(result)
                engine.accept(matched + 1, int(result.ids[matched]))
        finally:
            oracle.close()


@pytest.mark.parametrize(
    "kind, error", [("q8_0", 0.01), ("bf16", 0.003), ("f16", 0.001), ("q6_K", 0.03), ("q4_K", 0.1), ("q4_0", 0.12), ("iq4_nl", 0.12)]
)
def test_other_types_are_near(demo, kind, error):
    """Relative RMS of each matrix within what the type can do; q4_K rows of 512 and 1024 need no other type."""
    out = demo.parent / f"{kind}.gguf"
    done = convert_drafter(demo, DEMO_TARGET, out, kind.upper(), threads=1)
    assert set(done.types) == {kind, "f32"} and not done.notes
    before, after = floats(DEMO_DRAFTER), floats(out)
    for name, values in before.items():
        rms = np.sqrt(((after[name] - values) ** 2).mean() / (values**2).mean())
        assert rms <= (error if values.ndim > 1 else 0), (name, rms)


def test_other_types_of_checkpoints(f32, demo, tmp_path):
    """Within a fifth of the accepted drafts of one greedy text; a wrong layer id or scale costs far more than half of them."""
    out = demo.parent / "accept.gguf"
    convert_drafter(demo, DEMO_TARGET, out, "q8_0", threads=1)
    (text, _, exact, _), (same, _, quantised, _) = _matched(f32), _matched(out)
    assert text == same and abs(quantised - exact) <= 0.2 * exact
    # BF16 values are the upper halves of floats; F16 ones are converted by numpy.
    kept = {}

    def halve(config, tensors):
        for i, (name, values) in enumerate(tensors.items()):
            tensors[name] = (values.view(np.uint32) >> 16).astype(np.uint16) if i % 2 else values.astype(np.float16)
            kept[name] = (tensors[name].astype(np.uint32) << 16).view(np.float32) if i % 2 else tensors[name].astype(np.float32)

    source = export(DEMO_DRAFTER, tmp_path / "half", halve, prefix="model.")
    convert_drafter(source / "model.safetensors", DEMO_TARGET, tmp_path / "half.gguf", "f32")
    assert np.array_equal(floats(tmp_path / "half.gguf")["fc.weight"], kept["model.fc.weight"])
    assert np.array_equal(floats(tmp_path / "half.gguf")["blk.1.ffn_down.weight"], kept["model.layers.1.mlp.down_proj.weight"])


def _meta(tmp_path, change=lambda config, tensors: None, target=DEMO_TARGET):
    source = export(DEMO_DRAFTER, tmp_path / "source", change)
    done = convert_drafter(source, target, tmp_path / "out.gguf", "q8_0", threads=1, replace=True)
    with GGUFFile(tmp_path / "out.gguf") as file:
        return {k.removeprefix("dflash."): v for k, v in file.metadata.items() if k.startswith("dflash.")}, done.notes


def test_scales_and_sources(tmp_path):
    meta, _ = _meta(tmp_path, lambda config, tensors: config.update(hidden_act="gelu_pytorch_tanh", attention_value_scale=0.5))
    assert (meta["hidden_activation"], meta["attention.value_scale"]) == ("gelu_pytorch_tanh", 0.5)
    assert not {"hidden_activation", "attention.value_scale"} & _meta(tmp_path)[0].keys()
    for source, names in ((tmp_path / "no", "does not exist"), (tmp_path, "no \\*.safetensors")):
        fails_with(ConvertError, names, convert_drafter, source, DEMO_TARGET, tmp_path / "out.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    fails_with(ConvertError, "config.json", convert_drafter, tmp_path, DEMO_TARGET, tmp_path / "out.gguf")
    fails_with(ConvertError, "'q9' is not a type", convert_drafter, tmp_path, DEMO_TARGET, tmp_path / "out.gguf", "q9")


@pytest.mark.parametrize("change, causal", [({}, False), ({"is_causal": True}, True), ({"is_causal": False}, False)])
def test_the_block_direction_is_written(tmp_path, change, causal):
    assert _meta(tmp_path, lambda config, tensors: config.update(change))[0]["attention.causal"] is causal


def test_windows_scales_and_caps(tmp_path):
    def sliding(use):
        def change(config, tensors):
            config.update(layer_types=["sliding_attention", "full_attention"], sliding_window=64, use_sliding_window=use)

        return change

    for use in (True, None):
        meta, notes = _meta(tmp_path, sliding(use))
        assert meta["attention.sliding_window"] == 64 and meta["attention.sliding_window_pattern"].tolist() == [True, False] and not notes
    meta, notes = _meta(tmp_path, sliding(False))
    assert "attention.sliding_window" not in meta and "use_sliding_window" in notes[0]
    model = Model(DEMO_TARGET)
    model.keys = {key.replace("qwen35.", "gemma4."): value for key, value in model.keys.items()}
    model.keys["general.architecture"] = (8, b"gemma4")
    model.keys["gemma4.final_logit_softcapping"] = (F32, 30.0)
    target = model.write(tmp_path / "gemma.gguf")
    meta, notes = _meta(tmp_path, target=target)
    assert meta["embedding_scale"] == pytest.approx(512**0.5) and meta["final_logit_softcapping"] == 30.0 and "scale" in notes[0]

    def says(config, tensors):
        config["dflash_config"].update(input_embedding_scale=2.5, final_logit_softcapping=7)

    meta, notes = _meta(tmp_path, says, target)
    assert (meta["embedding_scale"], meta["final_logit_softcapping"], notes) == (2.5, 7.0, ())


def test_rope_sections_and_odd_rows(tmp_path, pair):
    model = Model(DEMO_TARGET)
    del model.keys["qwen35.rope.dimension_sections"]
    assert _meta(tmp_path)[0]["rope.dimension_sections"].tolist() == [32, 0, 0, 0]
    assert "rope.dimension_sections" not in _meta(tmp_path, target=model.write(tmp_path / "t.gguf"))[0]
    # Feed-forward rows of 512 are whole q4_K blocks, heads of 4 x 64 too; a drafter with 3 heads of 32 is not.
    from random_gguf.model import Shape, write_dflash

    small = write_dflash(tmp_path / "d.gguf", Shape(draft_heads=3, draft_heads_kv=1, draft_head_size=32))
    done = convert_drafter(export(small, tmp_path / "c"), pair[0], tmp_path / "o.gguf", "q4_K")
    assert done.types["q8_0"] == 2 and "blk.0.attn_output.weight has rows of 96" in done.notes[0]


def _drop(name):
    return lambda config, tensors: tensors.pop(name)


def _add(name, shape=(4, 4)):
    return lambda config, tensors: tensors.__setitem__(name, np.zeros(shape, np.float32))


def _set(**values):
    return lambda config, tensors: config.update(values)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_dflash2_comes_back_bit_by_bit(tmp_path, prefix):
    target, before = write_qwen3(tmp_path / "t.gguf", Shape()), write_dflash2(tmp_path / "d.gguf", Shape(), taps=3)
    folder = export(before, tmp_path / "checkpoint", as_dflash2(before), prefix)
    convert_drafter(folder, target, tmp_path / "f32.gguf", "f32")
    left, right = floats(before), floats(tmp_path / "f32.gguf")
    assert left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
    with ps.load(target, tmp_path / "f32.gguf", device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        text, stats = session.generate(PROMPT, 20)
        assert stats.drafted > 0
    with ps.load(target, before, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        other = session.generate(PROMPT, 20)
        assert (text, stats.matched) == (other[0], other[1].matched)
    done = convert_drafter(folder, target, tmp_path / "q8.gguf", "q8_0")
    with GGUFFile(tmp_path / "q8.gguf") as file:
        kinds = {t.type_name for name, t in file.tensors.items() if name.endswith("_conv_base")}
    assert kinds == {"f32"} and set(done.types) == {"q8_0", "f32"}


REFUSED = [
    (_add("candidate_selector.predecessor_codebook"), "no conv_kernel_size"),
    (_add("markov_head.w1.weight"), "no tensor 'markov_head.markov_w1.weight'"),
    (_set(architectures=["Qwen3DSparkModel"]), "no tensor 'markov_head.markov_w1.weight'"),
    (_add("midlayer.self_attn.q_proj.weight"), "the key 'block_size'"),
    (_set(architectures=["LlamaForCausalLMEagle3"]), "the key 'block_size'"),
    (_set(architectures=["EagleLlamaForCausalLM"]), "an EAGLE drafter"),
    (_set(architectures=["Gemma4Eagle3Model"]), "DeepSpec's EAGLE-3 for Gemma 4"),
    (_add("mtp.fc.weight"), "an MTP drafter"),
    (_add("d2t", (8,)), "a reduced-vocabulary drafter"),
    (_set(speculators_config={}, architectures=["MLPSpeculator"]), "a speculators drafter"),
    (_set(architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
    (_add("layers.0.self_attn.q_proj.bias", (512,)), "unknown tensor"),
    (
        _add("model.norm.weight", (512,)),
        "'norm.weight' and 'model.norm.weight', which are the same|'model.norm.weight' and 'norm.weight', which are the same",
    ),
    (_add("embed_tokens.weight", (4096, 512)), "lm_head"),
    (_drop("layers.1.mlp.up_proj.weight"), "no tensor 'layers.1.mlp.up_proj.weight'"),
    (_add("norm.weight", (511,)), r"shape \[511\]"),
    (_set(hidden_size=1024), "hidden states of 1024"),
    (_set(num_target_layers=9), "target of 9 layers"),
    (_set(vocab_size=5000), "vocabulary of 5000"),
    (_set(dflash_config={"mask_token_id": 4096, "target_layer_ids": [1]}), "mask_token_id is 4096"),
    (_set(dflash_config={"mask_token_id": 4095, "target_layer_ids": [8]}), "target_layer_ids holds 8"),
    (_set(dflash_config={"mask_token_id": 4095, "target_layer_ids": []}), "no target_layer_ids"),
    (_set(dflash_config={"mask_token_id": 4095, "target_layer_ids": [1, None]}), "target_layer_ids holds None"),
    (_set(layer_types=["full_attention", None]), "layer_types holds None"),
    (_set(dflash_config=3), "dflash_config is 3"),
    (_set(hidden_act="relu"), "activation 'relu'"),
    (_set(rope_scaling={"rope_type": "yarn", "factor": 4}), "'yarn'"),
    (_set(rope_theta=-1), "rope_theta is -1"),
    (_set(is_causal="maybe"), "block direction 'maybe'"),
    (_set(layer_types=["chunked", "full_attention"]), "'chunked'"),
    (_set(layer_types=["sliding_attention"] * 2, use_sliding_window=True), "no swa_window_size"),
    (_set(head_dim="64"), "head_dim is '64'"),
    (_set(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
]


@pytest.mark.parametrize("change, names", REFUSED, ids=[str(i) + " " + n[:20] for i, (_, n) in enumerate(REFUSED)])
def test_refused_by_name_and_nothing_is_written(tmp_path, change, names):
    source = export(DEMO_DRAFTER, tmp_path / "source", change)
    with pytest.raises(ConvertError, match=names) as error:
        convert_drafter(source, DEMO_TARGET, tmp_path / "out.gguf")
    assert "\n" not in str(error.value) and sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("value, kind, names", [(np.nan, "q8_0", "NaN or Inf"), (np.inf, "f32", "NaN or Inf"), (1e6, "f16", "bf16")])
def test_values_that_a_type_cannot_hold(tmp_path, value, kind, names):
    """The last tensor is bad, so the file is begun; it must not be left after."""

    def change(config, tensors):
        tensors["layers.1.mlp.down_proj.weight"][3, 5] = value

    source = export(DEMO_DRAFTER, tmp_path / "source", change)
    fails_with(ConvertError, names, convert_drafter, source, DEMO_TARGET, tmp_path / "out.gguf", kind)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_an_interrupt_leaves_no_file_and_an_existing_one_as_it_was(demo, tmp_path):
    out = tmp_path / "out.gguf"
    out.write_bytes(b"before")
    with pytest.raises(ConvertError, match="`replace`"):
        convert_drafter(demo, DEMO_TARGET, out)

    def interrupt(what, done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_drafter(demo, DEMO_TARGET, out, replace=True, progress=interrupt)
    assert out.read_bytes() == b"before" and list(tmp_path.iterdir()) == [out]


def test_files_are_replaced_whole(demo, tmp_path):
    """`-o target.gguf --force` took the target's place."""
    (tmp_path / "target.gguf").symlink_to(DEMO_TARGET)
    for out in (tmp_path / "target.gguf", demo / "config.json", *demo.glob("*.safetensors")):
        with pytest.raises(ConvertError, match=rf"the output \S+{out.name} is also an input \(\S+{out.name}\)"):
            convert_drafter(demo, tmp_path / "target.gguf", out, replace=True)
    assert (tmp_path / "target.gguf").is_symlink()
    seen = []
    convert_drafter(demo, DEMO_TARGET, tmp_path / "out.gguf", progress=lambda what, done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


def test_a_full_disk_and_a_missing_folder_are_sentences(demo, tmp_path, monkeypatch):
    fails_with(ConvertError, "cannot be written", convert_drafter, demo, DEMO_TARGET, tmp_path / "nowhere" / "out.gguf")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.gguf.GGUFWriter, "write_tensor_data", full)
    fails_with(ConvertError, "No space left", convert_drafter, demo, DEMO_TARGET, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []

    def read_only(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module.Path, "unlink", read_only)  # the system refuses that too, and it was what the user was told
    fails_with(ConvertError, "out.gguf cannot be written: Read-only", convert_drafter, demo, DEMO_TARGET, tmp_path / "out.gguf")


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
        for key in {*a.metadata, *b.metadata}:
            if key.startswith((f"{arch}.", "tokenizer.")) and key.split(".", 1)[1] not in ignored:
                assert_equal_values(a.metadata[key], b.metadata[key], key)


@pytest.mark.parametrize("layer, options", [
    ("midlayer", {"tokens": 100}), ("midlayer", {"own": ("head", "embedding"), "norm_before_fc": True}),
    ("layers.0", {"own": ("head", "embedding"), "tokens": 60, "norm_before_residual": True, "n_embd": 32}), ("layers.0", {"own": ()}),
])  # fmt: skip
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


def test_eagle3_layers_names_and_stretched_positions(tmp_path, target):
    found, done = meta(tmp_path, target, _set(eagle_aux_hidden_state_layer_ids=None))
    assert [int(v) for v in found["target_layers"]] == [2, 3, 3] == list(done.target_layers)
    nested = _set(eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]})
    found, _ = meta(tmp_path, target, nested)
    assert [int(v) for v in found["target_layers"]] == [0, 2, 4]
    found, _ = meta(tmp_path, target, _set(architectures=["LlamaForCausalLM"]))
    assert found["general.architecture"] == "eagle3"
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    meta(tmp_path, target, _set(rope_scaling=rope, rope_theta=500000.0))
    factors = floats(tmp_path / "o.gguf")["rope_freqs.weight"]
    waves = 2 * np.pi * 500000.0 ** (np.arange(0, 32, 2) / 32)
    assert factors.shape == (16,) and (factors[waves < 2048] == 1).all() and (factors[waves > 8192] == 8).all()
    between = factors[(waves >= 2048) & (waves <= 8192)]
    assert between.size and ((between > 1) & (between < 8)).all() and text(target, tmp_path / "o.gguf")[1] > 0
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
    found, _ = meta(tmp_path, target, _set(rope_scaling=yarn))
    scaling = {key.removeprefix("rope.scaling."): value for key, value in found.items() if key.startswith("rope.scaling.")}
    assert scaling == {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 32.0}
    assert text(target, tmp_path / "o.gguf")[1] > 0


@pytest.mark.parametrize("nested, options", [
    (False, {"confidence": True, "from_anchor": True}),
    (False, {"own": ("head", "embedding"), "from_anchor": True}),
    (True, {"own": ("head",), "tokens": 100, "from_anchor": False}),
])  # fmt: skip
def test_a_dspark_comes_back_bit_by_bit(tmp_path, nested, options):
    target, before = write_qwen35(tmp_path / "t.gguf", SMALL), write_dspark(tmp_path / "d.gguf", SMALL, **options)
    source = export(before, tmp_path / "checkpoint", as_dspark(before, nested))
    done = convert_drafter(source, target, tmp_path / "o.gguf", "f32")
    assert (done.block_size, done.target_layers, done.draft_vocab) == (8, (1, 2, 3), options.get("tokens"))
    assert_same(before, tmp_path / "o.gguf")
    assert text(target, before) == text(target, tmp_path / "o.gguf")


def _ids(change):
    def apply(config, tensors):
        tensors["d2t"] = change(tensors["d2t"].copy())

    return apply


REFUSED_CHAINS = [
    (_drop("fc.weight"), "no tensor 'fc.weight'"), (_drop("midlayer.hidden_norm.weight"), "no tensor 'midlayer.hidden_norm.weight'"),
    (_drop("lm_head.weight"), "no tensor 'lm_head.weight'"), (_drop("d2t"), "no tensor 'd2t'"),
    (_ids(lambda ids: ids + 320), "names the token [0-9]+, but the target has 320"),
    (_ids(lambda ids: ids * 0 - (np.arange(ids.size) > 0)), "names a token twice"),
    (_ids(lambda ids: ids - (1 << 62)), "names the token -"), (_ids(lambda ids: ids[:-1]), r"'d2t' has the shape \[99\]"),
    (_ids(lambda ids: ids.astype(np.float32)), "stored as F32, but it holds whole numbers"),
    (_set(draft_vocab_size=321), "draft_vocab_size is 321"), (_set(draft_vocab_size="many"), "draft_vocab_size is 'many'"),
    (_add("midlayer.self_attn.q_proj.bias", (128,)), "unknown tensor"), (_add("mask_hidden", (1, 64)), "unknown tensor"),
    (_set(parallel_drafting=True), "no mask_token_id"), (_set(parallel_drafting=True, ptd_token_id=3), "no tensor 'mask_hidden'"),
    (_set(parallel_drafting=True, mask_token_id=320), "mask_token_id is 320"), (_set(parallel_drafting=1), "parallel_drafting is 1"),
    (_set(ptd_token_id=3), "the key 'ptd_token_id'"), (_set(num_hidden_layers=2), "no tensor 'layers.1."), (_set(num_hidden_layers=65), "between 1 and 64"),
    (_set(hidden_act="gelu"), "activation 'gelu'"), (_set(attention_bias=True), "biases"),
    (_set(target_hidden_size=128), "hidden states of 128"), (_set(vocab_size=319), "vocabulary of 319"),
    (_set(eagle_aux_hidden_state_layer_ids=[1, 2]), "has 2 entries"), (_set(eagle_aux_hidden_state_layer_ids=[1, 2, 7]), "holds 7"),
    (_set(eagle_aux_hidden_state_layer_ids=[1, 2, "3"]), "holds '3'"), (_set(eagle_config=3), "eagle_config is 3"),
    (_set(eagle_config={"use_aux_hidden_state": False}), "one hidden state"),
    (_set(transformer_layer_config=[]), "transformer_layer_config is"), (_set(norm_before_fc="no"), "norm_before_fc is 'no'"),
    (_set(norm_before_fc=True), "no tensor 'input_norm.weight'"), (_set(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (_set(head_dim=31), "31 of the 31 values"), (_set(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
    (_set(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "no original_max_position_embeddings"),
    (_set(rope_scaling={"rope_type": "llama3", "factor": 0}), "factor is 0"),
    (_set(rope_scaling={"rope_type": "llama3", "low_freq_factor": 4.0}), "both 4"),
]  # fmt: skip


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory):
    return write_eagle3(tmp_path_factory.mktemp("eagle3") / "d.gguf", SMALL, tokens=100)


@pytest.mark.parametrize("change, names", REFUSED_CHAINS, ids=[str(i) + " " + n[:20] for i, (_, n) in enumerate(REFUSED_CHAINS)])
def test_chains_are_refused_by_name(tmp_path, target, eagle3, change, names):
    source = export_eagle3(eagle3, tmp_path / "source", change)
    with pytest.raises(ConvertError, match=names) as error:
        convert_drafter(source, target, tmp_path / "out.gguf")
    assert "\n" not in str(error.value) and sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("change, names", [
    (_drop("markov_head.markov_w2.weight"), "no tensor 'markov_head.markov_w2.weight'"), (_drop("confidence_head.proj.bias"), None),
    (_add("confidence_head.proj.weight", (1, 64)), r"shape \[1, 64\]"), (_set(markov_rank=16), r"calls for \[320, 16\]"),
    (_set(markov_head_type="gated"), "markov_head_type is 'gated'"), (_set(sample_from_anchor=1), "sample_from_anchor is 1"),
    (_set(draft_vocab_size=100), "no tensor 'd2t'"), (_set(architectures=["Gemma4DSparkModel"]), "no tensor"),
    (_set(architectures=["DeepseekV4DSparkModel"]), "DeepSeek V4 or other DSpark"),
    (_set(aux_hidden_state_layer_ids=[-1, 1, 2]), "target_layer_ids holds -2"),
])  # fmt: skip
def test_dsparks_that_are_refused(tmp_path, target, change, names):
    before = write_dspark(tmp_path / "d.gguf", SMALL, confidence=True)

    def both(config, tensors):
        as_dspark(before, False)(config, tensors)
        change(config, tensors)

    source = export(before, tmp_path / "source", both)
    if names is None:  # an offset is not needed
        convert_drafter(source, target, tmp_path / "out.gguf")
        return
    fails_with(ConvertError, names, convert_drafter, source, target, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_one_bit_a_key_and_a_missing_tensor_are_named(tmp_path):
    ours, theirs = tmp_path / "a.gguf", tmp_path / "b.gguf"
    convert_drafter(export(DEMO_DRAFTER, tmp_path / "checkpoint"), DEMO_TARGET, ours, "f32")
    assert differences(ours, ours, True) == ([], [], 25)
    model = Model(ours)
    data = bytearray(model.tensors["fc.weight"][2])
    data[0] ^= 1
    model.tensors["fc.weight"][2] = bytes(data)
    model.tensors["other.weight"] = model.tensors.pop("output_norm.weight")
    model.keys["dflash.block_size"] = (model.keys["dflash.block_size"][0], 8)
    model.keys["general.name"] = (model.keys["general.name"][0], "x")
    del model.keys["dflash.attention.causal"]
    model.write(theirs)
    wrong, named, equal = differences(ours, theirs, True)
    assert equal == 23 and [line.split(":")[0] for line in wrong] == [
        "tensor fc.weight", "tensor other.weight", "tensor output_norm.weight", "key dflash.block_size",
    ]  # fmt: skip
    assert [line.split(":")[0] for line in named] == ["key dflash.attention.causal", "key general.name"]
