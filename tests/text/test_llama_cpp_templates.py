"""Every template of llama.cpp's models/templates renders as llama-server renders it: llama_cpp_texts.json has what it made, as hashes.

`scripts/template_texts.py --texts FOLDER` writes the whole texts. The templates come from the sdist that pip downloads once into the user's cache.
"""

import hashlib
import json
from datetime import datetime
from pathlib import Path

import pytest
from llama_templates import templates  # noqa: F401  (a fixture)
from text.conversations import CONVERSATIONS

from pyggml_spec.errors import TemplateError
from pyggml_spec.text.template import ChatTemplate

KEPT = json.loads(Path(__file__).with_name("llama_cpp_texts.json").read_text())
NO_TAGS = "llama-server finds no tags of thinking in it and passes enable_thinking as false; here it is on where a template names it"
DIFFERENT = {
    ("Apertus-8B-Instruct", "plain"): NO_TAGS,
    ("Apertus-8B-Instruct", "tools"): NO_TAGS,
    ("fireworks-ai-llama-3-firefunction-v2", "tools"): "its name for the tools is functions, which llama-server leaves empty",
    (
        "unsloth-mistral-Devstral-Small-2507",
        "thinking",
    ): "llama-server makes parts of an answer that has reasoning, which this template drops",
}


@pytest.mark.slow
def test_all_templates_are_compared(templates):  # noqa: F811
    assert {path.stem for path in templates.glob("*.jinja")} == set(KEPT["texts"]) and len(KEPT["texts"]) == 70
    equal = 70 * len(CONVERSATIONS) - len(DIFFERENT)
    assert f"{equal} of {70 * len(CONVERSATIONS)} texts are equal" in (Path(__file__).parents[2] / "docs" / "chat.md").read_text()
    assert all(set(hashes) == set(CONVERSATIONS) for hashes in KEPT["texts"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT["texts"])
def test_the_text_is_llama_servers(templates, name):  # noqa: F811
    template = ChatTemplate((templates / f"{name}.jinja").read_text("utf-8"), "<bos>", "<|im_end|>")
    for conversation, expected in KEPT["texts"][name].items():
        try:
            text = template.render(**CONVERSATIONS[conversation], now=datetime.fromisoformat(KEPT["now"]))
        except TemplateError as error:
            assert expected is None, error  # llama-server refuses it too
            continue
        same = hashlib.sha256(text.encode()).hexdigest()[:16] == expected
        assert same == ((name, conversation) not in DIFFERENT), f"{conversation}: {text}"
