"""The table of public drafters: every shape that is known is found by its file, the page shows the table, and what does not run has its reason."""

import importlib
import json
from pathlib import Path

import pytest
from cli.process import one_sentence, pyspec
from click.testing import CliRunner
from gguf_io.build import STR, U32, Model
from random_gguf.archs import write_llama, write_qwen3moe
from random_gguf.model import Shape, write_dflash, write_qwen35
from random_gguf.mtp import write_mtp_target

import pyggml_spec as ps
from pyggml_spec.cli.inspect import command
from pyggml_spec.doctor import examine
from pyggml_spec.drafters import pairs
from pyggml_spec.drafters.pairs import PUBLISHED
from pyggml_spec.errors import ModelError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.registry import TARGETS
from pyggml_spec.tools.inspect import inspect_file
from pyggml_spec.tools.plan import plan

ROOT = Path(__file__).parents[2]
NAMES = {  # shapes of scripts/make_random_gguf.py: the target that each of them is
    "4B": "Qwen3.5-4B", "9B": "Qwen3.5-9B", "27B": "Qwen3.6-27B", "35B-A3B": "Qwen3.6-35B-A3B", "gemma4-31B": "gemma-4-31B-it",
    "gemma4-26B-A4B": "gemma-4-26B-A4B-it", "laguna-XS.2": "Laguna-XS-2.1", "qwen3-4B": "Qwen3-4B, not thinking", "qwen3-8B": "Qwen3-8B, not thinking",
    "qwen3-30B-A3B": "Qwen3-Coder-30B-A3B", "coder-next": "Qwen3-Coder-Next", "gpt-oss-20b": "gpt-oss-20b", "gpt-oss-120b": "gpt-oss-120b",
    "llama-8B": "Llama-3.1-8B-Instruct", "minimax-m2": "MiniMax-M2.7", "kimi-k2": "Kimi-K2.6", "glm-5.1": "GLM-5.1",
}  # fmt: skip


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


def test_the_table_is_that_of_the_pages(scripts):
    rows = scripts("pairs_table").rows()
    assert len(rows) == len(PUBLISHED) + 2 and "\n".join(rows) in (ROOT / "docs" / "pairs.md").read_text("utf-8")
    # Two lists of published sizes that contradict each other would name a drafter of another model, or none.
    models = scripts("make_random_gguf").MODELS
    for name, target in NAMES.items():
        shape = models[name].shape
        found = next(p for p in PUBLISHED if p.target == target)
        routed = found.n_expert > 0
        assert (found.n_layer, found.n_embd, found.n_expert) == (shape.n_layer, shape.n_embd, shape.n_expert if routed else 0), name
    assert {p.target for p in PUBLISHED if p.arch in TARGETS and p.n_embd} >= set(NAMES.values())


def of_shape(path, write, arch, **keys):
    """A file whose keys say the shape of a published model; its tensors are tiny."""
    model = Model(write(path, Shape()))
    model.keys |= {f"{arch}.{name}": (U32, value) for name, value in keys.items()}
    return model.write(path)


def test_drafters_of_a_target(tmp_path):
    path = of_shape(tmp_path / "t.gguf", write_qwen35, "qwen35", block_count=65, nextn_predict_layers=1, embedding_length=5120)
    drafters = {p.drafter for p in inspect_file(path).drafters}
    assert {"z-lab/Qwen3.5-27B-DFlash", "z-lab/Qwen3.6-27B-DFlash", "incoai/Qwen3.8-27B-DFlash2"} <= drafters
    assert not [name for name in drafters if "27B" not in name]
    path = of_shape(tmp_path / "t.gguf", write_qwen3moe, "qwen3moe", block_count=48, embedding_length=2048, expert_count=128)
    shown = CliRunner().invoke(command, [str(path), "--no-tensors"]).output
    line = "a public DFlash drafter for Qwen3-Coder-30B-A3B, which has this shape: z-lab/Qwen3-Coder-30B-A3B-DFlash, to be converted (pyspec convert)"
    assert line in shown.splitlines()
    listed = json.loads(CliRunner().invoke(command, [str(path), "--json"]).output)["drafters"]
    assert [one["drafter"] for one in listed] == ["z-lab/Qwen3-Coder-30B-A3B-DFlash"] and listed[0]["refused"] == ""
    assert not inspect_file(write_llama(tmp_path / "a.gguf")).drafters and not inspect_file(write_dflash(tmp_path / "d.gguf")).drafters
    path = of_shape(tmp_path / "t.gguf", write_llama, "llama", block_count=32, embedding_length=4096, expert_count=8)
    assert not inspect_file(path).drafters


def test_what_does_not_run_has_its_reason(monkeypatch):
    pair = pairs.Published("T", "deepseek9", 1, 1, 0, "a/b")
    assert "architecture deepseek9" in pair.refused
    monkeypatch.setitem(pairs.ARCHITECTURES, "deepseek9", object)
    assert pair.refused == ""
    assert "Domino drafters" in pairs.Published("T", "qwen3", 1, 1, 0, "a/b", "Domino").refused
    assert "layout Other" in pairs.Published("T", "qwen3", 1, 1, 0, "a/b", layout="Other").refused
    assert {p.arch for p in PUBLISHED if not p.refused} <= TARGETS.keys()


@pytest.fixture
def unknown(tmp_path):
    """A model of an architecture that is not there."""
    model = Model(write_llama(tmp_path / "l.gguf"))
    model.keys = {name.replace("llama.", "qwen9."): value for name, value in model.keys.items()}
    model.keys["general.architecture"] = (STR, "qwen9")
    return model.write(tmp_path / "unknown.gguf")


@pytest.mark.parametrize("use", ["load", "plan", "examine", "inspect"])
def test_an_unsupported_architecture_says_what_can_be_done(unknown, use):
    """It named what is supported, and no remedy for this file."""
    words = (
        "'qwen9', which does not run here yet",
        "nearest is qwen3",
        "docs/adding-an-architecture.md",
        "`pyspec inspect`",
        "llama.cpp runs it",
    )
    if use == "inspect":
        said = inspect_file(unknown).verdict
    else:
        with pytest.raises(ModelError) as raised:
            {"load": ps.load, "plan": plan, "examine": examine}[use](unknown, device="CPU")
        said = str(raised.value)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("use", ["load", "plan"])
def test_a_whole_model_as_a_drafter_says_what_drafts(tmp_path, unknown, use):
    """For this target, today: n-gram drafting always, its own MTP layer, and what is published for its shape."""
    small, target = write_llama(tmp_path / "small.gguf"), write_qwen3moe(tmp_path / "t.gguf")
    for draft in (small, unknown):
        with pytest.raises(ModelError) as raised:
            {"load": ps.load, "plan": plan}[use](target, draft, device="CPU")
        said = str(raised.value)
        assert "for t.gguf there is n-gram drafting, which needs no file (`spec` suffix)" in said and "`pyspec inspect`" in said, said
        assert "--" not in said
    model = Model(target)
    model.keys |= {"qwen3moe.block_count": (U32, 48), "qwen3moe.embedding_length": (U32, 2048), "qwen3moe.expert_count": (U32, 128)}
    with GGUFFile(model.write(tmp_path / "shape.gguf")) as file:
        assert "the published z-lab/Qwen3-Coder-30B-A3B-DFlash (docs/pairs.md)" in pairs.drafters_for(file)
    with GGUFFile(write_mtp_target(tmp_path / "mtp.gguf")) as file:
        assert "its own MTP layer" in pairs.drafters_for(file)


def test_the_command_names_its_options(tmp_path):
    small = write_llama(tmp_path / "small.gguf")
    for name in ("run", "serve", "chat", "plan"):
        done = pyspec(name, "-m", small, "-md", small, "--device", "CPU", *(["-p", "a"] if name == "run" else []))
        one_sentence(done, "whole models do not draft here yet", "--spec-type suffix")
    one_sentence(pyspec("doctor", "-m", small, "--device", "CPU"), "examines a pair", "-md", "n-gram drafting")
