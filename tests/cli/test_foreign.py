"""Whatever llama.cpp's users type by habit is taken, or answered with what to use instead; what is mistyped gets a suggestion."""

import re
from pathlib import Path

import click
import pytest
from chat_model import with_control_tokens
from random_gguf.archs import write_qwen3

from pyggml_spec.cli.foreign import KNOWN, options_of, resolve
from pyggml_spec.cli.main import cli, main

LISTED = [line.split() for line in (Path(__file__).parent / "llama_cpp_options.txt").read_text().splitlines() if not line.startswith("#")]
OFFERED = {"cli": ("run", "chat"), "server": ("serve",)}
VALUES = {"--spec-type": "suffix", "--host": "127.0.0.1", "--logit-bias": "5+1", "-l": "5+1"}
COMMANDS = {name: cli.get_command(click.Context(cli), name) for name in cli.names}


@pytest.fixture
def said(capsys):
    """What a command writes to stderr, and its exit code: in this process."""

    def run(*args) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("tools, count, names", [(tools, int(count), names) for tools, count, *names in LISTED], ids=lambda v: str(v)[:40])
def test_every_option_of_llama_cpp_is_taken_or_answered(capsys, tools, count, names):
    """Each with its values: none may read as another option, and none ends in `No such option` alone."""
    for command in {one for tool in tools.split(",") for one in OFFERED[tool]}:
        ctx = click.Context(COMMANDS[command], info_name=command, help_option_names=["-h", "--help"])
        for name in names:
            try:
                left = resolve(ctx, [name, *["1"] * count, "-m", "x.gguf"])
            except click.UsageError as error:
                assert re.search(r"llama\.cpp option: .{20}|`pyspec \w+` has it", error.message), error.message
                continue
            assert left[-2:] == ["-m", "x.gguf"]
            note = capsys.readouterr().err
            assert left[:-2] or name == "--slots" or (name in KNOWN and (not KNOWN[name].text or KNOWN[name].text in note)), (command, name)


def test_what_is_refused_says_what_to_use_instead():
    for name, one in KNOWN.items():
        assert not one.refused or len(one.text) > 20, name
        for words in re.findall(r"pyspec (\w+)", one.text):
            assert words in cli.names or words == "pyspec", one.text
        own = {option for command in COMMANDS.values() for option in options_of(command)} | {"--help", "--version"}
        assert not set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", re.sub(r"`hf [^`]*`", "", one.text))) - own, one.text


@pytest.mark.parametrize(
    "args, words",
    [
        (["run", "--temprature", "1"], "no such option: --temprature; did you mean --temp"),
        (["run", "-temp", "0.5"], "did you mean --temp"),
        (["run", "--promt", "a"], "did you mean --prompt"),
        (["chat", "--sytem-prompt", "a"], "did you mean --system-prompt"),
        (["serve", "--prot", "80"], "did you mean --port"),
        (["doctor", "--devise", "CPU"], "did you mean --device"),
        (["compare", "--logit", "x.gguf"], "did you mean --logits"),
        (["run", "--port", "80"], "`pyspec serve` has it"),
        (["run", "--qqqq"], "`pyspec run --help` lists the options"),
        (["rnu"], "there is no command 'rnu'; did you mean run?"),
        (["sever"], "did you mean serve?"),
        (["llama-server"], "use `pyspec serve`"),
        (["qqqq"], "`pyspec --help` lists them"),
        (["model.gguf"], "pyspec run -m model.gguf"),
        (["run", "--kernels", "gmml"], "did you mean ggml?"),
        (["run", "-ctk", "q8"], "did you mean q8_0?"),
        (["run", "--mode", "spekulative"], "did you mean speculative?"),
        (["run", "-p", "a", "--spec-type", "draft-dflahs"], "did you mean draft-dflash?"),
        (["run", "-p", "a", "--samplers", "topk"], "did you mean top_k?"),
        (["run", "-p", "a", "--device", "CPPU"], "did you mean CPU?"),
    ],
)
def test_what_was_perhaps_meant(said, args, words):
    code, text = said(*args)
    assert code in (1, 2) and words in text, text


def test_values_that_look_like_options_are_values():
    """`-p -cnv` asks about an option, -n -1 sets no limit, -n20 is -n 20."""
    ctx = click.Context(COMMANDS["run"], info_name="run")
    for args in (["-p", "--mlock", "-n", "-1"], ["-n20"], ["--prompt=-b", "-t4"], ["--", "--mlock"], ["-fa", "on", "-p", "a"]):
        assert resolve(ctx, args) == args
    assert resolve(ctx, ["-fa", "-p", "a"]) == ["-fa", "on", "-p", "a"]
    assert resolve(click.Context(COMMANDS["serve"]), ["--slots", "--metrics"]) == ["--metrics"]


MODEL = ["--device", "CPU", "-t", "1", "-c", "256", "-n", "4"]


@pytest.fixture
def instruct(tmp_path):
    """A model file with a chat template."""
    return with_control_tokens(write_qwen3(tmp_path / "plain.gguf"), tmp_path / "chat.gguf")


def test_run_on_a_model_that_chats_says_how(said, instruct):
    code, text = said("run", "-m", instruct, *MODEL, "-p", "hello")
    assert code == 0 and "continued as raw text" in text and "`pyspec chat`" in text and "-cnv" in text
    code, text = said("run", "-m", instruct, *MODEL, "-no-cnv", "-p", "hello")
    assert code == 0 and "raw text" not in text


@pytest.mark.slow
@pytest.mark.parametrize("how", [["-cnv", "-st"], ["-sys", "Be brief.", "-st"], ["-st"]])
def test_a_conversation_of_llama_cli_is_a_chat(said, instruct, how):
    code, text = said("run", "-m", instruct, *MODEL, *how, "--n-predict", 3, "-p", "hello", "--mlock", "--no-mmap", "-b", 512, "-e")
    assert code == 0 and "`pyspec chat` runs" in text and "chat: " in text and "prompt " in text and "--mlock has no effect here" in text, (
        text
    )


@pytest.mark.slow
def test_escapes_are_read_where_that_is_asked_for(said):
    from pyggml_spec.cli.options import unescaped

    assert unescaped(r"a\n\t\\n\x41\q\"") == 'a\n\t\\nA\\q"'
    code, text = said("run", *MODEL, "-e", "-p", r"def f():\n")
    assert code == 0 and r'prompt: "def f():\n"' in text
