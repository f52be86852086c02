"""One engine, one generation at a time: what a reader leaves half read, or an error leaves half done, never shows in another text."""

import asyncio
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from sessions import fails_with, loaded, together

import pyggml_spec as ps
from pyggml_spec.api import load_to_serve
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.sequence import GenerationOptions
from pyggml_spec.errors import EngineError
from pyggml_spec.ggml.kernels import levels
from pyggml_spec.load_options import LoadOptions
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET, silent
from pyggml_spec.speculation.policy import SpeculationPolicy

FIRST, SECOND = "def quicksort(items):\n", "import os\n"
session = loaded(pair=True, n_ctx=256, draft_width=4)


def test_generations_exclude_each_other(session):
    """It went on in the other one's caches, with text that looks right."""
    want, left = session.generate(SECOND, 20)[0], session.steps(FIRST, 20)
    next(left)
    other = session.steps(SECOND, 20)
    begun = next(other).text
    fails_with(EngineError, "ended by the next one", next, left)
    assert begun + "".join(event.text for event in other) == want
    left = session.steps(FIRST, 20)
    next(left)
    with session.concurrent(slots=1) as server:
        fails_with(EngineError, "ended by the next one", next, left)
        fails_with(EngineError, "many requests at once", session.calibrate_plain)
        assert server.submit(SECOND, 5).result(120)[1].emitted == 5

    # As from a second thread: two would step one engine at the same time.
    def inside(done, total):
        fails_with(EngineError, "generating already", session.generate, SECOND, 1)

    assert session.generate(FIRST, 5, prefill_progress=inside)[1].emitted == 5


def test_nothing_is_appended_to_a_step_that_failed(session, monkeypatch):
    """A plain step writes the recurrent state before it is accepted: the token would be in it twice."""
    prompt = session.prompt_ids(FIRST)
    shown = [t for event in session.steps(prompt, 4, mode="plain") for t in event.tokens]
    run = session.steps(prompt, 8, mode="plain")
    next(run), next(run)
    with monkeypatch.context() as patch:
        patch.setattr(session.runner, "commit", lambda *step: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(run)
    longer = [*prompt, *shown, 1, 2, 3]
    text, stats = session.generate(longer, 12, mode="plain", append=True)
    assert stats.reused_tokens == 0 and text == session.generate(longer, 12, mode="plain")[0]


@pytest.fixture
def switching():
    """Threads change places a thousand times as often."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def _in_thread(work):
    """What ``work`` gives or raises in a thread of its own, which has ended then."""
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(work)
        return asked.exception(120) or asked.result()


def test_of_two_threads_that_start_together_each_gets_its_own_text_or_the_sentence(session, switching):
    """They got wrong text, false NaN and other threads' errors: the guard looked and then acted, and the prefix cache came before it."""
    want, served = {prompt: session.generate(prompt, 8)[0] for prompt in (FIRST, SECOND)}, 0
    for _ in range(25):
        got, barrier = {}, threading.Barrier(2)

        def read(prompt):
            barrier.wait()
            try:
                got[prompt] = session.generate(prompt, 8)[0]
            except Exception as error:
                got[prompt] = error

        together(partial(read, prompt) for prompt in want)
        for prompt, text in want.items():
            refused = isinstance(got[prompt], EngineError) and "generating already" in str(got[prompt])
            assert got[prompt] == text or refused, got[prompt]
            served += not refused
    assert served >= 25


def test_another_thread_is_refused_at_once_while_a_generation_is_half_read(session):
    """And leaves its caches alone: it goes on as if nothing had been asked."""
    want, left = session.generate(FIRST, 20)[0], session.steps(FIRST, 20)
    begun = next(left).text
    for work in (lambda: session.generate(SECOND, 3), session.calibrate_plain, lambda: session.concurrent(slots=1)):
        assert "generating already" in str(_in_thread(work))
    assert begun + "".join(event.text for event in left) == want
    assert _in_thread(lambda: session.generate(SECOND, 3)[1].emitted) == 3


@pytest.mark.parametrize("how", ["dropped", "closed", "its thread has ended"])
def test_an_abandoned_generation_does_not_block_the_session(session, how):
    if how == "its thread has ended":
        left = _in_thread(lambda: (kept := session.steps(FIRST, 20), next(kept)))[0]
    else:
        left = session.steps(FIRST, 20)
        next(left)
    if how == "dropped":
        del left
        gc.collect()
    elif how == "closed":
        left.close()
    assert _in_thread(lambda: session.generate(SECOND, 3)[1].emitted) == 3 and session.generate(SECOND, 3)[1].emitted == 3


async def test_tasks_of_one_event_loop_are_one_thread(session):
    first = session.steps(FIRST, 20)
    next(first)
    await asyncio.sleep(0)
    assert session.generate(SECOND, 3)[1].emitted == 3
    with pytest.raises(EngineError, match="ended by the next one"):
        next(first)
    busy = session.steps(FIRST, 20)
    next(busy)
    with pytest.raises(EngineError, match="generating already"):
        await asyncio.to_thread(session.generate, SECOND, 3)
    busy.close()


def test_threads_and_requests(session):
    with session.concurrent(slots=1) as server:
        for work in (lambda: session.generate(SECOND, 3), lambda: session.concurrent(slots=1), session.calibrate_plain):
            assert "many requests at once" in str(_in_thread(work))
            fails_with(EngineError, "many requests at once", work)
        assert server.submit(SECOND, 5).result(120)[1].emitted == 5
    assert session.generate(SECOND, 3)[1].emitted == 3
    # They were filled in after the request was queued: the first events could lack them.
    sampling = session.sampling(temperature=1.0, seed=7)
    with session.concurrent(slots=1) as server:
        for _ in range(10):
            first = next(iter(server.submit(SECOND, 3, sampling=sampling)))
            assert first.stats.seed == 7 and first.stats.device and first.stats.versions


def test_a_generation_during_a_batch_is_refused(session):
    left = session.steps(FIRST, 20)
    next(left)
    with session.batch(2) as scheduler:
        fails_with(EngineError, "ended by the next one", next, left)
        for work in (lambda: session.generate(SECOND, 3), lambda: session.batch(2), lambda: session.concurrent(slots=1), session.close):
            assert "many requests at once" in str(_in_thread(work))
            fails_with(EngineError, "many requests at once", work)
        assert len(scheduler.submit(session.prompt_ids(SECOND), GenerationOptions(5)).result()) == 5
    assert session.generate(SECOND, 3)[1].emitted == 3
    busy = session.steps(FIRST, 20)
    next(busy)
    assert "generating already" in str(_in_thread(lambda: session.batch(2)))
    busy.close()


def test_a_session_is_not_closed_under_a_step(pair):
    """The step went on in freed memory."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        stepping, closed = threading.Event(), threading.Event()

        def wait(done, total):
            stepping.set()
            closed.wait(60)

        thread = threading.Thread(target=lambda: session.generate(FIRST, 3, prefill_progress=wait), daemon=True)
        thread.start()
        stepping.wait(60)
        fails_with(EngineError, "generating already", session.close)
        closed.set()
        thread.join(60)
        assert session.generate(SECOND, 3)[1].emitted == 3
    fails_with(EngineError, "closed", session.generate, SECOND, 3)


def test_statistics_of_events_and_of_early_ends(session):
    """All events shared one object, which said "20 emitted" in the first of them."""
    events, done = list(session.steps(FIRST, 20)), 0
    for event in events:
        done += len(event.tokens)
        assert event.stats.emitted == done == 1 + event.stats.steps + event.stats.matched
        assert sum(event.stats.widths.values()) == event.stats.steps
    assert [bool(event.stats.stop_reason) for event in events] == [False] * (len(events) - 2) + [True] * 2  # the last tokens, and the end
    assert sorted(event.stats.seconds["decode"] for event in events) == [event.stats.seconds["decode"] for event in events]
    stats = session.new_stats()
    left = session.steps(FIRST, 20, stats=stats)
    next(left), next(left)
    left.close()
    assert stats.computes > 0 and stats.seconds["decode"] > 0 and stats.emitted == 1 + stats.steps + stats.matched


def test_a_session_for_requests_alone_has_no_caches_of_its_own(pair):
    """A server's slots are all that is allocated: what a single generation would need is freed before, and said to be gone."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, prefix_memory=0) as session:
        own = sum(session.runner.memory().values())
        want, _ = session.generate("def f(x):", 8)
        for _ in range(2):  # a server makes it anew after an error
            with session.concurrent(2, only=True) as server:
                assert session.runner.graphs.closed and session.configuration().memory == {} and own > 0
                assert server.submit("def f(x):", 8).result()[0] == want
        fails_with(EngineError, "gave up its own caches", session.generate, "def f(x):", 8)
        fails_with(EngineError, "gave up its own caches", session.calibrate_plain)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_server_plans_the_graphs_of_its_slots_once(pair, monkeypatch, slots):
    """It planned those of a session first, and then its own: half of what the first token of a large pair waited for."""
    made, make = [], ModelRunner.__init__
    monkeypatch.setattr(ModelRunner, "__init__", lambda self, *of: made.append(of[-1].slots) or make(self, *of))
    options = LoadOptions(device="CPU", threads=1, n_ctx=256, prefix_memory=0)
    with ps.load(*pair, options) as session:
        want, _ = session.generate("def f(x):", 8)
    made.clear()
    with load_to_serve(*pair, options, silent, slots) as session:
        kept = session.runner
        for again in (False, True):  # after an error
            with session.concurrent(slots, only=True) as server:
                assert (server.engine.runner is kept) != again and server.submit("def f(x):", 8).result()[0] == want
        assert made == [slots] * 2 and kept.graphs.closed
        fails_with(EngineError, "gave up its own caches", session.generate, "def f(x):", 8)


def test_a_session_that_has_generated_keeps_nothing_of_it_for_requests(pair):
    """What its only slot holds is no other request's."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, prefix_memory=0) as session:
        want, _ = session.generate("def f(x):", 8)
        with session.concurrent(1, only=True) as server:
            assert server.engine.runner is not session.runner and session.runner.graphs.closed
            assert server.submit("def f(x):", 8).result()[0] == want


@pytest.mark.slow
def test_a_text_that_rests_loses_nothing_that_was_computed(pair, monkeypatch):
    """Without a drafter's inputs a text has other rows: what its prompt continues after decides, where drafts would not pay anyway."""
    prompt = list(range(40, 240)) * 6
    with ps.load(*pair, device="CPU", threads=1, n_ctx=2048, prefix_memory=1 << 28) as session:
        monkeypatch.setattr(SpeculationPolicy, "never_pays", property(lambda self: False))
        session.generate(prompt, 4)
        monkeypatch.setattr(SpeculationPolicy, "should_disable", lambda self: True)
        _, stats = session.generate([*prompt, 41, 42], 4)
        assert stats.reused_tokens > 300 and session.runner.slots[0].drafting
        _, stats = session.generate([7, *prompt], 4, ignore_end=True)
        assert not stats.reused_tokens and not session.runner.slots[0].drafting and not stats.drafted
        history = [7, *prompt, *(t for event in session.steps([7, *prompt], 4, ignore_end=True) for t in event.tokens)]
        events = [*session.steps([*history, 50, 51], 4, ignore_end=True, append=True)]
        assert events[-1].stats.reused_tokens >= len(history) - 1 and not session.runner.slots[0].drafting


@pytest.mark.slow
@pytest.mark.parametrize("slots, rested", [(1, [False, False, True]), (2, [False, False, False])])
def test_a_text_in_one_slot_rests_as_in_a_session(pair, monkeypatch, slots, rested):
    """Where drafts would not pay a text gets no drafter's inputs, unless its prompt continues after one that has them. What one slot's blocks cost
    says nothing of several."""
    prompt, said = list(range(40, 240)) * 3, []
    with (
        ps.load(*pair, device="CPU", threads=1, n_ctx=1024, prefix_memory=0) as session,
        session.batch(slots, prefix_memory=1 << 28) as scheduler,
    ):
        monkeypatch.setattr(SpeculationPolicy, "never_pays", property(lambda self: False))
        options = GenerationOptions(4, width=16, ignore_end=True)
        for ids, rests in ((prompt, False), ([*prompt, 41, 42], True), ([7, *prompt], True)):
            monkeypatch.setattr(SpeculationPolicy, "should_disable", lambda self, rests=rests: rests)
            stream = scheduler.submit(ids, options)
            tokens = [token for block in stream for token in block]
            said.append(not scheduler.runner.slots[stream.slot].drafting)
            assert len(tokens) == 4 and (not said[-1] or stream.stats.drafted == 0)
            assert bool(stream.stats.reused_tokens) == (len(said) == 2)
    assert said == rested


def test_a_waiting_prompt_is_not_looked_up_while_the_slot_is_taken(pair, monkeypatch):
    """Its prompt was hashed again, and files looked for, whenever anything changed."""
    prompt, asked = list(range(40, 240)), []
    with (
        ps.load(*pair, device="CPU", threads=1, n_ctx=512, prefix_memory=0) as session,
        session.batch(1, prefix_memory=1 << 26) as scheduler,
    ):
        monkeypatch.setattr(SpeculationPolicy, "never_pays", property(lambda self: False))
        monkeypatch.setattr(SpeculationPolicy, "should_disable", lambda self: True)
        known = scheduler.prefixes.known
        monkeypatch.setattr(scheduler.prefixes, "known", lambda *of: asked.append(len(scheduler.scheduler.active)) or known(*of))
        streams = [scheduler.submit([i, *prompt], GenerationOptions(6, width=16, ignore_end=True)) for i in (7, 8, 9)]
        while not scheduler.idle:
            scheduler.step()
            scheduler.wake()  # as where others come and go
        assert [len(stream.tokens) for stream in streams] == [6, 6, 6]
    assert asked == [0] * 6  # with drafters' rows, and without, of each


def test_closing_that_is_interrupted_says_so_and_can_be_repeated(monkeypatch):
    """Ctrl-C while its thread ended: the session said that it ran requests instead."""
    session = ps.load(device="CPU", threads=1, n_ctx=256)
    server = session.concurrent(1)
    with monkeypatch.context() as once:
        once.setattr(server.thread, "join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            session.close()
    session.close()
    assert server.closed and session.runner.graphs.closed


@pytest.mark.skipif(sys.platform != "linux", reason="what of a file is in memory is read from /proc")
def test_the_file_of_packed_weights_is_released():
    """Of the embedded target, by pages that this process has of it: all of them stayed, so weights counted twice."""
    with ps.load(device="CPU", threads=1, kernels="native" if levels() else "ggml", n_ctx=64) as session:
        path, size = str(DEMO_TARGET), DEMO_TARGET.stat().st_size
        lines, held, inside = Path("/proc/self/smaps").read_text().splitlines(), 0, False
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                inside = line.endswith(path)
            elif inside and line.startswith("Rss:"):
                held += 1024 * int(line.split()[1])
        assert 0 < held < 0.2 * size and session.configuration().memory["weights"] < 1.05 * (size + DEMO_DRAFTER.stat().st_size)
