"""The queue over an engine that fails, hangs, or is faster than its own answer: what the running server cannot be made to do at will."""

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import pytest
from server.running import request_of, wait_for

from pyggml_spec.cancel import Cancelled, cancelled_by, check
from pyggml_spec.engine.stats import BatchStats, Stats
from pyggml_spec.errors import DeviceError, EngineError
from pyggml_spec.events import End, StepEvent
from pyggml_spec.sampling.sampler import Sampling, TokenLogprob
from pyggml_spec.server import pool, tasks
from pyggml_spec.server.errors import ApiError
from pyggml_spec.server.output import prefill, timings
from pyggml_spec.server.pool import Pool
from pyggml_spec.server.reading import SMALL, Context
from pyggml_spec.server.tasks import AHEAD, Queue, QueueLimits, TaskRequest
from pyggml_spec.text.renderer import RENDERER, WouldBlock


class Engine:
    """A concurrent session whose ``behaviour`` is called with each request's sink, before ``submit`` has returned."""

    def __init__(self, behaviour):
        self.behaviour, self.ended, self.stats = behaviour, False, BatchStats()

    def submit(self, ids, max_tokens, *, sink, **more):
        stats = Stats(prompt_tokens=len(ids))
        handle = SimpleNamespace(stats=stats, slot=0, prompt_read=len(ids), cancel=lambda: sink(End(None)))
        self.behaviour(self, sink, stats)
        return handle


def answers(engine, sink, stats):
    for token in range(3):
        stats.emitted += 1
        sink(StepEvent("x", (token,), stats.snapshot()))
    stats.stop_reason = "length"
    sink(StepEvent("", (), stats))
    sink(End(None))


def fails(engine, sink, stats):
    engine.ended = True
    raise EngineError("a step failed")


def hangs(engine, sink, stats):
    pass


@contextlib.asynccontextmanager
async def queued(engine, broken=lambda error: None, slots=1, **limits):
    """A queue over ``engine``: one, or the behaviour of one."""
    with Pool() as pool:
        made = engine if hasattr(engine, "submit") else Engine(engine)
        yield Queue(made, slots, QueueLimits(**limits), pool, lambda task: None, broken)


async def read_all(got):
    items = []
    while not items or not isinstance(items[-1], End):
        items.append((await got.read())[1])
    return items


COMPILED = b"grammar regex lark json_schema response_format grammar_lazy text output_config output_format"


async def test_short_requests_are_read_in_the_event_loop_unless_a_template_keeps_it_waiting(work):
    context, here, hurries = Context(None, None, work[0]), threading.get_ident(), []

    def read(late=False):
        hurries.append(getattr(RENDERER.patience, "seconds", None))
        if late and hurries[-1] is not None:
            raise WouldBlock
        return threading.get_ident() == here

    assert await context.prepared(request_of(b"{}"), read) and hurries.pop() > 0
    assert not await context.prepared(request_of(b"{}"), read, True) and hurries == [hurries[0], None]
    for body in (*(b'{"%b": 1}' % name for name in COMPILED.split()), b'{"tools": []}', b"{" + b" " * SMALL + b"}"):
        assert not await context.prepared(request_of(body), read)


async def test_what_comes_before_the_handle_is_not_lost():
    async with queued(answers) as queue:
        for _ in range(20):
            items = await read_all(queue.enter([TaskRequest([1])]))
            assert [i.tokens for i in items[:-1]] == [(0,), (1,), (2,), ()] and items[-1] == End(None)
        assert not queue.running and queue.waiting == 0 and await queue.drain(1)


@pytest.mark.parametrize("kind", [EngineError, MemoryError, DeviceError, OSError])
async def test_an_engine_that_has_failed_is_made_anew_and_the_queue_goes_on(kind):
    """Whatever ended it: behind an OSError, those that waited were given to what had ended."""
    made = []

    def ends(engine, sink, stats):
        engine.ended = True
        raise kind("a step failed")

    def broken(error):
        made.append(str(error))
        return Engine(answers)

    async with queued(ends, broken) as queue:
        given, waiting = [queue.enter([TaskRequest([n])]) for n in range(1 + AHEAD)], queue.enter([TaskRequest([9])])
        assert [isinstance((await read_all(got))[-1].error, kind) for got in given] == [True] * (1 + AHEAD)
        assert (await read_all(waiting))[-1] == End(None) and (await read_all(queue.enter([TaskRequest([3])])))[-1] == End(None)
        assert made == ["a step failed"] and not queue.draining


async def test_an_engine_that_cannot_be_made_anew_ends_the_server():
    async with queued(fails) as queue:
        await read_all(queue.enter([TaskRequest([1])]))
        await queue._repairing
        with pytest.raises(ApiError, match="is ending") as raised:
            queue.enter([TaskRequest([1])])
        assert raised.value.status == 503


async def test_no_step_for_a_while_is_stuck_only_while_there_is_work(monkeypatch):
    monkeypatch.setattr(tasks, "STUCK_SECONDS", 0.05)
    async with queued(hangs) as queue:
        await asyncio.sleep(0.1)
        assert not queue.stuck
        got = queue.enter([TaskRequest([1])])
        queue.step_age()
        await asyncio.sleep(0.1)
        assert queue.stuck
        queue.engine.stats.steps += 1
        assert not queue.stuck
        got.cancel()
        assert (await read_all(got))[-1] == End(None)
        await asyncio.sleep(0.1)
        assert not queue.stuck


async def test_limits_of_the_queue():
    async with queued(hangs, requests=2, tokens=100, seconds=0.2) as queue:
        held = [queue.enter([TaskRequest([1] * 10)]) for _ in range(3)]  # one slot, and two ahead
        waits = queue.enter([TaskRequest([1] * 10)])
        for requests in ([TaskRequest([1] * 95)], [TaskRequest([1]), TaskRequest([2])]):
            with pytest.raises(ApiError) as raised:
                queue.enter(requests)
            assert raised.value.status == 429 and int(raised.value.headers["retry-after"]) >= 1
        assert queue.rejected["tokens"] == queue.rejected["requests"] == 1
        with pytest.raises(ApiError, match="has 6 sequences, and this server takes 5 at once") as never:  # however long it waits
            queue.enter([TaskRequest([1])] * 6)
        assert never.value.status == 400
        (late,) = await read_all(waits)
        assert late.error.status == 429 and "waited for 0.2 s" in late.error.message and not await queue.drain(0.05)
        assert [(await read_all(h))[-1].error.status for h in held] == [503] * 3


async def test_a_full_queue_takes_one_of_a_new_client_where_another_has_several_and_says_when_there_is_room():
    async with queued(hangs, requests=2) as queue:
        queue._seconds = 4.0
        for client in ("one", "two", "three", "four", "five"):  # a slot, two ahead, and two that wait
            queue.enter([TaskRequest([1])], client)
        with pytest.raises(ApiError, match="2 requests wait already") as full:
            queue.enter([TaskRequest([1])], "six")
        assert full.value.headers["retry-after"] == "20"  # five of four seconds each, one after the other
    async with queued(hangs, requests=2) as queue:
        for _ in range(5):
            queue.enter([TaskRequest([1])], "one")
        queue.enter([TaskRequest([1])], "two")
        for client, count in (("two", 1), ("three", 2)):
            with pytest.raises(ApiError, match="3 requests wait already"):
                queue.enter([TaskRequest([1])] * count, client)


async def test_without_a_queue_nothing_waits():
    async with queued(hangs, requests=0) as queue:
        held = queue.enter([TaskRequest([1])])
        with pytest.raises(ApiError, match="every slot is taken, and nothing waits") as full:
            queue.enter([TaskRequest([1])])
        assert full.value.status == 429 and int(full.value.headers["retry-after"]) >= 1 and queue.rejected["requests"] == 1
        with pytest.raises(ApiError, match="this server takes 1 at once"):
            queue.enter([TaskRequest([1])] * 2)
        await asyncio.sleep(0)
        held.cancel()
        assert (await read_all(held))[-1] == End(None)
        queue.enter([TaskRequest([1])])


async def test_one_that_waits_and_is_left_is_out_at_once():
    came = []

    def keeps(engine, sink, stats):
        came.append(stats.prompt_tokens)

    async with queued(keeps, requests=2) as queue:
        held = [queue.enter([TaskRequest([1])]) for _ in range(1 + AHEAD)]
        left, stays = queue.enter([TaskRequest([1] * 2)]), queue.enter([TaskRequest([1] * 3)])
        with pytest.raises(ApiError, match="2 requests wait already"):
            queue.enter([TaskRequest([1])])
        left.cancel()
        assert (await read_all(left)) == [End(None)] and queue.waiting_tokens == 3 and len(queue.running) == 1 + AHEAD
        queue.enter([TaskRequest([1] * 4)])
        await asyncio.sleep(0)  # the handles come
        held[0].cancel()
        assert (await read_all(held[0]))[-1] == End(None) and came == [1] * (1 + AHEAD) + [3] and queue.waiting_tokens == 4
        assert not any(task.over for got in (*held[1:], stays) for task in got.tasks)


async def test_connections_without_a_key_take_turns():
    """One with many sequences kept another one waiting behind all of them. The highest priority goes first, whosever it is."""
    came = []

    def keeps(engine, sink, stats):
        came.append(stats.prompt_tokens)

    async with queued(keeps) as queue:
        held = [queue.enter([TaskRequest([1] * 9)], "first") for _ in range(1 + AHEAD)]
        queue.enter([TaskRequest([1])] * 5, "first")
        queue.enter([TaskRequest([1] * 2)], "second")
        queue.enter([TaskRequest([1] * 3, priority=1)], "third")
        for got in held:
            await asyncio.sleep(0)  # the handles come
            got.cancel()
            await read_all(got)
        assert came[1 + AHEAD :] == [3, 1, 2], came
        queue.cancel_all("the end")


async def test_one_client_does_not_fill_the_queue_for_others():
    async with queued(hangs, requests=4) as queue:
        queue.enter([TaskRequest([1])] * (1 + AHEAD), "first")
        queue.enter([TaskRequest([1])] * 4, "first")
        with pytest.raises(ApiError, match="4 requests wait already"):
            queue.enter([TaskRequest([1])], "first")
        for n in range(4):
            queue.enter([TaskRequest([1])], f"another {n}")
        for client in ("another 0", "the last"):  # who has one waiting, and who finds as many again
            with pytest.raises(ApiError, match="8 requests wait already"):
                queue.enter([TaskRequest([1])], client)
        queue.cancel_all("the end")


class Held:
    """An engine whose handles record that they were cancelled; ``slot`` of each."""

    def __init__(self, slot=-1, submitting=None):
        self.slot, self.submitting, self.cancelled, self.sinks = slot, submitting or threading.Event(), [], []
        self.ended, self.stats, self.asked = False, BatchStats(), threading.Event()
        if submitting is None:
            self.submitting.set()

    def submit(self, ids, max_tokens, *, sink, **more):
        self.asked.set()
        assert self.submitting.wait(60)
        self.sinks.append(sink)
        return SimpleNamespace(stats=Stats(), slot=self.slot, prompt_read=0, cancel=lambda: (self.cancelled.append(sink), sink(End(None))))


async def test_one_that_is_left_while_its_sampler_is_made_is_not_computed():
    """It was cancelled before there was anything to cancel."""
    submitting = threading.Event()
    async with queued(hangs) as queue:
        queue.engine = engine = Held(0, submitting)
        got = queue.enter([TaskRequest([1], sampling=Sampling(temperature=0.7))])
        assert await asyncio.to_thread(engine.asked.wait, 60)
        got.cancel()
        submitting.set()
        assert (await read_all(got))[-1] == End(None) and len(engine.cancelled) == 1
        assert not queue.running and await queue.drain(1)


async def test_one_that_is_left_before_its_sampler_is_made_never_comes_to_the_engine():
    class Later(Executor):
        def submit(self, function, *arguments):
            calls.append(lambda: function(*arguments))
            return Future()

    calls, engine = [], Held()
    queue = Queue(engine, 1, QueueLimits(), Later(), lambda task: None, lambda error: None)
    got = queue.enter([TaskRequest([1], sampling=Sampling(temperature=0.7))])
    got.cancel()
    calls.pop()()
    assert (await read_all(got)) == [End(None)] and not engine.sinks and not queue.running


async def test_one_that_waited_too_long_at_the_engines_door_is_not_computed():
    """Its client was told 429, and its tokens were computed all the same."""
    engine = Held()
    async with queued(engine, seconds=0.05) as queue:
        got = queue.enter([TaskRequest([1])])
        (late,) = await read_all(got)
        assert late.error.status == 429 and len(engine.cancelled) == 1 and not queue.running
        got.cancel()


@pytest.mark.parametrize("streams, words", [(True, "were not read"), (False, "request fewer")])
async def test_what_answers_hold_has_a_bound(monkeypatch, caplog, streams, words):
    """A stream that nobody read kept a thousand log probabilities of each token without a limit."""
    monkeypatch.setattr(tasks, "MAX_KEPT", 1000)
    engine = Held(0)
    event = StepEvent("x", (1,), Stats(), (TokenLogprob(1, 0.0, ((1, 0.0),) * 98),))  # 100 in all
    async with queued(engine) as queue:
        got = queue.enter([TaskRequest([1])])
        got.streams = streams
        for _ in range(20):  # as long as it reads a stream may have any number; a whole answer holds them all
            engine.sinks[0](event)
            if streams:
                assert (await got.read())[1] == event and queue.kept == 0
            await asyncio.sleep(0)
        if streams:
            for _ in range(20):
                engine.sinks[0](event)
            await asyncio.sleep(0)
        items = await read_all(got)
        assert words in items[0].error.message and items[0].error.status == 400 and len(engine.cancelled) == 1
        got.cancel()
        assert queue.kept == 0 and words in caplog.text


async def test_what_all_answers_hold_has_a_bound(monkeypatch):
    monkeypatch.setattr(tasks, "MAX_KEPT_TOTAL", 1000)
    engine = Held(0)
    async with queued(engine, slots=4) as queue:
        got = [queue.enter([TaskRequest([1])]) for _ in range(3)]
        for sink in engine.sinks:
            sink(StepEvent("x", (1,) * 400, Stats()))
        await asyncio.sleep(0)
        assert [type(item[1]) for item in [await g.read() for g in got]] == [StepEvent, StepEvent, End]
        for g in got:
            g.cancel()
        assert queue.kept == 0


async def test_a_slow_readers_events_are_joined():
    def many(engine, sink, stats):
        def send():
            for token in range(500):
                sink(StepEvent("x", (token,), stats))
            sink(StepEvent("", (), stats))
            sink(End(None))

        thread.append(threading.Thread(target=send))
        thread[0].start()

    thread: list[threading.Thread] = []
    async with queued(many) as queue:
        got = queue.enter([TaskRequest([1])])
        await asyncio.to_thread(lambda: wait_for(lambda: thread and not thread[0].is_alive()))  # it has sent all before the first is read
        items = await read_all(got)
        assert len(items) <= tasks.MAX_UNREAD + 2 and [t for i in items[:-1] for t in i.tokens] == list(range(500))
        assert "".join(i.text for i in items[:-1]) == "x" * 500


async def test_a_slow_readers_events_of_several_answers_stay_apart():
    """Joined events belong to one answer: of `n` answers each has its own text, in its own order."""
    async with queued(hangs) as queue:
        got = queue.enter([TaskRequest([1]) for _ in range(3)])
        for token in range(300):  # of one, or of two and three in turn
            for task in got.tasks[:1] if token % 3 else got.tasks:
                got.put(task, StepEvent("abc"[task.index], (token,), Stats()))
        for task in got.tasks:
            got.put(task, End(None))
        texts, ids, items = ["", "", ""], [[], [], []], 0
        for _ in range(10_000):
            task, item = await got.read()
            items += 1
            if isinstance(item, End):
                if task is got.tasks[-1]:
                    break
                continue
            texts[task.index] += item.text
            ids[task.index] += item.tokens
        assert texts == ["a" * 300, "b" * 100, "c" * 100] and ids == [[*range(300)], [*range(0, 300, 3)], [*range(0, 300, 3)]]
        assert tasks.MAX_UNREAD < items < 500  # some were joined


async def test_what_draws_nothing_waits_for_no_thread():
    """Two turns of the pool were a third of what HTTP costs before the first token; a sampler's making still is one."""
    sampled = Sampling(temperature=0.7)
    async with queued(answers) as queue:
        turns = []
        queue._loop = SimpleNamespace(
            run_in_executor=lambda pool, function, task: turns.append(task), call_soon_threadsafe=asyncio.get_running_loop().call_soon_threadsafe,
            time=asyncio.get_running_loop().time,
        )  # fmt: skip
        await read_all(queue.enter([TaskRequest([1], sampling=Sampling(temperature=0))]))
        assert not turns
        queue.enter([TaskRequest([1], sampling=sampled)])
        assert [task.request.sampling for task in turns] == [sampled]


def test_progress_and_cancelled_threads():
    """The engine had read the first chunk when the event before any work was written: its timings had 128 tokens."""
    task = SimpleNamespace(handle=SimpleNamespace(prompt_read=128), progress_from=1.0, latest=1.5, first=None, queued_ms=0.0)
    told = timings(Stats(prompt_tokens=300), task, 0)
    assert (told["prompt_n"], told["prompt_ms"]) == (0, 0.0)
    assert timings(Stats(prompt_tokens=300), task, 100)["prompt_n"] == 100 and timings(Stats(prompt_tokens=300), task)["prompt_n"] == 128
    event = threading.Event()
    event.set()
    check()
    with cancelled_by(event), pytest.raises(Cancelled):
        check()
    check()


@pytest.fixture
def work():
    """A pool, and calls that go on until they are let go."""
    made, let_go = Pool(), threading.Event()
    yield made, lambda: let_go.wait(60)
    let_go.set()
    made.shutdown()


def test_short_work_does_not_wait_for_long_work(work):
    threads, hold = work
    held = [threads.start(hold, f"client {i}", long=True) for i in range(20)]
    assert threads.start(lambda: "done", "another").result(60) == "done"
    assert sum(w.running() for w in held) == pool.LONG


def test_short_work_that_takes_long_holds_up_nothing(work):
    """A short request may compile a grammar for seconds."""
    threads, hold = work
    for _ in range(20):
        threads.start(hold, "one")
    assert threads.start(lambda: "done", "another").result(60) == "done"
    assert threads.submit(lambda: "done").result(60) == "done"


def test_clients_take_turns(work):
    threads, order, first = work[0], [], threading.Event()
    for i in range(pool.LONG):
        threads.start(lambda: first.wait(60), f"before {i}", long=True)
    for name in ["a"] * 5 + ["b"]:
        threads.start(lambda name=name: order.append(name), name, long=True)
    first.set()
    assert threads.idle(60) and order.index("b") < 3, order


@pytest.mark.parametrize("long, most", [(False, pool.SHORT_SHARE), (True, pool.LONG_SHARE)])
def test_one_client_has_its_share_of_the_threads(work, long, most):
    threads, hold = work
    begun = []
    for i in range(20):
        threads.start(lambda i=i: (begun.append(i), hold()), "one", long)
    wait_for(lambda: len(begun) == most)
    time.sleep(4 * most * pool.OVERRUN_SECONDS)
    assert len(begun) == most and threads.start(lambda: "done", "another", long).result(60) == "done"


def test_what_is_cancelled_ends_and_what_waits_is_never_begun(work):
    threads, _ = work
    began, ended = threading.Event(), []

    def go_on():
        began.set()
        try:
            while True:
                check()
                time.sleep(0.001)
        except Cancelled:
            ended.append(True)
            raise

    runs, waits = threads.start(go_on, "one", long=True), threads.start(lambda: ended.append("never"), "one", long=True)
    assert began.wait(60)
    waits.cancel()
    runs.cancel()
    assert isinstance(runs.exception(60), Cancelled) and waits.cancelled()
    threads.shutdown()
    assert ended == [True]


def test_the_end_waits_for_nothing_that_can_be_cancelled():
    threads, began = Pool(), threading.Event()

    def never():
        began.set()
        time.sleep(1)  # nothing interrupts it

    threads.start(never)
    assert began.wait(60)
    waits = [threads.start(never, "one", long=True) for _ in range(50)]
    threads.shutdown(wait=False, cancel_futures=True)
    assert not threads.idle(0.05) and threads.idle(60) and sum(w.cancelled() for w in waits) >= 49
    with pytest.raises(RuntimeError, match="shut down"):
        threads.start(never)


def test_a_cancelled_prompt_counts_as_far_as_it_was_computed():
    task = SimpleNamespace(handle=SimpleNamespace(prompt_read=300), progress_from=1.0, latest=1.5)
    for reason, tokens in (("cancelled", 300), ("length", 1000)):  # of no tokens at all
        stats = Stats(prompt_tokens=1000, stop_reason=reason)
        assert prefill(stats, task)[0] == tokens
