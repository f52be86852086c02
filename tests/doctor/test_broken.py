"""A good pair broken in one place at a time: doctor names the place, and nothing else."""

import json
from contextlib import closing

import numpy as np
import pytest
from doctor.broken import AT_A_GLANCE, BROKEN, store, values, write, write_loud_target, write_own_embedding
from gguf_io.build import BOOL, Model

from pyggml_spec.doctor import FAIL, WARN, Subject, examine_drafter
from pyggml_spec.doctor.examine import Effort
from pyggml_spec.doctor.probe import held_out_prompts
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET

pytestmark = pytest.mark.slow
VALUES = {  # not only which key is wrong: what it has to be
    "layer ids + 1": "[1, 4, 6, 7]",
    "layer ids - 1": "[1, 4, 6, 7]",
    "rope base of another model": "rope base is 100000",
    "block of 32": "the block has 16 rows",
    "mask token is another token": "<|mask|>",
    "mask token outside the vocabulary": "<|mask|>",
    "sliding window of 16": "now windows [16, 16]",  # none and one of 128 are as good for short texts
    "half of each head rotated": "64 values of each head",
    "attention scale 1": "0.125",
}
EFFORT = Effort(prompts=2, prompt_tokens=64, tokens=112, blocks=8, running=False)
PROMPTS = [held_out_prompts(20)[i] for i in (16, 19)]  # whose drafts are right most often: few blocks tell
GLANCE = Effort(prompts=1, prompt_tokens=16, tokens=48, blocks=4, running=False)


def taken(target, effort=EFFORT):
    one = Subject(target, device="CPU", threads=1, effort=effort, prompts=PROMPTS)
    one.passages(range(one.target.n_layer + 1))
    return closing(one)


@pytest.fixture(scope="module")
def subject():
    with taken(DEMO_TARGET) as one:
        yield one


@pytest.fixture(scope="module")
def glance():
    """A subject that measures next to nothing, for what needs no measurement."""
    with taken(DEMO_TARGET, GLANCE) as one:
        yield one


def test_the_good_pair_passes(subject):
    report = examine_drafter(subject, DEMO_DRAFTER)
    assert not report.failed and not [c.name for c in report.checks if c.verdict == WARN]


@pytest.mark.parametrize("name", [*BROKEN, *AT_A_GLANCE])
def test_the_cause_is_named_alone(request, tmp_path, name):
    subject = request.getfixturevalue("subject" if name in BROKEN else "glance")
    cause, report = write(name, tmp_path / "drafter.gguf"), examine_drafter(subject, tmp_path / "drafter.gguf")
    assert [check.name for check in report.failed] == [cause], [(c.name, c.found) for c in report.failed]
    assert report.failed[0].remedy and VALUES.get(name, "") in report.failed[0].found
    json.dumps(report.as_dict(), allow_nan=False)


def test_causal_blocks_and_wide_hidden_states(glance, tmp_path):
    """No failure here: the embedded drafter drafts as well either way (3.64 against 3.75 tokens per block, likelihood unchanged)."""
    model = Model(DEMO_DRAFTER)
    model.keys["dflash.attention.causal"] = (BOOL, True)
    report = examine_drafter(glance, model.write(tmp_path / "drafter.gguf"))
    assert report.check("block direction").found.startswith("causal block")
    write_loud_target(tmp_path / "target.gguf", 2.0**14)
    write_own_embedding(tmp_path / "drafter.gguf")
    with taken(tmp_path / "target.gguf") as subject:
        report = examine_drafter(subject, tmp_path / "drafter.gguf")
    assert [check.name for check in report.failed] == ["features"]
    assert "beyond 65504" in report.failed[0].found and report.check("features").verdict == FAIL


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.3.attn_norm.weight"])
def test_a_damaged_target_is_named(tmp_path, name):
    """In the last norm a NaN stops the engine; in an earlier one, rounding activations to integers hides it and the text is merely wrong."""
    model = Model(DEMO_TARGET)
    norm = values(model, name)
    norm[0, 0] = np.nan
    store(model, name, norm[0], 0)
    with closing(Subject(model.write(tmp_path / "target.gguf"), device="CPU", threads=1, effort=GLANCE)) as subject:
        report = examine_drafter(subject, DEMO_DRAFTER)
    assert [check.name for check in report.failed] == ["target weights"] and name in report.failed[0].found
