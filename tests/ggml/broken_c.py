"""A source of csrc built with a driver alongside these tests, whole or with parts of it replaced, which the driver has to notice."""

import subprocess
from pathlib import Path

from ggml.test_levels import headers

ROOT = Path(__file__).parents[2]


def run(folder: Path, source: str, driver: str, *edits: str, apart: bool = True) -> str:
    """What the driver says of ``source``, a path below csrc: nothing if all is right, and a line for each thing that is not.

    ``edits``: texts that stand there once, each with what replaces it. ``apart``: the source is compiled alongside the driver, which includes it otherwise.
    """
    text, copy, program = (ROOT / "csrc" / source).read_text(), folder / source, folder / "program"
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(text)
    includes = [part for path in (folder, ROOT / "csrc", ROOT / "csrc" / "cpu", headers()) for part in ("-I", path)]
    sources = [Path(__file__).with_name(driver), *([copy] if apart else [])]
    subprocess.run(list(map(str, ["cc", "-std=gnu11", "-O1", *includes, *sources, "-pthread", "-o", program])), check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == bool(done.stdout)
    return done.stdout
