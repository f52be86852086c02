"""What a server has ready before the first request."""

from types import SimpleNamespace

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.serve.served import Served, ServeOptions
from pyggml_spec.session import DEMO_TARGET
from pyggml_spec.text import template
from pyggml_spec.text.tokenizer import Tokenizer


def test_no_request_waits_for_what_control_tokens_are_found_by(monkeypatch):
    """The first chat is read in the event loop, and 6,000 control tokens take most of a second the first time."""
    file = GGUFFile(DEMO_TARGET)
    tokenizer = Tokenizer(file)
    session = SimpleNamespace(tokenizer=tokenizer, methods=(), target=SimpleNamespace(file=file))
    served = Served(session, SimpleNamespace(n_ctx=256), None, ServeOptions())
    monkeypatch.setattr(template, "_Names", None)
    assert served.chat_ids([{"role": "user", "content": "hello"}]).ids
    tokenizer.close()
