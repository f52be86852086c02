#!/usr/bin/env python3
"""Fills the environment of the running Python: build tools, llama-cpp-python, this package with test and lint dependencies; `make` calls it.

    python -m venv .venv && .venv/bin/python scripts/set_up.py

llama-cpp-python takes minutes the first time. Its wheel is cached under a hash of recipe, compiler, flags and processor, not by pip, whose cache ignores
them.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pyggml_spec import building  # noqa: E402
from pyggml_spec.errors import BuildError  # noqa: E402
from pyggml_spec.pin import LLAMA_CPP_PYTHON, installed_libraries  # noqa: E402

TOOLS = ["scikit-build-core>=0.10", "cffi>=1.17", "cmake", "ninja"]
EVERY = 30  # seconds between two lines where no terminal moves one


class Line:
    """A progress line on stderr."""

    def __init__(self, what: str):
        self.what, self.began, self.said = what, time.monotonic(), time.monotonic()
        self.moves = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self.moves and done != total and now - self.said < EVERY:
            return
        self.said = now
        spent = f"{(now - self.began) // 60:.0f}:{(now - self.began) % 60:02.0f}"
        text = f"{self.what}: {f'{done} of {total}' if total else 'preparing'}, {spent}"
        print(f"\r\033[K{text}" if self.moves else text, end="" if self.moves else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.moves:
            print(file=sys.stderr)


def pip_install(said: str, *what: str) -> None:
    """Runs pip quietly after printing ``said``; its output is shown if it fails."""
    print(said, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *what]
    building.run(command, f"pip could not install {what[-1]}")


def wheel_of(plan: building.Plan) -> Path:
    """The cached wheel of llama-cpp-python, built with a progress line if there is none. Raises BuildError."""
    if (wheel := building.kept_wheel(plan.key)) is not None:
        return wheel
    line = Line(f"building llama-cpp-python {LLAMA_CPP_PYTHON} (minutes, once)")
    try:
        return plan.build(line)
    finally:
        line.close()


def llama_cpp_python() -> None:
    libraries = installed_libraries()
    note = building.build_note(libraries) if libraries is not None else {}
    plan = building.plan()
    if note.get("cuda") or note.get("patches") or note.get("key") == plan.key:
        return  # `make cuda` or `pyspec build --patches` was here, or nothing has changed
    wheel = wheel_of(plan)
    again = [] if libraries is None else ["--force-reinstall", "--no-deps"]  # with the headers; at first also what its Python part needs
    pip_install("installing llama-cpp-python", *again, str(wheel))
    libraries = installed_libraries()
    building.install(wheel, libraries, {"key": plan.key})


def main() -> None:
    pip_install("installing build tools", *TOOLS)
    llama_cpp_python()
    pip_install("installing pyggml_spec and what its tests need", "--no-build-isolation", "--editable", f"{ROOT}[test,lint,serve]")


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        print(*error.log, f"set_up.py: {error}", sep="\n", file=sys.stderr)
        sys.exit(1)
