"""`pyspec serve --print-config`: what is printed can be pasted, and names the server that the other options start."""

import json
import shlex
import tomllib

import pytest
from cli.process import pyspec

from pyggml_spec.cli.clients import CONFIGS

GIVEN = ["-m", "folder/model-q8_0.gguf", "--port", 9000, "-c", 4096, "--api-key", "secret,other", "--host", "0.0.0.0,x.sock"]


@pytest.mark.parametrize("client", CONFIGS)
def test_what_is_printed_names_address_model_and_key(client):
    done = pyspec("serve", "--print-config", client, *GIVEN)
    text = done.stdout.decode()
    assert done.returncode == 0 and not done.stderr and "http://127.0.0.1:9000" in text and "$" not in text.replace("$schema", "")
    assert client == "zed" or "secret" in text  # it asks for the key
    if client == "codex":
        read = tomllib.loads(text)
        assert read["model"] == "model-q8_0.gguf" and read["model_providers"][read["model_provider"]]["base_url"].endswith("/v1")
    elif text.startswith("{"):
        assert "model-q8_0.gguf" in json.dumps(json.loads(text)) and "4096" in text
    elif client != "continue":
        lines = [shlex.split(line) for line in text.splitlines()]
        assert all(words[0] == "export" and all("=" in word for word in words[1:]) for words in lines[:-1]) and lines[-1][0] != "export"


def test_the_model_is_the_alias_or_any_of_several():
    assert "openai/first" in pyspec("serve", "--print-config", "aider", "-a", "first,second").stdout.decode()
    assert "openai/any" in pyspec("serve", "--print-config", "aider", "--models-dir", "none").stdout.decode()
