"""Calls in threads of their own: their errors come to whoever needs the result, and what they made is closed."""

from types import SimpleNamespace

import pytest
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.background import Background
from pyggml_spec.errors import ModelError
from pyggml_spec.text.tokenizer import Tokenizer
from pyggml_spec.tools.plan import plan


def test_results_and_errors():
    closed = []
    made = Background(lambda: SimpleNamespace(close=lambda: closed.append(1)))
    assert made.result() is made.result()
    made.close()
    assert closed == [1]
    failed = Background(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    failed.close()  # there is nothing to close


def test_a_vocabulary_that_libllama_refuses_is_told_after_all(pair, monkeypatch):
    """It is loaded while graphs are planned; `plan` tells what loading would."""

    def refuses(self, file):
        raise ModelError("llama.cpp cannot load the vocabulary")

    monkeypatch.setattr(Tokenizer, "__init__", refuses)
    for call in (ps.load, plan):
        fails_with(ModelError, "cannot load the vocabulary", call, *pair, device="CPU", threads=1, n_ctx=256)
