"""`pyspec drafters`: what is there, what is published, what fits, and commands that work."""

import json
import shlex
import shutil

import pytest
from cli.process import one_sentence, pyspec
from drafters.test_drafters import of_shape
from drafters.test_model import other_vocabulary
from random_gguf.archs import write_qwen3, write_qwen3moe
from random_gguf.eagle3 import write_eagle3
from random_gguf.model import Shape, write_dflash
from random_gguf.mtp import write_mtp_target

from pyggml_spec.drafters.pairs import Published
from pyggml_spec.tools.drafters import CACHE, FOLDER, HUB, OWN, find_drafters


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A target with what people keep beside it, and caches of the hub and of llama.cpp."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama.cpp"))
    folder = tmp_path / "models"
    folder.mkdir()
    write_qwen3(folder / "t.gguf", Shape())
    write_eagle3(folder / "t-EAGLE3.gguf", Shape())
    write_dflash(folder / "other-dflash.gguf", Shape(n_embd=96))
    small = write_qwen3(folder / "small.gguf", Shape(n_layer=1), seed=1)
    other_vocabulary(small, folder / "small-b.gguf", range(319, -1, -1), drop=range(40))
    (folder / "mmproj-t.gguf").write_bytes(b"GGUF")
    snapshot = tmp_path / "hf" / "hub" / "models--a--b" / "snapshots" / "0"
    for place in (snapshot, tmp_path / "llama.cpp"):
        place.mkdir(parents=True)
    write_dflash(snapshot / "dflash-t.gguf", Shape())
    (snapshot / "again.gguf").symlink_to(snapshot / "dflash-t.gguf")
    shutil.copy(folder / "other-dflash.gguf", tmp_path / "llama.cpp" / "other.gguf")
    return folder


def test_what_is_there_and_what_fits(folder):
    found = {(one.where, one.name.rsplit("/")[-1]): one for one in find_drafters(folder / "t.gguf")}
    assert list(found) == [
        (FOLDER, "other-dflash.gguf"), (FOLDER, "t-EAGLE3.gguf"), (FOLDER, "mmproj-t.gguf"), (FOLDER, "small-b.gguf"), (FOLDER, "small.gguf"),
        (CACHE, "again.gguf"),
    ]  # fmt: skip
    fits = {name: one.method for (_, name), one in found.items() if one.fits}
    assert fits == {
        "t-EAGLE3.gguf": "draft-eagle3",
        "small-b.gguf": "draft-simple",
        "small.gguf": "draft-simple",
        "again.gguf": "draft-dflash",
    }
    assert "hidden states of 96 values" in found[FOLDER, "other-dflash.gguf"].said and not found[FOLDER, "mmproj-t.gguf"].commands
    assert "it has 87.5 % of the target's first 320 tokens" in found[FOLDER, "small-b.gguf"].said and not found[FOLDER, "small.gguf"].said
    assert "as large as the target" in find_drafters(folder / "small.gguf")[-2].said


def test_the_commands_run(folder):
    for one in find_drafters(folder / "t.gguf"):
        for line in one.commands:
            _, *args = shlex.split(line)
            done = pyspec(*args, "--device", "CPU", "-t", "1", "-c", "64", "-p", "abc", "-n", "2", "--draft-width", "2")
            assert done.returncode == 0 and f"drafter {one.name.rsplit('/')[-1]}" in done.stderr, done.stderr


def test_published_ones_by_shape(tmp_path, folder, monkeypatch):
    target = of_shape(tmp_path / "t x.gguf", write_qwen3moe, "qwen3moe", block_count=48, embedding_length=2048, expert_count=128)
    found = {one.name: one for one in find_drafters(target) if one.where == HUB}
    one = found["z-lab/Qwen3-Coder-30B-A3B-DFlash"]
    assert one.fits and [shlex.split(line)[:2] for line in one.commands] == [["hf", "download"], ["pyspec", "convert"], ["pyspec", "run"]]
    assert shlex.split(one.commands[1])[2:] == ["Qwen3-Coder-30B-A3B-DFlash", "-m", str(target), "-o", "Qwen3-Coder-30B-A3B-DFlash.gguf"]
    assert {"JetSpec/jetspec-qwen3-30b-a3b", "RedHatAI/Qwen3-30B-A3B-speculator.dflash"} < set(found)
    refused = Published("x", "qwen3moe", 48, 2048, 128, "a/b", layout="Gemma4Eagle3Model")
    monkeypatch.setattr("pyggml_spec.drafters.pairs.PUBLISHED", (refused,))
    (other,) = [one for one in find_drafters(target) if one.where == HUB]
    assert not other.fits and not other.commands and "Gemma4Eagle3Model" in other.said


def test_the_command(tmp_path, folder):
    target = write_mtp_target(tmp_path / "t.gguf", Shape())
    shown = pyspec("drafters", target).stdout.decode()
    assert shown.startswith(f"in the target's file:\n  {target}, draft-mtp: its MTP layer\n    pyspec run -m {target}\n")
    shown = pyspec("drafters", folder / "t.gguf").stdout.decode()
    assert "other-dflash.gguf: does not fit: " in shown and "in the caches of the hub and of llama.cpp:\n" in shown
    listed = [json.loads(line) for line in pyspec("drafters", folder / "t.gguf", "--json").stdout.splitlines()]
    assert (
        [one["where"] for one in listed] == [FOLDER] * 5 + [CACHE] and listed[1]["commands"] and OWN not in {one["where"] for one in listed}
    )
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.move(tmp_path / "hf", tmp_path / "away")
    assert "none is known" in pyspec("drafters", shutil.copy(folder / "t.gguf", alone)).stdout.decode()
    one_sentence(pyspec("drafters", folder / "t-EAGLE3.gguf"), "is a drafter (eagle3)")
