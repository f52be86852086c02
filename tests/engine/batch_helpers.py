"""Driving a batch engine in the tests: every slot does something of its own in every step, and comes out with the tokens of a solo run."""

from functools import partial
from pathlib import Path

import numpy as np
from pairs import write_pair
from random_gguf.model import Shape

import pyggml_spec as ps
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.engine.engine import Engine, generate
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.multi_device.pipeline import PipelinedEngine

TIE = 2e-3
LENGTHS = (1, 5, 17, 33, 40, 2, 61)


class Pair:
    """A tiny random pair with a one-slot engine to compare with, and batch engines over the same weights, one per number of slots."""

    def __init__(self, folder: Path, arch: str, n_ctx: int = 512, shape: Shape = Shape(), device: str = "CPU", tie: float = TIE):
        target, drafter = write_pair(folder, arch, shape)
        self.session = ps.load(target, drafter, device=device, threads=1, n_ctx=n_ctx, draft_width=16)
        self.n_ctx, self.tie, self._batches, self._solo = n_ctx, tie, {}, {}
        self.ties = 0  # streams that left the solo stream at a tie

    def batch(self, slots: int, **options) -> ModelRunner:
        """An engine without sequences; the same one again for the same options, so that its slots have been used before."""
        key = (slots, *options.items())
        if key not in self._batches:
            s = self.session
            self._batches[key] = ModelRunner(s.backend, s.target, s.drafter, EngineOptions(n_ctx=self.n_ctx, slots=slots, **options))
        batch = self._batches[key]
        for slot, state in enumerate(batch.slots):
            if state.used:
                batch.release(slot)
        return batch

    def solo(self, prompt: list[int], n: int) -> list[int]:
        """The first n tokens that plain decoding in the one-slot engine gives."""
        key = tuple(prompt)
        if len(self._solo.get(key, ())) < n:
            engine = self.session.runner
            engine.reset()
            self._solo[key] = [t for block in generate(engine, prompt, GenerationOptions(n, PLAIN)) for t in block]
        return self._solo[key][:n]

    def agrees(self, prompt: list[int], got: list[int]) -> bool:
        """Whether ``got`` is what the model gives after ``prompt``: the solo stream, or one that leaves it at a tie.

        K/V rows are F16, so that shapes of steps differ by up to 7e-4 in these models' logits. A stream that differs is fed to the solo
        engine: each of its tokens has to be within ``tie`` of the largest logit. A wrong state is off by 0.1 and more.
        """
        if got == self.solo(prompt, len(got)):
            return True
        self.ties += 1
        engine = self.session.runner
        engine.reset()
        rows = engine.logits([*prompt, *got])[len(prompt) - 1 : -1]
        return bool((rows.max(axis=1) - rows[np.arange(len(got)), got] < self.tie).all())

    def close(self) -> None:
        for batch in self._batches.values():
            batch.close()
        self.session.close()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, LENGTHS[i % len(LENGTHS)]).tolist() for i in range(count)]


def matched(result) -> int:
    agree = result.ids[:-1] == result.tokens[1:]
    return int(agree.size if agree.all() else np.argmin(agree))


def accept(batch: ModelRunner, results: dict, out: dict) -> None:
    """Accepts what the target agreed with; the tokens go to ``out``. A prompt's first token does too."""
    for slot, r in results.items():
        state = batch.slots[slot]
        m = matched(r) if state.open_rows else 0
        if state.open_rows:
            batch.accept(m + 1, int(r.ids[m]), slot)
            out[slot] += r.tokens[1 : m + 1].tolist()
        out[slot].append(int(r.ids[m]))


def run(batch: ModelRunner, texts: list[list[int]], n: int, work=lambda slot, done: Draft(16)) -> list[list[int]]:
    """``n`` tokens for every prompt, all slots in every step; ``work(slot, tokens so far)`` is what a slot does, None for nothing."""
    slots = [batch.admit() for _ in texts]
    out = {slot: [] for slot in slots}
    for slot, text in zip(slots, texts, strict=True):
        accept(batch, batch.step({slot: Prefill(text)}), out)
    while unfinished := [slot for slot in slots if len(out[slot]) < n]:
        items = {slot: work(slot, out[slot]) for slot in unfinished}
        items = {slot: item for slot, item in items.items() if item is not None}
        if items:
            accept(batch, batch.step(items), out)
    for slot in slots:
        batch.release(slot)
    return [out[slot][:n] for slot in slots]


def serve(pair: Pair, seed: int, requests: int = 10, groups: int | None = None) -> list[int]:
    """Requests that come, go and are cancelled at random, prompts that begin alike or not, budgets of every size, plain ones among the drafting.

    ``groups``: as of ``PipelinedEngine``. Returns the numbers of those that got other tokens than alone.
    """
    rng, s = np.random.default_rng(seed), pair.session
    slots, chunk, width = int(rng.integers(2, 6)), int(rng.choice([32, 64, 128])), rng.choice([None, 4, 16])
    own = [rng.integers(0, 256, 300).tolist() for _ in range(2)]
    engine = ModelRunner(s.backend, s.target, s.drafter, EngineOptions(n_ctx=pair.n_ctx, slots=slots, chunk=chunk, groups=groups == 2))
    streams = []
    made, memory = partial(PipelinedEngine, groups=groups) if groups else Engine, int(rng.choice([0, 1 << 19, 1 << 30]))
    with made(engine, width and int(width), memory) as scheduler:
        while len(streams) < requests or not scheduler.idle:
            if len(streams) < requests and rng.random() < 0.4:
                text = own[rng.integers(2)][: int(rng.integers(0, 300))] + rng.integers(0, 256, int(rng.integers(1, 60))).tolist()
                mode = SPECULATIVE if rng.random() < 0.8 else PLAIN
                streams.append(scheduler.submit(text, GenerationOptions(int(rng.integers(1, 20)), mode)))
            if streams and rng.random() < 0.03:
                streams[rng.integers(len(streams))].cancel()
            scheduler.step()
    return [i for i, stream in enumerate(streams) if stream.tokens and not pair.agrees(stream.prompt, stream.tokens)]


def random_work(rng, expected: dict[int, list[int]], width: int = 16):
    """Anything that a slot can do: nothing, a plain token, drafting, wrong drafts, drafts that are right up to somewhere."""

    def work(slot, done):
        kind, n = rng.integers(5), int(rng.integers(2, width + 1))
        if kind == 0:
            return None
        if kind == 1:
            return Verify()
        if kind == 2:
            return Draft(n)
        drafts = rng.integers(0, 256, n - 1).tolist()
        right = expected[slot][len(done) : len(done) + (0 if kind == 3 else int(rng.integers(0, n)))]
        return Verify([*right, *drafts[len(right) :]])

    return work
