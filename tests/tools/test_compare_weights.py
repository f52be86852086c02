"""compare --weights: equal files are equal, quantisation is even noise, and one wrong tensor stands out."""

import json

import numpy as np
import pytest
from cli.process import pyspec
from gguf_io.build import Model
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


def test_a_file_equals_itself():
    result = compare_weights(DEMO_DRAFTER, DEMO_DRAFTER)
    assert result.flagged == () and {t.relative_rms for t in result.tensors} == {0.0}
    assert len(result.tensors) == len(floats(DEMO_DRAFTER))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, low, high", [("f16", 0, 1e-3), ("bf16", 1e-4, 3e-3), ("q8_0", 0, 0.01), ("q4_K", 0.02, 0.1), ("q2_K", 0.1, 0.5)]
)
def test_even_quantisation_is_not_flagged(tmp_path, kind, low, high):
    result = compare_weights(DEMO_DRAFTER, _with(tmp_path, kind))
    values = [t.relative_rms for t in result.tensors if t.types[1] == kind]
    assert result.flagged == () and len(values) > 10 and low <= min(values) and max(values) < high


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, why",
    [
        (lambda v: v * 1.4, "times the median"),
        (lambda v: v[::-1], "not the same weights"),
        (
            lambda v: v.reshape(-1, 2, 32, v.shape[1]).swapaxes(1, 2).reshape(v.shape),
            "not the same weights",
        ),  # heads paired for another rope
        (lambda v: v[:-4], "shape [512, 256] against [512, 252]"),
        (lambda v: np.where(np.arange(v.size).reshape(v.shape) == 70, np.nan, v), "NaN or Inf"),
    ],
    ids=["scaled", "reversed", "other rope order", "cut", "nan"],
)
def test_one_wrong_tensor_is_named(tmp_path, change, why):
    kind = "bf16" if why == "NaN or Inf" else "q4_K"
    result = compare_weights(DEMO_DRAFTER, _with(tmp_path, kind, lambda name, v: change(v) if name == ODD else v))
    assert [t.name for t in result.flagged] == [ODD] and why in result.flagged[0].flag


@pytest.mark.slow
def test_vectors_are_compared_too(tmp_path):
    result = compare_weights(DEMO_DRAFTER, _with(tmp_path, "q8_0", lambda name, v: v + 1e-3 if name == "output_norm.weight" else v))
    assert [t.name for t in result.flagged] == ["output_norm.weight"] and "is equal" in result.flagged[0].flag


def test_missing_tensors_are_flagged(tmp_path):
    model = Model(DEMO_DRAFTER)
    model.tensors["extra.weight"] = model.tensors.pop(ODD)
    result = compare_weights(DEMO_DRAFTER, model.write(tmp_path / "b.gguf"))
    assert {t.name: t.flag for t in result.flagged} == {ODD: "only in drafter.gguf", "extra.weight": "only in b.gguf"}


def test_files_of_different_models_and_no_files(tmp_path):
    model = Model(DEMO_DRAFTER)
    model.tensors = {"x" + name: t for name, t in model.tensors.items()}
    with pytest.raises(ModelError, match="no tensor in common"):
        compare_weights(DEMO_DRAFTER, model.write(tmp_path / "b.gguf"))
    with pytest.raises(GGUFError, match="does not exist"):
        compare_weights(DEMO_TARGET, tmp_path / "none.gguf")


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


@pytest.mark.slow
def test_the_command(tmp_path):
    good = _run("--weights", DEMO_DRAFTER, _with(tmp_path, "q8_0"), "--json")
    seen = json.loads(good.stdout.splitlines()[-1])
    assert good.returncode == 0 and seen["passed"] and seen["flagged"] == []
    bad = _run("--weights", DEMO_DRAFTER, _with(tmp_path, "q4_K", lambda name, v: v * 2 if name == ODD else v))
    assert bad.returncode == 3 and bad.stderr.count("\n") == 1 and ODD in bad.stderr
    assert _run().returncode == 2 and _run("--weights", DEMO_DRAFTER).returncode == 2
    assert _run("--weights", DEMO_DRAFTER, DEMO_DRAFTER, "--logits", DEMO_TARGET).returncode == 2
