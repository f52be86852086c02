"""plan: what it says beforehand is what a loaded session then holds."""

import json
import os
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from architectures import FAST, having, thorough
from cli.process import pyspec
from gguf import GGUFWriter
from make_random_gguf import MODELS
from random_gguf.archs import WRITERS, write_gemma4, write_gpt_oss, write_laguna, write_qwen3, write_qwen35moe
from random_gguf.model import Shape, Tiled, write_dflash, write_qwen35
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec import loading
from pyggml_spec.cli import main
from pyggml_spec.cli.help import GROUPS
from pyggml_spec.cli.plan import command as plan_command
from pyggml_spec.cli.report import configuration_line
from pyggml_spec.cli.run import command as run_command
from pyggml_spec.engine import options as engine_options
from pyggml_spec.engine import resources as parts
from pyggml_spec.engine.memory import longest
from pyggml_spec.engine.sequence import PLAIN, GenerationOptions
from pyggml_spec.errors import ContextError, EngineError, GGUFError, ModelError, PairError, PyspecError
from pyggml_spec.ggml.device import Backend, devices
from pyggml_spec.ggml.graph import Graph
from pyggml_spec.load_options import LoadOptions
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET, Loader
from pyggml_spec.models.placement import ExpertOptions, Routing
from pyggml_spec.tools.plan import NoPlan, check, plan, plan_everywhere

pytestmark = pytest.mark.slow


def _assert_exact(target, draft, device="CPU", largest=False, **options):
    """Every purpose to the byte: the plan is the engine's own code without memory, so any difference is a drift between the two."""
    planned = plan(target, draft, device=device, largest=largest, **options)
    with ps.load(target, draft, device=device, **{"threads": 1, **options}) as session:
        loaded = session.runner.memory()
        assert planned.n_ctx == session.runner.options.n_ctx
        by_type = dict(session.target.weights.bytes_by_type)
        assert planned.host_bytes == session.target.weights.host_bytes
    assert planned.memory == loaded and planned.total == sum(loaded.values())
    assert all(planned.weights_by_type[name] >= nbytes for name, nbytes in by_type.items())
    return planned


@pytest.mark.parametrize("n_ctx, width", [(None, None), (256, 4), (2048, 16)])
def test_embedded_pair(n_ctx, width):
    planned = _assert_exact(DEMO_TARGET, DEMO_DRAFTER, largest=True, n_ctx=n_ctx, draft_width=width)
    assert planned.fits and planned.largest_context == planned.trained_context == 2048


@pytest.mark.parametrize("quant", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K"])
def test_random_pairs_of_every_kind_of_buffer(tmp_path, quant):
    """Types that the CPU repacks and types that it does not, with and without drafter, windows and fused projections."""
    shape = Shape(window=12)
    target, draft = write_qwen35(tmp_path / "t.gguf", shape, quant, mixed=quant == "Q4_K"), write_dflash(tmp_path / "d.gguf", shape, quant)
    _assert_exact(target, draft, n_ctx=700)
    _assert_exact(target, draft, n_ctx=1500)  # with a ring for the drafter's windows
    _assert_exact(target, None, n_ctx=4096)


@pytest.mark.parametrize("shape", [Shape(every=2, n_layer=5, n_ff=768), Shape(n_head=2, n_head_kv=1, head_size=128, n_rot=64, n_layer=8)])
def test_odd_shapes(tmp_path, shape):
    _assert_exact(write_qwen35(tmp_path / "t.gguf", shape), None, n_ctx=300)


def test_contexts_and_their_memory(pair):
    whole = plan(*pair, device="CPU", n_ctx=2048)
    tight = plan(*pair, device="CPU", n_ctx=4096, free=whole.total)
    assert tight.largest_context == 2048 and not tight.fits and whole.fits
    assert plan(*pair, device="CPU", free=whole.total - 1).largest_context == 2048 - 256
    assert plan(*pair, device="CPU", free=1000).largest_context == 0 and plan(*pair, device="CPU").largest_context == 4096
    a, b = (plan(*pair, device="CPU", n_ctx=n) for n in (1024, 2048))
    near = 2 * 4  # the position of each row, one F32 in either cache
    assert sum(b.memory[k] - a.memory[k] for k in ("kv", "draft_kv")) == 1024 * (a.kv_per_token + near)
    without, with_copies = (plan(*pair, device="CPU", n_ctx=512, prefix_memory=n) for n in (0, 1 << 20))
    assert with_copies.total == without.total + (1 << 20) and with_copies.memory == without.memory
    assert plan(*pair, device="CPU", free=with_copies.total, prefix_memory=1 << 20).largest_context == 512
    assert check(*pair, device="CPU", n_ctx=512, draft_width=4, prefix_memory=1 << 20).error < 0.01
    fails_with(PyspecError, "memory for the prefix cache is -1", plan, *pair, device="CPU", prefix_memory=-1)


def test_contexts_whose_masks_a_device_cannot_count_do_not_fit(pair, monkeypatch):
    """The trained one is tried first, whatever was asked for."""
    gpu = SimpleNamespace(device=SimpleNamespace(kind="gpu", name="CUDA0"))
    monkeypatch.setattr(parts, "check_masks", lambda asked, _: engine_options.check_masks(asked, [gpu]))
    monkeypatch.setattr(engine_options, "MOST_MASKED", 512 * 1500)
    planned = plan(*pair, device="CPU", n_ctx=512)
    assert planned.fits and (planned.trained_context, planned.largest_context) == (4096, 1280)
    needs = "steps of 512 rows over a context of 2000 tokens need masks of more than 768000 values, which CUDA0"
    fails_with(ContextError, needs, plan, *pair, device="CPU", n_ctx=2000)


@pytest.mark.parametrize("types", [("q8_0", "q8_0", "q4_0", "q4_0"), ("q4_0", "bf16", "f16", "q8_0")], ids="-".join)
def test_cache_types(tmp_path, types):
    names = ("cache_type_k", "cache_type_v", "draft_cache_type_k", "draft_cache_type_v")
    shape = Shape(window=12)
    pair = write_qwen35(tmp_path / "t.gguf", shape), write_dflash(tmp_path / "d.gguf", shape)
    planned = _assert_exact(*pair, n_ctx=700, **dict(zip(names, types, strict=True)))
    assert planned.kv_per_token < plan(*pair, device="CPU").kv_per_token


@pytest.mark.parametrize("host_layers, residency", [(-1, None), (2, None), (1, 0.5), (0, 0.25), (0, 1.0)])
@pytest.mark.parametrize("write", [write_qwen35moe, write_laguna])
def test_experts_in_host_memory(tmp_path, write, host_layers, residency):
    pair = write(tmp_path / "t.gguf", Shape(n_ctx=512), "Q4_K"), write_dflash(tmp_path / "d.gguf", Shape())
    counts = {i: np.arange(8) for i in range(4)}
    (tmp_path / "t.gguf.experts.json").write_text(Routing("t", 1, counts).to_json())
    experts = ExpertOptions(host_layers, residency)
    _assert_exact(*pair, n_ctx=300, experts=experts)
    # as files have them: native kernels pack experts that no option places, in groups of 16 outputs
    planned, whole = (plan(*pair, device="CPU", n_ctx=300, kernels="ggml", largest=False, experts=placed) for placed in (experts, None))
    saved = sum(whole.weights_by_type.values()) - sum(planned.weights_by_type.values())
    assert (planned.host_bytes > 0) == (saved > 0) == (residency != 1.0) and saved <= planned.host_bytes


@pytest.mark.parametrize("write", [write_qwen35moe, write_gpt_oss])
def test_copies_of_experts_for_prompts(tmp_path, write):
    """Two layers of them, of the largest; what has no room is planned without, as it is loaded."""
    path = write(tmp_path / "t.gguf", Shape(), "Q4_K")
    options = {"device": "CPU", "n_ctx": 300, "experts": ExpertOptions(3)}
    without, planned = plan(path, **options), _assert_exact(path, None, n_ctx=300, experts=ExpertOptions(3), offload_prompts=1)
    assert 0 < planned.copied == planned.memory["weights"] - without.memory["weights"] < planned.host_bytes
    tight = plan(path, **options, offload_prompts=1, free=without.total)
    assert tight.fits and (tight.copied, tight.memory) == (0, without.memory)


def test_layers_and_experts_by_the_options_of_run(tmp_path, capsys):
    path, options = write_qwen35(tmp_path / "t.gguf", Shape(), "Q4_K"), {"device": "CPU,CPU", "n_ctx": 300, "tensor_split": [3, 1]}
    without, planned = plan(path, **options), _assert_exact(path, None, offload_prompts=1, **options)
    assert 0 < planned.copied == planned.memory["weights"] - without.memory["weights"]
    assert planned.memory["recurrent"] == 2 * without.memory["recurrent"] and planned.memory["kv"] > without.memory["kv"]
    more = [part.total - before.total for part, before in zip(planned.split, without.split, strict=True)]
    assert 0 < more[0] < planned.copied and more[1] > 0
    tight = plan(path, **options, offload_prompts=1, free=sum(part.total for part in without.split))
    assert tight.fits and (tight.copied, tight.memory) == (0, without.memory)
    with ps.load(path, threads=1, offload_prompts=1, **options) as session, session.batch(3) as scheduler:
        of_slots = {name: nbytes for name, nbytes in scheduler.runner.memory().items() if name != "weights"}
        assert [sum(part.values()) for part in session.runner.memory_by_segment()] == [part.total for part in planned.split]
        assert more[0] == session.target.weights.offloaded.buffer_bytes
    assert plan(path, **options, offload_prompts=1, slots=3).slots_memory == of_slots
    path = write_qwen35moe(tmp_path / "t.gguf")
    for options, shown in ((("--cpu-moe",), True), (("--n-cpu-moe", "0"), False)):
        with pytest.raises(SystemExit) as stop:
            main(["plan", "-m", str(path), "--device", "CPU", *options])
        assert not stop.value.code and ("in host memory" in capsys.readouterr().out) == shown
    fails_with(ModelError, "no routing profile", lambda: plan(path, device="CPU", experts=ExpertOptions(0, 0.5)))


EXPERTS = {
    "qwen35moe": ExpertOptions(1, 0.5), "qwen3moe": ExpertOptions(2), "laguna": ExpertOptions(-1), "gpt-oss": ExpertOptions(1, 0.5),
    "qwen3next": ExpertOptions(1, 0.5), "deepseek2": ExpertOptions(1, 0.5), "glm-dsa": ExpertOptions(1, 0.5),
}  # fmt: skip
QUANTISED = {"cache_type_k": "q8_0", "cache_type_v": "q4_0", "draft_cache_type_k": "q8_0"}


@pytest.mark.parametrize("arch", thorough())
def test_every_architecture_with_everything_at_once(tmp_path, monkeypatch, arch):
    """After generating in every mode and with slots: within 1 % of what is allocated, and what is no compute buffer to the byte. F16 rows of
    one sequence for an architecture of each kind, and for experts without an option for them."""
    monkeypatch.setattr("pyggml_spec.tools.plan.longest", lambda *_: 0)
    sizes = {"n_embd": 128, "n_ff": 128, "n_ff_expert": 64, "n_ff_shared": 64, "draft_ff": 128}
    shape = Shape(n_layer=3, every=2, target_layers=(0, 1, 2), window=12, n_ctx=1024, **sizes)
    pair = WRITERS[arch](tmp_path / "t.gguf", shape, "Q8_0"), write_dflash(tmp_path / "d.gguf", shape, "Q8_0")
    (tmp_path / "t.gguf.experts.json").write_text(Routing("t", 1, {i: np.arange(8) for i in range(3)}).to_json())
    quantised = QUANTISED | ({"cache_type_v": "q8_0"} if arch in having("latent") else {})  # whose K and V are one row
    everything = {"n_ctx": 600, "slots": 3, "experts": EXPERTS.get(arch), **quantised}
    for options in ({"n_ctx": 300}, everything) if arch in (*FAST, *EXPERTS) else (everything,):
        found = check(*pair, device="CPU", draft_width=4, **options)
        assert found.error < 0.01 and found.taken is None
        for planned, allocated in ((found.plan.memory, found.memory), (found.plan.slots_memory, found.slots_memory)):
            assert planned.keys() == allocated.keys()
            assert {k: v for k, v in planned.items() if k != "compute"} == {k: v for k, v in allocated.items() if k != "compute"}


def test_long_contexts_take_little_memory_beside_their_rows(pair):
    """F16 masks of 512 rows, and a quarter more: it was 3.3 times as much, with F32 values of the masks and a buffer for each kind of step."""
    one = plan(*pair, device="CPU", kernels="ggml", n_ctx=131072, largest=False)
    assert 2 * 512 * 131072 < one.memory["compute"] < 3 * 512 * 131072
    assert sum(one.compute_by_role.values()) == one.memory["compute"] and one.compute_by_role["prefill"] == one.memory["compute"]


@pytest.mark.parametrize("write", [write_qwen35, write_gemma4])
def test_the_width_of_passes_and_the_threads(tmp_path, write):
    shape = Shape(window=12, n_ctx=1280)
    pair = write(tmp_path / "t.gguf", shape), write_dflash(tmp_path / "d.gguf", shape)
    counted = partial(plan, *pair, device="CPU", largest=False)
    plans = [_assert_exact(*pair, n_ctx=1100, chunk=chunk) for chunk in (16, 512, 1024)]
    small, usual, large = (p.compute_by_role["prefill"] for p in plans)
    assert small < usual < large and plans[1].memory == counted(n_ctx=1100).memory
    assert (plans[0].memory["kv"] < plans[2].memory["kv"]) == (write is write_gemma4)
    assert plan(*pair, device="CPU", n_ctx=1100, chunk=1024, free=plans[1].total).largest_context < 1100
    assert _assert_exact(*pair, n_ctx=300, threads=2).memory == counted(n_ctx=300, threads=1).memory
    slots = [counted(n_ctx=700, chunk=chunk, slots=2) for chunk in (64, 512)]
    assert slots[0].slots_memory["compute"] < slots[1].slots_memory["compute"]
    assert check(*pair, device="CPU", n_ctx=300, chunk=64, slots=2).error < 0.01


def test_plans_without_room(capsys, monkeypatch):
    monkeypatch.setattr("pyggml_spec.tools.plan.free_bytes", lambda device: 1 << 20)
    for more, remedy in (((), "use a smaller"), (("--prefix-memory", "1"), "use less --prefix-memory, a smaller")):
        with pytest.raises(SystemExit):
            main(["plan", "--device", "CPU", "-c", "512", *more])
        assert f"no context fits; {remedy} quantisation" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--device", "CPU"])
    assert stop.value.code == 3 and "DOES NOT FIT" in capsys.readouterr().out


def test_plan_takes_what_run_is_given_about_memory(capsys):
    run, mine = ({p.name: p for p in command.params} for command in (run_command, plan_command))
    about = {*GROUPS["Model and device"], *GROUPS["Caches"], "draft_width", "gpu_layers", "flash_attn", "n_max"}
    # CUDA's own memory, files, adapters (as large as their files), and what takes none
    about -= {
        "graphs",
        "prefix_cache",
        "prefix_disk",
        "share_prefixes",
        "rope_scaling",
        "rope_scale",
        "lora",
        "lora_scaled",
        "lora_unapplied",
    }
    assert about & set(run) == about <= set(mine) and all(mine[name].opts == run[name].opts for name in about)

    def total(*args):
        with pytest.raises(SystemExit) as stop:
            main(["plan", "-ngl", "0", "-c", "600", "-t", "2", "--json", *args])
        seen = json.loads(capsys.readouterr().out)
        assert not stop.value.code and seen["device"] == "CPU"
        return seen["total"]

    usual = total()
    assert total("-ub", "64") < usual and total("--prefix-memory", "1") == usual + (1 << 20)
    assert total("--spec-draft-n-max", "3") == total("--draft-width", "4") < usual


def test_what_does_not_fit_is_not_loaded(tmp_path):
    target = write_qwen35(tmp_path / "t.gguf", Shape(n_ctx=1 << 23))
    with pytest.raises(PyspecError, match="nothing was loaded; the longest context that fits is"):
        check(target, device="CPU", free=1 << 20, n_ctx=1 << 20)


def test_the_check_as_a_command(pair, capsys, monkeypatch):
    from pyggml_spec.ggml import device

    files = ["-m", str(pair[0]), "-md", str(pair[1])]

    def run(*args):
        with pytest.raises(SystemExit) as stop:
            main(["plan", "--check", *files, "--device", "CPU", "-c", "256", "--draft-width", "4", *args])
        return stop.value.code, capsys.readouterr().out

    code, out = run()
    assert not code and "all" in out and out.count("0.00 %") >= 5
    code, out = run("--json", "--slots", "2")
    allocated = json.loads(out)["allocated"]
    assert not code and allocated["error"] < 0.01 and allocated["slots_memory"]["kv"] > 0
    monkeypatch.setattr(device.CountingBackend, "size_of", lambda self, buffer: 12345)  # a plan that has drifted from the engine
    code, out = run()
    assert code == 3


@pytest.mark.parametrize("slots, n_ctx", [(2, 300), (5, 1000)])
def test_slots(tmp_path, slots, n_ctx):
    """What Session.concurrent takes on top, to the byte; compute buffers as far as they are reserved at its start."""
    shape = Shape(window=12, n_ctx=1024)
    pair = write_qwen35(tmp_path / "t.gguf", shape), write_dflash(tmp_path / "d.gguf", shape)
    planned, alone = (plan(*pair, device="CPU", n_ctx=n_ctx, draft_width=8, slots=n) for n in (slots, 1))
    with ps.load(*pair, device="CPU", threads=1, n_ctx=n_ctx, draft_width=8) as session, session.batch(slots) as scheduler:
        taken = scheduler.runner.memory()
    assert planned.slots_memory == {name: n for name, n in taken.items() if name not in ("weights", "draft_weights")}
    assert planned.memory == alone.memory and planned.total == alone.total + sum(planned.slots_memory.values())
    assert planned.per_slot * slots <= planned.total - alone.total and alone.slots_memory == {} and alone.per_slot == 0
    tight = plan(*pair, device="CPU", n_ctx=n_ctx, draft_width=8, slots=slots, free=alone.total)
    assert not tight.fits and tight.largest_context < n_ctx


def test_q8_0_halves_what_long_contexts_take_where_masks_are_narrow(tmp_path, monkeypatch):
    """Asked: 45 % less than with f16 beside the weights at 132,096 tokens. A chunk's mask of as many columns took 129 MiB with either."""

    def hole(writer, tensor):
        (file,) = writer.fout
        file.truncate(file.seek(-(-file.tell() // 32) * 32 + -(-tensor.nbytes // 32) * 32))

    monkeypatch.setattr(GGUFWriter, "write_tensor_data", hole)
    monkeypatch.setattr(Tiled, "values", lambda self: self)
    shape = replace(MODELS["4B"].shape, n_vocab=1024)
    pair = [write(tmp_path / f"{write.__name__}.gguf", shape, "Q4_K") for write in (write_qwen35, write_dflash)]
    monkeypatch.setattr(Backend, "supports", lambda self, node: True)

    def beside(rows, narrow):
        monkeypatch.setattr(Backend, "narrow_masks", property(lambda self: narrow, lambda self, value: None), raising=False)
        types = dict.fromkeys(("cache_type_k", "cache_type_v", "draft_cache_type_k", "draft_cache_type_v"), rows)
        planned = plan(*pair, device="CPU", kernels="ggml", n_ctx=132096, chunk=512, draft_width=16, largest=False, free=64 << 30, **types)
        return planned.total - planned.memory["weights"] - planned.memory["draft_weights"]

    f16, q8_0, whole = beside("f16", True), beside("q8_0", True), beside("q8_0", False)
    assert q8_0 < 0.55 * f16 and whole - q8_0 > 64 << 20


@pytest.fixture
def a_gpu(monkeypatch):
    """The CPU as if it were the one GPU of a session."""
    monkeypatch.setattr(Loader, "_one_gpu", True)


def test_several_slots_of_a_gpu_compute_prompts_in_wide_chunks_where_memory_allows(pair, a_gpu):
    options = {"device": "CPU", "n_ctx": 4096, "slots": 3}
    wide, narrow, ample = (plan(*pair, **options, **more, free=64 << 30) for more in ({"chunk": 2048}, {"chunk": 512}, {}))
    assert wide.slots_memory["compute"] > narrow.slots_memory["compute"]
    assert ample.slots_memory == wide.slots_memory and ample.memory == narrow.memory, "one slot reuses prompts in whole chunks"
    assert plan(*pair, **options, free=15 << 30).slots_memory == narrow.slots_memory


def test_wide_chunks_never_cost_the_room_to_run_at_all(pair, a_gpu, monkeypatch):
    monkeypatch.setattr(loading, "WIDE_CHUNK_ROOM", 0)
    options = {"device": "CPU", "n_ctx": 4096}
    wide, narrow = (plan(*pair, **options, slots=3, chunk=chunk, free=64 << 30) for chunk in (2048, 512))
    tight = plan(*pair, **options, slots=3, free=narrow.total)
    assert tight.fits and tight.slots_memory == narrow.slots_memory and wide.total > narrow.total
    plans = Graph.plan

    def out_of_memory(graph):
        if graph.allocator.name == "prefill" and graph.measure() > room:
            raise EngineError("the backend has no memory for a compute buffer of this graph")
        plans(graph)

    with ps.load(*pair, **options, threads=1) as session:
        with session.batch(3) as engine:
            assert engine.runner.options.chunk == 2048 and session.runner.options.chunk == 512
            assert not any("chunks" in note for note in session.configuration().notes)
            room = engine.runner.graphs.compute_bytes // 2
        monkeypatch.setattr(Graph, "plan", out_of_memory)
        with session.batch(3) as engine:
            assert engine.runner.options.chunk == 512
        told = (
            "several slots compute prompts in chunks of 512 tokens: with 2048, the backend has no memory for a compute buffer of this graph"
        )
        assert told in session.configuration().notes


@pytest.mark.parametrize("window", [0, 600])
def test_memory_of_a_slot_is_what_the_page_says(tmp_path, window):
    """The formula of docs/slots.md, by which a machine is planned; allocation rounds every tensor up by less than 100 bytes."""
    n_ctx, width, slots, d = 1500, 8, 4, Shape(n_layer=8, window=window)
    pair = write_qwen35(tmp_path / "t.gguf", d), write_dflash(tmp_path / "d.gguf", d)
    planned = plan(*pair, device="CPU", n_ctx=n_ctx, draft_width=width, slots=slots).slots_memory
    rows, near, ring = 1536 + 16, 4 * (1536 + 16), 768 + 16  # of a window of 600
    row = 4 * d.n_embd * len(d.target_layers)
    waiting = row * (slots * (max(64, min(2048, (16 << 20) // (row * slots))) + width) + 1)  # rows that a drafter which rests will read
    ringed = d.draft_layers - 1 if window else 0
    layers_of = {"kv": (d.n_layer // d.every, 0, d.n_head_kv, 0), "draft_kv": (d.draft_layers - ringed, ringed, d.draft_heads_kv, waiting)}
    for name, (full, sliding, heads, more) in layers_of.items():
        values = slots * (full * rows + sliding * ring) * 2 * d.head_size * heads
        assert 0 <= planned[name] - more - near - 2 * values < 100 * (2 * (full + sliding) + 1)
    s, conv, delta_layers = d.delta_head, 4, d.n_layer - d.n_layer // d.every
    channels = s * (2 * d.delta_k + d.delta_v)
    row = channels + s * d.delta_v + 2 * d.delta_v  # the projection is fused: q, k and v, z, beta, alpha
    floats = s * s * d.delta_v + row * conv + width * (s * d.delta_v + row + channels + 2 * s * d.delta_k + 2 * d.delta_v)
    assert 0 <= planned["recurrent"] - 4 * slots * delta_layers * floats - 4 * s < 700


def test_slots_and_contexts_that_are_planned(pair, tmp_path):
    fails_with(EngineError, "number of slots is 65", plan, *pair, device="CPU", slots=65)
    # A context of 8 million tokens is planned on a machine that has no room for it.
    target = write_qwen35(tmp_path / "t.gguf", Shape(n_ctx=1 << 23))
    planned = plan(target, device="CPU", n_ctx=1 << 23, slots=64)
    assert planned.slots_memory["kv"] > 60 * planned.memory["kv"]
    assert planned.memory["kv"] >= (1 << 23) * planned.kv_per_token and 0 < planned.largest_context <= 1 << 23
    # A context of 0, which stands for it, was refused with a number that was not given.
    target = write_qwen35(tmp_path / "t.gguf", Shape(n_ctx=1 << 24))
    planned = plan(target, device="CPU", n_ctx=0)
    assert (planned.n_ctx, planned.trained_context) == (1 << 23, 1 << 24)
    with ExitStack() as stack:
        loader = Loader(target, (), LoadOptions(device="CPU", n_ctx=0), lambda part: stack.enter_context(closing(part)))
        loader.open()
        assert loader.engine_options.n_ctx == 1 << 23
        assert loader.notes == ["the context is 8388608, the longest there is: the model was trained with 16777216 tokens"]


def test_devices_commands_and_refusals(pair, tmp_path):
    plans = plan_everywhere()
    assert [p.device for p in plans] == [d.name for d in devices()]
    assert not any(isinstance(p, NoPlan) and p.device == "CPU" for p in plans)
    wrong = {GGUFError: (tmp_path / "none.gguf", None), ModelError: (pair[1], None), PairError: (DEMO_TARGET, pair[1])}
    for error, args in {**wrong, PyspecError: (None, pair[1])}.items():
        with pytest.raises(error):
            plan(*args, device="CPU")
    with pytest.raises(ContextError):
        plan(device="CPU", n_ctx=-1)
    fails_with(PairError, "wider than the block", plan, device="CPU", draft_width=17)
    shown = pyspec("plan", "--device", "CPU", "-c", "512")
    assert shown.returncode == 0 and shown.stderr == "" and b"longest context that fits: 2048" in shown.stdout
    seen = json.loads(pyspec("plan", "--device", "CPU", "--json").stdout)
    assert seen["fits"] and seen["total"] == sum(seen["memory"].values())
    assert pyspec("plan", "-m", "none.gguf", "--device", "CPU").returncode == 1
    missing = pyspec("plan", "-m", "none.gguf")
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1


@pytest.fixture
def long(tmp_path):
    """A model trained for many tokens."""
    return write_qwen3(tmp_path / "long.gguf", Shape(n_ctx=40960))


def test_the_default_context_is_the_models_own(long):
    """It was 4,096, and a question with a file got an error that named a context that was not given."""
    with ps.load(long, device="CPU", threads=1) as session:
        configuration = session.configuration()
        assert (configuration.n_ctx, configuration.context) == (40960, "the model's")
        assert configuration_line(configuration, None).count("context 40960 (the model's) |") == 1
    with ps.load(long, device="CPU", threads=1, n_ctx=512) as session:
        assert session.configuration().context == "" and "| context 512 |" in configuration_line(session.configuration(), None)
    assert plan(long, device="CPU").n_ctx == 40960


def test_memory_limits_the_default_context(long, monkeypatch):
    """A quarter of what is free stays free. The plan says beforehand what is loaded then, and with slots, what they get."""
    whole, less = (plan(long, device="CPU", n_ctx=n).total for n in (40960, 8192))
    free = (whole + less) // 2 * 4 // 3
    monkeypatch.setattr("pyggml_spec.loading.free_bytes", lambda device: free)
    monkeypatch.setattr("pyggml_spec.api.free_bytes", lambda device: free)
    planned = plan(long, device="CPU", free=free)
    assert 8192 < planned.n_ctx < 40960 and planned.n_ctx % 1024 == 0 and planned.total <= free - free // 4
    assert plan(long, device="CPU", n_ctx=planned.n_ctx + 1024).total > free - free // 4
    with ps.load(long, device="CPU", threads=1) as session:
        assert session.runner.options.n_ctx == planned.n_ctx and session.configuration().context == "of 40960: memory"
        assert f"context {planned.n_ctx} of 40960: memory |" in configuration_line(session.configuration(), None)
        with session.concurrent(4) as server:
            assert 4096 <= server.n_ctx < planned.n_ctx
        with session.concurrent(2, 512) as server:
            assert server.n_ctx == 512
    assert plan(long, device="CPU", slots=4, free=free).n_ctx < planned.n_ctx
    assert plan(long, device="CPU", free=1 << 20).n_ctx == 4096  # as before, and refused in a sentence where even that has no room
    assert plan(long, device="CPU,CPU", tensor_split=[1, 1], free=free).n_ctx < planned.n_ctx  # which both come out of


def test_a_long_context_takes_memory_where_it_is_written(long):
    """Rows of a CPU's cache were zeroed at load, and all of a slot's again between two sequences."""

    def resident() -> int:
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with ps.load(long, device="CPU", threads=1, n_ctx=512) as session, session.batch(2, 1 << 20) as scheduler:
        rows, before = scheduler.runner.memory()["kv"], resident()
        assert rows > 256 << 20
        for _ in range(2):
            streams = [scheduler.submit([1, 2, 3], GenerationOptions(4, PLAIN)) for _ in range(2)]
            scheduler.run()
        assert streams[0].tokens == streams[1].tokens and resident() - before < rows // 4


@pytest.mark.parametrize("ring", [0, 4608], ids=["linear", "rings of windows"])
@pytest.mark.parametrize("most", [32768, 40000, 256, 100])
def test_a_context_takes_few_counts(ring, most):
    """Two counts give bytes per token. An exact answer is counted, and the next context; no engine is counted at every power of two."""

    def taken(n_ctx: int) -> list[int]:
        if n_ctx > 36000:
            raise ContextError("masks")
        counted.append(n_ctx)
        return [1000 + 7 * n_ctx, 500 + 50 * min(n_ctx, ring)]

    for share in (-1, 0.001, 0.3, 0.5, 0.77, 0.999, 1):
        rooms, counted = [1000 + int(share * 7 * most), 1 << 40], []
        want = max((n for n in (*range(256, most, 256), most) if n <= 36000 and 1000 + 7 * n <= rooms[0]), default=0)
        assert longest(taken, rooms, most) == want and len(counted) <= (4 if most <= 36000 else 9), counted
        counted.clear()
        near = longest(taken, rooms, min(most, 36000), exact=False)
        assert len(counted) <= 2 and abs(near - min(want, 36000)) <= 256
