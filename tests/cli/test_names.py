"""The library speaks of arguments and the command line of options; both take what llama.cpp's command lines say."""

import ast
import re

import click
import pytest
from cli.process import one_sentence, pyspec

import pyggml_spec as ps
from pyggml_spec.cli.main import cli
from pyggml_spec.cli.names import in_options
from pyggml_spec.errors import ContextError
from pyggml_spec.loading import DEMO_TARGET

ROOT = DEMO_TARGET.parents[1]
COMMAND = re.compile(r"(pyspec|pip|llama-gguf-split|gguf-set-metadata|nvidia-smi) [^;`]*")  # a whole command line to type, options and all
CPU = ["--device", "CPU", "-t", 1]


def _commands(group=cli):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield from _commands(command) if isinstance(command, click.Group) else [command]


OPTIONS = {name for command in _commands() for param in command.params if isinstance(param, click.Option) for name in param.opts}


def _texts(path):
    """The string literals of a file, docstrings left out, with {} for what is filled in."""
    tree = ast.parse(path.read_text("utf-8"))
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
        if parts and id(node) not in described:
            yield "".join(str(part.value) if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}" for part in parts)


@pytest.mark.parametrize("path", [p for p in sorted(ROOT.rglob("*.py")) if p.parts[len(ROOT.parts)] != "cli"], ids=lambda p: p.name)
def test_no_sentence_of_the_library_names_an_option(path):
    """A caller of ``load`` cannot pass -md."""
    words = {word for text in _texts(path) if " " in text for word in re.findall(r"(?<![\w-])--?[a-z][\w-]*", COMMAND.sub("", text))}
    assert not words & OPTIONS


@pytest.mark.slow
def test_an_argument_is_said_as_the_option_of_the_running_command():
    run, convert = (next(c for c in _commands() if c.name == name) for name in ("run", "convert"))
    assert (
        in_options("raise `n_ctx`, or `draft_width`; `cache_type_k` and `nothing`", run) == "raise -c, or --draft-width; -ctk and `nothing`"
    )
    assert in_options("`replace` it; use `kind` bf16", convert) == "--force it; use --type bf16"
    assert in_options("give it with `draft`") == "give it with -md"  # no command runs
    with pytest.raises(ContextError, match="`n_ctx`"), ps.load(device="CPU", threads=1, n_ctx=64) as session:
        session.generate([1] * 65)
    one_sentence(pyspec("run", *CPU, "-q", "-c", 64, "-p", "x" * 65), "raise -c")


@pytest.mark.slow
def test_words_that_belong_to_no_option_get_a_hint():
    for command, hint in (("run", "with -p"), ("chat", "piped in")):
        done = pyspec(command, "Write a poem")
        assert done.returncode == 2 and "unexpected argument 'Write a poem'" in done.stderr and hint in done.stderr


@pytest.mark.slow
def test_no_limit_and_the_trained_context_are_said_as_in_llama_cpp():
    """-n -1 and -2: until the end token or the end of the context. -c 0: the context that the model was trained with."""
    counts = []
    for limit in ("-1", "-2", "300"):
        done = pyspec("run", *CPU, "--mode", "plain", "-c", 64, "--ignore-eos", "-p", "def f(", "-n", limit)
        counts.append(re.search(r"(\d+) tokens in .* steps", done.stderr)[1])
        assert "ended by: context" in done.stderr
    assert counts[0] == counts[1] == counts[2]
    assert pyspec("run", *CPU, "-p", "a", "-n", "-3").returncode == 2
    with ps.load(device="CPU", threads=1, n_ctx=0) as session:
        trained = session.target.context_length
        assert session.engine.options.n_ctx == trained
    assert f"context {trained} " in pyspec("run", *CPU, "-p", "a", "-n", 1, "-c", 0).stderr
