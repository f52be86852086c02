"""The doctor and a model that drafts for itself: nothing of it can be read wrongly, so it is measured while it runs."""

import pytest
from random_gguf.model import Shape, write_qwen35
from random_gguf.mtp import write_mtp, write_mtp_target

from pyggml_spec.doctor.examine import examine
from pyggml_spec.doctor.report import FAIL
from pyggml_spec.errors import PyspecError

pytestmark = pytest.mark.slow


def test_a_target_with_a_layer_needs_no_drafter(tmp_path):
    target = write_mtp_target(tmp_path / "t.gguf", Shape())
    report = examine(target, device="CPU", threads=1, n_ctx=256, prompts=["def f(x):\n    return x"])
    names = [check.name for check in report.checks]
    assert {"drafter weights", "target weights", "micro-batches", "cache hit", "repeated prompt", "acceptance", "break-even"} <= set(names)
    assert "mask embedding" not in names and not [check for check in report.failed if check.name != "tokenizer"]


def test_a_layer_of_another_model_is_named(tmp_path):
    target, other = write_qwen35(tmp_path / "t.gguf", Shape()), write_mtp(tmp_path / "d.gguf", Shape(n_embd=128))
    report = examine(target, other, device="CPU", threads=1, n_ctx=256, prompts=["def f(x):\n    return x"])
    check = report.check("pair")
    assert check.verdict == FAIL and "hidden states of 128 values" in check.found


def test_a_target_alone_is_no_pair(tmp_path):
    with pytest.raises(PyspecError, match="examines a pair"):
        examine(write_qwen35(tmp_path / "t.gguf", Shape()), device="CPU")
