"""What is planned ahead is captured ahead, where a device can: once, before its first call, and kept until the graph is closed."""

from collections import Counter

import pytest
from engine.helpers import run
from random_gguf.archs import write_qwen35moe
from random_gguf.model import Shape

import pyggml_spec as ps
from pyggml_spec.engine.graph_cache import BY_CALLS
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.ggml.step_io import ReplayCounters, StepFields
from pyggml_spec.models.placement import ExpertOptions


class Recorder:
    """A device that captures, as far as callers can tell: what was captured, launched and released, in that order."""

    def __init__(self, monkeypatch, can: bool = True) -> None:
        self.events: list[tuple[str, int]] = []
        monkeypatch.delenv("GGML_CUDA_CAPTURE_AHEAD", raising=False)

        def capture(backend, graph, us) -> bool:
            self.events.append(("capture", int(ffi.cast("uintptr_t", graph))))
            us[0], us[1], us[2] = 3, 2, 1
            return can

        def release(backend, graph) -> None:
            self.events.append(("release", int(ffi.cast("uintptr_t", graph))))

        self._callbacks = ffi.callback("bool(void *, void *, int64_t *)", capture), ffi.callback("void(void *, void *)", release)
        lib.pgs_capture_by(*self._callbacks)
        launch = StepFields.launch

        def recorded(fields) -> None:
            self.events.append(("launch", int(ffi.cast("uintptr_t", fields.graph.gf))))
            launch(fields)

        monkeypatch.setattr(StepFields, "launch", recorded)

    def of(self, kind: str) -> Counter:
        return Counter(graph for what, graph in self.events if what == kind)


@pytest.fixture
def recorder(monkeypatch):
    yield Recorder(monkeypatch)
    lib.pgs_capture_by(ffi.NULL, ffi.NULL)


def test_every_graph_of_decoding_is_captured_once_before_its_first_launch_and_released_when_it_is_closed(pair, recorder):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=1024, draft_width=4) as session:
        engine = session.engine
        engine.io.replay = replay = ReplayCounters()  # as on a CUDA device
        for mode in ("speculative", "plain"):
            run(engine, [1, 2, 3], 300, mode=mode, width=4)
        steps = {int(ffi.cast("uintptr_t", step.graph.gf)): (key.kind, step) for key, step in engine.graphs.steps().items()}
        captured, launched = recorder.of("capture"), recorder.of("launch")
        assert set(captured.values()) == {1} and replay.ahead > 0 and replay.ahead_us == 6 * replay.ahead
        ran = {graph: role for graph, (role, _) in steps.items() if graph in launched}
        assert {role for graph, role in ran.items() if graph not in captured} <= set(BY_CALLS) < {*BY_CALLS, *ran.values()}
        assert not any(role in BY_CALLS for graph, (role, _) in steps.items() if graph in captured)
        assert all(recorder.events.index(("capture", graph)) < recorder.events.index(("launch", graph)) for graph in captured & launched)
        assert len(captured) < len(steps), "graphs that were only reserved at load are not captured"
        assert replay.inside == 0
    assert recorder.of("release") == captured


def test_graphs_of_a_text_are_captured_while_the_device_computes_instead_of_before_its_first_token(pair, recorder):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=1024, draft_width=4) as session:
        engine = session.engine
        engine.prebuilder.overlaps = True  # as on a GPU
        recorder.events.clear()
        run(engine, [1, 2, 3], 40, mode="speculative", width=4)
        kinds = [kind for kind, _ in recorder.events]
        first = [graph for kind, graph in recorder.events if kind == "launch"][1]  # behind the prompt
        before = {graph for kind, graph in recorder.events[: recorder.events.index(("launch", first))] if kind == "capture"}
        assert before <= {first}, "what the first step does not launch"
        assert kinds.count("capture") > len(before), "later ones"
        waiting = [
            key
            for key, step in engine.graphs.steps().items()
            if key.kind == "fused" and not step.ready and key.kv_bucket == engine.kv.bucket(60)
        ]
        assert not waiting, "what any step of this span may launch"


def test_what_a_device_does_not_capture_counts_as_captured_within_its_second_call(pair, monkeypatch):
    recorder = Recorder(monkeypatch, can=False)
    try:
        with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
            session.engine.io.replay = replay = ReplayCounters()
            monkeypatch.setattr("pyggml_spec.ggml.step_io.REPLAY_US_PER_NODE", 1e9)  # whatever the time, it is a replay
            run(session.engine, [1, 2, 3], 30, width=4)
            assert replay.ahead == 0 and 0 < replay.inside <= replay.captured
        assert not recorder.of("release")
    finally:
        lib.pgs_capture_by(ffi.NULL, ffi.NULL)


def test_capture_is_off_by_default(pair, recorder, monkeypatch):
    monkeypatch.setenv("GGML_CUDA_CAPTURE_AHEAD", "0")
    monkeypatch.setattr("pyggml_spec.ggml.step_io.REPLAY_US_PER_NODE", 1e9)
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        session.engine.io.replay = replay = ReplayCounters()
        run(session.engine, [1, 2, 3], 30, width=4)
        assert not recorder.of("capture") and replay.captured > 0 and replay.ahead == replay.inside == 0


def test_a_graph_that_is_reserved_when_it_is_asked_for_is_captured_before_it_runs(pair, recorder):
    """Requests that want other candidates have graphs of their own, and memory for them is reserved between two steps."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        session.engine.prefill([1, 2, 3])
        recorder.events.clear()
        session.engine.slots[0].candidates = 64
        session.engine.plain_step()
        of_plain = [int(ffi.cast("uintptr_t", step.graph.gf)) for key, step in session.engine.graphs.steps().items() if key.kind == "plain"]
        (launched,) = [graph for graph in of_plain if graph in recorder.of("launch")]
        assert recorder.events.index(("capture", launched)) < recorder.events.index(("launch", launched))


def test_graphs_of_several_devices_are_left_to_their_calls(pair, recorder):
    """The thread of a lane may be using a device when one of its graphs is built."""
    with ps.load(*pair, device="CPU,CPU", threads=1, n_ctx=256, draft_width=4) as session:
        run(session.engine, [1, 2, 3], 12, width=4)
        assert not recorder.of("capture")


def test_the_first_call_of_a_graph_that_was_captured_ahead_is_a_replay():
    counters = ReplayCounters()
    for call, us in enumerate([90, 80, 80], 1):
        assert counters.count(call, us, 1800, captured=True)
    assert (counters.warmup, counters.replayed, counters.eager) == (0, 3, 0)
    assert not counters.count(1, 90, 1800, captured=False) and not counters.count(2, 90, 1800)
    assert counters.warmup == 2


def test_a_graph_that_the_host_takes_part_in_is_not_captured(tmp_path, recorder):
    """It is computed in parts, which are other graphs to a device."""
    path = write_qwen35moe(tmp_path / "t.gguf", Shape(), "Q4_K")
    with ps.load(path, device="CPU", threads=1, n_ctx=256, prefix_memory=0, experts=ExpertOptions(-1)) as session:
        session.generate([1, 2, 3], 4, ignore_end=True)
        steps = {int(ffi.cast("uintptr_t", step.graph.gf)): step.graph.n_cuts for step in session.engine.graphs.steps().values()}
        assert any(steps[graph] for graph in recorder.of("launch")) and not any(steps[graph] for graph in recorder.of("capture"))
