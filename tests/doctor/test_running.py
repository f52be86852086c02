"""Checks that run steps: what they must notice on a device that is not here."""

import numpy as np

import pyggml_spec as ps
from pyggml_spec.doctor.report import FAIL, OK
from pyggml_spec.doctor.running import repeated_step


def test_a_replay_that_computes_something_else_is_noticed(pair, monkeypatch):
    """ggml-cuda's replays of gemma4 with shared K/V were wrong on one GPU from the third call of a graph on, and nothing said so."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        engine, prompt = session.engine, list(range(20))
        check = repeated_step(engine, prompt)
        assert check.verdict == OK and "replayed" not in check.found  # nothing is, on a CPU
        honest, calls = engine.candidates, iter(range(1000))

        def candidates(row):
            ids, logits = honest(row)
            return ids, logits + np.float32(1e-3) if next(calls) == 2 else logits

        monkeypatch.setattr(engine, "candidates", candidates)
        check = repeated_step(engine, prompt)
        assert check.verdict == FAIL and check.data["width"] == 1 and "GGML_CUDA_PDL=0" in check.remedy
