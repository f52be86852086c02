"""Commands of the guide and code of the pages run as a reader pastes them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli.process import environment, pyspec
from test_pages import GUIDE, PAGES, arguments, blocks, commands

from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET

pytestmark = pytest.mark.slow
ELSEWHERE = (
    "bench", "build", "doctor", "convert", "experts", "compare --weights",
)  # take long or need files of their own; run in tests/cli  # fmt: skip


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with the files that the guide names, and an environment in which one core is seen: threads that wait for each other are slow."""
    folder = tmp_path_factory.mktemp("desk")
    for name, path in (("target.gguf", DEMO_TARGET), ("drafter.gguf", DEMO_DRAFTER)):
        (folder / name).symlink_to(path)
    (folder / "prompt.txt").write_text("import os\n\n\ndef walk(path):\n" * 20)
    return folder


def _one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def in_desk(folder: Path, command, **more) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, input="def f(x):\n", env=environment(PATH=path),
        preexec_fn=_one_core, **more
    )  # fmt: skip


@pytest.mark.parametrize(
    "line", [line for line in commands(GUIDE) if "model.gguf" not in line and not " ".join(arguments(line)).startswith(ELSEWHERE)]
)
def test_the_guides_commands_run(desk, line):
    if line == f"pyspec {' '.join(arguments(line))}":  # nothing that a shell would have to do
        done = pyspec(*arguments(line), stdin=b"def f(x):\n", cwd=desk, one_core=True)
    else:
        done = in_desk(desk, line, shell=True)
    refused = "--require-spec" in line and done.returncode == 3  # a machine on which drafting does not pay
    assert (done.returncode == 0 or refused) and "Traceback" not in done.stderr, done.stderr
    written = re.search(r"> (\S+)$", line)
    assert done.stdout.strip() or (desk / written[1]).read_text().strip()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_code_of_the_pages_runs(desk, page):
    """Each block by itself, as a user would paste it: in a process that has imported nothing yet."""
    for code in blocks(page, "python"):
        done = in_desk(desk, [sys.executable, "-c", code])
        assert done.returncode == 0 and not done.stderr, done.stderr
