"""`pyspec run --prefix-cache`: a second process starts after what the first one computed, and says how much that was."""

import json
import os

import pytest
from cli.process import one_sentence, pyspec

SHARED = "def quicksort(items):\n    pivot = items[0]\n" * 6


@pytest.fixture
def run(pinned, tmp_path):
    def run(suffix, *more):
        done = pyspec("run", *pinned, "-c", 512, "-ub", 32, "-n", 12, "-p", SHARED + suffix, "--stats", tmp_path / "s.json", *more)
        assert done.returncode == 0, done.stderr
        return done, json.loads((tmp_path / "s.json").read_text())

    return run


def test_the_second_run_reuses_the_first(run, tmp_path):
    folder = tmp_path / "made" / "on the way"
    (first, a), (second, b), (without, c) = (
        run("return 1", "--prefix-cache", folder),
        run("yield 2", "--prefix-cache", folder),
        run("yield 2"),
    )
    assert a["reused_tokens"] == c["reused_tokens"] == 0 < b["reused_tokens"] < b["prompt_tokens"] == c["prompt_tokens"]
    assert b["reused_tokens"] > 200 and b["reused_from"]["disk"] == b["reused_tokens"] // 32
    assert f"{b['reused_tokens']} of them from the prefix cache" in second.stderr and "prefix cache" not in first.stderr
    assert second.stdout == without.stdout
    assert [b[k] for k in ("drafted", "matched_at", "steps")] == [c[k] for k in ("drafted", "matched_at", "steps")] and b["drafted"] > 0


def test_a_damaged_folder_costs_a_sentence(run, tmp_path):
    folder = tmp_path / "cache"
    want, _ = run("return 1", "--prefix-cache", folder)
    for path in folder.iterdir():
        os.truncate(path, 5000)
    done, stats = run("return 1", "--prefix-cache", folder)
    assert done.stdout == want.stdout and stats["reused_tokens"] == 0
    assert stats["notes"] and "cut short" in stats["notes"][0] and f"note: {stats['notes'][0]}" in done.stderr
    done, stats = run("return 1", "--prefix-cache", folder)  # what was refused has been written again
    assert done.stdout == want.stdout and stats["reused_tokens"] > 0 and not stats["notes"]


def test_a_folder_made_for_something_else_is_said(run, tmp_path):
    folder = tmp_path / "cache"
    run("return 1", "--prefix-cache", folder)
    done, stats = run("return 1", "--prefix-cache", folder, "-ub", 64)
    assert "was made for this model and layout ('chunk: 32' there, 'chunk: 64' here)" in done.stderr and stats["reused_tokens"] == 0


def test_the_disk_limit_is_kept(run, tmp_path):
    run("return 1", "--prefix-cache", tmp_path / "cache", "--prefix-disk", 0)
    assert not os.listdir(tmp_path / "cache")


def test_limits_of_a_cache_that_is_not_there_are_refused(pinned):
    """They were dropped without a word."""
    for option in ("--prefix-disk", "--prefix-memory"):
        done = pyspec("run", *pinned, "-q", "-p", "x", "-n", 1, option, 100)
        assert done.returncode == 2 and f"{option} is a limit of the prefix cache" in done.stderr
    assert pyspec("run", *pinned, "-q", "-p", "x", "-n", 1, "--cache-ram", 0).returncode == 0


def test_a_folder_that_cannot_be_made(pinned, tmp_path):
    done = pyspec("run", *pinned, "-q", "-p", "x", "--prefix-cache", "")
    assert done.returncode == 2 and "the name that --prefix-cache gives is empty" in done.stderr  # it was the current folder
    (tmp_path / "file").write_text("")
    one_sentence(pyspec("run", *pinned, "-q", "-p", "x", "--prefix-cache", tmp_path / "file"), "prefix cache", "cannot be opened")
