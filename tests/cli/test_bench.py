"""`pyspec bench`: every output form holds the same rows; what is needed to repeat the figures is written down."""

import csv
import hashlib
import json
import signal
import subprocess
import sys
from itertools import count

import pytest
from chat_model import CHATML, with_control_tokens
from cli.process import default_interrupt, environment, one_sentence, pyspec, start

from pyggml_spec.cli.main import main

pytestmark = pytest.mark.slow

SMALL = ["--device", "CPU", "-t", 1, "--draft-width", 4, "-n", 4]


@pytest.fixture(scope="module")
def talker(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("talker")
    files = [with_control_tokens(path, folder / name, end=301) for path, name in zip(pair, ("target.gguf", "drafter.gguf"))]
    return ["-m", files[0], "-md", files[1], *SMALL]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "def f(", "category": "code"}\n{"messages": [{"role": "user", "content": "he"}], "category": "chat"}\n')
    return path


def test_lengths_in_every_form(pinned):
    done = pyspec("bench", *pinned, "-p", "8,16", "-n", 4, "-r", 2, "--json")
    assert done.returncode == 0 and "configuration: " in done.stderr
    lines = done.stdout.decode().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| pp8", "| pp16", "| tg4", "| spec4"]
    assert [row["test"] for row in json.loads(lines[-1])["rows"]] == ["pp8", "pp16", "tg4", "spec4"]
    table = list(csv.DictReader(pyspec("bench", *pinned, "-p", "8", "-n", 4, "-r", 1, "-o", "csv").stdout.decode().splitlines()))
    assert [row["test"] for row in table] == ["pp8", "tg4", "spec4"] and all(float(row["tok/s"]) > 0 for row in table)


def test_nothing_to_measure_is_an_error_of_usage():
    """It loaded the pair and printed an empty table."""
    done = pyspec("bench", "-p", 0, "-n", 0)
    assert done.returncode == 2 and "there is nothing to measure" in done.stderr and not done.stdout


def test_prompts_and_their_conditions(talker, prompts):
    done = pyspec("bench", *talker, "--prompts", prompts, "-r", 2, "--temp", 1, "-s", 7, "--json")
    assert done.returncode == 0
    table, last = done.stdout.decode().splitlines(), json.loads(done.stdout.splitlines()[-1])
    assert [line.split(" | ")[:4] for line in table[2:5]] == [
        ["| code", "-", "1", "2"],
        ["| chat", "on", "1", "2"],
        ["| chat", "off", "1", "2"],
    ]
    seen = last["conditions"]
    assert any(line == "* seeds: [7, 8]" for line in table) and seen["seeds"] == [7, 8] and "temperature 1" in seen["sampling"]
    for name, path, more in (("target", talker[1], {}), ("drafter", talker[3], {}), ("prompts", prompts, {"prompts": 2})):
        assert seen[name] == {
            "file": path.name,
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            **more,
        }
    assert seen["template"] == {"origin": "the target's", "sha256": hashlib.sha256(CHATML.encode()).hexdigest()}
    assert {"date", "device", "threads", "context", "width", "kv_type", "command", "tokens", "runs"} <= seen.keys() and "ggml" in seen[
        "versions"
    ]
    assert all(len(row["acceptance"]["runs"]) == 2 and row["acceptance"]["deviation"] is not None for row in last["rows"])


def test_prompts_as_csv_and_jsonl(talker, prompts):
    done = pyspec("bench", *talker, "--prompts", prompts, "-r", 1, "--no-think", "-o", "csv")
    rows = list(csv.reader(done.stdout.decode().splitlines()))
    assert [row[:4] for row in rows] == [["category", "thinking", "prompts", "runs"], ["code", "-", "1", "1"], ["chat", "off", "1", "1"]]
    assert json.loads(next(line for line in done.stderr.splitlines() if line.startswith("conditions: "))[12:])["runs"] == 1
    lines = [json.loads(line) for line in pyspec("bench", *talker, "--prompts", prompts, "-r", 1, "-o", "jsonl").stdout.splitlines()]
    assert [line.get("category") for line in lines] == ["code", "chat", "chat", None] and lines[-1]["conditions"]["context"] > 0


def test_prompts_from_a_pipe_are_read_once(talker, prompts):
    done = pyspec(
        "bench",
        *talker,
        "--prompts",
        "/dev/stdin",
        "-r",
        1,
        "--no-think",
        "--temp",
        1,
        "-s",
        (1 << 32) - 3,
        "-o",
        "jsonl",
        stdin=prompts.read_bytes(),
    )
    seen = json.loads(done.stdout.splitlines()[-1])["conditions"]
    assert (
        done.returncode == 0
        and seen["prompts"]["sha256"] == hashlib.sha256(prompts.read_bytes()).hexdigest()
        and seen["seeds"] == [(1 << 32) - 3]
    )


def test_included_prompts_on_the_embedded_pair():
    done = pyspec("bench", "--prompts", "reasoning", *SMALL, "-r", 1, "-o", "jsonl")
    row, conditions = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0 and row["prompts"] == 6 and sum(row["offered_at"]) > 0
    assert conditions["conditions"]["template"]["origin"].startswith("none")


def test_ctrl_c_writes_the_complete_runs(talker, prompts):
    process = start("bench", *talker, "--prompts", prompts, "-r", 100000, "-o", "csv")
    while not process.stderr.readline().startswith(b"configuration"):
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130 and out.startswith(b"category,") and b"of 100000 runs" in err and b"Traceback" not in err


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("measured", ["-p 8", "--prompts FILE"])
def test_figures_of_a_busy_machine_are_called_that(pair, tmp_path, capsys, monkeypatch, measured, busy):
    """A table said "speedup 5.11" of four tokens alongside other work, and nothing else."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    clock = count(0, 100 * busy)  # seconds that this thread waited, each time one asks
    monkeypatch.setattr("pyggml_spec.speculation.calibrate.cpu_wait_s", lambda: next(clock))
    with pytest.raises(SystemExit) as end:
        main(
            [
                "bench",
                *f"-m {pair[0]} -md {pair[1]} --device CPU -t 1 -n 2 -r 1 {measured}".replace("FILE", str(tmp_path / "p.jsonl")).split(),
            ]
        )
    assert end.value.code == 0 and ("warning: other work had the processor" in capsys.readouterr().err) is busy


@pytest.mark.parametrize("output", ["md", "jsonl"])
def test_ctrl_c_keeps_what_was_measured(pinned, output):
    """Hours of it were lost."""
    script = """if True:
        import os, signal
        from pyggml_spec.tools import bench
        run = bench._Decode.run
        def slow(self, repetition):
            if repetition == 3 and self.mode == "speculative":
                os.kill(os.getpid(), signal.SIGINT)
            run(self, repetition)
        bench._Decode.run = slow
        from pyggml_spec.cli import main
        main()
    """
    command = [sys.executable, "-c", script, "bench", *map(str, pinned), "-p", "8", "-n", "4", "-r", "9", "-o", output]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=120, preexec_fn=default_interrupt, check=False
    )
    assert done.returncode == 130 and "interrupted" in done.stderr and "Traceback" not in done.stderr
    assert [name in done.stdout for name in ("pp8", "tg4", "spec4", "commit")] == [True, True, True, False]
    if output == "jsonl":
        assert [len(json.loads(line)["runs"]) for line in done.stdout.splitlines()] == [3, 3, 2]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--prompts", "all", "-p", "8"], "--n-prompt and --prompts do not go together"), (["--prompts", "all", "--slots", "2"], "--slots and"),
        (["--prompts", "all", "-n", "0"], "needs tokens"), (["--temp", "1"], "--temperature needs --prompts"), (["--no-think"], "--think needs --prompts"),
        (["--slots", "0"], "from 1 up"), (["-p", "x"], "'x'"), (["-r", "0"], "x>=1"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(options, words):
    done = pyspec("bench", *options)
    assert done.returncode == 2 and words in done.stderr and not done.stdout


def test_prompts_that_cannot_be_measured(talker, tmp_path):
    one_sentence(pyspec("bench", *talker, "--prompts", tmp_path / "no"), "cannot be read")
    done = pyspec("bench", "--prompts", "chat", *SMALL, "--think")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("pyspec: a thinking mode is selected")
