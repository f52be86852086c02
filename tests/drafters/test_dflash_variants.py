"""Drafters with everything that a dflash file may ask for, against llama.cpp's drafts; other dialects; other methods, refused by name."""

from contextlib import ExitStack

import numpy as np
import pytest
from drafters.parity import assert_blocks_equal
from gguf_io.build import F32, STR, U32, Model
from random_gguf.archs import write_gemma4, write_qwen3
from random_gguf.model import Shape, write_dflash

import pyggml_spec as ps
from pyggml_spec.errors import ModelError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.registry import open_drafter, open_target
from pyggml_spec.tools.inspect import inspect_file
from pyggml_spec.tools.plan import plan

pytestmark = pytest.mark.slow

SHAPE = Shape(n_layer=4)
PROMPT = np.random.default_rng(3).integers(0, 256, 128).tolist()  # a whole chunk: both engines compute the same shapes
VARIANTS = {
    "value scale": {"value_scale": 0.3},
    "gelu": {"gelu": True},
    "norms behind": {"post_norms": True},
    "K is V": {"shared_kv": True},
    "rope table": {"factors": True},
    "own embedding": {"own": ("embedding",)},
    "own head": {"own": ("head",), "softcap": 2.0},
    "causal": {"causal": True},
    "everything": {
        "causal": True,
        "value_scale": 1.7,
        "gelu": True,
        "post_norms": True,
        "shared_kv": True,
        "own": ("embedding", "head"),
        "softcap": 2.0,
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("target") / "t.gguf", SHAPE)


def drafts(target, draft) -> tuple[list[int], list[float]]:
    """One block, and the sum of each of its hidden rows."""
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        session.engine.prefill(PROMPT)
        tokens = session.engine.fused_step().tokens.tolist()
        return tokens, session.engine.graphs.get(session.engine.graphs.key("fused", 16, 256)).host["draft_sum"].tolist()


def test_a_causal_block_with_windows(tmp_path, target):
    """Both bounds at once: what a windowed layer sees of a block is what lies before the row and inside the window."""
    shape = Shape(n_layer=4, window=12)
    draft = write_dflash(tmp_path / "d.gguf", shape, causal=True)
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        assert_blocks_equal(session, target, draft, PROMPT, 6)


@pytest.mark.parametrize("more", VARIANTS.values(), ids=VARIANTS)
def test_drafted_ids_equal_llama_cpps(tmp_path, target, more):
    """And differ from those of the same weights without the feature, or the comparison would show nothing."""
    draft = write_dflash(tmp_path / "d.gguf", SHAPE, **more)
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        assert_blocks_equal(session, target, draft, PROMPT, 6)
    assert drafts(target, draft) != drafts(target, write_dflash(tmp_path / "plain.gguf", SHAPE))


def rewritten(path, out, keys=lambda name, value: (name, value), tensors=lambda name: name, more=()):
    """The model of ``path`` with other names."""
    model = Model(path)
    model.keys = dict(keys(name, value) for name, value in model.keys.items()) | dict(more)
    model.tensors = {tensors(name): value for name, value in model.tensors.items()}
    return model.write(out)


def nested(arch):
    """Keys as the makers of dflash-draft files nest them, layers counted by their outputs, the mask token alongside them."""

    def keys(name, value):
        if name == "general.architecture":
            return name, (STR, arch)
        if name == "tokenizer.ggml.mask_token_id":
            return f"{arch}.dflash.mask_token_id", value
        if name == "dflash.target_layers":
            kind, (item, layers) = value
            return f"{arch}.dflash.target_layer_ids", (kind, (item, [v - 1 for v in layers]))
        if name == "dflash.block_size":
            return f"{arch}.dflash.block_size", value
        return name.replace("dflash.", f"{arch}.", 1) if name.startswith("dflash.") else name, value

    return keys


FUSION = {"fc.weight": "fc.weight", "enc.output_norm.weight": "hidden_norm.weight"}


DIALECTS = [("dflash-draft", "dflash_"), ("qwen35-dflash-draft", "dflash."), ("gemma4-dflash-draft", "dflash."), ("dflash", "")]


@pytest.mark.parametrize("arch, prefix", DIALECTS)
def test_dialects_draft_what_the_original_drafts(tmp_path, target, arch, prefix):
    original = write_dflash(tmp_path / "d.gguf", SHAPE)

    def tensors(name):
        name = f"{prefix}{FUSION[name]}" if name in FUSION else name
        return name.replace("ffn_norm", "post_attention_norm") if arch == "dflash-draft" else name

    other = rewritten(original, tmp_path / "o.gguf", nested(arch), tensors)
    assert drafts(target, other) == drafts(target, original)
    seen = inspect_file(other)
    assert seen.usable and f"a {arch} drafter" in seen.verdict and "inputs of target layers 1, 2, 3" in seen.verdict
    assert plan(target, other, device="CPU", n_ctx=256).memory == plan(target, original, device="CPU", n_ctx=256).memory


OTHERS = {
    "DeepSeek-V4 DSpark": [("key", "dflash.dspark.enabled"), ("key", "dflash.hyper_connection.count")],
    "Domino": [("tensor", "dflash.domino.start")],
    "EAGLE": [("arch", "eagle")],
    "MTP": [("tensor", "blk.0.nextn.eh_proj.weight")],
    "reduced-vocabulary": [("tensor", "t2d")],
    "Laguna-style DFlash": [("tensor", "dflash.aux_hidden_norm.0.weight")],
}


@pytest.mark.parametrize("method, kind, name", [(m, *sign) for m, signs in OTHERS.items() for sign in signs])
def test_other_methods_are_refused_by_name_everywhere(tmp_path, target, method, kind, name):
    """At loading, planning and inspecting, as a drafter and as a target: by name, with what is supported instead."""
    model = Model(write_dflash(tmp_path / "d.gguf", SHAPE))
    if kind == "tensor":
        model.tensors[name] = list(model.tensors["output_norm.weight"])
    elif kind == "key":
        model.keys[name] = (U32, 1)
    else:
        model.keys["general.architecture"] = (STR, name)
    path = model.write(tmp_path / "o.gguf")
    words = rf"is a {method} drafter \(it has .*\), which is not supported; DFlash drafters with the architecture dflash, .* are supported"
    for use in (lambda: ps.load(target, path, device="CPU"), lambda: plan(target, path, device="CPU")):
        with pytest.raises(ModelError, match=words):
            use()
    seen = inspect_file(path)
    assert not seen.usable and f"is a {method} drafter" in seen.verdict
    if kind == "arch":
        with GGUFFile(path) as file, pytest.raises(ModelError, match=words):
            open_target(file)


def test_a_file_is_what_its_architecture_says_whatever_else_it_names(tmp_path, target):
    """llama.cpp writes hyper_connection keys of 0 into every file that it saves; a real target has some of its own, and MTP layers."""
    draft = Model(write_dflash(tmp_path / "d.gguf", SHAPE))
    draft.keys["dflash.hyper_connection.count"] = (U32, 0)
    assert inspect_file(draft.write(tmp_path / "o.gguf")).usable
    model = Model(target)
    model.keys |= {"general.architecture": (STR, "deepseek4"), "deepseek4.hyper_connection.count": (U32, 4)}
    model.tensors["blk.0.nextn.eh_proj.weight"] = list(model.tensors["output_norm.weight"])
    path = model.write(tmp_path / "t.gguf")
    with GGUFFile(path) as file:
        for use, words in (
            (open_target, "has the architecture 'deepseek4', which does not run here yet, with or without a drafter; supported targets: "),
            (open_drafter, "has the architecture 'deepseek4', which does not draft here; DFlash drafters"),
        ):
            with pytest.raises(ModelError, match=words):
                use(file)
    assert "it has the architecture 'deepseek4', which does not run here yet" in inspect_file(path).verdict


def test_a_target_with_mtp_layers_is_no_drafter(target):
    with GGUFFile(target) as file:
        file.metadata["qwen3.nextn_predict_layers"] = 1
        with pytest.raises(ModelError, match="its own MTP layers do not draft here"):
            open_drafter(file)


@pytest.mark.parametrize("name, value, words", [
    ("dflash.hidden_activation", (STR, "relu"), "relu"),
    ("dflash.final_logit_softcapping", (F32, -1.0), "below 0"),
    ("dflash.attention.value_length", (U32, 32), "value_length"),
])  # fmt: skip
def test_what_a_file_asks_for_is_applied_or_refused(tmp_path, name, value, words):
    model = Model(write_dflash(tmp_path / "d.gguf", SHAPE))
    model.keys[name] = value
    with GGUFFile(model.write(tmp_path / "o.gguf")) as file, pytest.raises(ModelError, match=words):
        open_drafter(file)


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "enc.output_norm.scale", "blk.1.attn_q.bias"])
def test_an_unused_tensor_is_named(tmp_path, name):
    model = Model(write_dflash(tmp_path / "d.gguf", SHAPE))
    model.tensors[name] = list(model.tensors["output_norm.weight"])
    with GGUFFile(model.write(tmp_path / "o.gguf")) as file, pytest.raises(ModelError, match=name):
        open_drafter(file).specs()


def test_gemma4_scale_omitted_applied_twice_and_applied_once(tmp_path):
    """Only a block embedded with the target's scale, once, drafts what llama.cpp drafts with the scale in the file. Leaving it out was a
    public bug, and so was applying it again to rows that already had it. A file without the key gets the target's scale."""
    shape = Shape(n_layer=4)
    target, scale = write_gemma4(tmp_path / "t.gguf", shape), shape.n_embd**0.5
    scales = (scale, 0.0, 1.0, scale * scale)
    once, absent, omitted, twice = (write_dflash(tmp_path / f"{x}.gguf", Shape(n_layer=4, embedding_scale=x)) for x in scales)
    with ps.load(target, once, device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        assert_blocks_equal(session, target, once, PROMPT, 4)
    right = drafts(target, once)
    assert drafts(target, absent) == right
    assert drafts(target, omitted) != right and drafts(target, twice) != right


def test_draft_logits_of_a_gemma_target_are_capped_once(tmp_path):
    """By the target's head; a cap in the drafter's file is for a head of its own. The verifier's logits are capped besides."""
    shape, caps = Shape(n_layer=4), {}
    target = write_gemma4(tmp_path / "t.gguf", shape, softcap=5.0)
    cases = {"borrowed": {}, "borrowed, in the file": {"softcap": 5.0}, "own, no cap": {"own": ("head",)}}
    cases["own"] = {"own": ("head",), "softcap": 5.0}
    for name, more in cases.items():
        draft = write_dflash(tmp_path / "d.gguf", shape, **more)
        with ExitStack() as stack:
            session = stack.enter_context(ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=256))
            caps[name] = session.engine.graphs.get(session.engine.graphs.key("fused", 16, 256)).graph.op_counts()["TANH"]
    assert caps == {"borrowed": 2, "borrowed, in the file": 2, "own": 2, "own, no cap": 1}
