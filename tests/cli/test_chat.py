"""`pyspec chat`, through a terminal and through pipes."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from contextlib import suppress

import pytest
from cli.process import one_sentence, pyspec, start

pytestmark = pytest.mark.slow
DEMO = ["--device", "CPU", "-t", 1, "--draft-width", 4, "-c", 512]


@pytest.fixture(scope="module")
def talker(talkers):
    return ["-m", talkers[0], "-md", talkers[1], *DEMO]


class Terminal:
    """A chat at the other end of a pseudo-terminal."""

    def __init__(self, *args):
        self.ours, theirs = pty.openpty()
        self.process = start("chat", *args, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 100) -> str:
        """What came since the last call, up to a match of ``pattern``."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.ours, 4096).decode("utf-8", "replace")
                except OSError:  # the other end is closed
                    raise AssertionError(f"ended without {pattern!r}: {self.seen!r}") from None
        out, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return out

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, pattern: str) -> None:
        """Python's input() misses a signal between its prompt and its wait: then another one is needed."""
        for _ in range(30):
            self.interrupt()
            with suppress(AssertionError):
                self.until(pattern, seconds=3)
                return
        raise AssertionError(f"no {pattern!r} in {self.seen!r}")

    def ends(self, seconds: float = 100) -> int:
        code = self.process.wait(seconds)
        os.close(self.ours)
        return code

    def ends_by_interrupt(self) -> int:
        for _ in range(30):
            self.interrupt()
            with suppress(subprocess.TimeoutExpired):
                return self.ends(3)
        raise AssertionError("it does not end")


@pytest.fixture
def terminal():
    opened = []

    def start_one(*args):
        opened.append(Terminal(*args))
        return opened[-1]

    yield start_one
    for one in opened:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_three_turns_through_a_terminal_with_drafts_in_each(terminal, tmp_path):
    chat = terminal(*DEMO, "-n", 20, "--draft-width", 8)
    start_text = chat.until("> ")
    assert "configuration: " in start_text and "no chat template" in start_text and "thinking" in start_text
    reused = []
    for line in ("class Stack:\\\r    def __init__(self):", "    def push(self, item):", "    def pop(self):"):
        chat.type(line + "\r")
        told = chat.until(r"\[\d+ tokens[^\]]*\]")
        assert int(re.search(r"of (\d+) drafts accepted", told)[1]) > 0
        reused.append(int((re.search(r"(\d+) in the caches", told) or [0, 0])[1]))
        chat.until("> ")
    assert reused[0] == 0 < reused[1] < reused[2]
    chat.type("/stats\r")
    assert "conversation: 3 answers" in chat.until("of context used")
    chat.type(f"/save {tmp_path / 'talk.json'}\r")
    chat.until("3 turns written")
    assert [m["role"] for m in json.loads((tmp_path / "talk.json").read_text())["messages"]] == ["user", "assistant"] * 3
    chat.type("/reset\r")
    chat.until("is forgotten")
    chat.type("/stats\r")
    chat.until("no answer yet")
    chat.type("/help\r")
    chat.until("/exit")
    chat.type("/exit\r")
    assert chat.ends() == 0


def test_ctrl_c_and_the_end_of_input(terminal):
    chat = terminal(*DEMO, "-n", 400, "-l", "4094-inf", "--temp", 1, "-s", 1)
    chat.until("> ")
    chat.type("import os\r")
    chat.until(r"import os\r\n[^>]*?[a-z]{3}")  # the answer has begun
    chat.interrupt()
    assert "ended by: interrupt" in chat.until(r"\[\d+ tokens[^\]]*\]")
    chat.until("> ")
    chat.type("/stats\r")
    chat.until("conversation: 1 answers")
    chat.until("> ")
    chat.interrupt_until("Ctrl-C again")
    assert chat.ends_by_interrupt() == 130
    chat = terminal(*DEMO)
    chat.until("> ")
    chat.type("\x04")
    assert chat.ends() == 0


def test_piped_lines_and_defaults(talker):
    lines = "he\n\n /not a command\nhe\\\nhe\n/stats\n"
    done = pyspec("chat", *talker, "-n", 6, stdin=lines.encode())
    assert done.returncode == 0 and "conversation: 3 answers" in done.stderr and "> " not in done.stdout.decode("utf-8", "replace")
    assert done.stderr.count(" drafts accepted; prompt") == 3
    assert "\x1b" not in done.stderr and "thinking on, the default" in done.stderr
    quiet = pyspec("chat", *talker, "-n", 6, "-q", stdin=b"he\n")
    assert quiet.stderr == "" and done.stdout.startswith(quiet.stdout)
    done = pyspec("chat", "-t", 1, "-n", 8, stdin=b"def add(a, b):\n")
    assert done.returncode == 0 and done.stdout.strip() and "ended by" in done.stderr


def test_names_of_the_template_and_full_contexts(talker):
    done = pyspec("chat", *talker, "-n", 2, "--no-think", stdin=b"he\n/think on\nhe\n/think\n/think maybe\n")
    assert "thinking off;" in done.stderr and done.stderr.count("thinking on\n") == 2
    assert done.returncode == 1 and "use /think on or /think off" in done.stderr
    one_sentence(pyspec("chat", *DEMO, "--think", "-q", stdin=b""), "no thinking mode")
    named = pyspec("chat", *talker, "-n", 2, "--chat-template-kwargs", '{"enable_thinking": false}', stdin=b"he\n/think\n")
    assert "thinking off;" in named.stderr and named.stderr.endswith("thinking off\n")
    template = "{{ raise_exception(effort) if effort else '' }}{{ messages[-1].content }}"
    options = "chat", *talker, "-n", 2, "-q", "--chat-template", template
    assert pyspec(*options, stdin=b"he\n").returncode == 0
    done = pyspec(*options, "--chat-template-kwargs", '{"effort": "low"}', stdin=b"he\n")
    assert done.returncode == 1 and "refuses this conversation: 'low'" in done.stderr
    done = pyspec("chat", *DEMO, "-c", 64, stdin=b"def f(a):\nx\n/reset\ndef f(a):\n")
    assert done.stderr.count("is full: /reset begins anew") == 2 and "/reset forgets the conversation" in done.stderr
    assert done.returncode == 1 and done.stderr.count("ended by: context") == 2


def test_system_prompts_templates_and_foreign_bytes(talker, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages | length }}{{ messages[0].content }}")
    done = pyspec("chat", *talker, "-n", 2, "-sys", "Be brief.", "--chat-template-file", tmp_path / "t.jinja",
                  stdin=b"he\n/system\n/system -\n/system Now\n")  # fmt: skip
    assert done.returncode == 0 and "template that was given" in done.stderr
    said = [line.removeprefix("system prompt: ") for line in done.stderr.splitlines() if "system prompt" in line]
    assert said == ["Be brief.", "no system prompt", "Now"]
    done = pyspec(
        "chat", *talker, "-n", 2, "-q", "-sys", os.fsdecode(b"\xff"), stdin=b"\xff\xfe\n/save " + os.fsencode(tmp_path / "talk.json")
    )
    messages = json.loads((tmp_path / "talk.json").read_text("utf-8"))["messages"]
    assert done.returncode == 0 and [m["content"] for m in messages][:2] == ["\ufffd", "\ufffd" * 2]


def test_errors_in_a_turn_are_one_sentence_and_the_next_turn_works(talker, tmp_path):
    lines = "x" * 600 + "\n/unknown\n/save\n/save " + str(tmp_path / "no" / "f") + f"\n/save {tmp_path}\n/save ~nosuch/x\n/save a\0b\nhe\n"
    done = pyspec("chat", *talker, "-n", 2, "-q", stdin=lines.encode())
    said = done.stderr.splitlines()
    assert done.returncode == 1 and done.stdout and len(said) == 7 and all(line.startswith("pyspec: ") for line in said)
    assert pyspec("chat", *talker, "-n", 2, "-q", stdin=b"/nosuch\n/exit\n").returncode == 1
    assert (
        "512" in said[0] and "/unknown" in said[1] and "name of a file" in said[2] and all("cannot be written" in line for line in said[3:])
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options, words", [
    (["--chat-template", "{% if %}"], ["chat template"]), (["--chat-template", ""], ["is empty"]), (["--chat-template-file", "/nowhere"], ["/nowhere"]),
    (["--grammar", "root ::= ("], ["grammar is wrong"]), (["-j", "{"], ["no JSON"]), (["--chat-template-kwargs", "{"], ["--chat-template-kwargs '{' is no JSON"]), (["--chat-template-kwargs", "[]"], ["no JSON object"]), (["-l", "999999+1"], ["token 999999"]),
    (["-m", "/nowhere.gguf"], ["nowhere.gguf"]),
])  # fmt: skip
def test_what_cannot_start_is_one_sentence(options, words):
    one_sentence(pyspec("chat", *DEMO, "-q", *options, stdin=b""), *words)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('not today') }}", "{{ messages.nothing.at_all }}", "{% for i in range(9**9) %}{% endfor %}"]
)
def test_a_template_that_fails_fails_the_turn_and_not_the_chat(talker, template):
    done = pyspec("chat", *talker, "-n", 2, "--chat-template", template, stdin=b"he\n/stats\n")
    said = [line for line in done.stderr.splitlines() if line.startswith("pyspec: ")]
    assert done.returncode == 1 and not done.stdout and len(said) == 1 and "chat template" in said[0] and "no answer yet" in done.stderr


def test_readers_that_leave_and_what_outlives_the_chat(talker, tmp_path):
    process = start("chat", *talker, "-n", 400, "-q", stdin=subprocess.PIPE)
    process.stdout.close()
    assert process.communicate(b"he\nhe\n", timeout=100)[1] == b"" and process.returncode == 141
    process = start("chat", *talker, "-q", stdin=subprocess.PIPE)
    process.stdin.write(b"he\n")
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and err == b""
    line = ("chat", *talker, "-n", 2, "-ub", 16, "--prefix-cache", tmp_path / "kept", "-sys", "s" * 100)
    first, second = (pyspec(*line, stdin=b"he\n").stderr for _ in range(2))
    assert "in the caches" not in first and "in the caches" in second


def test_pictures_and_sounds(tmp_path):
    """`run --image --audio`, and `/image` and `/audio` before a question; a file that is neither fails its line alone."""
    pytest.importorskip("miniaudio")
    from vision.families import file_of, wav, write_family

    target, _ = write_family(tmp_path, "gemma4")
    picture, sound, text = (tmp_path / name for name in ("a.png", "a.wav", "a.txt"))
    picture.write_bytes(file_of((96, 64)))
    sound.write_bytes(wav())
    text.write_text("neither")
    options = ["-m", target, "--device", "CPU", "-t", 1, "-c", 512]
    done = pyspec("run", *options, "--image", picture, "--audio", sound, "-p", "What?", "-n", 4)
    assert done.returncode == 0 and done.stdout
    lines = f"/image {picture}\n/audio {sound}\n/audio {text}\nWhat?\n/quit\n"
    done = pyspec("chat", *options, "-n", 4, stdin=lines.encode())
    assert done.returncode == 1 and len(re.findall(r"takes \d+ rows and stands before", done.stderr)) == 2
    assert "cannot be read" in done.stderr
