"""Requests from threads and event loops: each gets the text that a session alone would give, and none waits for ever."""

import asyncio
import itertools
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from sessions import fails_with, loaded, together

import pyggml_spec as ps
from pyggml_spec import concurrent
from pyggml_spec.cli.report import footer
from pyggml_spec.concurrent import ConcurrentSession
from pyggml_spec.errors import ContextError, EngineError
from pyggml_spec.events import End, StepEvent
from pyggml_spec.ggml.device import device_feature, pick_device
from pyggml_spec.sampling.sampler import Sampling
from pyggml_spec.speculation.policy import SpeculationPolicy

PROMPTS = ["def quicksort(items):\n", "import os\n", "class Queue:\n    ", "x = [", "for i in range(", "# sort\n", "return "]
WAIT = 120
session = loaded(pair=True, n_ctx=256, draft_width=4)


@pytest.fixture(scope="module")
def want(session):
    return {prompt: session.generate(prompt, 20)[0] for prompt in PROMPTS}


@pytest.fixture
def server(session, want):  # what is wanted is computed before the session is taken
    with session.concurrent(slots=3) as made:
        yield made


def test_threads(server, want):
    got = {}

    def read(prompt):
        events = list(server.submit(prompt, 20))
        got[prompt] = "".join(event.text for event in events), events[-1].stats.stop_reason

    together(partial(read, prompt) for prompt in PROMPTS)
    assert {prompt: text for prompt, (text, _) in got.items()} == want
    assert {reason for _, reason in got.values()} <= {"length", "end"} and sum(server.stats.finished.values()) == 7


async def test_asyncio(server, want):
    async def read(prompt):
        return "".join([event.text async for event in server.submit(prompt, 20)])

    texts = await asyncio.gather(*map(read, PROMPTS))
    text, stats = await server.submit(PROMPTS[0], 20).result_async()
    assert stats.drafted > 0 and stats.device == "CPU" and dict(zip(PROMPTS, texts)) | {PROMPTS[0]: text} == want


def test_results_stop_texts_and_limits(server, want):
    handles = [server.submit(prompt, 20) for prompt in PROMPTS]
    assert [handle.result(WAIT)[0] for handle in reversed(handles)] == [want[prompt] for prompt in reversed(PROMPTS)]
    assert handles[0].result(WAIT) == (want[PROMPTS[0]], handles[0].stats)  # asked again, the same
    text = want[PROMPTS[0]]
    got, stats = server.submit(PROMPTS[0], 20, stop=[text[4:7]]).result(WAIT)
    assert got == text[: text.index(text[4:7])] and stats.stop_reason == "stop"
    assert server.submit(PROMPTS[0], 0).result(WAIT)[0] == ""
    assert server.submit(PROMPTS[0], ignore_end=True).result(WAIT)[1].stop_reason == "context"


def test_sizes_are_those_of_the_last_step(server, want):
    """They are taken in the thread of the steps: buffers that are being planned are read by no other thread."""
    engine = server.engine.runner
    before, asked = server.graph_bytes, []
    engine.memory = lambda: asked.append(threading.current_thread().name) or type(engine).memory(engine)
    server.submit(PROMPTS[0], 20).result(WAIT)
    assert set(server.memory()) >= {"weights", "kv", "compute"} and server.graph_bytes == engine.graphs.host_bytes > before
    assert set(asked) == {"pyggml_spec steps"}


def test_a_sink_gets_what_a_reader_would(server):
    got, over = [], threading.Event()

    def sink(item):
        got.append(item)
        if isinstance(item, End):
            over.set()

    server.submit(PROMPTS[1], 20, sink=sink)
    assert over.wait(WAIT) and got[-1] == End(None)
    assert "".join(event.text for event in got[:-1]) == server.submit(PROMPTS[1], 20).result(WAIT)[0]


@pytest.mark.parametrize("mode", ["speculative", "plain"])
def test_nothing_is_computed_after_a_stop_text(session, mode):
    """It was seen a step late: the statistics counted a block that was not used."""
    text = session.generate(PROMPTS[0], 20, mode=mode)[0]
    stops = [text[i : i + 3] for i in (0, 4, 9)]
    alone = [session.generate(PROMPTS[0], 20, mode=mode, stop=[stop]) for stop in stops]
    with session.concurrent(slots=2) as server:
        got = [server.submit(PROMPTS[0], 20, mode=mode, stop=[stop]).result(WAIT) for stop in stops]
        assert server.stats.finished == {"stop": 3} and server.stats.emitted == sum(stats.emitted for _, stats in got)
    names = ("emitted", "steps", "drafted", "matched", "matched_at", "block_sizes", "widths", "stop_reason")
    for (text, stats), (want, single) in zip(got, alone, strict=True):
        assert text == want and [getattr(stats, n) for n in names] == [getattr(single, n) for n in names]


def test_where_no_block_can_pay_requests_do_not_draft_either(session, monkeypatch):
    """Each width was tried all the same, by every number of slots. The session's own steps have told it: costs of earlier ones forbid nothing."""
    monkeypatch.setattr(session, "_plans", session._possible_plans())
    for block_ms, drafts in ((2e-2, False), (1.1e-3, True)):
        told = {plan: block_ms if plan.draft_tokens else 1e-3 for plan in session._plans}
        monkeypatch.setattr(SpeculationPolicy, "learnt", property(lambda policy, told=told: told))
        monkeypatch.setattr(session.engine, "policy", SpeculationPolicy(told))
        monkeypatch.setattr(session.engine, "policy", session.new_policy())
        text, alone = session.generate(PROMPTS[0], 20)
        assert session.runner.slots[0].drafting == drafts  # whether the drafter's rows were computed
        with session.concurrent(slots=2) as server:
            both = [server.submit(PROMPTS[0], 20) for _ in range(2)]
            plain = server.submit(PROMPTS[0], 20, mode="plain").result(WAIT)[1]
            for handle in both:
                got, stats = handle.result(WAIT)
                assert got == text and bool(stats.drafted) == drafts and stats.mode == alone.mode == "speculative"
                reason = alone.width_reason
                assert drafts or (not alone.drafted and stats.width_reason == reason and reason in footer(alone, None))
            assert not plain.width_reason and not plain.drafted
            assert any(slot.drafting for slot in server.engine.runner.slots) == drafts  # one of the two was the plain one's last


def test_seeds_and_cancelling(server, want):
    sampled = Sampling(temperature=1.0, seed=7, logprobs=2)
    a, b = (server.submit(PROMPTS[0], 20, sampling=sampled) for _ in range(2))
    events = list(a)
    assert "".join(event.text for event in events) == b.result(WAIT)[0]
    assert sum(len(event.logprobs) for event in events) == a.stats.emitted and a.stats.seed == 7
    with server.submit(PROMPTS[0], ignore_end=True) as endless:
        next(endless)
    handles = [server.submit(prompt, 20) for prompt in PROMPTS[:3]]
    assert [handle.result(WAIT)[0] for handle in handles] == [want[prompt] for prompt in PROMPTS[:3]]
    assert endless.result(WAIT)[1].stop_reason == "cancelled"


def test_a_closed_event_loop_does_not_disturb_others(server, want):
    async def leave():
        handle = server.submit(PROMPTS[0], ignore_end=True)
        await anext(handle)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_forever(handle), 0.05)
        return handle

    async def _forever(handle):
        async for _ in handle:
            pass
        await asyncio.sleep(WAIT)

    gone = asyncio.run(leave())
    assert server.submit(PROMPTS[1], 20).result(WAIT)[0] == want[PROMPTS[1]]
    gone.cancel()


def test_opening_it_again_and_again_keeps_nothing_of_the_ones_before(session, want):
    for _ in range(3):
        with session.concurrent(slots=2) as server:
            assert server.submit(PROMPTS[0], 20).result(WAIT)[0] == want[PROMPTS[0]]
    assert sum(isinstance(part, ConcurrentSession) for part in session._parts) == 1


def test_what_cannot_be_submitted(session, server):
    fails_with(ContextError, "empty", server.submit, "")
    fails_with(ContextError, "256", server.submit, [1] * 300)
    fails_with(EngineError, "plain or reference", server.submit, "x", mode="eager")
    fails_with(EngineError, "many requests at once", session.generate, "x", 1)
    fails_with(EngineError, "many requests at once", session.concurrent, slots=2)


def test_closing_wakes_every_reader(session, want):
    server = session.concurrent(slots=2)
    handles, ended = [server.submit(prompt, ignore_end=True) for prompt in PROMPTS], []
    threads = [threading.Thread(target=lambda h=handle: ended.append(h.result(WAIT)[1].stop_reason)) for handle in handles]
    for thread in threads:
        thread.start()
    server.close(), server.close()
    for thread in threads:
        thread.join(WAIT)
    assert len(ended) == 7 and set(ended) <= {"cancelled", "context"}
    fails_with(EngineError, "closed", server.submit, "x")
    assert session.generate(PROMPTS[0], 20)[0] == want[PROMPTS[0]]


@pytest.mark.parametrize("error", [EngineError("a step failed"), ZeroDivisionError("a bug")])
def test_a_step_that_fails_ends_its_requests_with_the_error(session, error, monkeypatch):
    """An error of ours ends the requests of the step, a bug ends everything: it would come back with every step."""
    with session.concurrent(slots=1) as server:
        monkeypatch.setattr(server.engine.runner, "forward", lambda *work: (_ for _ in ()).throw(error))
        with server.changed:  # no step in between: it would end a request, or the session, before the next one is there
            handles = [server.submit(prompt, 5) for prompt in PROMPTS[:3]]
        for handle in handles:
            fails_with(type(error), str(error), handle.result, WAIT)
            with pytest.raises(type(error)):  # at each call
                next(handle)
        if isinstance(error, ZeroDivisionError):
            fails_with(EngineError, "ended by ZeroDivisionError: a bug", server.submit, PROMPTS[0], 5)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_bug_that_looks_like_an_end_ends_no_text(session, slots, monkeypatch):
    """`next` of something empty, in a step: texts were cut, and told of as complete."""
    with session.concurrent(slots=slots) as server:
        monkeypatch.setattr(server.engine.planner, "observe", lambda *of: next(iter(())))
        fails_with(RuntimeError, "a step failed with StopIteration", server.submit(PROMPTS[0], 5).result, WAIT)
    monkeypatch.setattr(session.engine.planner, "observe", lambda *of: next(iter(())))
    fails_with(RuntimeError, "a step failed with StopIteration", session.generate, PROMPTS[0], 5)


def test_another_one_is_made_while_the_failed_one_still_ends(session, want, monkeypatch):
    """Its readers hear of the error before its thread has ended; who made another one then was told that the session is in use."""
    give_up = ConcurrentSession.fail_all
    monkeypatch.setattr(ConcurrentSession, "fail_all", lambda self, error: (give_up(self, error), time.sleep(0.3)))
    failed = session.concurrent(slots=1)
    monkeypatch.setattr(failed.engine.runner, "forward", lambda *work: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.submit(PROMPTS[0], 5).result(WAIT)
    with session.concurrent(slots=1) as another:
        assert failed.closed and another.submit(PROMPTS[0], 20).result(WAIT)[0] == want[PROMPTS[0]]


def test_events_that_cannot_be_made_end_their_request_alone(server, want, monkeypatch):
    """They are made while a step is under way: neither the step nor the other requests may notice."""
    with server.changed:
        bad, good = server.submit(PROMPTS[0], 20), server.submit(PROMPTS[1], 20)
        monkeypatch.setattr(bad.text_events, "take", lambda block: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bad.result(WAIT)
    assert good.result(WAIT)[0] == want[PROMPTS[1]] and server.submit(PROMPTS[0], 20).result(WAIT)[0] == want[PROMPTS[0]]


def test_requests_that_begin_alike_share_the_beginning(session, want):
    """The second one is there before the first has ended: it waits for the shared part, and says what it did not compute."""
    prompts = ["def quicksort(items):\n    pivot = items[0]\n" * 5 + end for end in ("return 1", "yield 2")]
    alone = [session.generate(prompt, 12) for prompt in prompts]
    with session.concurrent(slots=2) as server:
        with server.changed:  # both before the first step
            handles = [server.submit(prompt, 12) for prompt in prompts]
        got = [handle.result(WAIT) for handle in handles]
    assert [text for text, _ in got] == [text for text, _ in alone]
    assert [stats.reused_tokens for _, stats in got] == [0, 128] and got[1][1].drafted > 0
    with session.concurrent(slots=2, prefix_memory=0) as server:
        assert server.submit(prompts[0], 12).result(WAIT)[1].reused_tokens == 0
        assert server.submit(prompts[0], 12).result(WAIT)[1].reused_tokens == 0


def test_a_result_that_takes_too_long_loses_no_text(server):
    """What had come before the timeout was thrown away."""
    with server.changed:  # before the first event
        handle = server.submit(PROMPTS[0], 20)
        put, handle.mail.put = handle.mail.put, lambda *items: None
    put(StepEvent("the beginning, ", (), handle.stats))
    with pytest.raises(TimeoutError):
        handle.result(0.01)

    put(StepEvent("the middle, ", (), handle.stats))

    async def impatient():
        task = asyncio.ensure_future(handle.result_async())
        assert await asyncio.wait({task}, timeout=0.01) == (set(), {task})
        task.cancel()  # as the loop's end would

    asyncio.run(impatient())
    put(StepEvent("the end", (), handle.stats)), put(End())
    assert handle.result(WAIT)[0] == "the beginning, the middle, the end"


def test_a_second_waiter_sees_the_end(server):
    """One of them slept for ever."""
    handle, ended = server.submit(PROMPTS[0], ignore_end=True), []
    with server.changed:  # nothing comes until all of them wait
        threads = [threading.Thread(target=lambda: ended.append(list(handle)), daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        handle.cancel()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 3


@pytest.mark.parametrize("read", ["events", "result"])
def test_a_reader_that_is_cancelled_while_it_waits_ends_its_request(server, want, read):
    """It went on to its token limit, in a slot that others waited for."""
    handle = server.submit(PROMPTS[0], ignore_end=True)

    async def events():
        async for _ in handle:
            pass

    async def main():
        task = asyncio.create_task(events() if read == "events" else handle.result_async())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with server.changed:  # no event comes: the reader waits when it is cancelled
        asyncio.run(main())
    assert handle.result(WAIT)[1].stop_reason == "cancelled" and handle.stats.emitted < 200
    assert server.submit(PROMPTS[1], 20).result(WAIT)[0] == want[PROMPTS[1]]


def test_statistics_of_events_and_drafts(server):
    done = 0
    for event in server.submit(PROMPTS[0], 20):
        done += len(event.tokens)
        assert event.stats.emitted == done == 1 + event.stats.steps + event.stats.matched
    # The accepted ones are the tokens that came out, and the figures of the statistics are those of the events.
    events = list(server.submit(PROMPTS[0], 20, ignore_end=True))
    blocks = [event for event in events if event.tokens]
    assert blocks[0].drafts == ()
    for event in blocks[1:]:
        assert event.tokens[:-1] == event.drafts[: len(event.tokens) - 1]
        assert event.drafts[len(event.tokens) - 1 : len(event.tokens)] != event.tokens[-1:]  # rejected, or the target's own after the last
    assert sum(len(event.drafts) for event in blocks) == events[-1].stats.drafted > 0
    assert all(not event.drafts for event in server.submit(PROMPTS[0], 20, mode="plain"))


def test_a_prompt_without_tokens_is_computed(session):
    prompt = [5 + i % 90 for i in range(128)]
    with session.concurrent(slots=2, prefix_memory=64 << 20) as server:
        text, stats = server.submit(prompt, 0).result(WAIT)
        assert (text, stats.emitted, stats.stop_reason) == ("", 0, "length")
        longer = [*prompt, 7, 8]
        assert server.submit(longer, 4, reuse=False).result(WAIT)[1].reused_tokens == 0
        handle = server.submit(longer, 4, progress=True)
        told = [event.prompt_read for event in handle if event.prompt_read is not None]
        assert handle.stats.reused_tokens == 128 and told == sorted(told) and handle.prompt_read == len(longer)


def threads_of_this_process() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted where Linux lists them")
def test_only_threads_of_the_stepping_thread_compute(pair):
    """Threads of OpenMP that had measured costs, in the thread that loaded, made every barrier of the stepping thread's sleep: on two cores
    concurrent(slots=1) had a quarter of the session's speed."""
    assert device_feature(pick_device("CPU"), "OPENMP") == "1", "ggml makes its own threads here, for each graph"
    before = threads_of_this_process()
    with ps.load(*pair, device="CPU", threads=3, n_ctx=251) as session:
        assert threads_of_this_process() <= before
        steps = session.steps(PROMPTS[0], 20, ignore_end=True)
        next(steps)
        assert len(threads_of_this_process() - before) == 2  # alongside this one
        steps.close()
        assert threads_of_this_process() <= before
        with session.concurrent(slots=1) as server:
            handle = server.submit(PROMPTS[0], ignore_end=True)
            next(handle)
            assert len(threads_of_this_process() - before) == 3  # the one that steps, and two alongside it
            handle.cancel()
            handle.result(WAIT)
            due = time.monotonic() + WAIT
            while len(threads_of_this_process() - before) > 1 and time.monotonic() < due:
                time.sleep(0.001)
            assert len(threads_of_this_process() - before) == 1  # it waits for requests, and keeps no other thread


@pytest.mark.parametrize("step, wakes", [(0.001, (3, 4)), (0.05, (40, 41))])
def test_readers_of_fast_steps_are_woken_for_several_events_at_once(session, want, monkeypatch, step, wakes):
    """A reader that woke for each step took a core from the threads that compute; the first event and the last one do not wait."""
    clock, calls = itertools.count(1000), []
    with session.concurrent(slots=1) as server:
        monkeypatch.setattr(concurrent, "time", SimpleNamespace(monotonic=lambda: step * next(clock)))
        with server.changed:  # nothing is handed over before the calls are counted
            handle = server.submit(PROMPTS[0], 40, mode="plain", ignore_end=True)
            put = handle.mail.put
            handle.mail.put = lambda *items: (calls.append(len(items)), put(*items))
        events = list(handle)
    assert len(events) == 41 and all(len(event.tokens) == 1 for event in events[:-1])  # one per step, and the end
    assert calls[0] == 1 and len(calls) in wakes and sum(calls) == 42


def test_a_sink_that_fails_ends_its_request_alone(server, want):
    def fails(item):
        raise RuntimeError("no")

    handle = server.submit(PROMPTS[0], 20, sink=fails)
    fails_with(RuntimeError, "no", handle.result, WAIT)
    assert server.submit(PROMPTS[1], 20).result(WAIT)[0] == want[PROMPTS[1]]
