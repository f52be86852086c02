"""Ctrl-C in a step that several sequences share."""

from typing import Any

import pytest
from engine.batch_helpers import Pair, prompts

from pyggml_spec.engine.engine import Engine
from pyggml_spec.engine.sequence import SPECULATIVE, GenerationOptions, Sequence


def interrupt_ends_all(pair: Pair, scheduler: Engine, streams: list[Sequence], patched: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Ctrl-C where ``name`` of ``owner`` is called in the next step ends all streams, and the next request gets its text."""
    with patched.context() as once:
        once.setattr(owner, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
    assert scheduler.idle and all(isinstance(s.error, KeyboardInterrupt) for s in streams)
    text = prompts(2)[1]
    assert scheduler.submit(text, GenerationOptions(20, SPECULATIVE)).result() == pair.solo(text, 20)
