"""Experts in host memory: the same bits wherever they are, profiles that are checked, refusals that name the remedy.

A second CPU backend plays the host, so the cuts, the slots and the selection of rows run as they do alongside a GPU.
"""

from contextlib import ExitStack, closing

import numpy as np
import pytest
from random_gguf.archs import WRITERS as ALL
from random_gguf.archs import write_gemma4, write_laguna, write_qwen3, write_qwen35moe
from random_gguf.model import Shape, write_dflash
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import EngineError, ModelError
from pyggml_spec.ggml import host_experts
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models import weights as weights_module
from pyggml_spec.models.placement import ExpertOptions, Placement, Routing, hot_count, overridden, routed_layers
from pyggml_spec.models.registry import open_target
from pyggml_spec.models.weights import Weights
from pyggml_spec.tools.experts import profile

ROUTED = ("qwen35moe", "qwen3moe", "laguna", "gpt-oss", "qwen3next", "minimax-m2", "deepseek2", "glm-dsa")
WRITERS = {name: ALL[name] for name in ROUTED} | {
    "qwen35moe-joined": lambda path, *more: write_qwen35moe(path, *more, joined=True),
    "gemma4": lambda path, *more: write_gemma4(path, *more, routed=True),
}
IDS = np.random.default_rng(1).integers(0, 256, 57).tolist()


def placed(target, hot, rows=512) -> Placement:
    return Placement({i: hot(i) for i in routed_layers(target)}, target.n_layer, target.experts.n_used, target.experts.glu, rows)


def logits(path, placement, kernels=None) -> np.ndarray:
    """Logits of IDS in one chunk, then of eight single rows; ``placement`` makes one for the target, or is None."""
    with ExitStack() as stack:

        def own(part):
            return stack.enter_context(closing(part))

        file = own(GGUFFile(path))
        target = open_target(file)
        device, host = (own(Backend(pick_device("CPU"), 1, kernels)) for _ in range(2))
        where = placement(target) if placement is not None else None
        target.weights = own(Weights(device, file, target.specs(), target.groups(), target.fused_alike(), None, where, host))
        engine = own(ModelRunner(device, target, None, EngineOptions(n_ctx=256)))
        rows = [engine.logits(IDS), *(engine.logits([i]) for i in range(8))]
        if where is not None and where.hot:
            chosen = target.weights.host_experts.chosen()
            assert {int(row.sum()) for row in chosen.values()} == {(len(IDS) + 8) * target.experts.n_used}
            counts = target.weights.host_experts.counts()
            assert counts.hits == sum(int(row[list(where.hot[i])].sum()) for i, row in chosen.items())
        return np.concatenate(rows)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("arch", WRITERS)
def test_every_placement_gives_the_same_bits(tmp_path, arch, quant):
    """None, one, some, all but one, all experts on the device, and a mixture; against the ordinary graph where nothing is repacked.

    With native kernels where they run, and ggml's for Q4_K, where it went wrong: ggml takes another kernel for an expert with eight rows or more,
    and filler rows made eight.
    """
    kernels = "ggml" if quant == "Q4_K" else None
    path, rng = WRITERS[arch](tmp_path / "t.gguf", Shape(), quant), np.random.default_rng(2)
    some = {i: tuple(int(e) for e in rng.permutation(8)) for i in range(8)}
    kinds = [lambda i: (), lambda i: (2,), lambda i: some[i][:3], lambda i: some[i][:7], lambda i: some[i], lambda i: some[i][: 2 * i]]
    first, *others = (logits(path, lambda target, hot=hot: placed(target, hot), kernels) for hot in kinds)
    assert np.isfinite(first).all()
    for other in others:
        np.testing.assert_array_equal(first, other)
    if quant != "Q4_K":
        np.testing.assert_array_equal(first, logits(path, None, kernels))


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["F32", "Q4_K"])
def test_slots_that_differ_within_a_token_change_nothing_but_rounding(tmp_path, monkeypatch, quant):
    """What a GPU's wide products need; alongside the CPU the hot experts then get rows that are not theirs, so other kernels."""
    path = tmp_path / "t.gguf"
    write_qwen35moe(path, Shape(), quant)
    want = logits(path, lambda target: placed(target, lambda i: (0, 5)))
    monkeypatch.setattr(host_experts, "_needs_distinct", lambda device: True)
    for hot in ((3,), (0, 5, 2)):
        got = logits(path, lambda target: placed(target, lambda i: hot))
        assert np.mean((got - want) ** 2) <= 1e-10 * np.mean(want**2)


def test_a_file_whose_tensors_are_not_aligned_is_copied(tmp_path, monkeypatch):
    path = write_qwen35moe(tmp_path / "t.gguf")
    mapped = logits(path, lambda target: placed(target, lambda i: (1, 4)))
    monkeypatch.setattr(weights_module, "HOST_ALIGNMENT", 1 << 62)
    np.testing.assert_array_equal(mapped, logits(path, lambda target: placed(target, lambda i: (1, 4))))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen35moe", "minimax-m2", "laguna", "gpt-oss", "qwen3next", "gemma4", "deepseek2"])
def test_speculative_text_is_the_same_at_any_residency(tmp_path, arch):
    """Prefill, plain and fused steps of several widths, rollback; the hit rate is counted, and nothing is built late."""
    shape = Shape()
    target, draft = WRITERS[arch](tmp_path / "t.gguf", shape, "Q8_0"), write_dflash(tmp_path / "d.gguf", shape, "Q8_0")
    experts = ExpertOptions(count=True, host_layers=-1)
    with ps.load(target, device="CPU", threads=1, n_ctx=256, experts=experts) as session:
        routing = profile(session, IDS * 4).routing
    path = tmp_path / "profile.json"
    path.write_text(routing.to_json())
    texts, rates = [], []
    for residency in (None, 0.0, 0.5, 1.0):
        options = ExpertOptions(0, residency, path) if residency is not None else None
        with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, draft_width=4, experts=options) as session:
            text, stats = session.generate(IDS[:20], 24, ignore_end=True)
            texts.append(text)
            rates.append(stats.expert_hit_rate)
            assert stats.buffer_growths_after_warmup == 0 and stats.graphs_built_after_warmup == 0
    assert len(set(texts)) == 1 and rates[0] is rates[3] is None and rates[1] == 0.0 < rates[2] < 1.0


def test_profiles_and_first_layers(tmp_path):
    path = write_laguna(tmp_path / "t.gguf")
    with ps.load(path, device="CPU", threads=1, n_ctx=64, experts=ExpertOptions(count=True)) as session:
        result = profile(session, (IDS * 6)[:330])
        fails_with(ps.PyspecError, "too few", profile, session, IDS)
    assert (result.routing.tokens, result.seen.tokens, result.held_out.tokens) == (320, 224, 96)
    assert {int(row.sum()) for row in result.routing.counts.values()} == {320 * 3}
    for layer, row in result.routing.counts.items():
        np.testing.assert_array_equal(row, result.seen.counts[layer] + result.held_out.counts[layer])
        assert row[result.routing.hottest(layer, 1)[0]] == row.max()
    assert result.hit_rate(0.0) == 0.0 and result.hit_rate(1.0) == 1.0 and 0 < result.hit_rate(0.25) < result.hit_rate(0.75) < 1
    seen, other = Routing("m", 2, {0: np.array([5, 1, 0, 4])}), Routing("m", 2, {0: np.array([1, 7, 1, 1])})
    assert seen.hottest(0, 2) == (0, 3) and seen.hit_rate(0.5) == 0.9 and seen.hit_rate(0.5, other) == 0.2
    assert [hot_count(f, 8) for f in (0, 0.05, 0.07, 0.5, 1.0)] == [0, 0, 1, 4, 8]
    for model in (write_qwen3(tmp_path / "a.gguf"), write_gemma4(tmp_path / "b.gguf")):
        with pytest.raises(ModelError, match="no routed experts"):
            ps.load(model, device="CPU", threads=1, n_ctx=64, experts=ExpertOptions(-1))
    with closing(GGUFFile(write_laguna(tmp_path / "t.gguf"))) as file:
        target = open_target(file)
        assert ExpertOptions(2).placement(target).hot == {1: (), 2: ()}
        assert ExpertOptions(99).placement(target).hot == dict.fromkeys((1, 2, 3), ())
        assert ExpertOptions(0, 1.0).placement(target).hot == {}


@pytest.mark.slow
@pytest.mark.parametrize("written, sentence", [
    (None, "no routing profile"),
    ("{", "cannot be read"),
    ("[" * 100_000, "cannot be read"),
    ('{"format": "pyggml_spec experts 1", "model": ["x"], "tokens": "many", "layers": {"0": [1]}}', "does not fit"),
    ("[]", "not a routing profile"),
    ('{"format": "pyggml_spec experts 1", "model": "x", "layers": {"0": [1, 2]}}', "does not fit"),
    ('{"format": "pyggml_spec experts 1", "model": "x", "layers": {"0": [1, 2, 3, 4, 5, 6, 7, -8]}}', "does not fit"),
])  # fmt: skip
def test_profiles_that_do_not_fit_are_refused(tmp_path, written, sentence):
    model = write_qwen35moe(tmp_path / "t.gguf")
    if written is not None:
        (tmp_path / "t.gguf.experts.json").write_text(written)
    fails_with(ModelError, sentence, lambda: ps.load(model, device="CPU", threads=1, n_ctx=64, experts=ExpertOptions(0, 0.5)))


@pytest.mark.parametrize("options, sentence", [(ExpertOptions(0, 1.5), "fraction from 0 to 1"), (ExpertOptions(-2), "0 or more")])
def test_placements_that_cannot_be_are_refused(tmp_path, options, sentence):
    with pytest.raises(ModelError, match=sentence):
        ps.load(write_laguna(tmp_path / "t.gguf"), device="CPU", threads=1, n_ctx=64, experts=options)


def test_a_step_wider_than_planned_is_refused_before_it_runs(tmp_path):
    path = write_qwen35moe(tmp_path / "t.gguf")
    fails_with(EngineError, "wider than the 16", lambda: logits(path, lambda target: placed(target, lambda i: (), rows=16)))


@pytest.mark.slow
def test_requests_at_once(tmp_path):
    """The same texts as with all experts on the device; more slots than rows were planned for are refused when they are asked for."""
    target, draft = write_laguna(tmp_path / "t.gguf", Shape(), "Q8_0"), write_dflash(tmp_path / "d.gguf", Shape(), "Q8_0")
    texts = []
    for options in (None, ExpertOptions(2)):
        with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, experts=options) as session:
            with session.concurrent(slots=3) as server:
                handles = [server.submit(IDS[i : i + 30], max_tokens=12, ignore_end=True) for i in range(5)]
                texts.append([handle.result()[0] for handle in handles])
            if options is not None:
                fails_with(EngineError, "use fewer slots", session.concurrent, slots=40)
    assert texts[0] == texts[1]


ALL_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_exps\."


@pytest.mark.parametrize("overrides, layers", [
    ([(ALL_EXPERTS, "CPU")], (0, 1, 2, 3)), ([(r"blk\.[23]\.ffn_.*_exps\.", "CPU")], (2, 3)),
    ([(r"blk\.0\.ffn_.*_exps", "cpu"), (r"blk\.0\.", "CPU")], "attn"), ([(r"ffn_up_exps", "CPU")], "but not"),
    ([(r"blk\.9", "CPU")], "moves nothing"), ([(r"exps", "CUDA1")], "to the CPU only"), ([(r"(", "CPU")], "no regular expression"),
])  # fmt: skip
def test_tensors_that_are_overridden_as_in_llama_cpp(tmp_path, overrides, layers):
    with GGUFFile(WRITERS["qwen35moe"](tmp_path / "t.gguf", Shape())) as file:
        if isinstance(layers, tuple):
            assert overridden(file, overrides) == layers
            assert set(ExpertOptions(layers=layers).placement(open_target(file)).hot) == set(layers)
        else:
            fails_with(ModelError, layers, overridden, file, overrides)
