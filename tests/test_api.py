"""What the Python API promises alongside the engine: names for type checkers, lists of prompts, chats in one call, the file's sampling."""

import ast
import ctypes
import inspect
import math
import subprocess
import sys
import typing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf_io.build import F32, I32, Model
from random_gguf.model import Shape
from sessions import fails_with, loaded

import pyggml_spec as ps
from pyggml_spec import arguments
from pyggml_spec.api import Session
from pyggml_spec.concurrent import ConcurrentSession
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.errors import ContextError, DeviceError, EngineError, PairError, PyspecError, SamplingError, TemplateError
from pyggml_spec.tools.plan import plan

TEXTS = ["def quicksort(", "class Stack:", "import os\n", "for i in range("]
demo = loaded(n_ctx=256, draft_width=4)


@pytest.mark.parametrize("call, options", [(Session.steps, arguments.GenerateOptions), (ConcurrentSession.submit, arguments.SubmitOptions)])
def test_the_named_options_are_those_of_the_call(call, options):
    """A new argument that the names lack would be an error to everybody's type checker."""
    hints = typing.get_type_hints(call)
    named = [name for name, p in inspect.signature(call).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert typing.get_type_hints(options) == {name: hints[name] for name in named}


def test_options_and_fields_of_load_are_listed_once():
    """Python, the command line, the server and `plan` build LoadOptions: a second list of its fields would drift from it."""
    names, root = {field.name for field in fields(ps.LoadOptions)}, Path(ps.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if sum(name in text for name in names) >= 8 else ():
            if isinstance(node, ast.FunctionDef):
                found = names & {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.ClassDef):
                found = names & {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
            else:
                continue
            assert len(found) < 8 or node.name == "LoadOptions", f"{path.relative_to(root)} lists {sorted(found)} in {node.name}"
    options = ps.LoadOptions(device="CPU", threads=1, n_ctx=128, draft_width=4)
    as_arguments = {"device": "CPU", "threads": 1, "n_ctx": 128, "draft_width": 4}
    with ps.load(options=options) as one, ps.load(options=options, n_ctx=256) as two, ps.load(**as_arguments) as three:
        assert one.options == three.options == options and two.options == replace(options, n_ctx=256)
        assert (one.runner.options, two.runner.options.n_ctx) == (three.runner.options, 256)
    fails_with(TypeError, "n_context", ps.load, n_context=5)


@pytest.mark.slow
def test_a_type_checker_knows_the_options(tmp_path):
    """The package is marked as typed: what it cannot check it must not hide."""
    (tmp_path / "user.py").write_text(
        "import pyggml_spec as ps\n"
        "with ps.load() as session:\n"
        "    text, stats = session.generate('a', 5, ignore_end=True)\n"
        "    session.generate('a', ignore_ends=True)\n"
        "    session.generate('a', stop=3)\n"
        "    reveal_type(ps.Chat.load().answer('a'))\n"
        "ps.load('t.gguf', None, n_ctx=4, device='CPU')\n"
        "ps.load(n_ctx='4')\n"
        "ps.load('t.gguf', n_context=4)\n"
    )
    done = subprocess.run([sys.executable, "-m", "mypy", "--no-incremental", "user.py"], cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 4 and "ignore_ends" in errors[0] and '"stop"' in errors[1] and 'is "str"' in done.stdout, done.stdout
    assert '"n_ctx"' in errors[2] and "n_context" in errors[3], done.stdout


def test_prompts_and_chats_in_one_call(demo):
    got = demo.generate_all(iter(TEXTS), 9, slots=2, ignore_end=True)
    assert [text for text, _ in got] == [demo.generate(text, 9, mode="plain", ignore_end=True)[0] for text in TEXTS]
    assert [stats.emitted for _, stats in got] == [9] * len(TEXTS) and demo.generate_all([]) == []
    fails_with(ContextError, "one text", demo.generate_all, "def f(x):", 5)
    fails_with(ContextError, "does not fit", demo.generate_all, [TEXTS[0], [1] * 300], 5)
    assert demo.generate(TEXTS[0], 5)[1].emitted == 5  # the session is free again
    with ps.Chat.load(device="CPU", threads=1, n_ctx=256) as chat:
        first = chat.answer("def f(x):", 12)
        assert chat.messages[-1] == {"role": "assistant", "content": first} and chat.stats[0].emitted == 12
    fails_with(ps.EngineError, "closed", chat.session.generate, "a", 1)
    assert ps.Chat(demo).answer("def f(x):", 12) == first
    fails_with(TemplateError, "empty", ps.Chat.load, device="CPU", threads=1, n_ctx=256, template="")


@pytest.fixture(scope="module")
def recommending(pair, tmp_path_factory):
    """A model whose file recommends sampling."""
    model = Model(pair[0])
    model.keys |= {"general.sampling.temp": (F32, 0.6), "general.sampling.top_k": (I32, 20)}
    path = model.write(tmp_path_factory.mktemp("recommending") / "t.gguf")
    with ps.load(path, device="CPU", threads=1, n_ctx=128) as session:
        yield session


def test_the_file_recommends_to_the_api_what_it_recommends_to_the_command_line(recommending):
    assert recommending.sampling().is_greedy and recommending.sampling(repeat_penalty=1.1).temperature == 0
    seeded = recommending.sampling(seed=4)
    assert (seeded.temperature, seeded.top_k, seeded.seed, seeded.top_p) == (0.6, 20, 4, ps.Sampling().top_p)
    assert recommending.sampling(seed=None, temperature=0.9).top_k == 20
    texts = [recommending.generate([1, 2, 3], 6, sampling=s)[0] for s in (seeded, recommending.sampling(seed=4))]
    assert texts[0] == texts[1]
    fails_with(SamplingError, "no field 'temp'", recommending.sampling, temp=0.5)


@pytest.mark.parametrize("call, says", [
    (lambda: ps.load(5), "`target` is 5, but it has to be a path"),
    (lambda: ps.load(b"t.gguf"), "`target` is b't.gguf', but it has to be a path"),
    (lambda: ps.load(""), "`target` is '', but it has to be a path"),
    (lambda: ps.load(prefix_cache="", n_ctx=64, draft_width=2), "the folder of the prefix cache (`prefix_cache`) is '', but it has to be a path"),
    (lambda: ps.load("t.gguf", 5), "the drafter (`draft`) is 5, but it has to be a path"),
    (lambda: ps.load("t.gguf", ["d.gguf", None]), "the drafter (`draft`) is None, but it has to be a path"),
    (lambda: ps.load(experts=5), "`experts` is 5, but it has to be ExpertOptions or None"),
    (lambda: ps.load(rope="yarn"), "`rope` is 'yarn', but it has to be RopeOptions or None"),
    (lambda: ps.load(device="CPU,CPU", tensor_split="1,3"), "the proportions (`tensor_split`) are '1,3', but they have to be numbers in a row"),
    (lambda: ps.load(device="CPU,CPU", tensor_split=[1, "x"]), "the proportions (`tensor_split`) are [1, 'x'], but they have to be numbers in a row"),
    (lambda: ps.load(prefix_cache=5, n_ctx=64, draft_width=2), "the folder of the prefix cache (`prefix_cache`) is 5, but it has to be a path"),
    (lambda: plan(5), "`target` is 5, but it has to be a path"),
    (lambda: plan(tensor_split=5), "the proportions (`tensor_split`) are 5, but they have to be numbers in a row"),
])  # fmt: skip
def test_arguments_of_another_kind_are_sentences(call, says):
    """They were a TypeError of whatever looked at them first."""
    with pytest.raises(ps.PyspecError) as caught:
        call()
    assert str(caught.value) == says


@pytest.mark.parametrize("few", [0, 64], ids=["all", "the largest, as on a GPU"])
def test_candidates_are_the_callers(few):
    """They were a view of what the next step writes over, and closing frees."""
    with ps.load(device="CPU", threads=1, n_ctx=200, draft_width=2) as session:
        session.runner.slots[0].candidates = few
        session.runner.prefill([1, 2, 3])
        found = [part for part in session.runner.candidates(0) if part is not None]
        assert [part.size for part in found] == ([few, few] if few else [session.tokenizer.n_vocab])
        before = [part.copy() for part in found]
        session.runner.plain_step()
        assert all(np.array_equal(*pair) and pair[0].flags.owndata for pair in zip(found, before, strict=True))
    assert all(np.array_equal(*pair) for pair in zip(found, before, strict=True))


HUGE, NAN, OUTSIDE = 2**70, math.nan, Shape().n_vocab
NUMBERS = [-1, 1.5, NAN, math.inf, "x", None, HUGE, True]  # none of them counts anything
NO_IDS = [None, 5, [], [-1], [OUTSIDE], [2**31], [HUGE], [1.5], [NAN], ["a"], [[1, 2]], [None], [True], np.ones(3), np.ones((2, 2), int), np.array(5),
          np.array([2**63], np.uint64), {1: 2}, {1, 2}, ""]  # fmt: skip
PROMPT = [1, 2, 3]
session = loaded(pair=True, n_ctx=128, draft_width=8, chunk=64)


@pytest.fixture(scope="module")
def want(session):
    return session.generate(PROMPT, 12)[0]


@pytest.fixture
def engine(session, want):
    """The session's engine after a prompt; afterwards it still generates what it did."""
    session.runner.reset()
    session.runner.prefill(PROMPT)
    yield session.runner
    assert session.generate(PROMPT, 12)[0] == want


def refused(call, *args, error=PyspecError, **named) -> None:
    with pytest.raises(error) as caught:
        call(*args, **named)
    message = str(caught.value)
    assert "\n" not in message and 10 < len(message) < 400, message


@pytest.mark.parametrize("name, values, error", [
    ("threads", [0, -1, 513, 10**9, *NUMBERS[1:5], HUGE], DeviceError), ("n_ctx", [-2, 10**18, *NUMBERS[:5], HUGE], ContextError),
    ("draft_width", [0, -5, 10**9, *NUMBERS[:5], HUGE], PairError), ("chunk", [0, 1 << 31, 10**12, *(n for n in NUMBERS if n is not None)], EngineError),
    ("prefix_memory", [-1, 1.5, NAN, "x", HUGE], PyspecError), ("cache_type_k", ["x", 3, None, ""], PyspecError),
    ("device", [3, "", b"CPU", "nope"], DeviceError), ("prefix_cache", ["a\0b"], PyspecError),
])  # fmt: skip
def test_load(pair, name, values, error):
    for value in values:
        refused(ps.load, *pair, error=error, **{"device": "CPU", "threads": 1, "n_ctx": 64, name: value})


def test_prompts_and_options_of_a_generation(session, engine):
    for ids in NO_IDS:
        refused(session.generate, ids, 3, error=ContextError)
    assert session.generate(np.array([1, 2], np.uint8), 3)[0] == session.generate(iter([1, 2]), 3)[0] == session.generate((1, 2), 3)[0]
    assert session.generate(b"ab\xff", 3)[0] == session.generate("ab\ufffd", 3)[0]  # bytes are text, not token ids
    for value in (-1, 1.5, NAN, "x", True):
        refused(session.generate, "ab", value, error=EngineError)
    for named, error in (
        ({"mode": "x"}, EngineError), ({"mode": 3}, EngineError), ({"stop": "abc"}, SamplingError), ({"stop": [5]}, SamplingError),
        ({"stop": 5}, SamplingError), ({"sampling": {"temperature": 1}}, SamplingError), ({"sampling": 3}, SamplingError),
    ):  # fmt: skip
        refused(session.generate, "ab", 3, error=error, **named)
    wrong = {"grammar": [3], "logit_bias": [[1], {1: NAN}], "temperature": [NAN], "top_k": [1.5], "seed": [HUGE], "logprobs": [10**9]}
    for named in ({name: value} for name, values in wrong.items() for value in values):
        refused(lambda: session.generate("ab", 3, sampling=ps.Sampling(**named)), error=SamplingError)
    assert session.generate("ab", 0)[0] == ""


@pytest.mark.parametrize("call", ["prefill", "logits", "verify_step"])
def test_token_ids_of_the_engine(engine, call):
    for ids in NO_IDS:
        refused(getattr(engine, call), ids)
    for ids, layers in (([-1], [1]), ([1], [-1]), ([1], [99]), ([1], [1.5])):
        refused(engine.capture, ids, layers)


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
        refused(other.runner.restore, snapshot)
        engine.restore(snapshot)
        snapshot.close()
    for nothing in (snapshot, None, 3):
        refused(engine.restore, nothing)


def test_a_closed_session(pair):
    session = ps.load(*pair, device="CPU", threads=1, n_ctx=64)
    engine = session.runner
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
        refused(partial(session.generate_all, ["x"], 1, slots=slots))
        assert EngineOptions(slots=slots, implied=True, slots_chunk=2048).narrow.slots is slots  # n-grams, and a GPU: it is checked later
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
