"""`pyspec train` on a toy target whose text was chosen beforehand: its answers are known, so that a drafter that learns them is right nearly always."""

import json
from pathlib import Path

import pytest
import scripted

torch = pytest.importorskip("torch", reason="training needs the extra `train`: `make test-train` installs it")

from pyggml_spec.api import load
from pyggml_spec.errors import ModelError, TrainingError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.registry import open_target
from pyggml_spec.train.blank import Shape, new_drafter
from pyggml_spec.train.features import EngineTarget, TorchTarget, agreement
from pyggml_spec.train.methods import simulate
from pyggml_spec.train.texts import Text, as_line
from pyggml_spec.train.train import TrainOptions, train

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps below 7 old trees until the morning comes; a bird sings 3 songs of rain, wind & snow."
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A target that says TEXT, from wherever the prompt leaves off."""
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    scripted.write(path, [TEXT], None, control=["<|mask|>"])
    return path


@pytest.fixture(scope="module")
def prompts(toy) -> Path:
    path = toy.with_name("prompts.jsonl")
    path.write_text("".join(json.dumps({"prompt": TEXT[:n], "category": "even" if n % 2 == 0 else "odd"}) + "\n" for n in range(3, 63, 3)))
    return path


def options(prompts: Path, **more) -> TrainOptions:
    usual = {"minutes": 0.25, "answer_tokens": 40, "slots": 4, "context": 64, "batch_tokens": 512, "rate": 5e-3, "torch_device": "cpu"}
    return TrainOptions([prompts], **usual | more)


@pytest.mark.parametrize(("method", "wanted"), [("dflash", 4.0), ("eagle3", 4.0)])
def test_a_drafter_from_noise_drafts_in_the_engine_as_simulated(toy, prompts, tmp_path, method, wanted):
    out = tmp_path / "drafter.gguf"
    done = train(toy, out, options(prompts, shape=Shape(method, 1, 8, 64)))
    assert done.before.tokens_per_step < 1.5 < wanted < done.score.tokens_per_step
    assert (
        {*done.score.categories} <= {"even", "odd"}
        and out.with_suffix(".md").exists()
        and not (tmp_path / "drafter.gguf.train/state.pt").exists()
    )
    with load(toy, out, draft_width=6) as session:
        _, stats = session.generate(TEXT[:9], 36, ignore_end=True)
    assert 1 + stats.matched / stats.steps == pytest.approx(min(done.score.tokens_per_step, 6.0), rel=0.25)
