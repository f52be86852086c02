"""Drafted ids of every method equal llama.cpp's, block after block, whatever was accepted before."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from drafters.parity import LAST, UB, WRITE, assert_blocks_equal, both, disagreement, write_files
from llama_oracle import LlamaEagle3
from random_gguf.archs import WRITERS, write_gemma4, write_qwen3
from random_gguf.dflash2 import write_dflash2
from random_gguf.model import Shape, write_dflash, write_qwen35

import pyggml_spec as ps
from pyggml_spec.cache.kv import NOWHERE
from pyggml_spec.cache.kv_types import KVTypes
from pyggml_spec.drafters.base import DraftOutput
from pyggml_spec.drafters.dflash import BlockInputs
from pyggml_spec.drafters.dflash2 import DFlash2
from pyggml_spec.drafters.dspark import DSpark
from pyggml_spec.drafters.eagle3 import Eagle3
from pyggml_spec.drafters.mtp import MTP
from pyggml_spec.engine.batch import Draft, Prefill
from pyggml_spec.engine.drafting import BorrowingDrafting
from pyggml_spec.engine.graphs import most_nodes
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import ModelError, PairError
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.step_io import StepFields, StepIO
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO, DEMO_DRAFTER, DEMO_MTP, DEMO_TARGET
from pyggml_spec.text.tokenizer import Tokenizer
from pyggml_spec.tools.inspect import inspect_file
from pyggml_spec.tools.plan import plan
from pyggml_spec.tools.prompts import read_prompts

FUNCTION = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
QUANTS = ("F32", "Q8_0", "Q4_K")
PROMPTS = (1, UB - 1, UB, UB + 1, LAST)  # tokens around a chunk's end
GEMMA = {"factors": True, "post_norms": True, "gelu": True}
CUT, BOTH = {"own": ("head",), "tokens": 100}, ("head", "embedding")


def cases(method):
    """(quant, architecture, options of the target, of the drafter, prompt, blocks, width)"""
    return {
        "assistant": [
            *((quant, "gemma4", {}, {}, 20, 60, 5) for quant in QUANTS),
            ("F32", "gemma4", {"shared": False, "n_per_layer": 0}, {"layers": 4}, 60, 40, 5),
            ("F32", "gemma4", {}, {"layers": 2, "n_embd": 64}, 40, 60, 5),
            ("Q8_0", "gemma4", {"routed": True}, {}, 20, 20, 5),
            *(("F32", "gemma4", {}, {}, prompt, 13, 5) for prompt in PROMPTS),
        ],
        "dflash2": [
            *((quant, "qwen35", {}, {}, 20, 60, 5) for quant in QUANTS),
            *(("F32", "qwen3", {}, {"taps": 3, "group_size": 64}, 20, 20, width) for width in (2, 3, 8)),
            ("F32", "qwen3", {}, {"taps": 1, "top_k": 3, "logit_scale": 0.3, "softcap": 2.0, "own": BOTH}, 20, 20, 5),
            ("F32", "gemma4", {}, GEMMA, 40, 20, 5),
            ("Q8_0", "muse-glimmer", {}, {"causal": True}, 40, 20, 5),
            ("F32", "qwen3", {}, CUT, 20, 20, 5),
            *(("F32", "qwen3", {}, {}, prompt, 13, 5) for prompt in PROMPTS),
        ],
        "dspark": [
            *((quant, "qwen35", {}, {}, 20, 60, 5) for quant in QUANTS),
            *((quant, "qwen35", {}, {"from_anchor": False}, 20, 30, 5) for quant in QUANTS),
            *(("F32", "qwen3", {}, {"confidence": True, "from_anchor": True}, 20, 13, width) for width in (2, 3, 9)),
            ("F32", "qwen3", {}, {"from_anchor": False, "causal": True}, 20, 13, 8),
            ("F32", "gemma4", {}, GEMMA, 40, 13, 5),
            ("F32", "qwen3", {}, CUT, 20, 20, 5),
            ("F32", "qwen3", {}, CUT | {"from_anchor": False}, 20, 20, 5),
            *(("F32", "qwen3", {}, {}, prompt, 13, 5) for prompt in PROMPTS),
        ],
        "eagle3": [
            *((quant, "llama", {}, {}, 20, 60, 5) for quant in QUANTS),
            *((quant, "llama", {}, {"tokens": 100}, 20, 60, 5) for quant in QUANTS),
            ("F32", "qwen3", {}, {"own": BOTH, "norm_before_residual": True}, 20, 13, 5),
            ("Q8_0", "qwen3", {}, {"own": (), "norm_before_fc": True}, 20, 13, 5),
            ("F32", "qwen3", {}, {"own": BOTH, "n_embd": 128, "factors": True, "tokens": 60}, 20, 13, 5),
            ("Q8_0", "qwen35", {}, {"tokens": 100}, 20, 20, 5),
            ("F32", "gpt-oss", {}, {}, 40, 13, 5),
            *(("F32", "llama", {}, {"tokens": 100}, prompt, 13, 5) for prompt in PROMPTS),
        ],
        "mtp": [
            *((quant, "qwen35", {}, {}, 20, 60, 5) for quant in QUANTS),
            *((quant, "qwen35moe", {}, {}, 20, 60, 5) for quant in QUANTS),
            ("Q8_0", "qwen35", {}, {"apart": True}, 20, 20, 5),
            ("F32", "qwen35moe", {}, {"apart": True}, 20, 20, 5),
            ("Q8_0", "qwen3next", {}, {}, 20, 20, 5),
            ("F32", "qwen3next", {}, {"apart": True}, 20, 20, 5),
            *(
                ("F32", "qwen35", {"own": own}, {}, 40, 13, 5)
                for own in (("embedding",), ("norm",), ("head",), ("embedding", "norm", "head"))
            ),
            *(("F32", "qwen35", {}, {}, prompt, 13, 5) for prompt in PROMPTS),
        ],
    }[method]


CASES = [
    pytest.param(method, *case, marks=() if i == 0 else pytest.mark.slow, id=f"{method}-{i}-{case[1]}-{case[0]}")
    for method in WRITE
    for i, case in enumerate(cases(method))
]


@pytest.mark.parametrize("method, quant, arch, of_target, of_drafter, prompt, blocks, width", CASES)
def test_ids_equal_llama_cpp(tmp_path, method, quant, arch, of_target, of_drafter, prompt, blocks, width):
    target, draft = write_files(tmp_path, method, quant, arch, of_target, **of_drafter)
    ids = np.random.default_rng(3).integers(0, 256, prompt).tolist()
    with both(method, target, draft, ids, width=width) as (session, oracle):
        assert disagreement(session, oracle, blocks) is None


@pytest.mark.slow
@pytest.mark.parametrize("quant, window, prompt", [("F32", 0, 20), ("Q8_0", 12, 300), ("Q4_K", 12, 700)])
def test_ids_of_dflash_equal_llama_cpp(tmp_path, quant, window, prompt):
    """Past the drafter's sliding window (12), and with a prompt longer than a micro-batch (700 > 512)."""
    shape = Shape(window=window)
    target, draft = write_qwen35(tmp_path / "t.gguf", shape, quant), write_dflash(tmp_path / "d.gguf", shape, quant)
    ids = np.random.default_rng(3).integers(0, 256, prompt).tolist()
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=1024) as session:
        assert_blocks_equal(session, target, draft, ids, 20)


def test_ids_of_the_embedded_dflash_equal_llama_cpp():
    """60 blocks, some drafts accepted and some rejected."""
    with ps.load(device="CPU", threads=1, kernels="ggml", n_ctx=1024) as session:
        accepted = assert_blocks_equal(session, DEMO_TARGET, DEMO_DRAFTER, session.tokenizer.encode(FUNCTION), 60)
    assert 60 < accepted < 15 * 60


@pytest.mark.slow
def test_ids_of_the_embedded_mtp_layer_equal_llama_cpp():
    """60 blocks of what the embedded target writes, as many drafts accepted as are right: some, and not all."""
    with GGUFFile(DEMO_TARGET) as file, closing(Tokenizer(file)) as tokenizer:
        prompt = tokenizer.encode(FUNCTION)
    accepted = 0
    with both("mtp", DEMO_TARGET, DEMO_MTP, prompt, n_ctx=1024, width=8) as (session, oracle):
        for _ in range(60):
            result = session.engine.fused_step()
            drafts = result.tokens[1:].tolist()
            assert drafts == oracle.draft(8)
            right = next((i for i, (a, b) in enumerate(zip(drafts, result.ids)) if a != b), 7)
            ids, _ = oracle.verify(drafts, right)
            assert result.ids.tolist() == ids.tolist()
            session.engine.accept(right + 1, int(result.ids[right]))
            accepted += right
    assert 90 < accepted < 7 * 60


@pytest.mark.slow
def test_the_embedded_mtp_layer_is_worth_its_drafts():
    """Held-out prompts: 2.4 tokens a step over 64 tokens of these; plain decoding gives 1, a layer without its training 1.1."""
    prompts = [prompt.text for prompt in read_prompts(DEMO / "prompts.jsonl")][:4]
    with ps.load(spec=["draft-mtp"], device="CPU", threads=1, n_ctx=512, draft_width=8) as session:
        assert session.methods == ("draft-mtp",) and DEMO_MTP.stat().st_size < 4e6
        assert "token_embd.weight" not in {spec.name for spec in session.drafter.specs()}  # the target's, bit for bit: one copy is kept
        stats = [session.generate(prompt, 64, ignore_end=True)[1] for prompt in prompts]
    assert sum(s.steps + s.matched for s in stats) / sum(s.steps for s in stats) > 2.0


# -- the comparison sees what matters


def one_more(field):
    fill = BorrowingDrafting.fill

    def filled(self, host, *more):
        fill(self, host, *more)
        host[field] += 1

    return filled


def largest_logit(self, g, hidden, block, slots, target):
    logits = self.logits(g, hidden, target)
    return DraftOutput((self.choose(g, logits),), logits)


def state_behind_the_norm(step):
    return lambda self, g, rows, target: (step(self, g, rows, target)[0],) * 2


def state_before_the_norm(step):
    def before(self, g, rows, target):
        rms, seen = g.rms_norm, []
        g.rms_norm = lambda x, weight, eps: seen.append(x) or rms(x, weight, eps)
        try:
            return step(self, g, rows, target)[0], seen[-1]
        finally:
            del g.rms_norm

    return before


WRONG = {
    "a visible last token": ("assistant", {"n_embd": 64, "layers": 2}, BorrowingDrafting, "fill", one_more("draft_last")),
    "the next position": ("assistant", {"n_embd": 64, "layers": 2}, BorrowingDrafting, "fill", one_more("draft_positions")),
    "no selector": ("dflash2", {}, DFlash2, "drafts", largest_logit),
    "no convolutions": ("dflash2", {}, DFlash2, "convolved", lambda self, g, i, part, side, x, moving, rows: x),
    "no Markov head": ("dspark", {}, DSpark, "drafts", largest_logit),
    "the hidden state after the norm": ("eagle3", {}, Eagle3, "step", state_behind_the_norm(Eagle3.step)),
    "the hidden state before the norm": ("mtp", {}, MTP, "step", state_before_the_norm(MTP.step)),
}


@pytest.mark.slow
@pytest.mark.parametrize("method, options, owner, name, wrong", WRONG.values(), ids=WRONG)
def test_other_inputs_give_other_ids(tmp_path, monkeypatch, method, options, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    target, draft = write_files(tmp_path, method, **options)
    with both(method, target, draft, list(range(40))) as (session, oracle):
        assert disagreement(session, oracle, 60) is not None


# -- what `inspect` and `plan` show, and what is refused

SHOWN = [
    ("assistant", {"tables": True}, "a gemma4-assistant drafter that reads the K/V of its target and drafts up to 15 tokens"),
    ("dflash2", {}, "a dflash drafter with blocks of 8 that reads the inputs of target layers 1, 2, 3"),
    ("dspark", {"confidence": True}, "a dflash drafter with blocks of 9 that reads the inputs of target layers 1, 2, 3"),
    ("dspark", {"confidence": True, "from_anchor": False}, "a dflash drafter with blocks of 8 that reads"),
    ("eagle3", {"tokens": 100}, "an eagle3 drafter that reads the inputs of target layers 1, 2, 3 and drafts up to 15 tokens"),
]


@pytest.mark.slow
@pytest.mark.parametrize("method, options, verdict", SHOWN)
def test_inspect_and_plan(tmp_path, method, options, verdict):
    target, draft = write_files(tmp_path, method, **options)
    seen = inspect_file(draft)
    assert seen.usable and verdict in seen.verdict
    assert set(seen.unused) == ({"masked_embd_centroids.weight", "masked_embd_ordering"} if method == "assistant" else set())
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
        assert plan(target, draft, device="CPU", n_ctx=256).memory == session.engine.memory()
        if method == "dspark":
            assert f"blocks of {session.engine.options.width} " in verdict and session.methods == ("draft-dspark",)


REFUSED = [
    ("assistant", "llama", {}, {}, "reads the K/V of gemma4 models, and that one is llama"),
    ("assistant", "gemma4", {"n_embd": 512}, {}, "hidden states of 512 values, the target's have 256"),
    ("assistant", "gemma4", {"n_vocab": 330}, {}, "it has 330 tokens, the target has 320"),
    ("assistant", "gemma4", {"target_window": 32}, {}, "its window is 32, the target's 24"),
    ("assistant", "gemma4", {"head_size": 32}, {}, "layer 0 has 4 heads of 32, the rows that it reads are of 2 of 64"),
    ("assistant", "gemma4", {}, {"n_embd": 256}, "embedding_length_out is the drafter's own 256"),
    ("dflash2", "qwen3", {}, {"group_size": 24}, "do not split into groups of 24"),
    ("dflash2", "qwen3", {}, {"top_k": 16}, "selector_top_k is 16, which hidden states of 256 values have no room for"),
    ("dflash2", "qwen3", {"n_vocab": 330}, {}, "its selector_predecessor.weight has 330 tokens, the target has 320"),
    ("dflash2", "qwen3", {"n_vocab": 330}, {"own": ("head",), "tokens": 330}, "its selector_predecessor.weight has 330 tokens"),
    ("dspark", "qwen3", {"n_vocab": 330}, {}, "its markov_w1.weight has 330 tokens, the target has 320"),
    ("dspark", "qwen3", {}, {"tokens": 100}, "its output.weight has 320 tokens, but d2t has 100"),
    ("eagle3", "llama", {"n_embd": 128}, {}, "hidden states of 128 values, the target's have 256"),
    ("eagle3", "llama", {}, {"tokens": 100, "chosen": 320}, "names the token 320, but the target has 320"),
    ("eagle3", "llama", {}, {"tokens": 100, "own": ()}, "its head has 320 tokens, but d2t has 100"),
    ("eagle3", "llama", {}, {"n_embd": 128}, "no token_embd.weight of its own"),
    ("eagle3", "llama", {"target_layers": (1, 2, 4)}, {}, "reads the input of layer 4, but of llama targets those of layers 0 to 3"),
    ("eagle3", "llama", {"target_layers": (1, 2)}, {}, "has 2 eagle3.target_layers"),
    ("eagle3", "llama", {"n_vocab": 330}, {"own": BOTH}, "its token_embd.weight has 330 tokens, the target has 320"),
]


@pytest.mark.slow
@pytest.mark.parametrize("method, arch, shape, options, words", REFUSED)
def test_a_drafter_that_does_not_fit_is_refused(tmp_path, method, arch, shape, options, words):
    target, draft = WRITERS[arch](tmp_path / "t.gguf", Shape()), WRITE[method](tmp_path / "d.gguf", Shape(**shape), **options)
    with pytest.raises((PairError, ModelError), match=words):
        ps.load(target, draft, device="CPU", threads=1, n_ctx=256)


# -- of single methods


def test_assistant_reads_quantised_rows(tmp_path):
    """The target's K/V are stored rotated then."""
    with both("assistant", *write_files(tmp_path, "assistant"), list(range(40)), kv=KVTypes("q8_0", "q8_0")) as (session, oracle):
        assert disagreement(session, oracle, 20) is None


def test_ring_positions_are_those_of_the_masks(tmp_path):
    """As C fills them for a step of the target, at every length around the ring's end."""
    with ps.load(write_gemma4(tmp_path / "t.gguf", Shape()), device="CPU", threads=1, n_ctx=2048) as session:
        kv, near = session.engine.kv, np.empty(256, np.float32)
        assert kv.ring
        for n in (1, 2, 255, 256, 257, kv.ring - 1, kv.ring, kv.ring + 1, 3 * kv.ring + 5):
            kv.positions_of_ring(n, near)
            held = np.array([max((p for p in range(n) if p % kv.ring == j), default=-1) for j in range(256)])
            assert np.array_equal(near, np.where(held < 0, np.float32(NOWHERE), 0.5 - held))


def test_a_convolution_of_dflash2_is_that_of_numpy(tmp_path):
    """Two blocks side by side, three taps: nothing comes from the block before."""
    target, draft = write_qwen3(tmp_path / "t.gguf", Shape()), write_dflash2(tmp_path / "d.gguf", Shape(), taps=3)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, kernels="ggml") as session:
        drafter, rng = session.drafter, np.random.default_rng(1)
        width, slots, n = 4, 2, 256
        x, moving = (rng.standard_normal((width * slots, m)).astype(np.float32) for m in (n, 2 * 3 * 16))
        with (
            closing(GraphAllocator(session.backend, "test")) as allocator,
            closing(StepIO(session.backend, 1 << 20)) as io,
            closing(Graph(allocator)) as graph,
        ):
            fields = StepFields(io, graph)
            values, told = fields.input("x", "f32", n, width * slots), fields.input("moving", "f32", 96, width * slots)
            rows = BlockInputs(values, values, values, (), 0, (), slots)
            out = drafter.convolved(graph, 0, "ffn", 1, values, told, drafter.prepared(graph, values, rows))
            fields.output("y", "f32", out)
            graph.plan()
            fields.host["x"][:], fields.host["moving"][:] = x.ravel(), moving.ravel()
            fields.run()
            with session.drafter.file.read("blk.0.ffn_conv_base") as data:
                base = np.frombuffer(data, np.float32).reshape(2, 3, n)[1]
            coefficients = moving.reshape(slots, width, 2, 3, 16)[:, :, 1].repeat(16, axis=-1)
            blocks, want = x.reshape(slots, width, n), np.zeros((slots, width, n), np.float32)
            for t in range(width):
                for tap in range(min(3, t + 1)):
                    want[:, t] += (base[tap] + coefficients[:, t, tap]) * blocks[:, t - tap]
            assert np.allclose(fields.host["y"].reshape(slots, width, n), want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_graphs_of_dflash2_have_room_for_many_taps(tmp_path, slots):
    """As many nodes more for each layer and tap as are planned for, and no more."""
    target, found = write_qwen3(tmp_path / "t.gguf", Shape()), []
    for taps, layers in ((2, 2), (8, 2), (8, 6)):
        draft = write_dflash2(tmp_path / f"{taps}-{layers}.gguf", replace(Shape(), draft_layers=layers), taps=taps, block=16)
        with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
            engine = ModelRunner(session.backend, session.target, session.drafter, EngineOptions(n_ctx=256, slots=slots))
            batch = {engine.admit(): Prefill([1, 2, 3]) for _ in range(slots)}
            engine.step(batch)
            engine.step({slot: Draft(16) for slot in batch})
            fused = max(step.graph.n_nodes for key, step in engine.graphs.steps().items() if key.kind == "fused")
            found.append((fused, most_nodes(session.target, session.drafter)))
            engine.close()
    nodes, planned = np.diff(np.array(found), axis=0).T
    assert (nodes <= planned).all() and (planned < 1.6 * nodes).all()


def test_ids_of_eagle3_do_not_depend_on_other_drafters(tmp_path):
    """A DFlash2 that reads other layers, and drafts some of the blocks: what the chain carries from block to block stays its own."""
    target, draft = write_files(tmp_path, "eagle3", tokens=100)
    other, ids = write_dflash2(tmp_path / "o.gguf", Shape(target_layers=(0, 2))), list(range(40))
    options = {"device": "CPU", "threads": 1, "kernels": "ggml", "n_ctx": 512, "draft_width": 5, "chunk": UB}
    with (
        ps.load(target, [other, draft], **options) as session,
        closing(LlamaEagle3(target, draft, Shape().target_layers, n_ctx=512, n_ubatch=UB, width=5)) as oracle,
    ):
        engine = session.engine
        assert engine.prefill(ids) == oracle.prefill(ids)
        for i, accepted in enumerate((1, 0, 4, 2, 3, 4, 0, 0, 1, 2)):
            result = engine.fused_step(drafter="draft-eagle3" if i % 3 else "draft-dflash")
            drafts = result.tokens[1:].tolist()
            assert i % 3 == 0 or drafts == oracle.draft(5), f"block {i}"
            oracle.verify(drafts, accepted)
            engine.accept(accepted + 1, int(result.ids[accepted]))


@pytest.mark.parametrize("from_anchor", [True, False])
def test_confidence_of_dspark_equals_llama_cpp(tmp_path, from_anchor):
    """And as many drafts are verified as ``weigh`` returns."""
    files = write_files(tmp_path, "dspark", confidence=True, from_anchor=from_anchor)
    with both("dspark", *files, list(range(40)), width=8) as (session, oracle):
        for kept in (1, 3, 2, 0):
            confidence = []
            result = session.engine.step({0: Draft(8, weigh=lambda of, out=confidence: out.append(of[0]) or 3)})[0]
            assert len(confidence[0]) == 7 and np.abs(confidence[0] - oracle.said(8)).max() < 1e-5 and np.ptp(confidence[0]) > 0.01
            assert result.tokens[1:].tolist() == oracle.draft(8)[:3]
            ids, _ = oracle.verify(result.tokens[1:].tolist(), kept)
            session.engine.accept(kept + 1, int(ids[kept]))
