"""What a server has ready before the first request, and chat templates that it has by name."""

import ctypes
from types import SimpleNamespace

import llama_cpp
import pytest

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.server.served import NAMED, Rendering, Served, ServeOptions
from pyggml_spec.text import template
from pyggml_spec.text.template import ChatTemplate
from pyggml_spec.text.tokenizer import Tokenizer

TALK = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", " And now? ")]


def test_no_request_waits_for_what_control_tokens_are_found_by(monkeypatch):
    """The first chat is read in the event loop, and 6,000 control tokens take most of a second the first time."""
    file = GGUFFile(DEMO_TARGET)
    tokenizer = Tokenizer(file)
    session = SimpleNamespace(tokenizer=tokenizer, methods=(), target=SimpleNamespace(file=file))
    served = Served(session, SimpleNamespace(n_ctx=256), None, ServeOptions())
    monkeypatch.setattr(template, "_Names", None)
    assert served.chat_ids(Rendering([{"role": "user", "content": "hello"}])).ids
    tokenizer.close()


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("open_turn", [True, False])
def test_templates_by_name_are_those_of_llama_cpp(name, open_turn):
    said = (llama_cpp.llama_chat_message * len(TALK))(*((role.encode(), text.strip().encode()) for role, text in TALK))
    out = ctypes.create_string_buffer(4096)
    length = llama_cpp.llama_chat_apply_template(name.encode(), said, len(TALK), open_turn, out, len(out))
    messages = [{"role": role, "content": text if name != "chatml" else text.strip()} for role, text in TALK]
    assert ChatTemplate(NAMED[name]).render(messages, add_generation_prompt=open_turn).encode() == out.raw[:length]
