"""Scripted drafters and a reference text for the loop's tests."""

from typing import Any

import pytest
from engine.batch_helpers import Pair, prompts

from pyggml_spec.engine.engine import Engine, generate
from pyggml_spec.engine.sequence import REFERENCE, SPECULATIVE, GenerationOptions, Sequence
from pyggml_spec.engine.stats import Stats


def count_matched(result):
    """Length of the longest prefix of drafts that are the target's greedy choices."""
    agree = (result.ids[:-1] == result.tokens[1:]).tolist()
    return agree.index(False) if False in agree else len(agree)


def run(engine, prompt, n, *, mode=SPECULATIVE, drafts=None, width=16, is_end=lambda t: False, **more):
    """All tokens of one generation from a fresh sequence, and its statistics."""
    engine.reset()
    stats = Stats()
    blocks = list(generate(engine, prompt, GenerationOptions(n, mode, width, is_end, drafts=drafts), stats, **more))
    return [t for block in blocks for t in block], stats


def reference(engine, prompt, n, width=16):
    return run(engine, prompt, n, mode=REFERENCE, width=width)[0]


def oracle(prompt, text, wrong_at=lambda step: None):
    """A drafter that knows ``text``; ``wrong_at(step)`` is the position of its first wrong draft, None for none."""
    step = 0

    def drafts(history, count):
        nonlocal step
        done = len(history) - len(prompt)
        out = list(text[done : done + count])
        out += [0] * (count - len(out))
        at = wrong_at(step)
        step += 1
        if at is not None and at < count:
            out[at] = (out[at] + 1) % 200
        return out

    return drafts


def interrupt_ends_all(pair: Pair, scheduler: Engine, streams: list[Sequence], patched: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Ctrl-C where ``name`` of ``owner`` is called in the next step ends all streams, and the next request gets its text."""
    with patched.context() as once:
        once.setattr(owner, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
    assert scheduler.idle and all(isinstance(s.error, KeyboardInterrupt) for s in streams)
    text = prompts(2)[1]
    assert scheduler.submit(text, GenerationOptions(20, SPECULATIVE)).result() == pair.solo(text, 20)
