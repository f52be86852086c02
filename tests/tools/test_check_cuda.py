"""The checks of a card, with other commands: what compares nothing, takes too long or is not run has not passed."""

import argparse
import re
import sys

import check_cuda
import check_replay
import pytest
from check_cuda import LONG, SANITIZED, Check, checks, others


def run(monkeypatch, capsys, tmp_path, commands: dict[str, str], *options: str) -> tuple[int, list[str]]:
    """Exit code and lines of the checks with these shell commands, one at a time."""
    (tmp_path / "test-backend-ops").touch(mode=0o755)
    (tmp_path / "libggml-cuda.so").touch()
    made = {name: Check(["/bin/sh", "-c", command], r"\d+/(\d+) tests passed", tmp_path) for name, command in commands.items()}
    monkeypatch.setattr(check_cuda, "checks", lambda *_: made)
    monkeypatch.setattr(sys, "argv", ["check_cuda.py", "--tools", str(tmp_path), "--logs", str(tmp_path / "logs"), "--jobs", "1", *options])
    return check_cuda.main(), capsys.readouterr().out.splitlines()


def test_what_compares_nothing_or_does_not_end_fails(monkeypatch, capsys, tmp_path):
    seen = 'test $CUDA_VISIBLE_DEVICES = 3 && echo "  5/5 tests passed"'
    commands = {"good": seen, "empty": "echo 0/0 tests passed", "wrong": "echo 1/2 tests passed; exit 1", "endless": "sleep 60 & wait"}
    code, lines = run(monkeypatch, capsys, tmp_path, commands, "--devices", "3", "--limit", "0.5")
    assert [line.split(":")[0].split(", see")[0] for line in lines[:4]] == [
        "passed",
        "FAILED (nothing was compared)",
        "FAILED (exit code 1)",
        "FAILED (stopped, it was not through within 0 s)",
    ]
    assert code == 1 and lines[4] == "1 of 4 passed, 3 failed, 0 not run" and "good, 5 compared" in lines[0]


def test_what_is_not_run_is_named_and_has_not_passed(monkeypatch, capsys, tmp_path):
    good = "echo 5/5 tests passed"
    code, lines = run(monkeypatch, capsys, tmp_path, {"first": f"sleep 0.2; {good}", "second": good}, "--budget", "0.1")
    assert code == 1 and lines[1:] == ["1 of 2 passed, 0 failed, 1 not run:", "  second"]
    assert run(monkeypatch, capsys, tmp_path, {"one": good, "two": good}, "--only", "two")[0] == 0
    with pytest.raises(SystemExit, match="no check's name contains three"):
        run(monkeypatch, capsys, tmp_path, {"one": good}, "--only", "three")


def test_nothing_starts_without_its_tools(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["check_cuda.py", "--tools", str(tmp_path), "--only", "memcheck KV_MASK", "early"])
    with pytest.raises(SystemExit, match="test-backend-ops, compute-sanitizer, cuobjdump, .*libggml-cuda.so: not found") as refusal:
        check_cuda.main()
    assert "build/patched-sanitized/build/bin/libggml-cuda.so" in str(refusal.value)


def test_every_operation_is_in_a_check(tmp_path):
    names = [*(LONG | SANITIZED), "ADD", "MUL", "MUL_MAT_ID_FUSION", "MUL_MAT_HADAMARD", "M", "FLASH_ATTN", "CONV_2D", "MOE_LAYERS"]
    rest = others(LONG)
    assert "(" not in rest and [name for name in names if not re.search(rest, name)] == list(LONG)
    found = checks(tmp_path, tmp_path / "sanitized")
    sanitized = [f"{op} {cases}".strip(" ,") for op, parts in SANITIZED.items() for cases in parts]
    assert all(f"{tool} {what}" in found for what in sanitized for tool in ("memcheck", "racecheck")) and "operations others" in found
    apart = [name for name, check in found.items() if "flash_attn_ext_vec" in " ".join(check.command)]
    assert len(apart) == 2 and all(name.startswith("racecheck ") for name in apart)


def test_a_pair_that_a_card_refuses_has_not_passed(monkeypatch, tmp_path):
    """Of three types two may load: their results were compared, the third was left out, and the check passed."""

    def refuse(*args, **options):
        raise check_replay.ps.PyspecError("no kernel for it")

    monkeypatch.setattr(check_replay, "pairs", lambda *_: [("llama, Q4_K", None, None, None)])
    monkeypatch.setattr(check_replay.ps, "load", refuse)
    args = {"device": "CPU", "threads": 1, "cache_type": "f16", "prompt": 40, "dump": tmp_path / "out.npz"}
    check_replay.measure(argparse.Namespace(all=False, **args))
    with pytest.raises(SystemExit, match="llama, Q4_K was refused"):
        check_replay.measure(argparse.Namespace(all=True, **args))
    assert all(what.command[-1] == "--all" for name, what in checks(tmp_path, tmp_path).items() if name.startswith("replay "))
