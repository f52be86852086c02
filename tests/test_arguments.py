"""What callers hand to Session, ModelRunner, Tokenizer and Sampling: nonsense ends in one of our sentences and changes nothing.

After each of these is C that ends the process, or reads what lies there, so a missing check ends this test run.
"""

import ctypes
import math

import numpy as np
import pytest
from random_gguf.model import Shape

import pyggml_spec as ps
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.errors import ContextError, DeviceError, EngineError, PairError, PyspecError, SamplingError

HUGE, NAN, OUTSIDE = 2**70, math.nan, Shape().n_vocab
NUMBERS = [-1, 1.5, NAN, math.inf, "x", None, HUGE, True]  # none of them counts anything
NO_IDS = [None, 5, [], [-1], [OUTSIDE], [2**31], [HUGE], [1.5], [NAN], ["a"], [[1, 2]], [None], [True], np.ones(3), np.ones((2, 2), int), np.array(5),
          np.array([2**63], np.uint64), {1: 2}, {1, 2}, ""]  # fmt: skip
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def session(pair):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=128, draft_width=8, chunk=64) as one:
        yield one


@pytest.fixture(scope="module")
def want(session):
    return session.generate(PROMPT, 12)[0]


@pytest.fixture
def engine(session, want):
    """The session's engine after a prompt; afterwards it still generates what it did."""
    session.engine.reset()
    session.engine.prefill(PROMPT)
    yield session.engine
    assert session.generate(PROMPT, 12)[0] == want


def refused(call, *args, error=PyspecError, **named) -> None:
    with pytest.raises(error) as caught:
        call(*args, **named)
    message = str(caught.value)
    assert "\n" not in message and 10 < len(message) < 400, message


@pytest.mark.parametrize(
    "name, values, error",
    [
        ("threads", [0, -1, 513, 10**9, *NUMBERS[1:5], HUGE], DeviceError),
        ("n_ctx", [-2, 10**18, *NUMBERS[:5], HUGE], ContextError),
        ("draft_width", [0, -5, 10**9, *NUMBERS[:5], HUGE], PairError),
        ("chunk", [0, 1 << 31, 10**12, *NUMBERS], EngineError),
        ("prefix_memory", [-1, 1.5, NAN, "x", HUGE], PyspecError),
        ("cache_type_k", ["x", 3, None, ""], PyspecError),
        ("device", [3, "", b"CPU", "nope"], DeviceError),
        ("prefix_cache", ["a\0b"], PyspecError),
    ],
)
def test_load(pair, name, values, error):
    for value in values:
        refused(ps.load, *pair, error=error, **{"device": "CPU", "threads": 1, "n_ctx": 64, name: value})


def test_prompts(session, engine):
    for ids in NO_IDS:
        refused(session.generate, ids, 3, error=ContextError)
    assert session.generate(np.array([1, 2], np.uint8), 3)[0] == session.generate(iter([1, 2]), 3)[0] == session.generate((1, 2), 3)[0]
    assert session.generate(b"ab\xff", 3)[0] == session.generate("ab\ufffd", 3)[0]  # bytes are text, not token ids


def test_options_of_a_generation(session, engine):
    for value in (-1, 1.5, NAN, "x", True):
        refused(session.generate, "ab", value, error=EngineError)
    for named, error in (
        ({"mode": "x"}, EngineError), ({"mode": 3}, EngineError), ({"stop": "abc"}, SamplingError), ({"stop": [5]}, SamplingError),
        ({"stop": 5}, SamplingError), ({"sampling": {"temperature": 1}}, SamplingError), ({"sampling": 3}, SamplingError),
    ):  # fmt: skip
        refused(session.generate, "ab", 3, error=error, **named)
    for named in (
        {"grammar": 3},
        {"logit_bias": [1]},
        {"logit_bias": {1: NAN}},
        {"temperature": NAN},
        {"top_k": 1.5},
        {"seed": HUGE},
        {"logprobs": 10**9},
    ):
        refused(lambda: session.generate("ab", 3, sampling=ps.Sampling(**named)), error=SamplingError)
    assert session.generate("ab", 0)[0] == ""


@pytest.mark.parametrize("call", ["prefill", "logits", "verify_step"])
def test_token_ids_of_the_engine(engine, call):
    for ids in NO_IDS:
        refused(getattr(engine, call), ids)
    (
        refused(engine.capture, [-1], [1]),
        refused(engine.capture, [1], [-1]),
        refused(engine.capture, [1], [99]),
        refused(engine.capture, [1], [1.5]),
    )


def test_widths_and_rows(engine):
    for value in (0, 1, 9, *NUMBERS[:5], HUGE):
        refused(engine.fused_step, value)
    engine.fused_step()
    for value in (0, 9, *NUMBERS):
        refused(engine.accept, value, 1)
    for value in (OUTSIDE, 10**9, *NUMBERS):
        refused(engine.accept, 1, value)
        refused(engine.candidates, value)
    engine.accept(1, np.int64(1))
    refused(engine.accept, 1, 1)
    for value in (1025, *NUMBERS[:5], HUGE, True):
        refused(engine.read_candidates, value)
    for role, width in (("nonsense", 4), ("prefill", -1), ("prefill", 0), ("fused", 0), ("fused", 10**6)):
        refused(engine.step_graph, role, width)
    refused(engine.step_graph, "verify", 1.5)


def test_a_sequence_cannot_go_on_from_nowhere(engine):
    for length, last_token in ((-1, 1), (129, 1), (1.5, 1), ("x", 1), (5, -1), (5, OUTSIDE), (5, NAN), (5, HUGE)):
        engine.reset()
        refused(engine.resume, length, last_token)
    assert engine.cursor.committed == 0
    refused(engine.plain_step), refused(engine.fused_step), refused(engine.verify_step, [1])


def test_rows_of_a_block_that_a_prompt_came_after_cannot_be_accepted(engine):
    engine.fused_step()
    engine.prefill([5])
    refused(engine.accept, 3, 1)
    assert engine.cursor.committed == len(PROMPT) + 1


def test_snapshots_of_another_engine(pair, engine):
    snapshot = engine.snapshot()
    with ps.load(*pair, device="CPU", threads=1, n_ctx=64) as other:
        refused(other.engine.restore, snapshot)
        engine.restore(snapshot)
        snapshot.close()
    for nothing in (snapshot, None, 3):
        refused(engine.restore, nothing)


def test_a_closed_session(pair):
    session = ps.load(*pair, device="CPU", threads=1, n_ctx=64)
    engine = session.engine
    engine.prefill(PROMPT)
    snapshot = engine.snapshot()
    session.close()
    calls = [lambda: session.generate("a", 2), lambda: session.batch(2), lambda: session.concurrent(2), session.configuration, session.calibrate_plain,
             lambda: session.tokenizer.encode("a"), lambda: session.tokenizer.piece(1), lambda: session.tokenizer.is_end(1), engine.plain_step,
             lambda: engine.prefill([1]), lambda: engine.logits([1]), lambda: engine.capture([1], [1]), engine.fused_step, lambda: engine.candidates(0),
             engine.memory, engine.reset, engine.snapshot, lambda: engine.step_graph("plain", 1), lambda: engine.restore(snapshot)]  # fmt: skip
    for call in calls:
        refused(call, error=EngineError)
    session.close()


def test_the_tokenizer(session):
    for text in (None, 5, [1], {}):
        refused(session.tokenizer.encode, text)
    assert session.tokenizer.decode([-1, 10**9, HUGE]) == "" and not session.tokenizer.is_end(-1)
    for token in (1.5, "x", None):
        with pytest.raises((TypeError, ctypes.ArgumentError)):  # nothing reaches C
            session.tokenizer.decode([token])


def test_slots(session, engine):
    for slots in (0, 65, 10**9, *NUMBERS):
        refused(session.batch, slots)
    for n_ctx in (0, *NUMBERS[:5], HUGE):
        refused(session.batch, 1, n_ctx)
    scheduler = session.batch(2, 64)
    batch = scheduler.runner
    for ids in NO_IDS:
        refused(scheduler.submit, ids)
        slot = batch.admit()
        refused(batch.step, {slot: Prefill(ids)})
        batch.release(slot)
    slot = batch.admit()
    batch.step({slot: Prefill(PROMPT)})
    for ids in ([-1], [OUTSIDE], [HUGE], [1.5], [NAN], ["a"], [[1, 2]], [None], np.ones((2, 2), int), [1] * 8):
        refused(batch.step, {slot: Verify(ids)})
    for value in (0, 1, 9, *NUMBERS):
        refused(batch.step, {slot: Draft(value)})
    for value in (1, 2, 99, *NUMBERS[:7]):
        refused(batch.step, {value: Verify()})
        refused(batch.release, value)
    for work in (None, 3, {}, [1], {slot: None}, {slot: 3}, {slot: "x"}):
        refused(batch.step, work)
    batch.step({slot: Draft(4)})
    for value in (0, 5, *NUMBERS):
        refused(batch.accept, value, 1, slot)
    for value in (OUTSIDE, 10**9, *NUMBERS):
        refused(batch.accept, 1, value, slot)
        refused(batch.candidates, value, slot)
    for value in (2, 99, *NUMBERS):
        refused(batch.rollback, value, slot)
    batch.accept(1, 1, slot)
    for value in (OUTSIDE, *NUMBERS):
        refused(batch.choose, value, slot)
    for value in (1025, *NUMBERS[:5], HUGE):
        refused(batch.admit, candidates=value)
    for n, last_token in ((65, 1), (0, 1), (1.5, 1), (10, -1), (10, OUTSIDE), (10, NAN)):
        refused(batch.resume, n, last_token, slot)
    for nothing in (None, 3, engine.snapshot()):
        refused(batch.restore, nothing, slot)
    scheduler.close()
    refused(batch.admit), refused(batch.step, {slot: Verify()})
