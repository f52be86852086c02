"""Drafted ids of every method equal llama.cpp's, block after block, whatever was accepted before."""

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from drafters.parity import LAST, UB, WRITE, assert_blocks_equal, both, disagreement, write_files
from engine.helpers import oracle, run
from engine.helpers import reference as plain
from gguf_io.build import F32, STR, U32, Model
from llama_oracle import LlamaEagle3
from random_gguf.archs import WRITERS, write_gemma4, write_laguna, write_llama, write_qwen3
from random_gguf.described import write_described
from random_gguf.dflash2 import write_dflash2
from random_gguf.eagle3 import write_eagle3
from random_gguf.model import Shape, write_dflash, write_qwen35
from random_gguf.mtp import write_mtp_target
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.cache.kv import NOWHERE, KVTypes
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
from pyggml_spec.errors import ModelError, PairError, PyspecError
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.step_io import StepFields, StepIO
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO, DEMO_DRAFTER, DEMO_MTP, DEMO_TARGET
from pyggml_spec.models.registry import open_drafter, open_target
from pyggml_spec.text.tokenizer import Tokenizer
from pyggml_spec.tools.inspect import inspect_file
from pyggml_spec.tools.plan import plan
from pyggml_spec.tools.prompts import read_prompts

pytestmark = pytest.mark.slow
FUNCTION = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
QUANTS = ("F32", "Q8_0", "Q4_K")
ENOUGH = {"assistant": 60}  # blocks, in which every mistake of WRONG shows; 26 of the others
ENDS = QUANTS[::2]  # of architectures whose layers are like those of another
PROMPTS = (1, UB - 1, UB, UB + 1, LAST)  # tokens around a chunk's end
GEMMA = {"factors": True, "post_norms": True, "gelu": True}
HYBRID = {"small": "qwen35", "layers": 4}  # every fourth layer has attention
CUT, BOTH = {"own": ("head",), "tokens": 100}, ("head", "embedding")


def cases(method):
    """(quant, architecture, options of the target, of the drafter, prompt, blocks, width)"""
    return {
        "assistant": [
            *((quant, "gemma4", {}, {}, 20, ENOUGH["assistant"], 5) for quant in QUANTS),
            ("F32", "gemma4", {"shared": False, "n_per_layer": 0}, {"layers": 4}, 60, 40, 5),
            ("F32", "gemma4", {}, {"layers": 2, "n_embd": 64}, 40, ENOUGH["assistant"], 5),
            ("Q8_0", "gemma4", {"routed": True}, {}, 20, 20, 5),
            *(("F32", "gemma4", {}, {}, prompt, 13, 5) for prompt in PROMPTS),
        ],
        "dflash2": [
            *((quant, "qwen35", {}, {}, 20, 26, 5) for quant in QUANTS),
            *(("F32", "qwen3", {}, {"taps": 3, "group_size": 64}, 20, 20, width) for width in (2, 3, 8)),
            ("F32", "qwen3", {}, {"taps": 1, "top_k": 3, "logit_scale": 0.3, "softcap": 2.0, "own": BOTH}, 20, 20, 5),
            ("F32", "gemma4", {}, GEMMA, 40, 20, 5),
            ("Q8_0", "muse-glimmer", {}, {"causal": True}, 40, 20, 5),
            ("F32", "qwen3", {}, CUT, 20, 20, 5),
            *(("F32", "qwen3", {}, {}, prompt, 13, 5) for prompt in PROMPTS),
        ],
        "dspark": [
            *((quant, "qwen35", {}, {}, 20, 26, 5) for quant in QUANTS),
            *((quant, "qwen35", {}, {"from_anchor": False}, 20, 30, 5) for quant in QUANTS),
            *(("F32", "qwen3", {}, {"confidence": True, "from_anchor": True}, 20, 13, width) for width in (2, 3, 9)),
            ("F32", "qwen3", {}, {"from_anchor": False, "causal": True}, 20, 13, 8),
            ("F32", "gemma4", {}, GEMMA, 40, 13, 5),
            ("F32", "qwen3", {}, CUT, 20, 20, 5),
            ("F32", "qwen3", {}, CUT | {"from_anchor": False}, 20, 20, 5),
            *(("F32", "qwen3", {}, {}, prompt, 13, 5) for prompt in PROMPTS),
        ],
        "eagle3": [
            *((quant, "llama", {}, {}, 20, 26, 5) for quant in QUANTS),
            *((quant, "llama", {}, {"tokens": 100}, 20, 26, 5) for quant in QUANTS),
            ("F32", "qwen3", {}, {"own": BOTH, "norm_before_residual": True}, 20, 13, 5),
            ("Q8_0", "qwen3", {}, {"own": (), "norm_before_fc": True}, 20, 13, 5),
            ("F32", "qwen3", {}, {"own": BOTH, "n_embd": 128, "factors": True, "tokens": 60}, 20, 13, 5),
            ("Q8_0", "qwen35", {}, {"tokens": 100}, 20, 20, 5),
            ("F32", "gpt-oss", {}, {}, 40, 13, 5),
            *(("F32", "llama", {}, {"tokens": 100}, prompt, 13, 5) for prompt in PROMPTS),
        ],
        "mtp": [
            *((quant, "qwen35", {}, {}, 20, 26, 5) for quant in QUANTS),
            *((quant, "qwen35moe", {}, {}, 20, 26, 5) for quant in ENDS),
            ("Q8_0", "qwen35", {}, {"apart": True}, 20, 20, 5),
            ("F32", "qwen35moe", {}, {"apart": True}, 20, 20, 5),
            ("Q8_0", "qwen3next", {}, {}, 20, 20, 5),
            ("F32", "qwen3next", {}, {"apart": True}, 20, 20, 5),
            *((quant, "glm4moe", {}, {}, 20, 26, 5) for quant in ENDS),
            *((quant, "deepseek2", {}, {}, 20, 26, 5) for quant in ENDS),
            *(
                ("F32", arch, {"own": own}, {}, 40, 13, 5)
                for arch in ("deepseek2", "deepseek32", "glm-dsa")
                for own in ((), ("norm", "head"))
            ),
            ("F32", "glm4moe", {"own": ("norm", "head")}, {}, 40, 13, 5),
            *((quant, arch, {}, {}, 20, 26, 4) for arch in ("step35", "mimo2") for quant in ENDS),
            *(("F32", arch, {"own": ("norm", "head", "embedding")}, {}, 90, 30, 4) for arch in ("step35", "mimo2")),
            ("F32", "step35", {}, {}, 40, 13, 3),
            *(
                (quant, "hy_v3", {"own": own}, {}, 20, 30, 3)
                for quant, own in (("F32", ()), ("Q8_0", ("norm",)), ("Q4_K", ("norm", "head")))
            ),
            *(
                ("F32", "qwen35", {"own": own}, {}, 40, 13, 5)
                for own in (("embedding",), ("norm",), ("head",), ("embedding", "norm", "head"))
            ),
            *(("F32", "qwen35", {}, {}, prompt, 13, 5) for prompt in PROMPTS),
        ],
        "simple": [
            *((quant, "qwen3", {}, {}, 20, 26, 5) for quant in QUANTS),
            *(("Q8_0", "qwen35", {}, {"small": small}, 60, 20, width) for small, width in (("qwen2", 2), ("gemma3", 9), ("qwen3moe", 5))),
            *(("F32", "gemma4", {}, {"small": small}, 60, 13, 5) for small in ("gemma4", "gpt-oss", "olmo2", "deepseek2")),
            *(("F32", "llama", {}, {}, prompt, 13, 5) for prompt in PROMPTS),
            *((quant, "qwen3", {}, HYBRID, 20, 26, 5) for quant in QUANTS),
            *(
                ("F32", "qwen35", {}, HYBRID | {"small": small}, 60, 20, width)
                for small, width in (("qwen35", 2), ("qwen3next", 9), ("lfm2", 5))
            ),
            *(
                ("F32", "llama", {}, HYBRID | {"small": small}, 60, 20, 5)
                for small in ("granitehybrid", "falcon-h1", "nemotron_h", "kimi-linear")
            ),
            *(("F32", "llama", {}, HYBRID, prompt, 13, 5) for prompt in PROMPTS),
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
    # 3: F32 drafts of "simple" within 1e-4 of each other, which processors with and without AVX-512 decide differently
    ids = np.random.default_rng(8 if method == "simple" else 3).integers(0, 256, prompt).tolist()
    with both(method, target, draft, ids, width=width) as (session, oracle):
        assert disagreement(session, oracle, blocks) is None


@pytest.mark.parametrize("quant, window, prompt", [("F32", 0, 20), ("Q8_0", 12, 300), ("Q4_K", 12, 700)])
def test_ids_of_dflash_equal_llama_cpp(tmp_path, quant, window, prompt):
    shape = Shape(window=window)
    target, draft = write_qwen35(tmp_path / "t.gguf", shape, quant), write_dflash(tmp_path / "d.gguf", shape, quant)
    ids = np.random.default_rng(3).integers(0, 256, prompt).tolist()
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=1024) as session:
        assert_blocks_equal(session, target, draft, ids, 20)


@pytest.mark.parametrize(
    "method, arch",
    [
        ("dflash", "qwen35"),
        ("dflash", "gemma4"),
        ("dflash2", "qwen35"),
        ("dspark", "laguna"),
        ("simple", "qwen35"),
        ("mtp", "step35"),
        ("mtp", "mimo2"),
    ],
)
def test_ids_past_the_wraps_of_a_drafters_ring_equal_llama_cpp(tmp_path, method, arch):
    """Rings of 256 rows, windows of 12: the prompt wraps twice, in chunks, and blocks with rejected drafts once more. llama.cpp keeps every position,
    so a window across the wrap is summed in another order there: quantised products of these small models can turn a draft then, and so can a router
    whose next expert is as good: every expert is used."""
    shape = Shape(window=12, embedding_scale=16.0 if arch == "gemma4" else 0.0, n_expert=3, n_used=3)
    write = (WRITE | {"dflash": write_dflash, "simple": partial(WRITE["simple"], small="gemma3")})[method]
    if method == "mtp":
        target, draft = write_mtp_target(tmp_path / "t.gguf", shape, arch=arch), None
    else:
        target, draft = WRITERS[arch](tmp_path / "t.gguf", shape), write(tmp_path / "d.gguf", shape)
    prompt, width = np.random.default_rng(3).integers(0, 256, 730).tolist(), 4 if method == "mtp" else 5
    with both(method, target, draft, prompt, n_ctx=1024, width=width) as (session, oracle):
        assert session.runner.draft_kv.ring == 256
        assert disagreement(session, oracle, 39) is None and session.runner.cursor.committed > 3 * 256 + 12


def test_ids_of_the_embedded_dflash_equal_llama_cpp():
    """24 blocks, some drafts accepted and some rejected."""
    with ps.load(device="CPU", threads=1, kernels="ggml", n_ctx=1024) as session:
        accepted = assert_blocks_equal(session, DEMO_TARGET, DEMO_DRAFTER, session.tokenizer.encode(FUNCTION), 24)
    assert 24 < accepted < 15 * 24


def test_the_embedded_mtp_layer():
    """24 blocks of what the embedded target writes, as many drafts accepted as are right: some, and not all."""
    with GGUFFile(DEMO_TARGET) as file, closing(Tokenizer(file)) as tokenizer:
        prompt = tokenizer.encode(FUNCTION)
    accepted = 0
    with both("mtp", DEMO_TARGET, DEMO_MTP, prompt, n_ctx=1024, width=8) as (session, oracle):
        for _ in range(24):
            result = session.runner.fused_step()
            drafts = result.tokens[1:].tolist()
            assert drafts == oracle.draft(8)
            right = next((i for i, (a, b) in enumerate(zip(drafts, result.ids)) if a != b), 7)
            ids, _ = oracle.verify(drafts, right)
            assert result.ids.tolist() == ids.tolist()
            session.runner.accept(right + 1, int(result.ids[right]))
            accepted += right
    assert 36 < accepted < 7 * 24
    prompts = [prompt.text for prompt in read_prompts(DEMO / "prompts.jsonl")][:4]
    with ps.load(spec=["draft-mtp"], device="CPU", threads=1, n_ctx=512, draft_width=8) as session:
        assert session.methods == ("draft-mtp",) and DEMO_MTP.stat().st_size < 4e6
        assert "token_embd.weight" not in {spec.name for spec in session.drafter.specs()}  # the target's, bit for bit: one copy is kept
        stats = [session.generate(prompt, 64, ignore_end=True)[1] for prompt in prompts]
    assert sum(s.steps + s.matched for s in stats) / sum(s.steps for s in stats) > 2.0


def one_more(field):
    fill = BorrowingDrafting.fill

    def filled(self, host, *more):
        fill(self, host, *more)
        host[field] += 1

    return filled


def largest_logit(self, g, hidden, block, slots, target, draws):
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


@pytest.mark.parametrize("method, options, owner, name, wrong", WRONG.values(), ids=WRONG)
def test_other_inputs_give_other_ids(tmp_path, monkeypatch, method, options, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    target, draft = write_files(tmp_path, method, **options)
    with both(method, target, draft, list(range(40))) as (session, oracle):
        assert disagreement(session, oracle, ENOUGH.get(method, 26)) is not None


@pytest.mark.parametrize("method, options, verdict", [
    ("assistant", {"tables": True}, "a gemma4-assistant drafter that reads the K/V of its target and drafts up to 15 tokens"),
    ("dflash2", {}, "a dflash drafter with blocks of 8 that reads the inputs of target layers 1, 2, 3"),
    ("dspark", {"confidence": True}, "a dflash drafter with blocks of 9 that reads the inputs of target layers 1, 2, 3"),
    ("dspark", {"confidence": True, "from_anchor": False}, "a dflash drafter with blocks of 8 that reads"),
    ("eagle3", {"tokens": 100}, "an eagle3 drafter that reads the inputs of target layers 1, 2, 3 and drafts up to 15 tokens"),
])  # fmt: skip
def test_inspect_and_plan(tmp_path, method, options, verdict):
    target, draft = write_files(tmp_path, method, **options)
    seen = inspect_file(draft)
    assert seen.usable and verdict in seen.verdict
    assert set(seen.unused) == ({"masked_embd_centroids.weight", "masked_embd_ordering"} if method == "assistant" else set())
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
        assert plan(target, draft, device="CPU", n_ctx=256).memory == session.runner.memory()
        if method == "dspark":
            assert f"blocks of {session.runner.options.width} " in verdict and session.methods == ("draft-dspark",)


@pytest.mark.parametrize("method, arch, shape, options, words", [
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
    ("eagle3", "llama", {"target_layers": (1, 2)}, {}, r"'fc.weight' has the shape \[768, 256\]"),
    ("eagle3", "llama", {"n_vocab": 330}, {"own": BOTH}, "its token_embd.weight has 330 tokens, the target has 320"),
])  # fmt: skip
def test_a_drafter_that_does_not_fit_is_refused(tmp_path, method, arch, shape, options, words):
    target, draft = WRITERS[arch](tmp_path / "t.gguf", Shape()), WRITE[method](tmp_path / "d.gguf", Shape(**shape), **options)
    fails_with((PairError, ModelError), words, ps.load, target, draft, device="CPU", threads=1, n_ctx=256)


def test_rows_and_rings_of_assistants(tmp_path):
    """The target's K/V are stored rotated then."""
    with both("assistant", *write_files(tmp_path, "assistant"), list(range(40)), kv=KVTypes("q8_0", "q8_0")) as (session, oracle):
        assert disagreement(session, oracle, 20) is None
    with ps.load(write_gemma4(tmp_path / "t.gguf", Shape()), device="CPU", threads=1, n_ctx=2048) as session:
        kv, near = session.runner.kv, np.empty(256, np.float32)
        assert kv.ring
        for n in (1, 2, 255, 256, 257, kv.ring - 1, kv.ring, kv.ring + 1, 3 * kv.ring + 5):
            kv.positions_of_ring(n, near)
            held = np.array([max((p for p in range(n) if p % kv.ring == j), default=-1) for j in range(256)])
            assert np.array_equal(near, np.where(held < 0, np.float32(NOWHERE), 0.5 - held))


def test_a_convolution_of_dflash2_is_that_of_numpy(tmp_path):
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
            rows = BlockInputs(values, values, (), (), slots)
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
    target, draft = write_files(tmp_path, "eagle3", tokens=100)
    other, ids = write_dflash2(tmp_path / "o.gguf", Shape(target_layers=(0, 2))), list(range(40))
    options = {"device": "CPU", "threads": 1, "kernels": "ggml", "n_ctx": 512, "draft_width": 5, "chunk": UB}
    theirs = closing(LlamaEagle3(target, draft, Shape().target_layers, n_ctx=512, n_ubatch=UB, width=5))
    with ps.load(target, [other, draft], **options) as session, theirs as oracle:
        engine = session.runner
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
            result = session.runner.step({0: Draft(8, weigh=lambda of, out=confidence: out.append(of[0]) or 3)})[0]
            assert len(confidence[0]) == 7 and np.abs(confidence[0] - oracle.said(8)).max() < 1e-5 and np.ptp(confidence[0]) > 0.01
            assert result.tokens[1:].tolist() == oracle.draft(8)[:3]
            ids, _ = oracle.verify(result.tokens[1:].tolist(), kept)
            session.runner.accept(kept + 1, int(ids[kept]))


KINDS = {
    "mtp": (write_mtp_target, None, {}), "mtp with a head of its own": (write_mtp_target, None, {"own": ("head",)}),
    "dflash": (write_qwen35, write_dflash, {}), "eagle3": (write_llama, write_eagle3, {}),
}  # fmt: skip
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
        engine, out = session.runner, []
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


def test_vocabularies_of_drafts(tmp_path, files):
    """296 outputs are packed by eight; the next 32 after the first 290 would be 320."""
    every, text = drafted(write(tmp_path, "dflash", "Q4_0", Shape(n_vocab=296)), "ggml", steps=8)
    few, same = drafted((tmp_path / "t.gguf", tmp_path / "d.gguf"), "ggml", 290, steps=8)
    assert same == text and all(token < 290 for drafts in few for token in drafts)
    assert all(a == b for a, b in zip(every, few, strict=True) if max(a) < 290)
    target, draft = write_llama(tmp_path / "t.gguf", Shape(), "F32"), write_eagle3(tmp_path / "d.gguf", Shape(), "F32", tokens=90)
    with pytest.raises(PairError, match="reduced vocabulary of 90 tokens"):
        ps.load(target, draft, device="CPU", threads=1, n_ctx=64, draft_vocab=80)
    fails_with(PyspecError, "draft_vocab", ps.load, *files, device="CPU", threads=1, n_ctx=64, draft_vocab=3)
    with pytest.raises(PairError, match="`draft_vocab` is for drafters that are models"):
        ps.load(device="CPU", threads=1, n_ctx=64, spec=["suffix"], draft_vocab=80)


def check(files, kernels):
    every, text = drafted(files, kernels)
    n = Shape().n_vocab
    assert drafted(files, kernels, n) == (every, text)  # the whole vocabulary: nothing changes
    few, same = drafted(files, kernels, 100)
    assert same == text and all(token < 100 for drafts in few for token in drafts) and few != every
    for a, b in zip(every, few):
        if a[0] < 100:
            assert a[0] == b[0]  # the largest of all is the largest of those


LAGUNA_PROMPT = np.random.default_rng(8).integers(0, 256, 128).tolist()
LIKE_PUBLISHED = {"feature_norms": True, "gate": "head", "causal": True}


def matrices(path) -> dict[str, np.ndarray]:
    with GGUFFile(path) as file:
        data = {name: (np.frombuffer(bytes(file.read(name)), np.float32), info.shape) for name, info in file.tensors.items()}
        return {name: values.reshape(shape[::-1]).astype(float) for name, (values, shape) in data.items()}


def rms(x, weight=1.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rotated(x, positions, base):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


class Drafter:
    """One block, from the hidden states of the target's layers F32 [layers, n, n_embd]."""

    def __init__(self, session, target, draft):
        self.hp, self.w, self.t = session.drafter.hp, matrices(draft), matrices(target)

    def keys_values(self, i, x, positions):
        hp, w = self.hp, self.w
        k, v = ((x @ w[f"blk.{i}.attn_{name}.weight"].T).reshape(len(x), hp.n_head_kv, hp.head_size) for name in "kv")
        k = rotated(rms(k, w[f"blk.{i}.attn_k_norm.weight"]), positions, hp.rope.base)
        return k.astype(np.float16).astype(float), v.astype(np.float16).astype(float)

    def hidden(self, features, last_token):
        hp, w, n = self.hp, self.w, features.shape[1]
        f = np.moveaxis(features.astype(float), 0, 1)
        if "enc.aux_norm.weight" in w:
            f = rms(f, w["enc.aux_norm.weight"])
        c = rms(f.reshape(n, -1) @ w["fc.weight"].T, w["enc.output_norm.weight"])
        x = self.t["token_embd.weight"][[last_token] + [hp.mask_token] * (hp.block_size - 1)]
        past, here = np.arange(n), n + np.arange(hp.block_size)
        for i in range(hp.n_layer):
            norm = w[f"blk.{i}.attn_norm.weight"]
            h = rms(x, norm)
            own, old = self.keys_values(i, h, here), self.keys_values(i, rms(c, norm) if "enc.aux_norm.weight" in w else c, past)
            k, v = (np.repeat(np.concatenate(both), hp.n_head // hp.n_head_kv, 1) for both in zip(old, own, strict=True))
            q = (h @ w[f"blk.{i}.attn_q.weight"].T).reshape(len(x), hp.n_head, hp.head_size)
            q = rotated(rms(q, w[f"blk.{i}.attn_q_norm.weight"]), here, hp.rope.base)
            scores = np.einsum("qhd,khd->hqk", q, k) / hp.head_size**0.5
            ahead = here[:, None] - np.concatenate([past, here])[None, :]
            unseen = (ahead < 0) & hp.causal[i] | (ahead >= (hp.window[i] or np.inf))
            scores[:, unseen] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)
            if f"blk.{i}.attn_gate.weight" in w:
                gate = np.log1p(np.exp(h @ w[f"blk.{i}.attn_gate.weight"].T))
                out = out * gate.reshape(len(x), hp.n_head, -1)
            x = x + out.reshape(len(x), -1) @ w[f"blk.{i}.attn_output.weight"].T
            m = rms(x, w[f"blk.{i}.ffn_norm.weight"])
            gate, up = m @ w[f"blk.{i}.ffn_gate.weight"].T, m @ w[f"blk.{i}.ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{i}.ffn_down.weight"].T
        return rms(x, w["output_norm.weight"])


VARIANTS = {
    "an ordinary one": {}, "feature norms": {"feature_norms": True}, "gate per head": {"gate": "head"},
    "gate per output": {"gate": "output"}, "as published": LIKE_PUBLISHED,
}  # fmt: skip


@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("more", VARIANTS.values(), ids=VARIANTS)
def test_a_block_is_what_the_formulae_give(tmp_path, more, window):
    shape = Shape(n_layer=4, window=window, target_layers=(1, 2, 4))
    target, draft = write_laguna(tmp_path / "t.gguf", shape), write_dflash(tmp_path / "d.gguf", shape, **more)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
        engine = session.runner
        _, features = engine.capture(LAGUNA_PROMPT, shape.target_layers)
        engine.reset()
        last_token, drafted = engine.prefill(LAGUNA_PROMPT), engine.fused_step().tokens
        sums = engine.graphs.get(engine.graphs.key("fused", 16, 256)).host["draft_sum"].ravel().copy()
        expected = Drafter(session, target, draft)
        hidden = expected.hidden(features, last_token)
    assert np.abs(sums - hidden.sum(1)).max() < 0.1  # of 256 values; attention sums V in F16
    for extra in [name for name in expected.w if "aux_norm" in name or "attn_gate" in name]:
        without = expected.w.pop(extra)
        assert np.abs(sums - expected.hidden(features, last_token).sum(1)).max() > 0.3, extra
        expected.w[extra] = without
    logits = hidden[1:] @ expected.t["output.weight"].T
    top = np.sort(logits, 1)
    clear = top[:, -1] - top[:, -2] > 1e-2
    assert clear.sum() > 8 and (logits.argmax(1) == drafted[1:])[clear].all()


@pytest.mark.parametrize("write", [write_laguna, write_qwen3])
def test_speculative_text_and_requests_at_once(tmp_path, write):
    shape = Shape(n_layer=4, window=12)
    target, draft = write(tmp_path / "t.gguf", shape, "Q8_0"), write_dflash(tmp_path / "d.gguf", shape, "Q8_0", **LIKE_PUBLISHED)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, draft_width=8) as session:
        assert run(session.runner, LAGUNA_PROMPT, 40, width=8)[0] == plain(session.runner, LAGUNA_PROMPT, 40, width=8)
        alone = [session.generate(LAGUNA_PROMPT[i : i + 30], 12, ignore_end=True)[1] for i in range(3)]
        with session.concurrent(slots=3) as server:
            handles = [server.submit(LAGUNA_PROMPT[i : i + 30], max_tokens=12, ignore_end=True) for i in range(3)]
            together = [handle.result()[1] for handle in handles]
    assert [s.matched for s in together] == [s.matched for s in alone]


SHAPE = Shape(n_layer=4)
VARIANTS_PROMPT = np.random.default_rng(3).integers(0, 256, 128).tolist()  # a whole chunk: both engines compute the same shapes
DFLASH_VARIANTS = {
    "value scale": {"value_scale": 0.3},
    "gelu": {"gelu": True},
    "norms behind": {"post_norms": True},
    "K is V": {"shared_kv": True},
    "rope table": {"factors": True},
    "sinks": {"sinks": True},
    "own embedding": {"own": ("embedding",)},
    "own head": {"own": ("head",), "softcap": 2.0},
    "causal": {"causal": True},
    "everything": {
        "causal": True, "value_scale": 1.7, "gelu": True, "post_norms": True, "shared_kv": True, "own": ("embedding", "head"),
        "softcap": 2.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("target") / "t.gguf", SHAPE)


def drafts(target, draft) -> tuple[list[int], list[float]]:
    """One block, and the sum of each of its hidden rows."""
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        session.runner.prefill(VARIANTS_PROMPT)
        tokens = session.runner.fused_step().tokens.tolist()
        return tokens, session.runner.graphs.get(session.runner.graphs.key("fused", 16, 256)).host["draft_sum"].tolist()


def test_a_causal_block_with_windows(tmp_path, target):
    """Both bounds at once: what a windowed layer sees of a block is what lies before the row and inside the window."""
    shape = Shape(n_layer=4, window=12)
    draft = write_dflash(tmp_path / "d.gguf", shape, causal=True)
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        assert_blocks_equal(session, target, draft, VARIANTS_PROMPT, 6)


@pytest.mark.parametrize("more", DFLASH_VARIANTS.values(), ids=DFLASH_VARIANTS)
def test_drafted_ids_equal_llama_cpps(tmp_path, target, more):
    """And differ from those of the same weights without the feature, or the comparison would show nothing."""
    draft = write_dflash(tmp_path / "d.gguf", SHAPE, **more)
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        assert_blocks_equal(session, target, draft, VARIANTS_PROMPT, 6)
    assert drafts(target, draft) != drafts(target, write_dflash(tmp_path / "plain.gguf", SHAPE))


def rewritten(path, out, keys=lambda name, value: (name, value), tensors=lambda name: name, more=()):
    """The model of ``path`` with other names."""
    model = Model(path)
    model.keys = dict(keys(name, value) for name, value in model.keys.items()) | dict(more)
    model.tensors = {tensors(name): value for name, value in model.tensors.items()}
    return model.write(out)


def nested(arch):
    """Keys as the makers of dflash-draft files nest them, layers counted by their outputs, the mask token alongside them."""

    def keys(name, value):
        if name == "general.architecture":
            return name, (STR, arch)
        if name == "tokenizer.ggml.mask_token_id":
            return f"{arch}.dflash.mask_token_id", value
        if name == "dflash.target_layers":
            kind, (item, layers) = value
            return f"{arch}.dflash.target_layer_ids", (kind, (item, [v - 1 for v in layers]))
        if name == "dflash.block_size":
            return f"{arch}.dflash.block_size", value
        return name.replace("dflash.", f"{arch}.", 1) if name.startswith("dflash.") else name, value

    return keys


FUSION = {"fc.weight": "fc.weight", "enc.output_norm.weight": "hidden_norm.weight"}
DIALECTS = [("dflash-draft", "dflash_"), ("qwen35-dflash-draft", "dflash."), ("gemma4-dflash-draft", "dflash."), ("dflash", "")]


@pytest.mark.parametrize("arch, prefix", DIALECTS)
def test_dialects_draft_what_the_original_drafts(tmp_path, target, arch, prefix):
    original = write_dflash(tmp_path / "d.gguf", SHAPE)

    def tensors(name):
        name = f"{prefix}{FUSION[name]}" if name in FUSION else name
        return name.replace("ffn_norm", "post_attention_norm") if arch == "dflash-draft" else name

    other = rewritten(original, tmp_path / "o.gguf", nested(arch), tensors)
    assert drafts(target, other) == drafts(target, original)
    seen = inspect_file(other)
    assert seen.usable and f"a {arch} drafter" in seen.verdict and "inputs of target layers 1, 2, 3" in seen.verdict
    assert plan(target, other, device="CPU", n_ctx=256).memory == plan(target, original, device="CPU", n_ctx=256).memory


OTHERS = {
    "DeepSeek-V4 DSpark": [("key", "dflash.dspark.enabled"), ("key", "dflash.hyper_connection.count")],
    "Domino": [("tensor", "dflash.domino.start")], "EAGLE": [("arch", "eagle")], "MTP": [("tensor", "blk.0.nextn.eh_proj.weight")],
    "reduced-vocabulary": [("tensor", "t2d")], "Laguna-style DFlash": [("tensor", "dflash.aux_hidden_norm.0.weight")],
}  # fmt: skip


@pytest.mark.parametrize("method, kind, name", [(m, *sign) for m, signs in OTHERS.items() for sign in signs])
def test_other_methods_are_refused_by_name_everywhere(tmp_path, target, method, kind, name):
    """At loading, planning and inspecting, as a drafter and as a target: by name, with what is supported instead."""
    model = Model(write_dflash(tmp_path / "d.gguf", SHAPE))
    if kind == "tensor":
        model.tensors[name] = list(model.tensors["output_norm.weight"])
    elif kind == "key":
        model.keys[name] = (U32, 1)
    else:
        model.keys["general.architecture"] = (STR, name)
    path = model.write(tmp_path / "o.gguf")
    words = rf"is a {method} drafter \(it has .*\), which is not supported; DFlash drafters with the architecture dflash, .* are supported"
    for use in (lambda: ps.load(target, path, device="CPU"), lambda: plan(target, path, device="CPU")):
        fails_with(ModelError, words, use)
    seen = inspect_file(path)
    assert not seen.usable and f"is a {method} drafter" in seen.verdict
    if kind == "arch":
        with GGUFFile(path) as file, pytest.raises(ModelError, match=words):
            open_target(file)


def test_a_file_is_what_its_architecture_says_whatever_else_it_names(tmp_path, target):
    draft = Model(write_dflash(tmp_path / "d.gguf", SHAPE))
    draft.keys["dflash.hyper_connection.count"] = (U32, 0)
    assert inspect_file(draft.write(tmp_path / "o.gguf")).usable
    model = Model(target)
    model.keys |= {"general.architecture": (STR, "deepseek4"), "deepseek4.hyper_connection.count": (U32, 4)}
    model.tensors["blk.0.nextn.eh_proj.weight"] = list(model.tensors["output_norm.weight"])
    path = model.write(tmp_path / "t.gguf")
    with GGUFFile(path) as file:
        for use, words in (
            (
                open_target,
                "has the architecture 'deepseek4', which does not run here yet, with or without a drafter; the .* 128 positions, .* The nearest is glm5-next",
            ),
            (open_drafter, "has the architecture 'deepseek4', which does not draft here; DFlash drafters"),
        ):
            with pytest.raises(ModelError, match=words):
                use(file)
    assert "it has the architecture 'deepseek4', which does not run here yet" in inspect_file(path).verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, width", [*((arch, 8) for arch in ("glm4moe", "deepseek2", "deepseek32", "glm-dsa")), ("mimo2", 4), ("step35", 4), ("hy_v3", 3)]
)
def test_text_with_mtp_layers_is_plain(tmp_path, arch, width):
    """Blocks are forced, which the policy would not draft with random layers; then drafts are rejected at every position."""
    path, prompt = write_mtp_target(tmp_path / "t.gguf", SHAPE, "Q8_0", arch=arch), np.random.default_rng(5).integers(0, 256, 230).tolist()
    with ps.load(path, device="CPU", threads=1, n_ctx=512, spec=["draft-mtp"], draft_width=width) as session:
        text = plain(session.runner, prompt, 100, width=width)
        assert run(session.runner, prompt, 100, width=width)[0] == text
        tokens, stats = run(session.runner, prompt, 100, width=width, drafts=oracle(prompt, text, wrong_at=lambda step: step % width))
        assert tokens == text and set(stats.block_sizes) == set(range(1, width + 1))


def test_a_target_whose_mtp_layer_was_left_out_loads(tmp_path):
    path = write_described("glm4moe", tmp_path / "t.gguf", SHAPE, keys={"block_count": SHAPE.n_layer + 1, "nextn_predict_layers": 1})
    with ps.load(path, device="CPU", threads=1, n_ctx=64) as session:
        assert "draft-mtp" not in session.methods


@pytest.mark.parametrize("name, value, words", [
    ("dflash.hidden_activation", (STR, "relu"), "relu"),
    ("dflash.final_logit_softcapping", (F32, -1.0), "below 0"),
    ("dflash.attention.value_length", (U32, 32), "value_length"),
])  # fmt: skip
def test_what_a_file_asks_for_is_applied_or_refused(tmp_path, name, value, words):
    model = Model(write_dflash(tmp_path / "d.gguf", SHAPE))
    model.keys[name] = value
    with GGUFFile(model.write(tmp_path / "o.gguf")) as file, pytest.raises(ModelError, match=words):
        open_drafter(file)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "enc.output_norm.scale", "blk.1.attn_q.bias"])
def test_an_unused_tensor_is_named(tmp_path, name):
    model = Model(write_dflash(tmp_path / "d.gguf", SHAPE))
    model.tensors[name] = list(model.tensors["output_norm.weight"])
    with GGUFFile(model.write(tmp_path / "o.gguf")) as file, pytest.raises(ModelError, match=name):
        open_drafter(file).specs()


def test_scales_and_caps_of_gemma_targets(tmp_path):
    # Only a block embedded with the target's scale, once, drafts what llama.cpp drafts with the scale in the file. Leaving it out was a
    # public bug, and so was applying it again to rows that already had it. A file without the key gets the target's scale.
    shape = Shape(n_layer=4)
    target, scale = write_gemma4(tmp_path / "t.gguf", shape), shape.n_embd**0.5
    scales = (scale, 0.0, 1.0, scale * scale)
    once, absent, omitted, twice = (write_dflash(tmp_path / f"{x}.gguf", Shape(n_layer=4, embedding_scale=x)) for x in scales)
    with ps.load(target, once, device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        assert_blocks_equal(session, target, once, VARIANTS_PROMPT, 4)
    right = drafts(target, once)
    assert drafts(target, absent) == right and drafts(target, omitted) != right and drafts(target, twice) != right
    # By the target's head; a cap in the drafter's file is for a head of its own. The verifier's logits are capped besides.
    shape, caps = Shape(n_layer=4), {}
    target = write_gemma4(tmp_path / "t.gguf", shape, softcap=5.0)
    cases = {"borrowed": {}, "borrowed, in the file": {"softcap": 5.0}, "own, no cap": {"own": ("head",)}}
    cases["own"] = {"own": ("head",), "softcap": 5.0}
    for name, more in cases.items():
        draft = write_dflash(tmp_path / "d.gguf", shape, **more)
        with ExitStack() as stack:
            session = stack.enter_context(ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=256))
            caps[name] = session.runner.graphs.get(session.runner.graphs.key("fused", 16, 256)).graph.op_counts()["TANH"]
    assert caps == {"borrowed": 2, "borrowed, in the file": 2, "own": 2, "own, no cap": 1}
