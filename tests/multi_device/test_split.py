"""Layers split over several devices give the bits of one device: no sum changes, rows are only copied. Here every device is the CPU."""

import json
from contextlib import contextmanager
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from architectures import FAST, TARGETS, thorough
from models.test_archs import LEAN
from pairs import write_pair
from random_gguf.archs import write_gemma4, write_glm_dsa, write_qwen35moe
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape, write_dflash
from random_gguf.mtp import write_mtp_target
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.errors import DeviceError, EngineError, PairError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.placement import ExpertOptions
from pyggml_spec.models.registry import open_target
from pyggml_spec.multi_device.devices import halves
from pyggml_spec.multi_device.split import cuts_by, segments_of, split
from pyggml_spec.tools.plan import check, plan

pytestmark = pytest.mark.slow
PROMPT = np.random.default_rng(2).integers(0, 256, 75).tolist()
DRAFTS = np.random.default_rng(3).integers(0, 256, 64).tolist()


@contextmanager
def loaded(target, draft=None, cuts=(), **more):
    """The model cut before these layers."""
    with GGUFFile(target) as file:
        bounds = [0, *cuts, open_target(file).n_layer]
    shares = [b - a for a, b in zip(bounds, bounds[1:])] if cuts else None  # noqa: RUF007
    more = {"threads": 1, "n_ctx": 512, "draft_width": 16 if draft or "spec" in more else None, "prefix_memory": 0} | more
    with ps.load(target, draft, device=",".join(["CPU"] * (len(cuts) + 1)), tensor_split=shares, **more) as session:
        assert [s.first for s in session.target.weights.segments[1:]] == list(cuts)
        yield session


def seen(engine, rows):
    return [engine.candidates(row)[1].copy() for row in range(rows)]


def trace(session, widths):
    """What comes out of a prompt, plain tokens, and blocks of these widths of which more or fewer rows count."""
    engine, out = session.runner, []
    engine.reset()
    out.append(np.array([engine.prefill(PROMPT)]))
    for n, width in enumerate(widths):
        drafts = [engine.verify_step(DRAFTS[n : n + width - 1])] if width > 1 else []
        for result in drafts:
            out += [result.ids, *seen(engine, width)]
            engine.accept(1 + n % width, int(result.ids[n % width]))
        if session.drafter is not None and width > 1:
            result = engine.fused_step(width)
            out += [result.tokens, result.ids, *seen(engine, width)]
            assert result.draft_finite and result.target_finite
            engine.accept(width - n % width, int(result.ids[-1 - n % width]))
            if n % 3 == 1:
                engine.rollback(engine.rollback_range()[0])
        result = engine.plain_step()
        out += [result.ids, *seen(engine, 1)]
        engine.accept(1, int(result.ids[0]))
    out.append(engine.logits(PROMPT[:37]))
    return out


def equal(one, other):
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


HYBRID_CUTS = [cuts for n in (1, 2, 3) for cuts in combinations((1, 2, 3), n)]


def test_cuts_and_what_crosses_them(tmp_path):
    target, draft = write_pair(tmp_path, "qwen35")
    widths = list(range(1, 17))
    with loaded(target, draft) as session:
        alone = trace(session, widths)
    for cuts in HYBRID_CUTS:
        with loaded(target, draft, cuts) as session:
            assert equal(alone, trace(session, widths)), cuts
    target = write_gemma4(tmp_path / "t.gguf", Shape(n_layer=8), n_own=4)
    with loaded(target) as session:
        last, alone = session.target.last_cut(), trace(session, (1, 5))
        assert last == 2
        with pytest.raises(EngineError, match=f"before layer {last + 1}: later layers read rows"):
            segments_of(session.target, [session.backend] * 2, [last + 1])
    for cut in range(1, last + 1):
        with loaded(target, None, (cut,)) as session:
            assert equal(alone, trace(session, (1, 5))), cut
    # The hidden rows, and those captured before the cut; what is captured at the cut is there already. Ids of drafts go to the first device.
    target, draft = write_pair(tmp_path, "qwen35")  # captures the inputs of layers 1, 2 and 3
    rows = 4 * 4 * 256
    with loaded(target, draft, (2,), draft_width=4) as session:
        engine = session.runner
        engine.prefill(PROMPT)
        assert engine.step_graph("verify", 4).hops == [(0, 1, rows), (0, 1, rows)]
        assert engine.step_graph("fused", 4).hops == [(0, 1, 4 * 4), (1, 2, rows), (1, 2, rows)]
    target, found = write_glm_dsa(tmp_path / "t.gguf", Shape(), "Q8_0", full=(True, False, True, False)), []
    for cuts in ((), (1, 2)):
        with loaded(target, cuts=cuts, draft_width=8, spec=["suffix"]) as session:
            found.append(trace(session, (1, 7)) + lanes_trace(session, bool(cuts), 2))
            masks = [hop for hop in session.runner.step_graph("verify", 4).hops if hop[-1] == 2 * 4 * 256] if cuts else []
    assert equal(*found) and len(masks) == 1


@pytest.mark.parametrize("arch, kernels", [*((arch, "native") for arch in thorough()), *((arch, "ggml") for arch in FAST)])
def test_every_kind_of_layer(tmp_path, arch, kernels):
    more = {"shared": False} if arch == "gemma4" else {}
    shape = Shape(**LEAN)
    target, draft = TARGETS[arch](tmp_path / "t.gguf", shape, "Q8_0", **more), write_dflash(tmp_path / "d.gguf", shape, "Q8_0")
    with loaded(target, draft, kernels=kernels) as session:
        alone, last = trace(session, (1, 2, 7)), session.target.last_cut()
    for cut in {1, last}:
        with loaded(target, draft, (cut,), kernels=kernels) as session:
            assert equal(alone, trace(session, (1, 2, 7))), cut


@pytest.mark.parametrize("own", [(), ("embedding", "norm", "head")], ids=["borrowed ends", "own ends"])
def test_chains_of_drafts(tmp_path, own):
    target = write_mtp_target(tmp_path / "t.gguf", Shape(), own=own)
    with loaded(target, target, draft_width=6) as session:
        assert session.drafter.chained
        alone = trace(session, (1, 2, 4, 6))
    with loaded(target, target, (1, 3), draft_width=6) as session:
        assert equal(alone, trace(session, (1, 2, 4, 6)))


def of_slots(session, slots=3):
    """Tokens of three sequences in steps that prompts, drafts and plain tokens share."""
    engine, out = ModelRunner(session.backend, session.target, session.drafter, EngineOptions(n_ctx=256, width=6, slots=slots)), []
    try:
        for _ in range(slots):
            engine.admit()
        works = [
            {0: Prefill(PROMPT[:40]), 2: Prefill(PROMPT[5:9])},
            {1: Prefill(PROMPT[:3]), 2: Verify()},
            {0: Draft(6), 1: Verify(DRAFTS[:3]), 2: Verify()},
            {0: Verify(), 2: Draft(3)},
            {0: Draft(6), 1: Draft(6), 2: Draft(6)},
            {1: Verify()},
        ]
        for work in works:
            results = engine.step(work)
            for slot, result in results.items():
                out += [result.ids, *(engine.candidates(row, slot)[1].copy() for row in range(len(result.ids)))]
                if not isinstance(work[slot], Prefill):
                    engine.accept(1, int(result.ids[0]), slot)
        copy = engine.snapshot(2)
        engine.step({2: Prefill(PROMPT[:6])})
        engine.restore(copy, 1)
        out.append(engine.step({1: Verify()})[1].ids)
        copy.close()
    finally:
        engine.close()
    return out


@pytest.mark.parametrize("name", ["qwen35", "granitehybrid", "mtp", "laguna"])
def test_slots_and_snapshots(tmp_path, name):
    target, draft = write_pair(tmp_path, name)
    with loaded(target, draft, draft_width=2) as session:
        alone = of_slots(session)
    for cuts in ((2,), (1, 3)):
        with loaded(target, draft, cuts, draft_width=2) as session:
            assert equal(alone, of_slots(session)), cuts


def test_rings_and_prefixes_on_devices(tmp_path):
    ids, seen = np.random.default_rng(5).integers(0, 256, 900).tolist(), []
    target, draft = write_pair(tmp_path, "laguna", Shape(window=12))
    for cuts in ((), (1,), (2,)):
        with loaded(target, draft, cuts, n_ctx=1024, chunk=64, draft_width=4) as session:
            assert session.runner.kv.ring and session.runner.draft_kv.ring and (not cuts or len(session.runner.kv.mask_bases) == 2)
            seen.append(trace(session, (1, 4)) + list(session.runner.logits(ids)[-3:]))
    assert all(equal(seen[0], other) for other in seen[1:])
    # The second prompt continues after a state that is kept on every device, the third session after files of the second.
    target, draft = write_pair(tmp_path, "qwen35")
    ids, texts = np.random.default_rng(5).integers(0, 256, 200).tolist(), []
    for cuts in ((), (2,)):
        for again in (False, True):
            folder = tmp_path / f"prefix{len(cuts)}"
            with loaded(target, draft, cuts, chunk=32, prefix_cache=folder, prefix_memory=1 << 24) as session:
                for end in (160, 200):
                    result = session.generate(ids[:end], 12, ignore_end=True)
                    texts.append((end, result[0]))
                    assert result[1].reused_tokens > 0 or (end == 160 and not again)
    assert len(set(texts)) == 2


@pytest.mark.parametrize("residency", [None, 0.5])
def test_experts_in_host_memory(tmp_path, residency):
    target = write_qwen35moe(tmp_path / "t.gguf", Shape(), "Q8_0")
    counts, profile = {str(layer): list(range(8, 0, -1)) for layer in range(4)}, tmp_path / "p.json"
    profile.write_text(json.dumps({"format": "pyggml_spec experts 1", "model": "t", "tokens": 1, "layers": counts}))
    experts = ExpertOptions(2 if residency is None else 0, residency, profile)
    with loaded(target, experts=experts) as session:
        alone, chosen = trace(session, (1, 4)), session.runner.expert_counts()
    for cuts in ((1,), (2,), (1, 3)):
        with loaded(target, None, cuts, experts=experts) as session:
            assert equal(alone, trace(session, (1, 4))), cuts
            counts = session.runner.expert_counts()
            assert (counts["chosen"], counts["hits"]) == (chosen["chosen"], chosen["hits"])
    with loaded(target, None, (2,), experts=experts) as session, session.batch(4, groups=2) as scheduler:
        assert not scheduler.runner.devices.groups


def test_drafts_and_schedulers_over_devices(tmp_path):
    target, _ = write_pair(tmp_path, "qwen35")
    texts = []
    for cuts in ((), (2,)):
        with loaded(target, None, cuts, spec=["suffix"], draft_width=8) as session:
            texts.append(session.generate(PROMPT * 2, 60, ignore_end=True)[0])
    assert texts[0] == texts[1]
    # Many requests at once, with what is drafted and accepted left to the scheduler.
    target, draft = write_pair(tmp_path, "qwen35")
    texts = []
    for cuts in ((), (1, 2)):
        with loaded(target, draft, cuts) as session, session.batch(3) as scheduler:
            streams = [scheduler.submit(PROMPT[: 20 + 7 * i], GenerationOptions(20, SPECULATIVE if i else PLAIN)) for i in range(5)]
            scheduler.run()
            texts.append([list(stream.tokens) for stream in streams])
    assert texts[0] == texts[1]
    with loaded(target, draft, (3,)) as session:
        assert session.configuration().device == "layers 0 to 2 on CPU, layer 3 on CPU"
    wrong = {"proportions 1 do not fit 2 devices": ("CPU,CPU", (1,)), "a number above 0 for each": ("CPU,CPU", (1, 0))}
    wrong |= {"proportions of a split need several devices": ("CPU", (1, 1)), "empty name": ("CPU,", None)}
    wrong["can be cut into 4 parts at most, and 5 devices"] = (",".join(["CPU"] * 5), None)
    for words, (device, shares) in wrong.items():
        error = DeviceError if words == "empty name" else EngineError
        fails_with(error, words, ps.load, target, draft, device=device, threads=1, n_ctx=256, tensor_split=shares)


@pytest.mark.parametrize("name", ["eagle3", "peagle", "dflash2", "dspark"])
def test_other_drafters(tmp_path, name):
    target, draft = write_pair(tmp_path, name)
    with loaded(target, draft, draft_width=8) as session:
        alone = trace(session, (1, 2, 7))
    for cuts in ((1,), (2, 3)):
        with loaded(target, draft, cuts, draft_width=8) as session:
            assert equal(alone, trace(session, (1, 2, 7))), cuts


def test_two_drafters_at_once(tmp_path):
    """Blocks and a chain, in turn: both draft on the last device, from rows that earlier ones captured."""
    both = ["draft-dflash", "draft-mtp"]

    def in_turn(session):
        engine, out = session.runner, []
        engine.reset()
        out.append(np.array([engine.prefill(PROMPT)]))
        for n, method in enumerate([*both, *both, *both]):
            result = engine.fused_step(4 + n % 2, drafter=method)
            assert result.draft_finite and result.target_finite
            out += [result.tokens, result.ids, *seen(engine, 4)]
            engine.accept(1 + n % 4, int(result.ids[n % 4]))
        return out

    target, draft = write_mtp_target(tmp_path / "t.gguf", Shape(), "Q8_0"), write_dflash(tmp_path / "d.gguf", Shape(), "Q8_0")
    with loaded(target, draft, spec=both, draft_width=8) as session:
        alone = in_turn(session)
        assert [m.method for m in session.drafter.methods] == both
    with loaded(target, draft, (1, 3), spec=both, draft_width=8) as session:
        assert equal(alone, in_turn(session))


def test_plans_and_drafters_of_split_models(tmp_path):
    target = write_gemma4(tmp_path / "t.gguf", Shape(), shared=False)
    draft = write_gemma4_assistant(tmp_path / "d.gguf", Shape())
    with pytest.raises(PairError, match=r"d.gguf drafts as draft-mtp, which needs its target on one device: name one with `device`"):
        ps.load(target, draft, device="CPU,CPU", threads=1, n_ctx=256)
    target, draft = TARGETS["qwen3"](tmp_path / "t.gguf", Shape()), TARGETS["llama"](tmp_path / "d.gguf", Shape(n_layer=1))
    with pytest.raises(PairError, match=r"drafts as draft-simple, which needs its target on one device: name one with `device`"):
        ps.load(target, draft, device="CPU,CPU", threads=1, n_ctx=256)
    target, draft = write_pair(tmp_path, "qwen35")
    options = {"device": "CPU,CPU", "tensor_split": [1, 3], "n_ctx": 256}
    need = plan(target, draft, **options)
    assert need.fits and plan(target, draft, free=need.total, **options).fits  # one memory, named twice
    assert not plan(target, draft, free=need.total - 1, **options).fits


@pytest.mark.parametrize("shares, sizes, last, cuts", [
    ((1, 1), [1] * 8, 7, [4]), ((3, 1), [1] * 8, 7, [6]), ((1, 1), [1] * 7 + [9], 7, [7]), ((1, 1), [1] * 8, 2, [2]),
    ((1000, 1, 1), [1] * 4, 3, [2, 3]), ((1, 1, 1000), [1] * 4, 3, [1, 2]),
    ((0, 0), [1] * 8, 7, [4]),  # two devices that say that nothing is free
])  # fmt: skip
def test_where_layers_are_cut(shares, sizes, last, cuts):
    assert cuts_by(shares, sizes, last) == cuts


@pytest.mark.parametrize("kinds, free, cuts", [
    (("gpu", "gpu"), (300, 100), [6]), (("gpu", "gpu"), (3000, 1000), [6]),  # in proportion to what is free, whether that does or not
    (("cpu", "gpu"), (9000, 1000), [1]), (("cpu", "gpu"), (9000, 444), [4]), (("cpu", "gpu", "gpu"), (9000, 333, 111), [4, 7]),
])  # fmt: skip
def test_without_proportions_gpus_have_what_fits_and_a_cpu_the_rest(tmp_path, kinds, free, cuts):
    mib, backends = 1 << 20, [SimpleNamespace(device=SimpleNamespace(kind=kind)) for kind in kinds]
    with GGUFFile(TARGETS["qwen3"](tmp_path / "t.gguf", Shape(n_layer=8))) as file:
        found = split(open_target(file), backends, None, [n * mib for n in free], 0, 100 * mib)
    assert [segment.first for segment in found[1:]] == cuts


@pytest.mark.parametrize("slots", [1, 3])
def test_the_plan_of_a_split_is_what_each_device_allocates(tmp_path, slots):
    target, draft = write_pair(tmp_path, "qwen35")
    found = check(target, draft, device="CPU,CPU,CPU", tensor_split=[1, 2, 1], n_ctx=256, slots=slots)
    assert (found.plan.memory, found.plan.slots_memory) == (found.memory, found.slots_memory)
    assert sum(part.total for part in found.plan.split) == found.plan.total == found.total
    with loaded(target, draft, (1, 3), n_ctx=256, draft_width=None) as session:
        session.generate(PROMPT, 8, ignore_end=True)
        by_segment = [sum(part.values()) for part in session.runner.memory_by_segment()]
        assert sum(by_segment) == sum(session.runner.memory().values())
        if slots == 1:
            assert by_segment == [part.total for part in found.plan.split]


@pytest.mark.parametrize("name", ["qwen35", "granitehybrid", "mtp", "laguna"])
def test_prefill_chunks_without_synchronisation(tmp_path, name):
    """Ten chunks and more are launched one after the other: more than there are stages for their inputs."""
    target, draft = write_pair(tmp_path, name)
    ids, runs = PROMPT * 3, []
    for cuts in ((), (2,), (1, 3)):
        with loaded(target, draft, cuts, chunk=16, draft_width=4) as session:
            engine, out = session.runner, []
            out.append(np.array([engine.prefill(ids)]))
            result = engine.fused_step(4)
            out += [result.tokens, result.ids, *seen(engine, 4)]
            runs.append(out)
    assert all(equal(runs[0], other) for other in runs[1:])


def test_a_prompt_that_is_given_up_on_its_way(tmp_path):
    """Two of its chunks are launched; then there is another sequence, a snapshot is refused, or the session ends."""
    target, draft = write_pair(tmp_path, "qwen35")
    with loaded(target, draft, (2,), chunk=16) as session:
        engine = session.runner
        expected = engine.prefill(PROMPT)
        for give_up in (engine.reset, engine.settle, lambda: engine.prepare([engine.verify_key(1)], 8)):
            engine.reset()
            for first in (0, 16):
                assert engine.step({0: Prefill(PROMPT[first : first + 16], True)})[0].ids.size == 0
            assert engine.devices.under_way is not None and engine.cursor.last_token is None
            fails_with(EngineError, "no last token", engine.plain_step)
            give_up()
            assert engine.devices.under_way is None
            engine.reset()
            assert engine.prefill(PROMPT) == expected
        engine.reset()
        engine.step({0: Prefill(PROMPT[:16], True)})
    assert session.runner.graphs.closed


def lanes_trace(session, grouped, slots=4, width=8):
    """Tokens, choices and logits of several sequences in blocks and plain tokens, in steps of all of them or of two groups alongside each other."""
    options = EngineOptions(n_ctx=256, width=width, slots=slots, groups=grouped)
    engine, out = ModelRunner(session.backend, session.target, session.drafter, options), []

    def took(results):
        for slot, result in results.items():
            rows = 1 + len(result.ids) // 2
            out.append((slot, result.tokens, result.ids, *(engine.candidates(row, slot)[1].copy() for row in range(rows))))
            engine.accept(rows, int(result.ids[rows - 1]), slot)

    try:
        for slot in range(slots):
            engine.admit()
            engine.step({slot: Prefill(PROMPT[slot : 20 + 2 * slot])})
        for drafts in (1, 1, width, width, 4, width, 1, 1, width):
            item = Verify() if drafts == 1 else Draft(drafts) if session.drafter else Verify(DRAFTS[: drafts - 1])
            work = dict.fromkeys(range(slots), item)
            if not grouped:
                took(engine.step(work))
                continue
            assert engine.devices.groups == 2
            groups = halves(range(slots), slots)
            for group, members in enumerate(groups):
                engine.devices.launch(group, {slot: work[slot] for slot in members})
            for group in range(len(groups)):
                took(engine.devices.land(group))
        return [x for _, *arrays in sorted(out, key=lambda item: item[0]) for x in arrays]
    finally:
        engine.close()


@pytest.mark.parametrize("arch, cuts, slots", [("qwen35", (2,), 4), ("qwen35", (1, 3), 3), ("gemma4", (1,), 2), ("laguna", (2,), 5)])
def test_pipelined_groups_give_the_bits_of_whole_steps(tmp_path, arch, cuts, slots):
    if arch == "gemma4":
        target, draft = write_gemma4(tmp_path / "t.gguf", Shape(), "Q8_0", shared=False), write_dflash(tmp_path / "d.gguf", Shape(), "Q8_0")
    else:
        target, draft = write_pair(tmp_path, arch)
    with loaded(target, draft, cuts) as session:
        assert equal(lanes_trace(session, False, slots), lanes_trace(session, True, slots))


@pytest.mark.parametrize("family, cuts", [("qwen3vl", (1,)), ("qwen3vl", (2, 3)), ("gemma3", (2,)), ("qwen35", (1, 3)), ("mtp", (2,))])
def test_pictures_over_devices(tmp_path, family, cuts):
    """In chunks that are not waited for, with deepstack rows on a later device, with a drafter that reads rows of pictures on the last one, and with copied layers."""
    pytest.importorskip("pyggml_spec._mtmd")
    from random_gguf.mmproj import CONTROL
    from vision.families import file_of, write_family

    target, mmproj = write_family(tmp_path, "qwen35" if family == "mtp" else family)
    if family == "mtp":
        write_mtp_target(target, Shape(n_ff=128, control=CONTROL["qwen3vl_merger"]))
    out, drafts = [], {"spec": ["draft-mtp"]} if family == "mtp" else {"spec": ["none"], "draft_width": None}
    for at, more in (((), {}), (cuts, {}), (cuts, {"offload_prompts": 16})):
        if more and (len(cuts) > 1 or family == "mtp"):  # layers of one device go to one other one
            continue
        with loaded(target, None, at, mmproj=mmproj, chunk=32, kernels="ggml", **drafts, **more) as session:
            prompt = session.picture_prompt("What is in ", file_of((96, 64)), " and so on" * 9, file_of((64, 64), 1), "? Say it.")
            engine = session.runner
            engine.read_candidates(None)
            engine.prefill(prompt)
            logits = engine.candidates(0)[1].tolist()
            engine.read_candidates(0)
            text, stats = session.generate(prompt, 24, ignore_end=True)
            out.append((logits, text))
    assert all(one == out[0] for one in out) and bool(stats.drafted) == (family == "mtp")
