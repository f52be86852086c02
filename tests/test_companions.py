"""Drafters that are found in the target's folder."""

import shutil

import pytest
from random_gguf.archs import write_gemma4, write_llama
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape, write_dflash, write_qwen35

import pyggml_spec as ps

OPTIONS = {"device": "CPU", "threads": 1, "n_ctx": 64, "draft_width": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    write_qwen35(folder / "t.gguf", Shape())
    write_dflash(folder / "DFlash-t.gguf", Shape())
    write_dflash(folder / "A-dflash-of-another.gguf", Shape(n_embd=96))
    (folder / "mtp-cut.gguf").write_bytes((folder / "t.gguf").read_bytes()[:1000])
    return folder


def test_the_one_that_fits_drafts_and_is_said(folder):
    with ps.load(folder / "t.gguf", **OPTIONS) as session:
        text, stats = session.generate([1, 2, 3], 20)
        assert session.methods == ("draft-dflash",) and stats.drafted > 0
        found, other = (next(note for note in session.notes if note.startswith(name)) for name in ("DFlash-t.gguf", "A-dflash"))
    assert "found in the target's folder, drafts (draft-dflash)" in found and "does not draft: " in other
    with ps.load(folder / "t.gguf", spec=[], device="CPU", threads=1, n_ctx=64) as session:
        assert not session.methods and session.generate([1, 2, 3], 20)[0] == text


def test_none_is_looked_for_where_one_is_given_or_excluded(folder, tmp_path):
    for options in ({"spec": ["none"]}, {"no_spec": ["draft-dflash"]}, {"spec": ["suffix"]}):
        with ps.load(folder / "t.gguf", device="CPU", threads=1, n_ctx=64, **options) as session:
            assert "draft-dflash" not in session.methods
    given = shutil.copy(folder / "DFlash-t.gguf", tmp_path / "given.gguf")
    with ps.load(folder / "t.gguf", given, **OPTIONS) as session:
        assert not any("found in the target's folder" in note for note in session.notes)


def test_a_method_that_is_named_is_looked_for(folder):
    with ps.load(folder / "t.gguf", spec=["draft-dflash"], **OPTIONS) as session:
        assert session.methods == ("draft-dflash",)
    with pytest.raises(ps.PairError, match="has nothing that drafts as draft-eagle3"):
        ps.load(folder / "t.gguf", spec=["draft-eagle3"], **OPTIONS)


def test_a_whole_model_with_such_a_name_is_none(tmp_path):
    """A chat model called "...-assistant" became the drafter of whatever lay in its folder."""
    target, _ = (write_llama(tmp_path / name, Shape()) for name in ("t.gguf", "code-assistant.gguf"))
    with ps.load(target, device="CPU", threads=1, n_ctx=64) as session:
        assert session.drafter is None and any("it is a whole model" in note for note in session.notes)
    with ps.load(target, tmp_path / "code-assistant.gguf", **OPTIONS) as session:
        assert session.methods == ("draft-simple",)


def test_one_that_needs_its_target_on_one_device_is_left_out_on_several(tmp_path):
    """The target alone did not load any more."""
    shape = Shape(n_layer=8)
    target, _ = write_gemma4(tmp_path / "t.gguf", shape, n_own=4), write_gemma4_assistant(tmp_path / "t-assistant.gguf", shape)
    with ps.load(target, device="CPU", threads=1, n_ctx=64) as session:
        assert session.drafter is not None
    with ps.load(target, device="CPU,CPU", threads=1, n_ctx=64) as session:
        assert session.drafter is None and any("needs its target on one device" in note for note in session.notes)
