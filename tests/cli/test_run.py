"""`pyspec run`: stdout is the text, stderr the rest, statistics as documented, exit codes as promised."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import click
import pytest
from cli.conftest import PROMPT
from cli.process import COMMAND, default_interrupt, environment, one_sentence, pyspec, start
from gguf_io.build import F32, I32, Model
from random_gguf.archs import write_qwen35moe

from pyggml_spec.__main__ import main as program
from pyggml_spec.api import Configuration
from pyggml_spec.cli.options import OffloadRows
from pyggml_spec.cli.report import configuration_line, footer
from pyggml_spec.cli.run import write_atomically
from pyggml_spec.engine.stats import Stats

pytestmark = pytest.mark.slow
DOCUMENTED = {
    "emitted", "steps", "drafted", "matched", "tokens_per_step", "matched_per_position", "target_forwards", "draft_forwards",
    "graphs_built", "graphs_built_after_warmup", "buffer_growths", "buffer_growths_after_warmup", "computes", "mode", "width", "device",
    "versions", "seconds",
}  # fmt: skip


def test_stdout_is_the_text_and_nothing_else(pinned, text):
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40)
    assert (done.returncode, done.stdout.decode()) == (0, text)
    assert done.stderr.startswith("configuration: ") and "ended by: length" in done.stderr
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 5)
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    process = start("run", *pinned, "-p", PROMPT, "-n", 40, "-q")
    out, err = process.communicate()
    assert (process.returncode, out.decode(), err) == (0, text, b"")
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.stdout.decode() == text


def test_cache_types_and_closed_streams(pinned, tmp_path):
    for more in (["--cache-type-k", "q8_0", "--draft-cache-type-v", "q4_0"], ["-ctk", "q8_0", "-ctvd", "q4_0"],
                 ["-ctk", "q8_0", "--spec-draft-type-v", "q4_0"]):  # fmt: skip
        done = pyspec("run", *pinned, "-p", PROMPT, "-n", 5, *more)
        assert done.returncode == 0 and "K q8_0 V f16, drafter K f16 V q4_0" in done.stderr
    assert pyspec("run", *pinned, "-p", PROMPT, "-ctv", "q4_K").returncode == 2
    # Daemons start with them closed; Python then has None instead of a file.
    line = [str(a) for a in ("run", *pinned, "-p", PROMPT, "-n", 5, "--stats", tmp_path / "s.json")]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *COMMAND, *line], timeout=60)
    assert done.returncode == 0 and json.loads((tmp_path / "s.json").read_text())["emitted"] == 5
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "run", *map(str, pinned)], capture_output=True, text=True)
    assert done.returncode == 1 and "there is no prompt" in done.stderr and "Traceback" not in done.stderr
    # The server's log asked a closed stdout whether it was a terminal; number 2 became that of a connection, to which libraries then wrote.
    line = [*COMMAND, "serve", *map(str, pinned), "--port", "0"]
    with subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&-', "sh", *line], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = next((line for line in server.stderr if line.startswith(("serving", "Traceback"))), "it ended")
        server.terminate()
    assert said.startswith("serving")


def test_prompts_of_every_source(pinned, text, tmp_path):
    (tmp_path / "prompt").write_text(PROMPT)
    assert pyspec("run", *pinned, "-f", tmp_path / "prompt", "-n", 40, "-q").stdout.decode() == text
    assert pyspec("run", *pinned, "-n", 40, "-q", stdin=PROMPT.encode()).stdout.decode() == text
    done = pyspec("run", *pinned, "-n", 2, "-q", stdin=b"\xff\xfe\xf7\xbf\xbf\xbf\0")
    assert done.returncode == 0 and done.stdout
    assert pyspec("run", *pinned, "-n", 2, "-q", "-p", os.fsdecode(b"caf\xe9")).returncode == 0
    for more in (["--mode", "reference"], ["--reference-shape"]):
        done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40, *more)
        assert done.stdout.decode() == text and "unused (reference mode: the text is that of --draft-width 4)" in done.stderr
    stop = text[10:14]
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40, "--stop", "not in it", "--stop", stop)
    assert done.stdout.decode() == text[: text.index(stop)] and "ended by: stop" in done.stderr
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 0, "--stats", tmp_path / "s.json")
    assert (done.returncode, done.stdout) == (0, b"") and json.loads((tmp_path / "s.json").read_text())["emitted"] == 0


def test_statistics_files(pinned, tmp_path, text):
    pyspec("run", *pinned, "-p", PROMPT, "-n", 40, "-q", "--stats", tmp_path / "s.json")
    s = json.loads((tmp_path / "s.json").read_text())
    assert set(s) >= DOCUMENTED and set(s["seconds"]) == {"load", "prefill", "decode"}
    assert s["emitted"] == 40 == 1 + s["steps"] + s["matched"]
    assert s["drafted"] == 3 * s["steps"] and s["target_forwards"] == 1 + s["steps"] and s["draft_forwards"] == s["steps"]
    assert (s["mode"], s["width"], s["device"]) == ("speculative", 4, "CPU")
    assert s["graphs_built_after_warmup"] == s["buffer_growths_after_warmup"] == 0
    assert s["waited_s"] is None or 0 <= s["waited_s"] <= s["seconds"]["decode"]
    assert {"pyggml_spec", "llama_cpp_python", "ggml"} <= set(s["versions"]) and len(s["matched_per_position"]) == 3
    assert os.listdir(tmp_path) == ["s.json"]
    # A disk that is full by then. A folder that is missing, or in the file's place, is said at once: test_usage.py.
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 40, "--stats", "/dev/full")
    assert (done.returncode, done.stdout.decode()) == (1, text)
    assert "ended by: length" in done.stderr and "statistics cannot be written" in done.stderr.splitlines()[-1]
    (tmp_path / "s.json").write_text("old")
    pyspec("run", *pinned, "-p", PROMPT, "-n", 3, "-q", "--stats", tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["emitted"] == 3
    assert pyspec("run", *pinned, "-p", PROMPT, "-n", 5, "--require-spec").returncode == 0


@pytest.mark.parametrize("more, words", [
    (["--mode", "plain"], "the mode was plain"), (["--mode", "reference"], "the mode was reference"), (["-n", 1], "first token"),
])  # fmt: skip
def test_require_spec_fails_with_the_reason(pinned, more, words):
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 5, "--require-spec", "-q", *more)
    assert done.returncode == 3 and words in done.stderr


def test_outputs_that_end_early(pair, pinned, tmp_path):
    run = ["run", "-m", pair[0], "--device", "CPU", "-t", 1, "-p", PROMPT, "-n", 3, "--require-spec"]
    done = pyspec(*run)
    assert done.returncode == 3 and done.stdout and "| n-gram drafts (suffix) where the text repeats |" in done.stderr
    assert "only suffix could draft, and nothing in the text repeated" in done.stderr and "-md" in done.stderr
    done = pyspec(*run, "--spec-type", "none")
    assert done.returncode == 3 and "no drafter: plain decoding" in done.stderr and "--spec-type none takes all drafts away" in done.stderr
    # `| head -c 10`: no traceback, no 'Exception ignored' at the end of the interpreter.
    process = start("run", *pinned, "-p", PROMPT, "--ignore-eos", "--stats", tmp_path / "s.json")
    head = process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(60) == 141 and 0 < len(head) <= 10
    assert "Traceback" not in err and "Exception" not in err and "Broken" not in err
    assert json.loads((tmp_path / "s.json").read_text())["steps"] > 0
    with open("/dev/full", "wb") as full:
        done = pyspec("run", *pinned, "-p", PROMPT, "-n", 5, "-q", stdout=full)
    assert done.returncode == 1 and done.stderr == "pyspec: the output cannot be written: No space left on device\n"
    # A disk of logs that is full does not cost the text.
    with open("/dev/full", "wb") as full:
        process = start("run", *pinned, "-p", PROMPT, "-n", 5, stderr=full)
    assert process.communicate(timeout=60)[0] == pyspec("run", *pinned, "-p", PROMPT, "-n", 5).stdout and process.returncode == 0


def test_usage_and_contradictions(pinned, pair):
    wrong = {"-f b": "not with both", "--unknown": "--unknown", "-n -3": "-3", "--draft-width 1": "draft-width", "--mode fast": "fast"}
    for more, words in wrong.items():
        done = pyspec("run", *pinned, "-p", "a", *more.split())
        assert done.returncode == 2 and not done.stdout and words in done.stderr
    one_sentence(pyspec("run", *pinned, "-q", "-p", ""), "prompt is empty")
    one_sentence(pyspec("run", *pinned, "-q", stdin=b""), "no prompt")
    one_sentence(pyspec("run", *pinned, "-q", "-c", 64, "-p", "x" * 65), "65", "64", "-c")
    assert pyspec("run", *pinned, "-q", "-c", 64, "-p", "x" * 64).returncode == 0
    asked = OffloadRows()
    assert [asked.convert(text, None, None) for text in ("off", "auto", "128")] == [None, "auto", 128]
    for text, words in (("maybe", "neither auto nor off, nor a number of rows"), ("0", "not in the range"), ("-1", "neither auto nor off")):
        with pytest.raises(click.BadParameter, match=words):
            asked.convert(text, None, None)


def test_files_of_devices_and_links(pinned, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    done = pyspec("run", *pinned, "-p", PROMPT, "-n", 3, "-q", "--stats", tmp_path / "pipe")
    assert done.returncode == 0 and json.loads(os.read(reader, 1 << 16))["emitted"] == 3 and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    assert pyspec("run", *pinned, "-p", PROMPT, "-n", 3, "-q", "--stats", "/dev/full").returncode == 1 and not os.path.isfile("/dev/full")
    # A link with the name that the part file was going to have, by the process id, sent the statistics into another file.
    victim, path = tmp_path / "victim", tmp_path / "s.json"
    victim.write_text("mine")
    (tmp_path / f".s.json.{os.getpid()}.part").symlink_to(victim)
    write_atomically(path, "{}")
    assert path.read_text() == "{}" and victim.read_text() == "mine"
    path.unlink()
    path.symlink_to(victim)
    write_atomically(path, "{}")
    assert victim.read_text() == "mine" and path.read_text() == "{}" and not path.is_symlink()


@pytest.mark.parametrize("name", ["/dev/stderr", "/dev/fd/2", "/proc/self/fd/2"])
def test_statistics_for_a_descriptor_go_to_it(tmp_path, name):
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


def _stats(**more) -> Stats:
    stats = Stats(mode="speculative", device="CPU", **more)
    for _ in range(9):
        stats.add_step(1, 0, False)
    stats.emitted += 1
    stats.seconds["decode"] = 2.0
    return stats


def test_speeds_in_the_footer():
    """Width control may take plain steps throughout: their speed is not that of speculation."""
    assert "decoded plainly at 4.5 tok/s" in footer(_stats(), 100.0) and "speedup" not in footer(_stats(), 100.0)
    # It said "plain 10.0 tok/s (calibrated) | plain 4.5 tok/s".
    stats = _stats()
    stats.mode = "plain"
    assert "plain 10.0 tok/s (calibrated) | decoded plainly at 4.5 tok/s" in footer(stats, 100.0)
    # `-n 0` said "steps: ; plain decoding: 3024 tok/s expected".
    assert "steps:" not in footer(Stats(mode="speculative", device="CPU", width_reason="plain decoding: 3 tok/s expected"), None)
    # It said "width chosen from 1" where no block width pays.
    memory = {"weights": 1, "kv": 1, "compute": 1}

    def line(widths, mode=None, sampling="greedy", draws=True):
        used = Configuration("t", "d", None, None, "CPU", 1, 16, widths, 256, "", "f16", "ggml", draws, memory, ())
        return configuration_line(used, mode, sampling)

    assert "on CPU (1 thread, kernels: ggml) | drafter d unused (no block width is faster" in line((1,))
    told = line((1, 2), "reference")
    assert "the text is that of --draft-width 16" in told  # and not that of a width chosen while running
    assert "drafter d, width chosen from 1/2" in line((1, 2)) and "drafter d, width 16" in line(())
    # Sampled text of a ggml-cuda without the patch has more rejected drafts.
    told = [line((), mode, sampling, False) for mode, sampling in ((None, "temperature 1"), ("plain", "temperature 1"), (None, "greedy"))]
    assert ["drafts are argmaxes" in text for text in told] == [True, False, False] and "argmaxes" not in line((), None, "temperature 1")


def test_a_busy_machine_is_named():
    """Two threads on two busy cores decode at a seventieth of the speed; without a word the model or the engine would be blamed."""
    busy = footer(_stats(waited_s=1.5, most_threads=2), None)
    assert "other processes used the CPU for 1.5 of 2.0 s" in busy and "-t 2 keeps all threads" in busy and "leave -t out" in busy
    follows = _stats(waited_s=0.0, most_threads=2, threads_follow=True, threads=Counter({2: 3, 1: 6}), contended_s=1.2)
    busy = footer(follows, None)
    assert "fewer threads computed meanwhile: 3 steps by 2 threads, 6 steps by 1 thread" in busy
    assert "other processes used the CPU, so" in busy and "-t" not in busy
    moment = _stats(waited_s=0.02)
    moment.seconds["decode"] = 0.03
    assert "other processes" not in footer(moment, None)  # it said "for 0.0 of 0.0 s"
    for idle in (0.02, 0.0, None):
        calm = _stats(waited_s=idle, contended_s=0.1, threads=Counter({2: 9}), most_threads=2, threads_follow=True)
        assert "other processes" not in footer(calm, None)


def _drafted(**more) -> Stats:
    drafted = Stats(mode="speculative", device="CPU", width_reason="width 4: 900 tok/s expected, plain decoding would give 800", **more)
    drafted.add_step(4, 3, True)
    drafted.seconds["decode"] = 1.0
    return drafted


def test_speeds_that_are_not_claimed():
    assert "plain 2.0 tok/s (calibrated)" in (line := footer(_drafted(), 500.0)) and "speedup 1.50x" in line
    for line in (footer(_drafted(), 500.0, True), footer(_drafted(contended_s=0.5), 500.0)):
        assert "plain 2.0" not in line and "speedup" not in line and "expected" not in line
        assert "no speed of plain decoding to compare with: other processes used the CPU" in line
    # It said "steps: 7 plain; width 4" and not why.
    for reason, kept in (
        (
            "width 4: 9 tok/s expected, plain decoding would give 8; until a block's cost is known, a text has to be longer to try one",
            "width 4; until a",
        ),
        (
            "plain decoding: 9 tok/s expected, width 4 would give 8 (first draft accepted 30 %)",
            "plain decoding (first draft accepted 30 %)",
        ),
    ):
        told = _drafted()
        told.width_reason = reason
        assert f"; {kept}" in footer(told, 500.0, True) and f"; {reason}" in footer(told, 500.0)
    # It said "plain 0.4 tok/s (measured on a busy processor) | decoded plainly at 109.0 tok/s".
    plainly = _stats()
    for _ in range(40):
        plainly.add_time(1, 10_000_000, 2, True)
    assert plainly.plain_ms == pytest.approx(10) and plainly.threads == {2: 40}
    for ms, shown in ((11.0, True), (9.0, True), (2500.0, False), (4.0, False)):
        line = footer(plainly, ms)
        assert (f"plain {1000 / ms:.1f} tok/s" in line) == shown and "decoded plainly at 4.5 tok/s" in line
        assert ("no speed of plain decoding to compare with" in line) != shown
    drafted = _drafted()
    for n in range(60):
        drafted.add_time(1 if n % 10 else 4, 10_000_000, 2, True)
    assert "speedup" in footer(drafted, 10.0) and "speedup" not in footer(drafted, 30.0)
    stats = _stats()
    for _ in range(5):
        for rows in (4, 1, 1, 1, 1):  # the first ones after a block find caches cold
            stats.add_time(rows, 90_000_000, 2, True)
    assert stats.plain_ms is None and "plain 100.0 tok/s" in footer(stats, 10.0)


N = ["-p", PROMPT, "-n", 30]


def test_seeds_and_defaults_of_sampling(pinned, text, tmp_path):
    options = ["--temp", 1.2, "--seed", 5, "--repeat-penalty", 1.1]
    first, again, plain = (pyspec("run", *pinned, *N, *options, *more) for more in ([], [], ["--reference-shape"]))
    assert first.returncode == 0 and first.stdout == again.stdout == plain.stdout
    assert "temperature 1.2" in first.stderr.splitlines()[0] and "--seed 5" in first.stderr
    assert pyspec("run", *pinned, *N, "--temp", 1.2, "-s", 6, "-q").stdout != first.stdout
    done = pyspec("run", *pinned, *N, "--temp", 0)
    assert text.startswith(done.stdout.decode()) and "| greedy |" in done.stderr and "--seed" not in done.stderr
    done = pyspec("run", *pinned, *N, "--top-k", 7, "--stats", tmp_path / "s.json")
    assert "top-k 7, top-p 0.95, min-p 0.05, temperature 0.8" in done.stderr.splitlines()[0]
    stats = json.loads((tmp_path / "s.json").read_text())
    assert f"--seed {stats['seed']}" in done.stderr and "top-k 7" in stats["sampling"]


def test_constraints_and_log_probabilities(pinned, tmp_path):
    done = pyspec("run", *pinned, *N, "--temp", 0, "--logprobs", tmp_path / "p.jsonl", "--n-probs", 2)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert done.returncode == 0 and len(lines) == 30
    assert all(line["top"][0]["token"] == line["token"] and len(line["top"]) == 2 and line["logprob"] <= 0 for line in lines)
    missing = pyspec("run", *pinned, *N, "-q", "--logprobs", "/dev/full")
    assert missing.returncode == 1 and missing.stdout and "log probabilities cannot be written" in missing.stderr
    demo = ["--device", "CPU", "-t", 1, "--draft-width", 4, "-c", 512, "-q", "-p", "x = "]
    (tmp_path / "g").write_text('root ::= "[" [0-9]{3,3} "]"')
    assert pyspec("run", *demo, "--grammar-file", tmp_path / "g").stdout.decode().strip("[]").isdigit()
    assert json.loads(pyspec("run", *demo, "-j", '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}').stdout)
    assert re.fullmatch(r"[a-c]{2}-\d", pyspec("run", *demo, "--regex", r"[a-c]{2}-\d").stdout.decode())
    (tmp_path / "l").write_text('start: "<" %json {"type": "integer", "minimum": 4, "maximum": 9} ">"')
    assert pyspec("run", *demo, "--lark-file", tmp_path / "l").stdout.decode().strip("<>") in set("456789")
    plain, biased = (pyspec("run", *demo, "-n", 8, *more).stdout for more in ([], ["-l", "319-inf", "--logit-bias", "15+20.5"]))
    assert plain != biased
    demo = ["--device", "CPU", "-t", 1, "--draft-width", 4, "-c", 512, "-p", "x = ", "-j", '{"enum": [{"a_rather_long_name": 1}]}']
    whole, cut = pyspec("run", *demo, "-n", 40), pyspec("run", *demo, "-n", 4)
    assert json.loads(whole.stdout) == {"a_rather_long_name": 1}
    assert "ended by: end\n" in whole.stderr and "forced by the constraint: " in whole.stderr
    assert "ended by: length (cut: not complete)" in cut.stderr


def test_what_the_file_recommends_counts_where_nothing_was_asked_for(pair, pinned, tmp_path):
    model = Model(pair[0])
    model.keys |= {
        f"general.sampling.{key}": value for key, value in {"temp": (F32, 0.5), "top_k": (I32, 7), "penalty_repeat": (F32, -1.0)}.items()
    }
    options = ["-m", model.write(tmp_path / "t.gguf"), *pinned[2:], *N[:2], "-n", 6]
    greedy, sampled, asked = (pyspec("run", *options, *more) for more in ([], ["-s", 1], ["-s", 1, "--temp", 0.5, "--top-k", 9, "-q"]))
    chain = "top-k 7, top-p 0.95, min-p 0.05, temperature 0.5"
    assert "| greedy |" in greedy.stderr and f"note: t.gguf recommends {chain}; this is greedy" in greedy.stderr
    assert f"| {chain} |" in sampled.stderr and "note: t.gguf recommends penalty_repeat -1.0, which is not" in sampled.stderr
    same = pyspec("run", *pinned, *N[:2], "-n", 6, "-q", "-s", 1, "--temp", 0.5, "--top-k", 9)
    assert asked.stdout == same.stdout and asked.stderr == ""


@pytest.mark.parametrize("options, words", [
    (["--grammar", "root ::= ("], ["grammar is wrong"]), (["-j", "{"], ["no JSON"]), (["-l", "999999+1"], ["token 999999"]),
    (["--grammar-file", "/nowhere"], ["/nowhere"]), (["-j", '{"not": {}}'], ["'not'"]), (["--regex", "("], ["regular expression"]),
])  # fmt: skip
def test_what_cannot_be_sampled_is_one_sentence(pinned, options, words):
    one_sentence(pyspec("run", *pinned, *N, "-q", *options), *words)


def test_usage(pinned):
    wrong = {"-l 5*2": "5*2", "--grammar a --grammar-file b": "not both", "--mirostat 3": "--mirostat", "-s -2": "-2"}
    for options, words in wrong.items():
        done = pyspec("run", *pinned, *N, *options.split())
        assert done.returncode == 2 and words in done.stderr


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


def test_bars_and_colours_of_terminals(pinned, text):
    out, seen = on_a_terminal("run", *pinned, "-p", PROMPT, "-n", 40)
    assert out.decode() == text and "weights" in seen and "prefill" in seen and COLOUR.search(seen)
    assert seen.count("\x1b[?25h") >= seen.count("\x1b[?25l") > 0  # the cursor is shown again
    assert "\x1b" not in seen[seen.index(" tok/s") :]
    _, seen = on_a_terminal("run", *pinned, "-p", PROMPT, "-n", 3, NO_COLOR="1")
    assert "weights" in seen and not COLOUR.search(seen)
    _, seen = on_a_terminal("run", *pinned, "-p", PROMPT, "-n", 3, TERM="dumb")
    assert "\x1b" not in seen and "configuration: " in seen


@pytest.mark.parametrize("command", [["inspect"], ["devices"]])
def test_other_commands_write_no_escapes(pair, command):
    out, seen = on_a_terminal(*command, *([pair[0]] if command == ["inspect"] else []))
    assert b"\x1b" not in out and "\x1b" not in seen


SHARED = "def quicksort(items):\n    pivot = items[0]\n" * 6


@pytest.fixture
def run(pinned, tmp_path):
    def run(suffix, *more):
        done = pyspec("run", *pinned, "-c", 512, "-ub", 32, "-n", 12, "-p", SHARED + suffix, "--stats", tmp_path / "s.json", *more)
        assert done.returncode == 0, done.stderr
        return done, json.loads((tmp_path / "s.json").read_text())

    return run


def test_prefix_cache_over_two_runs(run, tmp_path, pinned):
    folder = tmp_path / "made" / "on the way"
    (first, a), (second, b) = (run(suffix, "--prefix-cache", folder) for suffix in ("return 1", "yield 2"))
    without, c = run("yield 2")
    assert a["reused_tokens"] == c["reused_tokens"] == 0 < b["reused_tokens"] < b["prompt_tokens"] == c["prompt_tokens"]
    assert b["reused_tokens"] > 200 and b["reused_from"]["disk"] == b["reused_tokens"] // 32
    assert f"{b['reused_tokens']} of them from the prefix cache" in second.stderr and "prefix cache" not in first.stderr
    assert second.stdout == without.stdout
    assert [b[k] for k in ("drafted", "matched_at", "steps")] == [c[k] for k in ("drafted", "matched_at", "steps")] and b["drafted"] > 0
    folder = tmp_path / "cache"
    want, _ = run("return 1", "--prefix-cache", folder)
    for path in folder.iterdir():
        os.truncate(path, 5000)
    done, stats = run("return 1", "--prefix-cache", folder)
    assert done.stdout == want.stdout and stats["reused_tokens"] == 0
    assert stats["notes"] and "cut short" in stats["notes"][0] and f"note: {stats['notes'][0]}" in done.stderr
    done, stats = run("return 1", "--prefix-cache", folder)  # what was refused has been written again
    assert done.stdout == want.stdout and stats["reused_tokens"] > 0 and not stats["notes"]
    folder = tmp_path / "cache"
    run("return 1", "--prefix-cache", folder)
    done, stats = run("return 1", "--prefix-cache", folder, "-ub", 64)
    assert "was made for this model and layout ('chunk: 32' there, 'chunk: 64' here)" in done.stderr and stats["reused_tokens"] == 0
    run("return 1", "--prefix-cache", tmp_path / "cache", "--prefix-disk", 0)
    assert not os.listdir(tmp_path / "cache")
    # They were dropped without a word.
    for option in ("--prefix-disk", "--prefix-memory"):
        done = pyspec("run", *pinned, "-q", "-p", "x", "-n", 1, option, 100)
        assert done.returncode == 2 and f"{option} is a limit of the prefix cache" in done.stderr
    assert pyspec("run", *pinned, "-q", "-p", "x", "-n", 1, "--cache-ram", 0).returncode == 0
    done = pyspec("run", *pinned, "-q", "-p", "x", "--prefix-cache", "")
    assert done.returncode == 2 and "the name that --prefix-cache gives is empty" in done.stderr  # it was the current folder
    (tmp_path / "file").write_text("")
    one_sentence(pyspec("run", *pinned, "-q", "-p", "x", "--prefix-cache", tmp_path / "file"), "prefix cache", "cannot be opened")


CPU = ("--device", "CPU", "-t", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_qwen35moe(tmp_path_factory.mktemp("experts") / "t.gguf", quant="Q8_0")


def test_profile_then_run_with_it(model, tmp_path):
    text, stats = tmp_path / "text.txt", tmp_path / "stats.json"
    text.write_text("Which experts does this text need? " * 40)
    done = pyspec("experts", "profile", "-m", model, "-f", text, *CPU)
    assert done.returncode == 0 and "| 0.5 | " in done.stdout.decode() and f"{model}.experts.json" in done.stderr
    run = ("run", "-m", model, "-p", "Which experts", "-n", 12, "--ignore-eos", "-c", 128, *CPU)
    plain = pyspec(*run)
    for more in (("--expert-residency", 0.5), ("--cpu-moe",), ("--n-cpu-moe", 1, "--expert-residency", 0.5)):
        done = pyspec(*run, *more, "--stats", stats)
        assert done.returncode == 0 and done.stdout == plain.stdout and "in host memory" in done.stderr and "% of" in done.stderr
        seen = json.loads(stats.read_text())
        assert seen["expert_hit_rate"] == seen["experts"]["hits"] / seen["experts"]["chosen"]
        assert (seen["expert_hit_rate"] == 0) == (more == ("--cpu-moe",))


def test_residency_without_a_profile_says_how_to_make_one(tmp_path):
    model = write_qwen35moe(tmp_path / "t.gguf")
    one_sentence(pyspec("run", "-m", model, "-p", "x", "--expert-residency", 0.5, *CPU), "no routing profile", "pyspec experts profile")


@pytest.mark.parametrize("options", [("--expert-profile", "x.json"), ("--cpu-moe", "--n-cpu-moe", 1), ("--expert-residency", 2)])
def test_contradictions_are_usage_errors(model, options):
    assert pyspec("run", "-m", model, "-p", "x", *options, *CPU).returncode == 2


def test_experts_of_a_dense_model_and_texts_that_are_too_short(model, pair, tmp_path):
    one_sentence(pyspec("run", "-m", pair[0], "-p", "x", "--cpu-moe", *CPU), "no routed experts")
    (tmp_path / "t.txt").write_text("short")
    one_sentence(pyspec("experts", "profile", "-m", model, "-f", tmp_path / "t.txt", "-o", tmp_path / "p.json", *CPU), "too few")
    assert not (tmp_path / "p.json").exists()
    one_sentence(pyspec("experts", "profile", "-m", model, "-f", tmp_path / "none.txt", *CPU), "none.txt")


ROOT = Path(__file__).parents[2]
KILL = "import os, signal\nctrl_c = lambda: os.kill(os.getpid(), signal.SIGINT)\n"


def run_patched(patch: str, *args):
    """`pyspec run` in an interpreter where ``patch`` has put Ctrl-C at an exact place."""
    script = KILL + patch + "\nfrom pyggml_spec.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", script, "run", *map(str, args)],
        capture_output=True, env=environment(), timeout=120, stdin=subprocess.DEVNULL, preexec_fn=default_interrupt,
    )  # fmt: skip
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()  # what a text holds of \r stays
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    return done


def test_during_decoding(pinned, text, tmp_path):
    process = start("run", *pinned, "-p", PROMPT, "--ignore-eos", "-c", 4096, "--stats", tmp_path / "s.json")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    shown, err = (first + rest).decode(), err.decode()
    assert process.returncode == 130 and "Traceback" not in err
    assert shown.startswith(text) or text.startswith(shown)
    assert "ended by: interrupt" in err
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["stop_reason"] == "interrupt" and stats["emitted"] == 1 + stats["steps"] + stats["matched"] < 4096


@pytest.mark.parametrize("spec", ["draft-mtp", "draft-dflash,draft-mtp"])
def test_during_decoding_by_chains(spec, tmp_path):
    """The embedded target's MTP layer, alone and alongside the block drafter: the text so far is the plain one, and who drafted what is counted."""
    args = ["-p", PROMPT, "--ignore-eos", "-c", 2048, "-t", 1, "--device", "CPU"]
    plain = pyspec("run", *args, "--spec-type", "none", "-n", 64).stdout.decode()
    process = start("run", *args, "--spec-type", spec, "--stats", tmp_path / "s.json")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    shown, err = (first + rest).decode(), err.decode()
    assert process.returncode == 130 and "Traceback" not in err and "ended by: interrupt" in err
    assert shown.rstrip("\n").startswith(plain.rstrip("\n")) or plain.startswith(shown.rstrip("\n"))
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["stop_reason"] == "interrupt" and stats["emitted"] == 1 + stats["steps"] + stats["matched"] < 2048
    assert set(stats["drafters"]) <= set(spec.split(","))


def test_during_prefill(pinned, tmp_path):
    patch = """if True:
        from pyggml_spec.engine.runner import ModelRunner
        step = ModelRunner.forward
        def slow(self, work, meanwhile=None):
            ctrl_c()
            return step(self, work, meanwhile)
        ModelRunner.forward = slow
    """
    done = run_patched(patch, *pinned, "-p", "x" * 1200, "-n", 5, "--stats", tmp_path / "s.json")
    assert (done.returncode, done.stdout) == (130, "") and "ended by: interrupt" in done.stderr
    stats = json.loads((tmp_path / "s.json").read_text())
    assert (stats["stop_reason"], stats["emitted"], stats["computes"]) == ("interrupt", 0, 1)  # one chunk of three


def test_while_the_command_line_is_imported(monkeypatch):
    class Interrupted:
        def find_spec(self, name, *_):
            if name == "pyggml_spec.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "pyggml_spec.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        program()
    assert end.value.code == 130


def test_both_names_of_the_program_are_one():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["pyspec"] == "pyggml_spec.__main__:main"


WHILE_LOADING = {
    "weights are loaded": """if True:
        from pyggml_spec.models.weights import Weights
        upload = Weights._upload
        def slow(self, *args, **kwargs):
            ctrl_c()
            return upload(self, *args, **kwargs)
        Weights._upload = slow
    """,
    # Its bytes in the file were still held when they were given back: a BufferError in place of the interrupt.
    "a tensor is copied": """if True:
        from pyggml_spec.models import weights
        class Copying:
            def __getattr__(self, name):
                return getattr(real, name)
            def ggml_backend_tensor_set(self, *args):
                ctrl_c()
        real, weights.lib = weights.lib, Copying()
    """,
    # Its log went to a Python function: Ctrl-C was raised in there, ctypes dropped it, and the run went on.
    "llama.cpp reads the vocabulary": """if True:
        import threading, time
        from pyggml_spec.text import tokenizer
        class Slow:
            def __getattr__(self, name):
                return getattr(real, name)
            def llama_model_load_from_file(self, *args):
                def later():
                    time.sleep(0.003)
                    ctrl_c()
                threading.Thread(target=later).start()
                for _ in range(20):  # long enough for it
                    model = real.llama_model_load_from_file(*args)
                return model
        real, tokenizer.lib = tokenizer.lib, Slow()
    """,
}


@pytest.mark.parametrize("patch", WHILE_LOADING.values(), ids=WHILE_LOADING)
def test_while_loading(pinned, patch):
    done = run_patched(patch, *pinned, "-p", PROMPT)
    assert (done.returncode, done.stdout) == (130, "") and not done.stderr.strip()


def test_a_second_one_does_not_wait_for_the_step(pinned, text, tmp_path):
    patch = """if True:
        from pyggml_spec.engine.runner import ModelRunner
        step, count = ModelRunner.forward, 0
        def slow(self, *args):
            global count
            count += 1
            if count == 6:  # one is the prompt's
                ctrl_c()
                ctrl_c()
            return step(self, *args)
        ModelRunner.forward = slow
    """
    done = run_patched(patch, *pinned, "-p", PROMPT, "-n", 40, "-q", "--stats", tmp_path / "s.json")
    assert done.returncode == 130 and done.stdout and text.startswith(done.stdout)
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["steps"] == 4 and stats["computes"] >= 5


def test_one_after_the_text_is_complete_changes_nothing(pinned, text):
    """While the footer's plain speed is measured: the text is whole, so the run succeeded."""
    patch = """if True:
        from pyggml_spec.api import Session
        calibrate = Session.calibrate_plain
        def slow(self, *args):
            ctrl_c()
            return calibrate(self, *args)
        Session.calibrate_plain = slow
    """
    done = run_patched(patch, *pinned, "-p", PROMPT, "-n", 40)
    assert (done.returncode, done.stdout) == (0, text) and "ended by: length" in done.stderr
