"""`pyspec run`: stdout is the text, stderr the rest, statistics as documented, exit codes as promised."""

import json
import os
import subprocess
import sys

import pytest
from cli.conftest import PROMPT
from cli.process import COMMAND, one_sentence, pyspec, start

from pyggml_spec.cli.run import write_atomically

DOCUMENTED = {
    "emitted", "steps", "drafted", "matched", "tokens_per_step", "matched_per_position", "target_forwards", "draft_forwards",
    "graphs_built", "graphs_built_after_warmup", "buffer_growths", "buffer_growths_after_warmup", "computes", "mode", "width", "device",
    "versions", "seconds",
}  # fmt: skip


@pytest.mark.slow
def test_stdout_is_the_text_and_nothing_else(pinned, text):
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40)
    assert (done.returncode, done.stdout.decode()) == (0, text)
    assert done.stderr.startswith("configuration: ") and "ended by: length" in done.stderr


def test_without_a_terminal_there_are_no_bars_and_no_escapes(pinned):
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 5)
    assert "\x1b" not in done.stderr and "\r" not in done.stderr


@pytest.mark.slow
def test_cache_types_are_engaged(pinned):
    """Under our names, llama.cpp's old ones and its new ones."""
    for more in (["--cache-type-k", "q8_0", "--draft-cache-type-v", "q4_0"], ["-ctk", "q8_0", "-ctvd", "q4_0"],
                 ["-ctk", "q8_0", "--spec-draft-type-v", "q4_0"]):  # fmt: skip
        done = pyspec("run", *pinned, "-p", PROMPT, "-n", 5, *more)
        assert done.returncode == 0 and "K q8_0 V f16, drafter K f16 V q4_0" in done.stderr
    assert pyspec("run", *pinned, "-p", PROMPT, "-ctv", "q4_K").returncode == 2


@pytest.mark.slow
def test_quiet_says_nothing(pinned, text):
    """In a process as users': nor does a library that takes itself apart at the end."""
    process = start("run", *pinned, "-p", PROMPT, "-n", 40, "-q")
    out, err = process.communicate()
    assert (process.returncode, out.decode(), err) == (0, text, b"")


@pytest.mark.slow
def test_the_locale_does_not_change_the_text(pinned, text):
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.stdout.decode() == text


def test_prompt_from_a_file_and_from_stdin(pinned, text, tmp_path):
    (tmp_path / "prompt").write_text(PROMPT)
    assert pyspec("run", *pinned, "-f", tmp_path / "prompt", "-n", 40, "-q").stdout.decode() == text
    assert pyspec("run", *pinned, "-n", 40, "-q", stdin=PROMPT.encode()).stdout.decode() == text


def test_a_prompt_that_is_no_utf8_runs(pinned):
    done = pyspec("run", *pinned, "-n", 2, "-q", stdin=b"\xff\xfe\xf7\xbf\xbf\xbf\0")
    assert done.returncode == 0 and done.stdout
    assert pyspec("run", *pinned, "-n", 2, "-q", "-p", os.fsdecode(b"caf\xe9")).returncode == 0


def test_modes_and_aliases_give_the_same_text(pinned, text):
    for more in (["--mode", "reference"], ["--reference-shape"]):
        done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40, *more)
        assert done.stdout.decode() == text and "unused (reference mode: the text is that of --draft-width 4)" in done.stderr


def test_a_stop_string_ends_the_text(pinned, text):
    stop = text[10:14]
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40, "--stop", "not in it", "--stop", stop)
    assert done.stdout.decode() == text[: text.index(stop)] and "ended by: stop" in done.stderr


def test_no_tokens_is_no_text(pinned, tmp_path):
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 0, "--stats", tmp_path / "s.json")
    assert (done.returncode, done.stdout) == (0, b"") and json.loads((tmp_path / "s.json").read_text())["emitted"] == 0


# -- statistics


def test_statistics_have_the_documented_keys_and_add_up(pinned, tmp_path):
    pyspec("run", *pinned, "-p", PROMPT, "-n", 40, "-q", "--stats", tmp_path / "s.json")
    s = json.loads((tmp_path / "s.json").read_text())
    assert set(s) >= DOCUMENTED and set(s["seconds"]) == {"load", "prefill", "decode"}
    assert s["emitted"] == 40 == 1 + s["steps"] + s["matched"]
    assert s["drafted"] == 3 * s["steps"] and s["target_forwards"] == 1 + s["steps"] and s["draft_forwards"] == s["steps"]
    assert (s["mode"], s["width"], s["device"]) == ("speculative", 4, "CPU")
    assert s["graphs_built_after_warmup"] == s["buffer_growths_after_warmup"] == 0
    assert s["waited_s"] is None or 0 <= s["waited_s"] <= s["seconds"]["decode"]
    assert {"pyggml_spec", "llama_cpp_python", "ggml"} <= set(s["versions"])
    assert len(s["matched_per_position"]) == 3
    assert os.listdir(tmp_path) == ["s.json"]


def test_statistics_that_cannot_be_written_cost_neither_the_text_nor_the_footer(pinned, text):
    """A disk that is full by then. A folder that is missing, or in the file's place, is said at once: test_usage.py."""
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40, "--stats", "/dev/full")
    assert (done.returncode, done.stdout.decode()) == (1, text)
    assert "ended by: length" in done.stderr and "statistics cannot be written" in done.stderr.splitlines()[-1]


def test_old_statistics_are_replaced(pinned, tmp_path):
    (tmp_path / "s.json").write_text("old")
    pyspec("run", *pinned, "-p", PROMPT, "-n", 3, "-q", "--stats", tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["emitted"] == 3


# -- requirements


def test_require_spec_passes_when_drafts_were_verified(pinned):
    assert pyspec("run", *pinned, "-p", PROMPT, "-n", 5, "--require-spec").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, words",
    [(["--mode", "plain"], "the mode was plain"), (["--mode", "reference"], "the mode was reference"), (["-n", 1], "first token")],
)
def test_require_spec_fails_with_the_reason(pinned, more, words):
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 5, "--require-spec", "-q", *more)
    assert done.returncode == 3 and words in done.stderr


def test_require_spec_without_a_drafter(pair):
    run = ["run", "-m", pair[0], "--device", "CPU", "-t", 1, "-p", PROMPT, "-n", 3, "--require-spec"]
    done = pyspec(*run)
    assert done.returncode == 3 and done.stdout and "| n-gram drafts (suffix) where the text repeats |" in done.stderr
    assert "only suffix could draft, and nothing in the text repeated" in done.stderr and "-md" in done.stderr
    done = pyspec(*run, "--spec-type", "none")
    assert done.returncode == 3 and "no drafter: plain decoding" in done.stderr and "--spec-type none takes all drafts away" in done.stderr


# -- an output that goes away


def test_a_reader_that_stops_reading_ends_the_run_quietly(pinned, tmp_path):
    """`| head -c 10`: no traceback, no 'Exception ignored' at the end of the interpreter."""
    process = start("run", *pinned, "-p", PROMPT, "--ignore-eos", "--stats", tmp_path / "s.json")
    head = process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(60) == 141 and 0 < len(head) <= 10
    assert "Traceback" not in err and "Exception" not in err and "Broken" not in err
    assert json.loads((tmp_path / "s.json").read_text())["steps"] > 0


def test_a_full_disk_is_one_sentence(pinned):
    with open("/dev/full", "wb") as full:
        done = pyspec("run", *pinned, "-p", PROMPT, "-n", 5, "-q", stdout=full)
    assert done.returncode == 1 and done.stderr == "pyspec: the output cannot be written: No space left on device\n"


@pytest.mark.slow
def test_closed_standard_streams_are_no_crash(pinned, tmp_path):
    """Daemons start with them closed; Python then has None instead of a file."""
    line = [str(a) for a in ("run", *pinned, "-p", PROMPT, "-n", 5, "--stats", tmp_path / "s.json")]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *COMMAND, *line], timeout=60)
    assert done.returncode == 0 and json.loads((tmp_path / "s.json").read_text())["emitted"] == 5
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "run", *map(str, pinned)], capture_output=True, text=True)
    assert done.returncode == 1 and "there is no prompt" in done.stderr and "Traceback" not in done.stderr


# -- what cannot be run


def test_usage_errors_are_2(pinned, pair):
    for more, words in (
        (["-p", "a", "-f", "b"], "not with both"),
        (["--unknown"], "--unknown"),
        (["-p", "a", "-n", "-3"], "-3"),
        (["-p", "a", "--draft-width", "1"], "draft-width"),
        (["-p", "a", "--mode", "fast"], "fast"),
    ):
        done = pyspec("run", *pinned, *more)
        assert done.returncode == 2 and not done.stdout and words in done.stderr


def test_an_empty_prompt_is_one_sentence(pinned):
    one_sentence(pyspec("run", *pinned, "-q", "-p", ""), "prompt is empty")
    one_sentence(pyspec("run", *pinned, "-q", stdin=b""), "no prompt")


def test_a_prompt_longer_than_the_context_is_one_sentence(pinned):
    one_sentence(pyspec("run", *pinned, "-q", "-c", 64, "-p", "x" * 65), "65", "64", "-c")
    assert pyspec("run", *pinned, "-q", "-c", 64, "-p", "x" * 64).returncode == 0


def test_a_file_that_is_a_device_or_a_pipe_is_written_to_and_not_replaced(pinned, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 3, "-q", "--stats", tmp_path / "pipe")
    assert done.returncode == 0 and json.loads(os.read(reader, 1 << 16))["emitted"] == 3 and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    assert pyspec("run", *pinned, "-p", PROMPT, "-n", 3, "-q", "--stats", "/dev/full").returncode == 1 and not os.path.isfile("/dev/full")


def test_a_statistics_file_is_written_through_no_link(tmp_path):
    """A link with the name that the part file was going to have, by the process id, sent the statistics into another file."""
    victim, path = tmp_path / "victim", tmp_path / "s.json"
    victim.write_text("mine")
    (tmp_path / f".s.json.{os.getpid()}.part").symlink_to(victim)
    write_atomically(path, "{}")
    assert path.read_text() == "{}" and victim.read_text() == "mine"
    path.unlink()
    path.symlink_to(victim)
    write_atomically(path, "{}")
    assert victim.read_text() == "mine" and path.read_text() == "{}" and not path.is_symlink()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["/dev/stderr", "/dev/fd/2", "/proc/self/fd/2"])
def test_statistics_for_a_descriptor_go_to_it(tmp_path, name):
    """Root's `--stats /dev/stderr 2> FILE` put a file into the place of /dev/stderr, which every other program of the machine needs."""
    code = f"from pathlib import Path; from pyggml_spec.cli.run import write_atomically as w; w(Path({name!r}), 'two')"
    with (tmp_path / "out").open("w") as out:
        print("one,", end="", file=out, flush=True)
        done = subprocess.run([sys.executable, "-c", code], stderr=out, check=False)
    assert done.returncode == 0 and (tmp_path / "out").read_text() == "one,two" and os.path.islink("/dev/stderr")


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_a_statistics_file_has_the_permissions_that_the_user_gives_new_files(tmp_path, umask, mode):
    old = os.umask(umask)
    try:
        write_atomically(tmp_path / "s.json", "{}")
    finally:
        os.umask(old)
    assert (tmp_path / "s.json").stat().st_mode & 0o777 == mode
