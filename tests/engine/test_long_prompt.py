"""A long prompt beside streams that decode: counted in passes, which a busy machine does not change. PYSPEC_LONG_PROMPT=32768 takes a minute."""

import os
from itertools import pairwise

import numpy as np
from engine.batch_helpers import Pair
from random_gguf.model import Shape

from pyggml_spec.engine.batch import Prefill
from pyggml_spec.engine.engine import Engine
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.scheduler import MAX_PREFILL_TOKENS_WITH_DECODE
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions

LONG = int(os.environ.get("PYSPEC_LONG_PROMPT", "4096"))


def test_no_sequence_waits_longer_than_one_prefill_step(tmp_path):
    """Between two steps of streams that decode there is one pass at most, of at most 128 tokens; the prompt is read to its end all the same."""
    pair = Pair(tmp_path, "qwen3", 256, Shape())
    s = pair.session
    engine = ModelRunner(s.backend, s.target, s.drafter, EngineOptions(n_ctx=LONG + 8, slots=3, width=4, chunk=512))
    try:
        with Engine(engine, 4) as scheduler:
            streams = [
                scheduler.submit([65 + i, 66, 67], GenerationOptions(None, mode, ignore_end=True))
                for i, mode in enumerate((SPECULATIVE, PLAIN))
            ]
            while not all(stream.tokens for stream in streams):
                scheduler.step()
            prompt = np.random.default_rng(1).integers(0, 256, LONG).tolist()
            long = scheduler.submit(prompt, GenerationOptions(1, SPECULATIVE))
            passes: list[tuple[int, set[int]]] = []  # rows of the prompt in each step, and who decoded in it
            forward = engine.forward

            def counted(batch, meanwhile=None):
                work = batch.items
                rows = sum(item.rows for item in work.values() if isinstance(item, Prefill))
                passes.append((rows, {slot for slot, item in work.items() if not isinstance(item, Prefill)}))
                return forward(batch, meanwhile)

            engine.forward = counted
            while not long.tokens:
                scheduler.step()
            assert sum(rows for rows, _ in passes) == LONG and max(rows for rows, _ in passes) == MAX_PREFILL_TOKENS_WITH_DECODE
            for stream in streams:
                waits = [i for i, (_, decoding) in enumerate(passes) if stream.slot in decoding]
                assert max(b - a for a, b in pairwise(waits)) == 2, "more than one pass between two of its steps"
                assert len(waits) >= LONG // MAX_PREFILL_TOKENS_WITH_DECODE - 1
            scheduler.cancel_all()
    finally:
        engine.close()
        pair.close()
