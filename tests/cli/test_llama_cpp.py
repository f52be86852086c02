"""Command lines of llama.cpp's tools can be pasted; what they ask for and cannot have is refused by name."""

import pytest
from cli.conftest import PROMPT
from cli.process import one_sentence, pyspec

PASTED = ["-ngl", 99, "-ngld", "all", "-fa", "on", "--spec-type", "draft-dflash", "--spec-draft-n-max", 3]


def test_a_pasted_line_is_the_same_run(pair, pinned):
    files = ["-m", pair[0], "--spec-draft-model", pair[1]]
    pasted = pyspec("run", *files, "-t", 1, "--device", "CPU", *PASTED, "-p", PROMPT, "-n", 20)
    ours = pyspec("run", *pinned, "-p", PROMPT, "-n", 20)
    assert pasted.returncode == 0 and pasted.stdout == ours.stdout and "width 4 " in pasted.stderr
    assert pasted.stderr.splitlines()[0] == ours.stderr.splitlines()[0]


def test_no_layers_on_the_device_is_the_cpu(pair):
    done = pyspec("run", "-m", pair[0], "-t", 1, "-ngl", 0, "-p", PROMPT, "-n", 2)
    assert done.returncode == 0 and " on CPU " in done.stderr


@pytest.mark.parametrize("command", ["run", "chat", "bench"])
def test_some_layers_only_are_refused(pair, command):
    one_sentence(
        pyspec(command, "-m", pair[0], "-ngl", 2, "-q" if command != "bench" else "--json", stdin=b""), "-ngl 2", "2 of 4 layers", "-ngl 0"
    )


@pytest.mark.parametrize(
    "options, words",
    [
        (["-fa", "off"], "always flash attention"), (["--spec-type", "draft-simple"], "would be a second engine"), (["-ngl", "some"], "'some'"),
        (["--spec-draft-n-max", 0], "x<=1023"), (["--spec-draft-n-max", 3, "--draft-width", 8], "contradict"), (["-ngl", 0, "--device", "CUDA0"], "contradict"),
        (["-ngld", 0], "another device"),
    ],
)  # fmt: skip
def test_what_they_cannot_have(options, words):
    done = pyspec("run", "-p", PROMPT, *options)
    assert done.returncode == 2 and words in done.stderr and not done.stdout


def test_they_are_not_in_the_help():
    assert "-ngl" not in pyspec("run", "--help").stdout.decode()
