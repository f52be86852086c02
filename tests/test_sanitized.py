"""The sanitizer build: what CI runs of it, and that the write which it has to find is still there to be injected."""

import os
import subprocess
from pathlib import Path

import pytest
import run_sanitized_tests as sanitized

ROOT = Path(__file__).parents[1]
ALWAYS = ["lint", "test", "test-patches"]


@pytest.mark.parametrize("slow, targets", [(None, ALWAYS), ("0", ALWAYS), ("1", [*ALWAYS, "test-sanitized"])])
def test_the_weekly_set_of_ci_has_the_sanitizers(tmp_path, slow, targets):
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$@"\n')
    make.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({"SLOW": slow} if slow is not None else {})
    assert subprocess.run([ROOT / ".ci" / "run"], env=env, check=True, capture_output=True, text=True).stdout.split() == targets
    planned = subprocess.run(
        ["make", "-n", "test-sanitized", "-o", ".venv/.ready"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert planned.index("run_sanitized_tests.py --proof") < planned.rindex("run_sanitized_tests.py\n")


def test_what_is_injected_fits_the_source():
    name, before, after = sanitized.INJECTED
    assert (ROOT / name).read_text().count(before) == 1 and before in after
    assert all((ROOT / test).exists() for test in sanitized.TESTS)
