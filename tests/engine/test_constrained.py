"""Constraints in a step: masks on the device give the text that masks on the host give, asked for once per step, and only where they matter."""

import json
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from sessions import fails_with, loaded

import pyggml_spec as ps
from pyggml_spec.constraints import grammar as grammars
from pyggml_spec.constraints.grammar import Grammar, allows, only
from pyggml_spec.engine import masked
from pyggml_spec.engine.batch import Draft, Verify
from pyggml_spec.engine.constrained import StepConstraint
from pyggml_spec.engine.engine import Engine
from pyggml_spec.engine.masked import MOST_ROWS, MaskedRows
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import DeviceError, EngineError
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.sampling.sampler import Sampler, Sampling
from pyggml_spec.speculation.synthetic import SyntheticAcceptance
from pyggml_spec.tools.plan import plan

pytestmark = pytest.mark.slow
KEYS = {"the_name_of_the_function": {"type": "string", "maxLength": 12}, "number_of_arguments": {"type": "integer", "maximum": 99}}
SCHEMA = json.dumps({"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False})
CONSTRAINTS = {
    "schema": {"json_schema": SCHEMA}, "regex": {"regex": r"def [a-z]{3,9}\(self, (name|number)\):\n    return [^\n]{3,20}\n"},
    "gbnf": {"grammar": 'root ::= "x = [" d (", " d){0,3} "]" \nd ::= [0-9] | "(" d ")"'},
}  # fmt: skip
VALUES = {
    "greedy": {"temperature": 0.0}, "sampled": {"seed": 7, "temperature": 1.2}, "penalties": {"temperature": 0.0, "repeat_penalty": 1.3, "repeat_last_n": 20},
    "whole rows": {"seed": 7, "top_k": 0},
}  # fmt: skip
PROMPT = "import os\n\n"


@pytest.fixture(scope="module", params=[None, DEMO_DRAFTER], ids=["no drafter", "drafter"])
def session(request):
    with ps.load(DEMO_TARGET, draft=request.param, device="CPU", threads=1, n_ctx=256, draft_width=4 if request.param else None) as session:
        yield session


class Asked(list):
    """What a device was asked for: the numbers of rows, one entry each time. ``rows``: whole rows that were read."""

    rows = 0


@pytest.fixture
def device(monkeypatch):
    """Engines treat the CPU's memory as a device's while decoding: logits stay in it, masks go to it."""
    asked = Asked()

    def read_candidates(self, count, slot=0, masked=False):
        self._expect(count, slot, masked)

    def counted(real):
        return lambda self, asks, count: asked.append(len(asks)) or real(self, asks, count)

    def candidates(self, row, slot=0, real=ModelRunner.candidates):
        ids, logits = real(self, row, slot)
        asked.rows += ids is None
        return ids, logits

    monkeypatch.setattr(ModelRunner, "read_candidates", read_candidates)
    monkeypatch.setattr(ModelRunner, "candidates", candidates)
    monkeypatch.setattr(MaskedRows, "_run", counted(MaskedRows._run))
    return asked


@pytest.fixture(scope="module")
def host_texts(session):
    samplings = {(kind, values): Sampling(**CONSTRAINTS[kind], **VALUES[values]) for kind in CONSTRAINTS for values in VALUES}
    return {key: session.generate(PROMPT, 60, sampling=sampling)[0] for key, sampling in samplings.items()}


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("values", VALUES)
def test_the_text_is_the_hosts(session, host_texts, device, kind, values):
    sampling, want = Sampling(**CONSTRAINTS[kind], **VALUES[values]), host_texts[kind, values]
    text, stats = session.generate(PROMPT, 60, sampling=sampling)
    assert text == want and session.generate(PROMPT, 60, sampling=sampling, mode="plain")[0] == want
    assert bool(device) is (values != "whole rows"), "none of its greedy choices or draws was forbidden"
    assert bool(device.rows) is (values == "whole rows")
    if values == "greedy":
        assert len(device) <= 2 * (stats.emitted + 1)
    alone = session.generate("def f(", 20)[0]
    with session.concurrent(slots=2) as server:
        free, handle = server.submit("def f(", 20), server.submit(PROMPT, 60, sampling=sampling)
        assert handle.result()[0] == want and free.result()[0] == alone


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("values", ["greedy", "sampled"])
def test_masks_by_threads_go_to_the_device_too(session, host_texts, device, always_slow, kind, values):
    text, _ = session.generate(PROMPT, 60, sampling=Sampling(**CONSTRAINTS[kind], **VALUES[values]))
    assert text == host_texts[kind, values] and device and not device.rows


def test_the_device_is_asked_once_in_a_step_and_not_where_nothing_is_forbidden(session, device):
    sampling = Sampling(json_schema=SCHEMA, temperature=0)
    _, stats = session.generate(PROMPT, 60, sampling=sampling)
    assert 0 < len(device) <= stats.steps + 1
    device.clear()
    text, _ = session.generate("x = 1\n", 12)
    free = "".join(f"\\x{{{ord(c):x}}}" for c in text)
    again, _ = session.generate("x = 1\n", 12, sampling=Sampling(temperature=0, regex=f"({free}|zz)(.|\\n)*"))
    assert again == text and not device and not device.rows


def test_a_device_without_room_for_masks_reads_whole_rows_and_says_so(session, device, host_texts, monkeypatch):
    def none(*more):
        raise DeviceError("no memory for 64 rows")

    monkeypatch.setattr(masked, "MaskedRows", none)
    monkeypatch.setattr(session.runner, "_tried_masked", False)
    monkeypatch.setattr(session.runner.resources, "masked", None)
    text, stats = session.generate(PROMPT, 60, sampling=Sampling(**CONSTRAINTS["regex"], **VALUES["greedy"]))
    assert text == host_texts["regex", "greedy"] and device.rows and not device
    assert [note for note in stats.notes if "whole rows of logits" in note and "no memory for 64 rows" in note]
    assert not session.generate(PROMPT, 5)[1].notes


def test_slots_ask_together(session, device, monkeypatch):
    submitted, step = threading.Event(), Engine._step
    # All four begin with the same step, however fast steps are.
    monkeypatch.setattr(Engine, "_step", lambda *given: submitted.wait(60) and step(*given))
    with session.concurrent(slots=4) as server:
        sampling = [Sampling(temperature=0, regex=f"[{c}-{c}A-Z]{{40}}") for c in "wxyz"]
        handles = [server.submit(PROMPT, 30, sampling=s) for s in sampling]
        submitted.set()
        for handle in handles:
            handle.result()
    assert max(device) >= 4 and not device.rows


def test_drafts_that_are_forbidden_are_not_verified(monkeypatch):
    widths, real = Counter(), StepConstraint.check

    def check(self, drafts):
        passed = real(self, drafts)
        widths[next(w for w in (1, 2, 4, 8, 16) if passed < w)] += 1
        return passed

    monkeypatch.setattr(StepConstraint, "check", check)
    with ps.load(device="CPU", threads=1, n_ctx=256, draft_width=16) as session:
        sampling = Sampling(seed=3, temperature=1.5, regex="[0-9]{30}[0-9a-f]*")
        text, stats = session.generate("def quicksort(items):\n    ", 30, sampling=sampling)
        assert text == session.generate("def quicksort(items):\n    ", 30, sampling=sampling, mode="plain")[0]
    assert stats.widths == widths and widths[1]
    assert stats.drafted == sum((width - 1) * n for width, n in widths.items())


@pytest.mark.parametrize("slow", [False, True])
def test_a_pinned_width_is_that_of_every_block_where_bits_depend_on_it(request, slow):
    """With ggml's kernels a row of a narrower graph has other last bits: text would not be that of ``--reference-shape``."""
    if slow:
        request.getfixturevalue("always_slow")
    constraints = {"regex": "[a-z ]{5,60}[0-9]{2,9}"}, {"json_schema": SCHEMA}, {"grammar": 'root ::= "x = " n\nn ::= [0-9] n | "\\n"'}
    with ps.load(device="CPU", threads=1, n_ctx=256, draft_width=8, kernels="ggml") as session:
        for seed, constraint in enumerate(constraints):
            sampling = Sampling(temperature=1, seed=seed, **constraint)
            text, stats = session.generate("import json\n" * 3, 40, sampling=sampling)
            assert text == session.generate("import json\n" * 3, 40, sampling=sampling, mode="reference")[0]
            assert set(stats.widths) == {8}


@pytest.fixture
def guided(session):
    sampler = Sampler(Sampling(temperature=0, regex="(ab|cd)[0-9]{6}x+"), session.tokenizer, session.target.n_vocab)
    yield sampler
    sampler.close()


def test_masks_ahead_end_tokens_and_ambiguous_grammars(session, monkeypatch):
    tokenizer = session.tokenizer
    for text, kind in (('{"the_name_of_the_function": "ab c", "number', "schema"), ("def abc(self, na", "regex")):
        grammar, ids = Grammar(*Sampling(**CONSTRAINTS[kind]).constraint, tokenizer), tokenizer.encode(text, bos=False)
        ahead, forbidden = grammar.ahead(ids), grammar.ahead([*ids[:2], next(t for t in range(300) if not grammar.allows(t)), ids[2]])
        assert len(ahead) == len(ids) + 1 and len(forbidden) >= 3
        for bits, token in zip(ahead, [*ids, None]):
            np.testing.assert_array_equal(bits, grammar.bits())
            np.testing.assert_array_equal(np.unpackbits(bits, bitorder="little")[: tokenizer.n_vocab].view(bool), grammar.mask())
            if token is not None:
                assert allows(bits, token)
                grammar.accept(token)
    grammar = Grammar("regex", "a{1,3}", session.tokenizer)
    end = next(i for i in range(session.tokenizer.n_vocab) if session.tokenizer.is_end(i))
    a = session.tokenizer.encode("a", bos=False)[0]
    here, behind = grammar.ahead([a, end, a])
    assert not allows(here, end) and allows(behind, end) and grammar.allows(a)
    assert only(Grammar("regex", "aaa", session.tokenizer).bits()) in (None, a)
    monkeypatch.setattr(grammars, "LEAST_ITEMS", 10_000)  # or it takes five seconds
    words = "s s s s s s | s s s s s | s s s s | s s s | s s"
    with pytest.raises(ps.ConstraintError, match="too ambiguous.*s ::= \\[a-z\\]\\+"):
        session.generate("a", 200, sampling=ps.Sampling(temperature=0, grammar=f"root ::= s\ns ::= {words} | [a-z]"))


@pytest.mark.parametrize("tokens", [[], [0], [31], [32], [4095], [7, 8], [3, 4000]])
def test_only_one(tokens):
    bits = np.zeros(4096, bool)
    bits[tokens] = True
    assert only(np.packbits(bits, bitorder="little")) == (tokens[0] if len(tokens) == 1 else None)


def digits_and_wrong(session, guided) -> tuple[list[int], int]:
    """Tokens that may come behind `ab`, which is taken, and one that may not."""
    a, b, wrong, *digits = (session.tokenizer.encode(c, bos=False)[0] for c in "ab(123456")
    guided.take(a), guided.take(b)
    return digits, wrong


def test_rows_that_cannot_be_reached_are_not_asked_about(session, guided):
    digits, wrong = digits_and_wrong(session, guided)
    for drafts, greedy, rows in [
        (digits[:3], [wrong] * 4, [0, 1, 2, 3]), (digits[:3], [digits[0], wrong, digits[2], digits[3]], [1]), (digits[:3], [digits[1], wrong, wrong, wrong], []),
        ([digits[0], wrong, digits[2]], [wrong] * 4, [0, 1]), ([], [wrong], [0]), ([], [digits[5]], []),
    ]:  # fmt: skip
        guide = StepConstraint(guided)
        guide.begin()
        guide.check(np.array(drafts, np.int32)) if drafts else None
        guide.compute_masks(len(drafts) + 1)
        assert [row for row, _ in guide.forbidden(np.array(greedy))] == rows


def test_a_block_is_filled_up_to_a_width_that_is_cheaper(session, guided):
    """With ggml's own CUDA kernels 16 rows cost less than 8."""
    digits, wrong = digits_and_wrong(session, guided)
    drafts, guide = np.array([*digits[:5], *[wrong] * 10], np.int32), StepConstraint(guided)
    for widths, passed in [((), 5), ((1, 2, 4, 8, 16), 7), ((1, 2, 4, 16), 15), ((1, 2), 5)]:
        guide.widths = widths
        guide.begin()
        assert guide.check(drafts) == passed
    assert guide.check(drafts[:6]) == 5
    guide.widths = (1, 16)
    assert guide.check(drafts[:6]) == 6
    guide.compute_masks(7)
    assert [row for row, _ in guide.forbidden(np.array([wrong] * 7))] == [0, 1, 2, 3, 4, 5], "what only fills up cannot come"


def test_synthetic_acceptance_follows_the_constraint(session, device):
    synthetic = SyntheticAcceptance(3, 3, seed=1)
    schema = json.dumps({"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 6, "maxItems": 40})
    for _ in range(2):
        text, stats = session.generate(PROMPT, 120, sampling=Sampling(temperature=0, json_schema=schema), synthetic=synthetic)
        assert stats.tokens_per_step > (2 if session.drafter is not None else 1.2)
        if not stats.cut:
            jsonschema.validate(json.loads(text), json.loads(schema))


@pytest.mark.parametrize("method", ["fits", "forced", "ahead", "accept"])
def test_a_constraint_that_fails_within_a_step_ends_its_own_sequence_alone(session, device, monkeypatch, method):
    alone, sampling = session.generate("def f(", 20)[0], Sampling(temperature=0, regex="[a-z ]{40}")
    real, calls = getattr(Grammar, method), 0

    def fails(self, *more):
        nonlocal calls
        calls += 1
        if calls > 3:
            raise EngineError("too many states of the lexer")
        return real(self, *more)

    with session.concurrent(slots=2) as server:
        free = server.submit("def f(", 20)
        monkeypatch.setattr(Grammar, method, fails)
        bound = server.submit(PROMPT, 30, sampling=sampling)
        fails_with(EngineError, "too many states", bound.result)
        assert free.result()[0] == alone
        monkeypatch.undo()
        assert server.submit("def f(", 20).result()[0] == alone and not server.ended


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("spec", ["draft-dflash", "suffix", "draft-dflash,draft-mtp,suffix"])
def test_memory_of_looked_at_and_looked_up_drafts_is_there_at_load(spec, slots):
    """Before, the first constrained text of a session made buffers for drafts that are looked at, and of several slots the first suffix draft did."""
    more = {"spec": spec.split(","), "device": "CPU", "n_ctx": 512}
    planned = plan(None, None, slots=slots, **more)
    with ps.load(threads=1, **more) as session, ExitStack() as stack:
        engine = session.runner
        assert engine.memory() == planned.memory
        scheduler = session.engine if slots == 1 else stack.enter_context(session.batch(slots))
        engine = scheduler.runner
        before, roles = engine.memory(), {name: c.buffer_growths for name, c in engine.graphs.counters().items()}
        if slots > 1:
            assert planned.slots_memory == {name: n for name, n in before.items() if name not in ("weights", "draft_weights")}
        prompt = session.tokenizer.encode("x = [1, 2, 3]\nx = [1, 2, 3]\n")
        for constrained in (False, True):
            for width in (4, 16):
                drafts = Draft(width, check=len) if constrained else Draft(width)
                for method in [m.method for m in session.drafter.methods] if session.drafter is not None else ():
                    _step_of_all(engine, prompt, replace(drafts, drafter=method))
                if session.lookup is not None or (constrained and session.drafter is not None):
                    _step_of_all(engine, prompt, Verify(prompt[: width - 1]))
        assert engine.memory() == before
        assert {name: c.buffer_growths for name, c in engine.graphs.counters().items() if name in roles or c.buffer_growths} == roles


def _step_of_all(engine, prompt, work):
    for slot in range(engine.options.slots):
        if engine.options.slots > 1:
            assert engine.admit() == slot
        else:
            engine.reset()
        engine.prefill(prompt, slot=slot)
    engine.step(dict.fromkeys(range(engine.options.slots), work))
    for slot in range(engine.options.slots) if engine.options.slots > 1 else ():
        engine.release(slot)


AMBIGUOUS = "root ::= s\ns ::= s s s | s s | [a-z]"
SHORT_SCHEMA = '{"type": "object", "properties": {"kind": {"enum": ["list", "dict"]}, "size": {"type": "integer", "maximum": 99}}, "required": ["kind", "size"], "additionalProperties": false}'
SLOW = {"gbnf": {"grammar": AMBIGUOUS}, "schema": {"json_schema": SHORT_SCHEMA}, "lark": {"lark": 'start: s\ns: s s | s "," s | /[a-z]/'}}
LATE_VALUES = {"greedy": {"temperature": 0.0}, "sampled": {"seed": 5, "temperature": 1.3}, "whole rows": {"seed": 5, "top_k": 0}}


@pytest.fixture
def always_slow(monkeypatch):
    """Every mask counts as a slow one."""
    monkeypatch.setattr(grammars, "SLOW_S", -1.0)
    monkeypatch.setattr(grammars, "QUICK_S", -1.0)


class Held:
    """What the threads of masks compute waits while ``gate`` is closed; ``others``: how often another thread computed one."""

    def __init__(self, monkeypatch):
        self.gate, self.waits, self.others = threading.Event(), threading.Event(), 0
        real = Grammar.compute_bits

        def computed(grammar):
            if threading.current_thread().name == "pyggml_spec masks":
                self.waits.set()
                self.gate.wait(60)
            else:
                self.others += 1
            return real(grammar)

        monkeypatch.setattr(Grammar, "compute_bits", computed)


@pytest.fixture
def held(always_slow, monkeypatch):
    held = Held(monkeypatch)
    yield held
    held.gate.set()


@pytest.mark.parametrize(
    "kind, values",
    [("gbnf", "greedy"), ("gbnf", "sampled"), ("schema", "sampled"), ("schema", "whole rows"), ("lark", "greedy"), ("lark", "whole rows")],
)
def test_the_text_is_that_of_masks_computed_at_once(session, always_slow, monkeypatch, kind, values):
    sampling = ps.Sampling(**SLOW[kind], **LATE_VALUES[values])
    texts = [session.generate("import os\n\n", 24, sampling=sampling, mode=mode)[0] for mode in (None, "plain", "reference")]
    with session.concurrent(slots=2) as server:
        handles = [server.submit("import os\n\n", 24, sampling=sampling) for _ in range(2)]
        texts += [handle.result()[0] for handle in handles]
    monkeypatch.setattr(grammars, "SLOW_S", 1e9)
    monkeypatch.setattr(grammars, "HEAVY_S", 1e9)
    assert set(texts) == {session.generate("import os\n\n", 24, sampling=sampling)[0]}


def test_masks_are_computed_beside_the_others_and_can_be_cancelled(session, held):
    with session.concurrent(slots=3) as server:
        slow = server.submit("import os\n\n", 12, sampling=ps.Sampling(temperature=0, grammar=AMBIGUOUS))
        assert held.waits.wait(60)
        beside = [server.submit(prompt, 40, ignore_end=True) for prompt in ("def f(", "x = 1\n")]
        assert [handle.result(60)[1].emitted for handle in beside] == [40, 40] and slow.stats.emitted <= 2
        held.gate.set()
        text, stats = slow.result(60)
    assert text.isalpha() and stats.emitted == 12
    assert held.others <= 2, "only until the first slow one, masks are computed by the thread of the steps"
    with session.concurrent(slots=1) as server:
        slow = server.submit("import os\n\n", 12, sampling=ps.Sampling(temperature=0, grammar=AMBIGUOUS))
        assert held.waits.wait(60)
        slow.cancel()
        assert slow.result(60)[1].stop_reason == "cancelled" and server.submit("def f(", 5).result(60)[1].emitted == 5


def test_a_mask_that_takes_too_long_ends_its_sequence_alone(session, held, monkeypatch):
    monkeypatch.setattr(grammars, "DEADLINE_S", 0.05)
    with session.concurrent(slots=2) as server:
        slow = server.submit("import os\n\n", 12, sampling=ps.Sampling(temperature=0, grammar=AMBIGUOUS))
        beside = server.submit("def f(", 60, ignore_end=True)
        fails_with(ps.ConstraintError, "more than 0.05 s.*ambiguous.*s ::= \\[a-z\\]\\+", slow.result, 60)
        assert beside.result(60)[1].emitted == 60 and slow.stats.cut


def test_what_a_thread_raises_ends_its_sequence(session, always_slow, monkeypatch):
    real = Grammar.compute_bits

    def computed(grammar):
        if threading.current_thread().name == "pyggml_spec masks":
            raise ps.ConstraintError("too many states")
        return real(grammar)

    monkeypatch.setattr(Grammar, "compute_bits", computed)
    with session.concurrent(slots=2) as server:
        slow, beside = server.submit("a", 12, sampling=ps.Sampling(temperature=0, grammar=AMBIGUOUS)), server.submit("def f(", 20)
        fails_with(ps.ConstraintError, "too many states", slow.result, 60)
        assert beside.result(60)[1].emitted == 20


pair_session = loaded(n_ctx=256, draft_width=4)


def packed(allowed: np.ndarray) -> np.ndarray:
    bits = np.packbits(allowed, bitorder="little")
    return np.concatenate([bits, np.zeros(-bits.size % 4, np.uint8)])


@pytest.mark.parametrize("n", [4096, 1000, 5, 33000])
def test_the_likeliest_and_the_largest_of_the_allowed(pair_session, n):
    """Vocabularies that fill blocks of 128 bits and that do not; one row and more than fit one graph; few allowed tokens, and none."""
    rng, rows = np.random.default_rng(n), 9
    masked = MaskedRows(pair_session.backend, n, rows, 64)
    try:
        logits = rng.normal(0, 5, (rows, n)).astype(np.float32)
        lib.ggml_backend_tensor_set(masked.logits, ffi.from_buffer(logits), 0, logits.nbytes)
        for share in (0.9, 0.02):
            for count in (1, 2, 7, MOST_ROWS + 5):
                asked, allowed = rng.integers(0, rows, count), rng.random((count, n)) < share
                allowed[:, -1] = True
                want = np.where(allowed, logits[asked], -np.inf).argmax(axis=1)
                assert masked.likeliest([(int(row), packed(a)) for row, a in zip(asked, allowed)]) == want.tolist()
        for allowed in (rng.random(n) < 0.5, np.arange(n) == n - 1, np.zeros(n, bool)):
            ids, values = masked.largest(4, packed(allowed), 32)
            order, want = np.argsort(-values), np.sort(np.where(allowed, logits[4], -np.inf))[::-1][:32]
            np.testing.assert_array_equal(values[order], want)
            assert all(allowed[i] and logits[4, i] == v for i, v in zip(ids, values) if v > -np.inf)
    finally:
        masked.close()


def test_what_was_not_kept_cannot_be_asked_about(pair_session):
    pair_session.runner.reset()
    pair_session.runner.prefill([1, 2, 3])
    bits, engine = packed(np.ones(4096, bool)), pair_session.runner
    for ask in (lambda: engine.likeliest([(0, 0, bits)]), lambda: engine.largest(0, bits)):
        fails_with(EngineError, "read_candidates", ask)


def test_drafts_are_looked_at_before_they_are_verified(pair_session):
    """The block made in two graphs has the drafts of the block made in one, and is as wide as the drafts that pass."""
    engine, prompt, seen = pair_session.runner, pair_session.tokenizer.encode("def quicksort(items):\n    "), []
    for passes in (None, 3, 2, 1, 0):
        engine.reset()
        engine.prefill(prompt)
        if passes is None:
            whole = engine.fused_step(4)
            continue
        check = lambda drafts, n=passes: seen.append(drafts.tolist()) or n  # noqa: E731
        result, rows = engine.step({0: Draft(4, check=check)})[0], {3: 4, 2: 4, 1: 2, 0: 1}[passes]
        assert seen.pop() == whole.tokens[1:].tolist() and not seen and result.tokens.tolist() == whole.tokens[:rows].tolist()
        assert result.ids.tolist() == whole.ids[:rows].tolist() and result.draft_finite
        engine.accept(1, int(result.ids[0]))
        assert engine.plain_step().target_finite
