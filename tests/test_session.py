"""One engine, one generation at a time: what a reader leaves half read, or an error leaves half done, never shows in another text."""

import pytest

import pyggml_spec as ps
from pyggml_spec.errors import EngineError

FIRST, SECOND = "def quicksort(items):\n", "import os\n"


@pytest.fixture(scope="module")
def session(pair):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as loaded:
        yield loaded


def test_a_generation_that_another_one_interrupts_says_so(session):
    """It went on in the other one's caches, with text that looks right."""
    want = session.generate(SECOND, 20)[0]
    left = session.steps(FIRST, 20)
    next(left)
    other = session.steps(SECOND, 20)
    begun = next(other).text
    with pytest.raises(EngineError, match="ended by the next one"):
        next(left)
    assert begun + "".join(event.text for event in other) == want


def test_a_generation_left_half_read_does_not_step_beside_requests(session):
    left = session.steps(FIRST, 20)
    next(left)
    with session.concurrent(slots=1) as server:
        with pytest.raises(EngineError, match="ended by the next one"):
            next(left)
        with pytest.raises(EngineError, match="many requests at once"):
            session.calibrate_plain()
        assert server.submit(SECOND, 5).result(120)[1].emitted == 5


def test_a_generation_inside_of_another_one_is_refused(session):
    """As from a second thread: two would step one engine at the same time."""

    def inside(done, total):
        with pytest.raises(EngineError, match="another thread is generating"):
            session.generate(SECOND, 1)

    assert session.generate(FIRST, 5, prefill_progress=inside)[1].emitted == 5


def test_nothing_is_appended_to_a_step_that_failed(session, monkeypatch):
    """A plain step writes the recurrent state before it is accepted: the token would be in it twice."""
    prompt = session.prompt_ids(FIRST)
    shown = [t for event in session.steps(prompt, 4, mode="plain") for t in event.tokens]
    run = session.steps(prompt, 8, mode="plain")
    next(run), next(run)
    with monkeypatch.context() as patch:
        patch.setattr(session.engine, "accept", lambda *rows: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(run)
    longer = [*prompt, *shown, 1, 2, 3]
    text, stats = session.generate(longer, 12, mode="plain", append=True)
    assert stats.reused_tokens == 0 and text == session.generate(longer, 12, mode="plain")[0]
