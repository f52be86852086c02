"""Drafters that choose among the first tokens of the vocabulary: the same drafts where those suffice, never another token, and the same text."""

import pytest
from random_gguf.archs import write_llama
from random_gguf.eagle3 import write_eagle3
from random_gguf.model import Shape, write_dflash, write_qwen35
from random_gguf.mtp import write_mtp_target

import pyggml_spec as ps
from pyggml_spec.errors import PairError, PyspecError

pytestmark = pytest.mark.slow

KINDS = {
    "mtp": (write_mtp_target, None, {}),
    "mtp with a head of its own": (write_mtp_target, None, {"own": ("head",)}),
    "dflash": (write_qwen35, write_dflash, {}),
    "eagle3": (write_llama, write_eagle3, {}),
}
PROMPT = list(range(3, 40))


def write(folder, kind, quant="Q8_0", shape=Shape()):
    target, draft, options = KINDS[kind]
    path = target(folder / "t.gguf", shape, quant, **options)
    return path, draft(folder / "d.gguf", shape, quant) if draft is not None else None


@pytest.fixture(params=KINDS)
def files(request, tmp_path):
    return write(tmp_path, request.param)


def drafted(files, kernels, tokens=None, steps=24):
    """Drafts after every token, and the greedy text."""
    with ps.load(*files, device="CPU", threads=1, kernels=kernels, n_ctx=256, draft_width=4, draft_vocab=tokens) as session:
        engine, out = session.engine, []
        engine.reset()
        engine.prefill(PROMPT)
        for _ in range(steps):
            result = engine.fused_step()
            out.append(result.tokens[1:].tolist())
            engine.accept(1, int(result.ids[0]))
        text, stats = session.generate(PROMPT, 30, ignore_end=True)
        assert stats.drafted > 0 and text == session.generate(PROMPT, 30, mode="reference", ignore_end=True)[0]
        return out, text


@pytest.mark.parametrize("kernels", ["native", "ggml"])
def test_drafts_come_from_the_first_tokens_and_the_text_stays(files, kernels):
    check(files, kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_so_they_do_where_ggml_packs_the_head(tmp_path, kind):
    """Q4_0 by eight outputs or more on every x86: the first 100 tokens' ended within a group, and drafts were random."""
    check(write(tmp_path, kind, "Q4_0"), "ggml")


def test_a_head_that_ends_within_a_group_of_packed_outputs(tmp_path):
    """296 outputs are packed by eight; the next 32 after the first 290 would be 320."""
    every, text = drafted(write(tmp_path, "dflash", "Q4_0", Shape(n_vocab=296)), "ggml", steps=8)
    few, same = drafted((tmp_path / "t.gguf", tmp_path / "d.gguf"), "ggml", 290, steps=8)
    assert same == text and all(token < 290 for drafts in few for token in drafts)
    assert all(a == b for a, b in zip(every, few, strict=True) if max(a) < 290)


def check(files, kernels):
    every, text = drafted(files, kernels)
    n = Shape().n_vocab
    assert drafted(files, kernels, n) == (every, text)  # the whole vocabulary: nothing changes
    few, same = drafted(files, kernels, 100)
    assert same == text and all(token < 100 for drafts in few for token in drafts) and few != every
    for a, b in zip(every, few):
        if a[0] < 100:
            assert a[0] == b[0]  # the largest of all is the largest of those


def test_a_head_that_knows_few_tokens_is_not_cut(tmp_path):
    target, draft = write_llama(tmp_path / "t.gguf", Shape(), "F32"), write_eagle3(tmp_path / "d.gguf", Shape(), "F32", tokens=90)
    with pytest.raises(PairError, match="reduced vocabulary of 90 tokens"):
        ps.load(target, draft, device="CPU", threads=1, n_ctx=64, draft_vocab=80)


def test_an_impossible_vocabulary_is_refused(files):
    with pytest.raises(PyspecError, match="draft_vocab"):
        ps.load(*files, device="CPU", threads=1, n_ctx=64, draft_vocab=3)


def test_without_a_drafter_that_is_a_model_it_is_refused():
    with pytest.raises(PairError, match="`draft_vocab` is for drafters that are models"):
        ps.load(device="CPU", threads=1, n_ctx=64, spec=["suffix"], draft_vocab=80)
