"""Prompts with experts in host memory, computed on the device with copies of them: the bits of a model that is wholly there, and memory that is
taken only where it fits. One CPU plays the device, another the host."""

import sys
from contextlib import contextmanager

import numpy as np
import pytest
from ggml.kernel_graphs import LEVELS
from models.test_placement import WRITERS
from pairs import write_pair
from random_gguf.archs import write_gemma4, write_glm_dsa, write_gpt_oss, write_qwen35moe
from random_gguf.model import Shape, write_dflash, write_qwen35

import pyggml_spec as ps
from pyggml_spec.cache.prefix import layout_of
from pyggml_spec.engine.batch import Prefill, Verify
from pyggml_spec.engine.sequence import SPECULATIVE, GenerationOptions
from pyggml_spec.errors import EngineError
from pyggml_spec.ggml import weight_stream
from pyggml_spec.ggml.device import Backend
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models import weights as weights_module
from pyggml_spec.models.placement import ExpertOptions, Routing, routed_layers
from pyggml_spec.models.registry import open_target
from pyggml_spec.models.weights import Weights
from pyggml_spec.multi_device import offload as copying

pytestmark = pytest.mark.slow
IDS = np.random.default_rng(4).integers(0, 256, 150).tolist()
ALL = ExpertOptions(-1)


@contextmanager
def loaded(target, draft=None, experts=ALL, rows=1, **more):
    more = {"device": "CPU", "threads": 1, "n_ctx": 256, "chunk": 64, "kernels": "ggml", "prefix_memory": 0} | more
    more |= {} if draft else {"spec": ["none"]}  # or else n-grams have a note of their own
    with ps.load(target, draft, experts=experts, offload_prompts=rows, **more) as session:
        yield session


def counts(session):
    """Bytes copied, and chunks that computed with copies."""
    found = [stream.counts() for stream in session.target.weights.streams]
    return [(count.bytes, count.chunks) for count in found]


def seen(session, ids=IDS):
    """The logits after prompts of one, two and three chunks, and text."""
    out = []
    for end in (1, 40, 65, len(ids)):
        session.runner.reset()
        session.runner.prefill(ids[:end])
        out.append(session.runner.candidates(0)[1].copy())
    return np.array(out), session.generate(ids[:90], 12, ignore_end=True)[0]


def resident(path, **more):
    """What a model gives all of whose experts are on the device, where none is repacked."""
    with loaded(path, experts=ExpertOptions(count=True), rows=None, **more) as session:
        found = seen(session)
        assert np.isfinite(found[0]).all()
        return found


def check_same(path, want, experts, hosted, **more):
    with loaded(path, experts=experts, **more) as session:
        found = seen(session)
        np.testing.assert_array_equal(found[0], want[0])
        assert found[1] == want[1]
        (stream,) = session.target.weights.streams
        assert (len(stream.layers), stream.counts().chunks) == (hosted, 1 + 1 + 2 + 3 + 2)


@pytest.mark.parametrize("arch", ["qwen35moe-joined", "laguna", "gemma4", "deepseek2", "glm-dsa"])
def test_bits_are_those_of_experts_on_the_device(tmp_path, arch):
    path = WRITERS[arch](tmp_path / "t.gguf", Shape(), "Q4_K")
    with GGUFFile(path) as file:
        hosted = len(routed_layers(open_target(file)))
    check_same(path, resident(path), ALL, hosted)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K"])
def test_own_kernels_compute_with_copies_too(tmp_path, quant):
    path = write_qwen35moe(tmp_path / "t.gguf", Shape(), quant)
    check_same(path, resident(path, kernels=None), ALL, 4, kernels=None)


@pytest.mark.parametrize("quant", ["F32", "MXFP4"])
def test_wherever_the_others_are(tmp_path, quant):
    path, profile = write_gpt_oss(tmp_path / "t.gguf", Shape(), quant), tmp_path / "p.json"
    profile.write_text(Routing("t", 1, dict.fromkeys(range(4), np.arange(8))).to_json())
    want = resident(path)
    for experts, hosted in ((ExpertOptions(1), 1), (ExpertOptions(2), 2), (ExpertOptions(0, 0.5, profile), 4)):
        check_same(path, want, experts, hosted)
    if quant == "F32":
        with loaded(path, experts=None, rows=None) as session:
            np.testing.assert_array_equal(seen(session)[0], want[0])


def test_wide_and_narrow_chunks(tmp_path):
    """After a chunk that another one follows, its first layers are on their way; two layers and fewer are copied once for all."""
    path = write_qwen35moe(tmp_path / "t.gguf", Shape(n_layer=5))
    for layers, first, then in ((1, 1, 0), (2, 2, 0), (3, 3, 2), (5, 5, 5)):
        with loaded(path, experts=ExpertOptions(layers)) as session:
            (stream,) = session.target.weights.streams
            one = stream.layer_bytes // layers
            session.runner.prefill(IDS[:60])
            assert counts(session) == [(first * one, 1)]
            session.runner.reset()
            session.runner.prefill(IDS[:60])
            assert counts(session) == [((first + then) * one, 2)]
            session.runner.reset()
            session.runner.prefill(IDS)
            assert counts(session) == [((first + 4 * then) * one, 5)]
    path = write_qwen35moe(tmp_path / "t.gguf")
    with loaded(path, rows=64) as session:
        session.runner.prefill(IDS[:130])  # 64, 64 and 2
        assert counts(session)[0][1] == 2
        assert session.runner.expert_counts()["chosen"] == 2 * session.target.experts.n_used * session.target.n_layer
        assert "chunks of prompts of 64 rows or more compute on CPU with copies of the experts of 4 layers" in " ".join(session.notes)


@pytest.mark.parametrize("cuts", [(1,), (2, 3)])
def test_several_devices(tmp_path, cuts):
    path = write_qwen35moe(tmp_path / "t.gguf", Shape(), "Q8_0")
    with loaded(path, rows=None) as session:
        want = seen(session)
    bounds = [0, *cuts, 4]
    shares = [b - a for a, b in zip(bounds, bounds[1:])]  # noqa: RUF007
    with loaded(path, device=",".join(["CPU"] * len(shares)), tensor_split=shares) as session:
        found = seen(session)
        assert [chunks for _, chunks in counts(session)] == [9] * len(shares)
        assert sum(stream.nbytes for stream in session.target.weights.streams) > 0
    np.testing.assert_array_equal(found[0], want[0])
    assert found[1] == want[1]


def test_slots_and_prefixes(tmp_path):
    shape = Shape()
    target, draft = write_qwen35moe(tmp_path / "t.gguf", shape, "Q8_0"), write_dflash(tmp_path / "d.gguf", shape, "Q8_0")
    texts, layouts = [], []
    for rows in (None, 1, 33):
        with loaded(target, draft, rows=rows, draft_width=4, prefix_memory=1 << 24) as session:
            layouts.append(layout_of(session.runner, dict.fromkeys(("pyggml_spec", "llama_cpp_python", "ggml_commit"), "")))
            texts.append([session.generate(IDS[:end], 10, ignore_end=True)[0] for end in (70, 140, 140)])
            with session.batch(3) as scheduler:
                streams = [scheduler.submit(IDS[: 50 + 30 * i], GenerationOptions(10, SPECULATIVE)) for i in range(4)]
                scheduler.run()
                texts[-1] += [list(stream.tokens) for stream in streams]
            if rows is not None:
                assert counts(session)[0][1] > 3
    assert texts[0] == texts[1] == texts[2] and len(set(layouts)) == 3


def test_pinned_memory(tmp_path, monkeypatch):
    """Where the device offers it, the host's experts are read into it, and it is what copies are made from."""
    path = write_qwen35moe(tmp_path / "t.gguf")
    with loaded(path, rows=None) as session:
        assert "stay mapped" in session.notes[0] and not session.target.weights.pinned
        want = seen(session)
    offered = {"ggml_backend_dev_host_buffer_type": lambda device: lib.ggml_backend_cpu_buffer_type()}
    monkeypatch.setattr(weights_module, "lib", Instead(lib, offered))
    with loaded(path) as session:
        assert "of the file are in pinned memory" in session.notes[0]
        np.testing.assert_array_equal(seen(session)[0], want[0])
    with loaded(path, rows=None) as session:
        assert not session.target.weights.pinned


class Instead:
    """Another thing with some of its attributes replaced."""

    def __init__(self, of, attributes):
        self._of, self._attributes = of, attributes

    def __getattr__(self, name):
        return self._attributes.get(name) or getattr(self._of, name)


def test_copies_that_are_padded_or_have_no_room(tmp_path, monkeypatch):
    more, size = 512, lib.ggml_backend_buft_get_alloc_size
    padded = {"ggml_backend_buft_get_alloc_size": lambda buft, tensor: size(buft, tensor) + more}
    monkeypatch.setattr(weight_stream, "lib", Instead(lib, padded))
    with loaded(write_qwen35moe(tmp_path / "t.gguf", Shape(), "Q8_0")) as session:
        (stream,) = session.target.weights.streams
        lib.ggml_backend_buffer_clear(stream.buffer, 0xFF)
        session.runner.prefill(IDS[:60])
        for layer in list(stream.layers)[-2:]:  # what is there now
            for tensor in stream.layers[layer].values():
                nbytes = lib.ggml_nbytes(tensor)
                assert bytes(ffi.buffer(tensor.data, nbytes + more))[nbytes:] == bytes(more)
    path = write_qwen35moe(tmp_path / "t.gguf")
    with loaded(path, rows=None) as session:
        want, memory = seen(session), session.runner.memory()["weights"]
    no_room_for_copies(monkeypatch)
    with loaded(path) as session:
        assert "prompts of experts in host memory are computed by the CPU: copies of two layers need" in session.notes[-1]
        assert session.runner.memory()["weights"] == memory and counts(session) == []
        np.testing.assert_array_equal(seen(session)[0], want[0])


def no_room_for_copies(patch) -> None:
    allocate = Backend.allocate

    def allocated(self, ctx, *more):
        return ffi.NULL if "weight_stream" in sys._getframe(1).f_code.co_filename else allocate(self, ctx, *more)

    patch.setattr(Backend, "allocate", allocated)


def test_an_engine_without_room_for_copies_goes_without(tmp_path, monkeypatch):
    path = write_qwen35moe(tmp_path / "t.gguf")
    from pyggml_spec import loading

    class Tight(loading.ModelRunner):
        def __init__(self, backend, target, drafter, options):
            if target.weights.streams:
                raise EngineError("there is no memory for a compute buffer")
            super().__init__(backend, target, drafter, options)

    monkeypatch.setattr(loading, "ModelRunner", Tight)
    with loaded(path) as session:
        assert session.notes[-1].endswith("with copies of two layers on the device, there is no memory for a compute buffer")
        assert not session.target.weights.streams


@pytest.mark.parametrize("faster", [32, 64, None])
def test_copies_are_taken_from_where_they_are_faster(tmp_path, monkeypatch, faster):
    """Measured once: the next session knows. What never pays gives its memory back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, asked = write_qwen35moe(tmp_path / "t.gguf"), []

    def cost(engine, rows, copies):
        asked.append((rows, copies))
        return 20.0 if copies else 30.0 if faster is not None and rows >= faster else 10.0

    monkeypatch.setattr(copying, "chunk_cost", cost)
    monkeypatch.setattr(copying.Waiting, "__exit__", lambda *_: None)
    for _ in range(2):
        with loaded(path, rows="auto") as session:
            streams, note = session.target.weights.streams, session.notes[-1]
            memory = session.runner.memory()["weights"]
            session.runner.prefill(IDS[:64])
            if faster is None:
                assert not streams and "a chunk of 64 rows takes 10 ms there, and 20 ms with copies on CPU" in note
            else:
                assert streams[0].rows == faster and f"of {faster} rows or more" in note
                assert f"{faster} rows take 20 ms, by the CPU 30 ms" in note and counts(session)[0][1] == 1
    assert asked == [(rows, copies) for rows in (32, 64) if rows <= (faster or 64) for copies in (False, True)]
    with loaded(path, rows=None) as session:
        assert (session.runner.memory()["weights"] == memory) == (faster is None)


def test_what_a_chunk_takes_is_measured_in_both_ways(tmp_path):
    with loaded(write_qwen35moe(tmp_path / "t.gguf"), rows="auto") as session:
        if not session.target.weights.streams:
            session.target.weights.open_stream(1)
        before = counts(session)[0][1]
        assert copying.chunk_cost(session.runner, 32, False) > 0 and counts(session)[0][1] == before
        assert copying.chunk_cost(session.runner, 32, True) > 0 and counts(session)[0][1] == before + 1 + copying.RUNS


@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: there are ggml's only")
def test_rows_of_other_kernels_of_the_host_are_not_mixed(tmp_path):
    path, seen = write_qwen35moe(tmp_path / "t.gguf"), set()
    for kernels in ("ggml", "native"):
        with loaded(path, rows=None, kernels=kernels) as session:
            lines = layout_of(session.runner, dict.fromkeys(("pyggml_spec", "llama_cpp_python", "ggml_commit"), "")).splitlines()
            seen.add(next(line for line in lines if line.startswith("experts")))
    assert len(seen) == 2


def layers_of_the_cpu(path, count, rows=1, **more):
    """A session whose first ``count`` layers of four are one CPU's, the others another's."""
    return loaded(path, more.pop("draft", None), None, rows, device="CPU,CPU", tensor_split=[count, 4 - count], **more)


CUT = {
    "qwen35": write_qwen35, "gpt-oss": write_gpt_oss, "deepseek2": WRITERS["deepseek2"],
    "glm-dsa": lambda *args: write_glm_dsa(*args, full=(True, False, True, False)),
    "gemma4": lambda path, *more: write_gemma4(path, *more, shared=False),
}  # fmt: skip


@pytest.mark.parametrize("arch", CUT)
def test_layers_of_the_cpu_have_the_bits_of_the_device(tmp_path, arch):
    """After every chunk their rows and states are at home again, for the next one and for what is generated. BF16, which no CPU repacks."""
    path = CUT[arch](tmp_path / "t.gguf", Shape(), "BF16")
    with loaded(path, experts=None, rows=None) as session:
        want = seen(session)
    for count in (1, 3) if arch == "qwen35" else (3,):
        with layers_of_the_cpu(path, count) as session:
            found = seen(session)
            (stream,) = session.target.weights.streams
            assert (len(stream.layers), stream.counts().chunks) == (count, 1 + 1 + 2 + 3 + 2)
            assert f"compute on CPU with copies of {len(stream.layers)} layer" in session.notes[-1] and "of the CPU (" in session.notes[-1]
        np.testing.assert_array_equal(found[0], want[0])
        assert found[1] == want[1]


@pytest.mark.parametrize("kernels", [None, "ggml"])
@pytest.mark.parametrize("apart", [False, True], ids=["fused", "apart"])
def test_copies_are_fused_as_their_layers_are(tmp_path, monkeypatch, apart, kernels):
    """A state's history keeps fused projections whole. AMX takes gates of 48 outputs in no fused matrix: its rows were copied to wider ones, and
    ggml ended the process. Three heads are what ggml's kernels of a CPU do not fuse, and our own do."""
    path, fusable = write_qwen35(tmp_path / "t.gguf", Shape(every=2, n_layer=4, delta_k=1, delta_v=3), "BF16"), Weights.fusable
    monkeypatch.setattr(Weights, "fusable", lambda self, parts: 0 if apart and type(self) is Weights else fusable(self, parts))
    with layers_of_the_cpu(path, 3, kernels=kernels) as session:
        weights = session.target.weights
        for name in session.target.groups():
            if int(name.split(".")[1]) < 3:
                assert [run.rows for run in weights.offloaded.group(name).runs] == [run.rows for run in weights.parts[0].group(name).runs]
        session.generate(IDS, 8, ignore_end=True)


def test_rings_of_the_cpus_layers(tmp_path):
    path, ids = write_gpt_oss(tmp_path / "t.gguf", Shape(), "BF16"), IDS * 3
    found = []
    for rows in (None, 32):
        with layers_of_the_cpu(path, 3, rows, n_ctx=700, chunk=32) as session:
            assert session.runner.resources.kv.ring == 256
            session.runner.prefill(ids[:437])  # 21 rows more than whole chunks, after more than one turn of the ring
            found.append((session.runner.candidates(0)[1].copy(), session.generate(ids[:300], 12, ignore_end=True)[0]))
            assert rows is None or counts(session)[0][1] == 13 + 9
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_drafters_and_prefixes_with_copies_of_layers(tmp_path):
    """The drafter reads what layers gave that are copies; prompts begin where others ended; several slots' prompts go the same way, each's own."""
    shape = Shape()
    target, draft = write_qwen35(tmp_path / "t.gguf", shape, "BF16"), write_dflash(tmp_path / "d.gguf", shape, "Q8_0")
    texts, drafts = [], []
    for rows in (None, 33):
        with layers_of_the_cpu(target, 3, rows, draft=draft, draft_width=4, prefix_memory=1 << 24) as session:
            engine, waited = session.runner, []
            engine.prefill(IDS, stop=lambda waited=waited, parts=engine.devices: waited.append(parts.under_way is None))
            drafts.append(engine.fused_step(4).tokens.tolist())
            assert rows is None or waited == [True] * 3
            for key, step in engine.graphs.steps().items():
                if key.streamed:  # hidden rows go to the device, and nothing comes from where no layer was computed
                    assert [hop[:2] for hop in step.graph.hops] == [(0, 1)]
            texts.append([session.generate(IDS[:end], 10, ignore_end=True)[0] for end in (70, 140, 140)])
            texts[-1].append(session.generate(IDS[:100], 10, mode="plain", ignore_end=True)[0])
            before = counts(session)
            with session.batch(3) as scheduler:
                streams = [scheduler.submit(IDS[5 * i : 50 + 30 * i], GenerationOptions(10, SPECULATIVE)) for i in range(5)]
                scheduler.run()
                texts[-1] += [list(stream.tokens) for stream in streams]
            assert rows is None or counts(session)[0][1] > before[0][1] + 3 > 6
    assert texts[0] == texts[1] and drafts[0] == drafts[1]


def test_slots_of_the_cpus_layers(tmp_path):
    path, found = write_qwen35(tmp_path / "t.gguf", Shape(every=2), "BF16"), []
    for rows in (None, 33):
        with layers_of_the_cpu(path, 3, rows) as session, session.batch(3) as scheduler:
            engine, seen = scheduler.runner, []

            def step(engine=engine, seen=seen, **work):
                work = {int(name[1:]): item for name, item in work.items()}
                engine.step(work)
                for slot in work:
                    seen.append(engine.candidates(0, slot)[1].copy())

            def decode(slot, token, engine=engine, step=step):
                engine.choose(token, slot)
                step(**{f"s{slot}": Verify()})
                engine.accept(1, token, slot)

            for _ in range(3):
                engine.admit(drafting=False, candidates=None)
            step(s0=Prefill(IDS[:64]), s2=Prefill(IDS[10:50]))
            step(s1=Prefill(IDS[20:84]))
            for slot in range(3):
                decode(slot, 7 + slot)
            step(s0=Prefill(IDS[64:128]), s1=Prefill(IDS[84:140]))
            engine.release(1)
            assert engine.admit(drafting=False, candidates=None) == 1
            step(s1=Prefill(IDS[5:60]))
            for slot in (2, 1, 0):
                decode(slot, 70 + slot)
            found.append(np.array(seen))
            assert rows is None or counts(session)[0][1] == 4
    np.testing.assert_array_equal(*found)


def test_nothing_of_a_sequence_of_nan_stays_in_the_rows_of_guests(tmp_path):
    """Masked rows of NaN are none for a CPU, and poison attention on a GPU."""
    with layers_of_the_cpu(write_qwen35(tmp_path / "t.gguf", Shape(every=2), "BF16"), 3) as session:
        engine, embeddings = session.runner, session.target.weights.parts[0]["token_embd.weight"]
        guests = engine.devices.offload
        lib.ggml_backend_tensor_memset(embeddings, 0xFF, 200 * embeddings.nb[1], embeddings.nb[1])

        def finite():
            read = []
            for tensor in (tensor for layer in guests.kv.layers for tensor in layer.stored):
                read.append(np.empty(lib.ggml_nbytes(tensor) // 2, np.float16))
                lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(read[-1]), 0, read[-1].nbytes)
            return all(np.isfinite(rows).all() for rows in read)

        with pytest.raises(EngineError, match="NaN"):
            engine.prefill([*range(40), *[200] * 10])
        assert not finite()
        engine.reset()
        assert finite()


def test_chunks_that_are_narrow_and_experts_of_the_host(tmp_path):
    path, found = write_qwen35(tmp_path / "t.gguf", Shape(), "BF16"), []
    for rows in (None, 64):
        with layers_of_the_cpu(path, 2, rows) as session:
            engine = session.runner
            for first, end in ((0, 64), (64, 84), (84, 148), (148, 150)):
                engine.prefill(IDS[first:end])
            found.append(engine.candidates(0)[1].copy())
            assert rows is None or counts(session)[0][1] == 2
    np.testing.assert_array_equal(*found)
    path = write_qwen35moe(tmp_path / "t.gguf", Shape(), "BF16")
    with loaded(path, rows=None, device="CPU,CPU", tensor_split=[2, 2]) as session:
        want = seen(session)
    with loaded(path, device="CPU,CPU", tensor_split=[2, 2]) as session:
        assert session.target.weights.offloaded is None and len(session.target.weights.streams) == 2
        np.testing.assert_array_equal(seen(session)[0], want[0])


def test_only_what_was_written_since_is_copied_to_guests(tmp_path):
    """Every chunk of a prompt of 4,096 tokens copied all rows before it, 2,048 on average. Blocks, rolled back ones, copies of a sequence and sequences
    that begin anew write rows at home; what the device has of them is not read."""
    path, draft, found = write_qwen35(tmp_path / "t.gguf", Shape(every=2), "BF16"), write_dflash(tmp_path / "d.gguf", Shape(), "Q8_0"), []
    for rows in (None, 33):
        with layers_of_the_cpu(path, 3, rows, draft=draft, draft_width=4) as session:
            engine, seen, brought = session.runner, [], []

            def chunk(first, count, engine=engine, seen=seen, brought=brought):
                before = engine.devices.offload.brought if engine.devices.offload is not None else 0
                engine.prefill(IDS[first : first + count])
                seen.append(engine.candidates(0)[1].copy())
                brought.append(engine.devices.offload.brought - before if engine.devices.offload is not None else 0)

            chunk(0, 64)
            chunk(64, 36)
            chunk(0, 20)  # by the CPU
            chunk(20, 40)
            snapshot = engine.snapshot()
            engine.verify_step([5, 6, 7])
            engine.accept(3, 8)
            engine.rollback(engine.cursor.committed - 2)
            chunk(50, 40)
            engine.verify_step([9])
            engine.rollback(engine.cursor.committed)
            chunk(10, 5)
            engine.restore(snapshot)
            chunk(70, 36)
            chunk(100, 34)
            engine.reset()
            chunk(30, 40)
            engine.reset()
            for first in (80, 90):
                chunk(first, 20)
            chunk(5, 40)  # after as many other tokens as copies have
            engine.reset()
            chunk(0, 140)  # three passes
            snapshot.close()
            found.append(np.array(seen))
            if rows is not None:
                guests = engine.devices.offload
                row, states = guests.kv.layers[0].k.nb[1] + guests.kv.layers[0].v.nb[1], brought[0]
                assert len(guests.kv.layers) == 1 and states > 0
                # a snapshot of 160 tokens is brought whole; of one token of the block's three, and of the chunk's before
                assert brought[:9] == [states, 0, 0, states + 20 * row, states + row, 0, states + 160 * row, 0, states]
                assert brought[9:] == [0, 0, states + 40 * row, states]
    np.testing.assert_array_equal(*found)


def test_layers_that_no_memory_is_left_for(tmp_path, monkeypatch):
    path = write_qwen35(tmp_path / "t.gguf", Shape(), "BF16")
    with layers_of_the_cpu(path, 2, None) as session:
        want, memory = seen(session), session.runner.memory()

    def check(words, rows=1):
        with layers_of_the_cpu(path, 2, rows) as session:
            assert session.notes[-1].startswith("prompts of layers in host memory are computed by the CPU: ") and words in session.notes[-1]
            assert session.runner.memory() == memory and counts(session) == [] and session.runner.devices.offload is None
            np.testing.assert_array_equal(seen(session)[0], want[0])

    with monkeypatch.context() as m:
        no_room_for_copies(m)
        check("copies of two layers need")
    with monkeypatch.context() as m:
        m.setattr(copying, "free_bytes", lambda device: 1 << 20)
        check("MiB of host memory in addition, of which 1 are free")
    with monkeypatch.context() as m:
        m.setattr(copying, "chunk_cost", lambda engine, rows, copies: 2.0 if copies else 1.0)
        m.setenv("XDG_CACHE_HOME", str(tmp_path))
        check("a chunk of 64 rows takes 1 ms there, and 2 ms with copies on CPU", "auto")


def test_refusals(tmp_path):
    routed, (dense, _) = write_qwen35moe(tmp_path / "r.gguf"), write_pair(tmp_path, "qwen35")
    for path, experts, rows, words in (
        (routed, None, 1, "`offload_prompts` is for routed experts and layers that lie in host memory, and none do"),
        (routed, ExpertOptions(0, 1.0), 1, "and none do"),
        (routed, ExpertOptions(count=True), 1, "and none do"),
        (dense, None, "auto", "and none do"),
        (routed, ALL, 65, "no chunk of a prompt has the 65 rows of `offload_prompts`: a `chunk` has 64; use fewer"),
        (routed, ALL, 0, "has to be a whole number from 1 to"),
        (routed, ALL, "always", "`offload_prompts`, rows of a chunk if it is not 'auto', is 'always'"),
    ):
        with pytest.raises(EngineError, match=words), loaded(path, experts=experts, rows=rows):
            pass
