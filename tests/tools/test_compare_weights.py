"""compare --weights: equal files are equal, quantisation is even noise, and one wrong tensor stands out."""

import json

import gguf
import numpy as np
import pytest
from cli.process import pyspec
from gguf_io.build import Model
from random_gguf.model import MIXES, Shape, write_qwen35
from random_gguf.model import quantise as quantise_any
from sessions import fails_with
from tools.checkpoint import floats

from pyggml_spec.errors import GGUFError, ModelError
from pyggml_spec.ggml.library import lib, text
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.compare_weights import compare_weights
from pyggml_spec.tools.quants import TYPES, dequantise, quantise, type_id

ODD = "blk.1.attn_k.weight"


def _with(tmp_path, kind="q8_0", change=lambda name, values: values, name="b.gguf"):
    """The embedded drafter with its matrices in another type, each after ``change``."""
    model = Model(DEMO_DRAFTER)
    for tensor, values in floats(DEMO_DRAFTER).items():
        values = np.ascontiguousarray(change(tensor, values.copy()), np.float32)
        number = type_id(kind) if values.ndim > 1 else 0
        data = values.tobytes() if number == 0 else quantise(values, number).tobytes()
        model.tensors[tensor] = [values.shape[::-1], number, data]
    return model.write(tmp_path / name)


def test_files_types_and_missing_tensors(tmp_path):
    result = compare_weights(DEMO_DRAFTER, DEMO_DRAFTER)
    assert result.flagged == () and {t.relative_rms for t in result.tensors} == {0.0}
    assert len(result.tensors) == len(floats(DEMO_DRAFTER))
    for name in ("iq2_xxs", "iq1_s", "i32"):
        fails_with(ModelError, "importance matrix", lambda: quantise(np.zeros((2, 256), np.float32), type_id(name)))
    model = Model(DEMO_DRAFTER)
    model.tensors["extra.weight"] = model.tensors.pop(ODD)
    result = compare_weights(DEMO_DRAFTER, model.write(tmp_path / "b.gguf"))
    assert {t.name: t.flag for t in result.flagged} == {ODD: "only in drafter.gguf", "extra.weight": "only in b.gguf"}
    model = Model(DEMO_DRAFTER)
    model.tensors = {"x" + name: t for name, t in model.tensors.items()}
    fails_with(ModelError, "no tensor in common", lambda: compare_weights(DEMO_DRAFTER, model.write(tmp_path / "b.gguf")))
    fails_with(GGUFError, "does not exist", compare_weights, DEMO_TARGET, tmp_path / "none.gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, low, high", [("f16", 0, 1e-3), ("bf16", 1e-4, 3e-3), ("q8_0", 0, 0.01), ("q4_K", 0.02, 0.1), ("q2_K", 0.1, 0.5)]
)
def test_even_quantisation_is_not_flagged(tmp_path, kind, low, high):
    result = compare_weights(DEMO_DRAFTER, _with(tmp_path, kind))
    values = [t.relative_rms for t in result.tensors if t.types[1] == kind]
    assert result.flagged == () and len(values) > 10 and low <= min(values) and max(values) < high


@pytest.mark.slow
@pytest.mark.parametrize("change, why", [
    (lambda v: v * 1.4, "times the median"),
    (lambda v: v[::-1], "not the same weights"),
    (lambda v: v.reshape(-1, 2, 32, v.shape[1]).swapaxes(1, 2).reshape(v.shape), "not the same weights"),  # heads paired for another rope
    (lambda v: v[:-4], "shape [512, 256] against [512, 252]"),
    (lambda v: np.where(np.arange(v.size).reshape(v.shape) == 70, np.nan, v), "NaN or Inf"),
], ids=["scaled", "reversed", "other rope order", "cut", "nan"])  # fmt: skip
def test_one_wrong_tensor_is_named(tmp_path, change, why):
    kind = "bf16" if why == "NaN or Inf" else "q4_K"
    result = compare_weights(DEMO_DRAFTER, _with(tmp_path, kind, lambda name, v: change(v) if name == ODD else v))
    assert [t.name for t in result.flagged] == [ODD] and why in result.flagged[0].flag


@pytest.mark.slow
def test_vectors_and_the_command(tmp_path):
    result = compare_weights(DEMO_DRAFTER, _with(tmp_path, "q8_0", lambda name, v: v + 1e-3 if name == "output_norm.weight" else v))
    assert [t.name for t in result.flagged] == ["output_norm.weight"] and "is equal" in result.flagged[0].flag
    good = _run("--weights", DEMO_DRAFTER, _with(tmp_path, "q8_0"), "--json")
    seen = json.loads(good.stdout.splitlines()[-1])
    assert good.returncode == 0 and seen["passed"] and seen["flagged"] == []
    bad = _run("--weights", DEMO_DRAFTER, _with(tmp_path, "q4_K", lambda name, v: v * 2 if name == ODD else v))
    assert bad.returncode == 3 and bad.stderr.count("\n") == 1 and ODD in bad.stderr
    assert _run().returncode == 2 and _run("--weights", DEMO_DRAFTER).returncode == 2
    assert _run("--weights", DEMO_DRAFTER, DEMO_DRAFTER, "--logits", DEMO_TARGET).returncode == 2


@pytest.mark.parametrize("kind", range(lib.GGML_TYPE_COUNT))
def test_dequantise_takes_or_refuses_every_type(kind):
    """ggml has holes in its list of types and types without a conversion: none of them may be called through a null pointer."""
    block = lib.ggml_blck_size(kind)
    if not block:
        pytest.skip("a type number that is no longer in use")
    data = bytes(lib.ggml_row_size(kind, 2 * block))
    try:
        assert dequantise(data, kind, 2 * block).shape == (2 * block,)
    except ModelError as error:
        assert text(lib.ggml_type_name(kind)) in str(error) and text(lib.ggml_type_name(kind)) not in TYPES


def _run(*args):
    return pyspec("compare", *args)


Q8_0 = type_id("q8_0")


@pytest.mark.parametrize("name", TYPES)
def test_there_and_back(name):
    values = np.random.default_rng(0).standard_normal((3, 512), np.float32)
    data = quantise(values, type_id(name))
    assert data.shape == (3, lib.ggml_row_size(type_id(name), 512)) and data.dtype == np.uint8
    back = dequantise(data.tobytes(), type_id(name), values.size).reshape(values.shape)
    assert np.sqrt(((back - values) ** 2).mean()) < 0.4


TOO_FEW = [(bytes(33), "q8_0", 32), (bytes(34), "q8_0", 31), (bytes(34), "q8_0", -32), (bytes(3), "f32", 1), (b"", "f16", 1 << 40)]


@pytest.mark.parametrize("values", [
    np.zeros((2, 33)), np.zeros((0, 32)), np.float32(1), np.zeros((2, 32), object), np.array([["a"] * 32]), np.zeros((2, 32), complex),
])  # fmt: skip
def test_values_that_are_no_blocks(values):
    with pytest.raises(ModelError):
        quantise(values, Q8_0)


@pytest.mark.parametrize("kind", [-1, 4, 5, 31, 99, 1 << 40, 1.5, None, "q8_0", True])
def test_types_that_there_are_not(kind):
    for call in (lambda: quantise(np.zeros((2, 256), np.float32), kind), lambda: dequantise(bytes(4096), kind, 256)):
        fails_with(ModelError, "tensor type", call)


@pytest.mark.parametrize("data, kind, count", TOO_FEW)
def test_bytes_that_are_too_few(data, kind, count):
    with pytest.raises(ModelError):
        dequantise(data, type_id(kind), count)


def test_quantised_values_and_types(tmp_path):
    values = np.full((1, 256), np.nan, np.float32)
    values[0, :64] = 3e38
    for name in TYPES:
        assert dequantise(quantise(values, type_id(name)).tobytes(), type_id(name), 256).shape == (256,)
    path = write_qwen35(tmp_path / "mixed.gguf", Shape(n_layer=8), "Q4_K_M")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["output.weight"] == "Q6_K" and kinds["token_embd.weight"] == "Q4_K"
    assert kinds["blk.0.attn_qkv.weight"] == "Q5_K" and kinds["blk.3.attn_q.weight"] == "Q4_K"
    down = [kinds[f"blk.{i}.ffn_down.weight"] for i in range(8)]
    assert down == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]  # the first and last eighth, and every third between
    assert kinds["blk.3.attn_v.weight"] == "Q6_K" and kinds["blk.3.attn_k.weight"] == "Q4_K"
    assert MIXES["Q5_K_M"].of("token_embd.weight", 32) == "q5_K" and MIXES["Q5_K_M"].of("output.weight", 32) == "q6_K"
    assert [MIXES["UD-IQ3_XXS"].of(f"blk.0.{name}.weight", 32) for name in ("ffn_up", "attn_qkv", "ffn_down")] == [
        "iq3_xxs",
        "q5_K",
        "iq4_xs",
    ]
    values = np.random.default_rng(1).standard_normal((2, 256), np.float32)
    for name, worst in (("q6_K", 0.03), ("iq3_xxs", 0.25), ("iq2_xxs", 0.4)):  # the last one wants an importance matrix
        read = dequantise(quantise_any(values, type_id(name)).tobytes(), type_id(name), 512).reshape(2, 256)
        assert np.linalg.norm(read - values) < worst * np.linalg.norm(values)
