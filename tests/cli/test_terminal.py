"""On a terminal there is a progress bar, without colour if NO_COLOR says so; a dumb terminal gets none."""

import os
import re

import pytest
from cli.conftest import PROMPT
from cli.process import environment, start

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3|4|9|10)\d(?:;\d+)*m")


def on_a_terminal(*args, **env) -> tuple[bytes, str]:
    """(stdout through a pipe, stderr as a terminal receives it)"""
    master, slave = os.openpty()
    process = start(*args, stderr=slave, env=environment(**{"TERM": "xterm", **env}))
    os.close(slave)
    out, seen = process.stdout.read(), b""
    try:
        while data := os.read(master, 65536):
            seen += data
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait(60) == 0, seen
    return out, seen.decode()


@pytest.mark.slow
def test_a_bar_while_loading_and_none_while_text_streams(pinned, text):
    out, seen = on_a_terminal("run", *pinned, "-p", PROMPT, "-n", 40)
    assert out.decode() == text
    assert "weights" in seen and "prefill" in seen and COLOUR.search(seen)
    assert seen.count("\x1b[?25h") >= seen.count("\x1b[?25l") > 0  # the cursor is shown again
    assert "\x1b" not in seen[seen.index(" tok/s") :]


def test_no_color(pinned):
    _, seen = on_a_terminal("run", *pinned, "-p", PROMPT, "-n", 3, NO_COLOR="1")
    assert "weights" in seen and not COLOUR.search(seen)


def test_a_dumb_terminal_gets_plain_lines(pinned):
    _, seen = on_a_terminal("run", *pinned, "-p", PROMPT, "-n", 3, TERM="dumb")
    assert "\x1b" not in seen and "configuration: " in seen


@pytest.mark.parametrize("command", [["inspect"], ["devices"]])
def test_other_commands_write_no_escapes(pair, command):
    out, seen = on_a_terminal(*command, *([pair[0]] if command == ["inspect"] else []))
    assert b"\x1b" not in out and "\x1b" not in seen
