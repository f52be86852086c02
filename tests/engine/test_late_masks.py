"""A sequence whose constraint is slow sits out steps until its mask is there; the others go on, and it ends with a sentence if that takes too long."""

import threading

import pytest

import pyggml_spec as ps
from pyggml_spec.constraints import grammar as grammars
from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET

AMBIGUOUS = "root ::= s\ns ::= s s s | s s | [a-z]"
SCHEMA = '{"type": "object", "properties": {"kind": {"enum": ["list", "dict"]}, "size": {"type": "integer", "maximum": 99}}, "required": ["kind", "size"], "additionalProperties": false}'
SLOW = {"gbnf": {"grammar": AMBIGUOUS}, "schema": {"json_schema": SCHEMA}, "lark": {"lark": 'start: s\ns: s s | s "," s | /[a-z]/'}}
VALUES = {"greedy": {"temperature": 0.0}, "sampled": {"seed": 5, "temperature": 1.3}, "whole rows": {"seed": 5, "top_k": 0}}


@pytest.fixture(scope="module", params=[None, DEMO_DRAFTER], ids=["no drafter", "drafter"])
def session(request):
    with ps.load(DEMO_TARGET, draft=request.param, device="CPU", threads=1, n_ctx=256, draft_width=4 if request.param else None) as session:
        yield session


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
                self.gate.wait(30)
            else:
                self.others += 1
            return real(grammar)

        monkeypatch.setattr(Grammar, "compute_bits", computed)


@pytest.fixture
def held(always_slow, monkeypatch):
    held = Held(monkeypatch)
    yield held
    held.gate.set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW)
@pytest.mark.parametrize("values", VALUES)
def test_the_text_is_that_of_masks_computed_at_once(session, always_slow, monkeypatch, kind, values):
    sampling = ps.Sampling(**SLOW[kind], **VALUES[values])
    texts = [session.generate("import os\n\n", 24, sampling=sampling, mode=mode)[0] for mode in (None, "plain", "reference")]
    with session.concurrent(slots=2) as server:
        handles = [server.submit("import os\n\n", 24, sampling=sampling) for _ in range(2)]
        texts += [handle.result()[0] for handle in handles]
    monkeypatch.setattr(grammars, "SLOW_S", 1e9)
    monkeypatch.setattr(grammars, "HEAVY_S", 1e9)
    assert set(texts) == {session.generate("import os\n\n", 24, sampling=sampling)[0]}


@pytest.mark.slow
def test_the_others_go_on_while_a_mask_is_computed(session, held):
    with session.concurrent(slots=3) as server:
        slow = server.submit("import os\n\n", 12, sampling=ps.Sampling(temperature=0, grammar=AMBIGUOUS))
        assert held.waits.wait(30)
        beside = [server.submit(prompt, 40, ignore_end=True) for prompt in ("def f(", "x = 1\n")]
        assert [handle.result(30)[1].emitted for handle in beside] == [40, 40]
        assert slow.stats.emitted <= 2
        held.gate.set()
        text, stats = slow.result(30)
    assert text.isalpha() and stats.emitted == 12
    assert held.others <= 2, "only until the first slow one, masks are computed by the thread of the steps"


def test_it_can_be_cancelled_while_its_mask_is_computed(session, held):
    with session.concurrent(slots=1) as server:
        slow = server.submit("import os\n\n", 12, sampling=ps.Sampling(temperature=0, grammar=AMBIGUOUS))
        assert held.waits.wait(30)
        slow.cancel()
        assert slow.result(30)[1].stop_reason == "cancelled"
        assert server.submit("def f(", 5).result(30)[1].emitted == 5


def test_a_mask_that_takes_too_long_ends_its_sequence_alone(session, held, monkeypatch):
    monkeypatch.setattr(grammars, "DEADLINE_S", 0.05)
    with session.concurrent(slots=2) as server:
        slow = server.submit("import os\n\n", 12, sampling=ps.Sampling(temperature=0, grammar=AMBIGUOUS))
        beside = server.submit("def f(", 60, ignore_end=True)
        with pytest.raises(ps.ConstraintError, match="more than 0.05 s.*ambiguous.*s ::= \\[a-z\\]\\+"):
            slow.result(30)
        assert beside.result(30)[1].emitted == 60
        assert slow.stats.cut


def test_what_a_thread_raises_ends_its_sequence(session, always_slow, monkeypatch):
    real = Grammar.compute_bits

    def computed(grammar):
        if threading.current_thread().name == "pyggml_spec masks":
            raise ps.ConstraintError("too many states")
        return real(grammar)

    monkeypatch.setattr(Grammar, "compute_bits", computed)
    with session.concurrent(slots=2) as server:
        slow, beside = server.submit("a", 12, sampling=ps.Sampling(temperature=0, grammar=AMBIGUOUS)), server.submit("def f(", 20)
        with pytest.raises(ps.ConstraintError, match="too many states"):
            slow.result(30)
        assert beside.result(30)[1].emitted == 20


@pytest.mark.slow
def test_an_ambiguous_grammar_is_named_and_its_remedy(session):
    words = "s s s s s s | s s s s s | s s s s | s s s | s s"
    with pytest.raises(ps.ConstraintError, match="too ambiguous.*s ::= \\[a-z\\]\\+"):
        session.generate("a", 200, sampling=ps.Sampling(temperature=0, grammar=f"root ::= s\ns ::= {words} | [a-z]"))
