"""With native kernels a row has the same bits in every step, so speculative text is plain text at every width, on any graph."""

from itertools import pairwise

import numpy as np
import pytest
from architectures import TARGETS
from engine.helpers import oracle, run
from ggml.kernel_graphs import LEVELS
from random_gguf.model import Shape, write_dflash

import pyggml_spec as ps
from pyggml_spec.engine.sequence import PLAIN
from pyggml_spec.ggml.kernels import FEATURES
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.compare import compare_logits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing"),
]
DENSE = ["qwen35", "qwen3", "llama", "gemma4"]
ROUTED = [("qwen3moe", "MXFP4"), ("qwen3moe", "IQ3_S"), ("qwen35moe", "Q4_K")]
QUANTS = ["F32", "F16", "BF16", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "NVFP4"]


def prompt_of(n, seed=5):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


@pytest.mark.parametrize("arch, quant", [*ROUTED, *((arch, "Q8_0") for arch in DENSE), *(("qwen35", quant) for quant in QUANTS)])
def test_logits_do_not_depend_on_the_shape_of_a_step(tmp_path, arch, quant):
    path, ids, seen = TARGETS[arch](tmp_path / "t.gguf", Shape(), quant), prompt_of(330), []
    singly = [*range(30), 30, *range(240, 330)]  # where steps begin
    for threads in (1, 2):
        with ps.load(path, device="CPU", threads=threads, n_ctx=384, kernels="native") as session:
            engine = session.runner
            for begins in (range(0, 330, 256), range(0, 330, 16), singly, *([range(0, 330, 5)] if threads == 1 else [])):
                engine.reset()
                seen.append(np.concatenate([engine.logits(ids[i:j]) for i, j in pairwise([*begins, 330])]))
    assert all(np.array_equal(seen[0], other) for other in seen[1:])


def test_what_depends_on_the_width_and_what_is_held_once(tmp_path):
    """Whether the test above could fail."""
    path, ids, seen = TARGETS["qwen35"](tmp_path / "t.gguf", Shape(), "Q8_0"), prompt_of(600), []
    with ps.load(path, device="CPU", threads=1, n_ctx=640, kernels="ggml") as session:
        for rows in (512, 1):
            session.runner.reset()
            seen.append(np.concatenate([session.runner.logits(ids[i : i + rows]) for i in range(0, len(ids), rows)]))
    assert (seen[0] != seen[1]).any(axis=1).sum() > 300
    # The table that rows are looked up in is the packed head itself; all weights together take what the file takes, and 5 % at most.
    with ps.load(device="CPU", threads=1, n_ctx=64) as session:
        weights = session.target.weights
        assert weights["token_embd.weight"] is weights["output.weight"]
        assert session.configuration().memory["weights"] < 1.05 * DEMO_TARGET.stat().st_size
        assert session.configuration().memory["draft_weights"] < 1.05 * DEMO_DRAFTER.stat().st_size
        assert session.configuration().kernels == f"native ({LEVELS[0].name})"


@pytest.mark.parametrize("arch", [*DENSE, "qwen3moe"])
def test_speculative_text_is_plain_text_at_every_width(tmp_path, arch):
    """No reference shape: plain decoding is plain decoding. Every accepted length occurs, behind a prompt of several spans."""
    target, draft = TARGETS[arch](tmp_path / "t.gguf", Shape(), "Q8_0"), write_dflash(tmp_path / "d.gguf", Shape(), "Q8_0")
    prompt = prompt_of(530)
    with ps.load(target, draft, device="CPU", threads=2, n_ctx=768, draft_width=16) as session:
        assert session.configuration().kernels.startswith("native")
        engine = session.runner
        text = run(engine, prompt, 80, mode=PLAIN)[0]
        for width in (2, 3, 5, 8, 13, 16):
            wrong = oracle(prompt, text, wrong_at=lambda step, width=width: step % width)
            tokens, stats = run(engine, prompt, 80, width=width, drafts=wrong)
            assert tokens == text and len(stats.block_sizes) > 1, width
            assert run(engine, prompt, 40, width=width)[0] == text[:40], width


def test_the_embedded_pair_and_continued_answers(tmp_path):
    texts = set()
    for threads in (1, 2):
        with ps.load(device="CPU", threads=threads, n_ctx=1024) as session:
            for mode in ("plain", "speculative"):
                text, _ = session.generate("def merge(left, right):\n", 200, mode=mode, ignore_end=True)
                texts.add(text)
    assert len(texts) == 1
    # ``append``: rows that steps wrote are those that a prefill would write, so going on and starting afresh give the same text.
    target, draft = TARGETS["qwen35"](tmp_path / "t.gguf", Shape(), "Q8_0"), write_dflash(tmp_path / "d.gguf", Shape(), "Q8_0")
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=512, draft_width=8, prefix_memory=0) as session:
        first = prompt_of(50)
        answer = [t for event in session.steps(first, 30, ignore_end=True) for t in event.tokens]
        whole = [*first, *answer, *prompt_of(20, seed=6)]
        went_on = [t for event in session.steps(whole, 40, ignore_end=True, append=True) for t in event.tokens]
        reused = session.runner.epoch
        assert [t for event in session.steps(whole, 40, ignore_end=True) for t in event.tokens] == went_on and session.runner.epoch > reused


@pytest.mark.parametrize("quant", ["Q8_0", *QUANTS])
def test_own_kernels_are_llama_cpps_to_rounding(tmp_path, quant):
    result = compare_logits(TARGETS["qwen35"](tmp_path / "t.gguf", Shape(), quant), 65, device="CPU", threads=1, kernels="native")
    assert result.nmse < 1e-3 and result.argmax_agree > 0.95


@pytest.mark.skipif(len(LEVELS) < 2, reason="this processor has only one level")
def test_a_lower_level_gives_the_same_bits_and_is_named(monkeypatch):
    """The whole embedded target: what differs between levels is time."""
    seen = []
    for level in LEVELS:
        monkeypatch.setenv(FEATURES, level.name)
        with ps.load(device="CPU", threads=1, n_ctx=128, draft_width=4) as session:
            assert session.configuration().kernels == f"native ({level.name})"
            seen.append(session.runner.logits(prompt_of(40)))
    assert all(np.array_equal(seen[0], other) for other in seen[1:])
    monkeypatch.setenv(FEATURES, "none")
    with ps.load(device="CPU", threads=1, n_ctx=128, draft_width=4) as session:
        assert session.configuration().kernels == "ggml" and session.target.weights.native_bytes == 0
