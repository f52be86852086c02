"""Output: sizes, tables and JSON, one progress line, unbuffered text."""

import csv
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Self

import click


def say(message: str = "") -> None:
    """One line on stderr, unless it cannot be written: a full disk of logs ends neither a run nor a server."""
    try:
        click.echo(message, err=True)
    except OSError:
        sys.stderr = None  # what it has buffered fails at exit too


def size(nbytes: int) -> str:
    """Bytes as KiB, MiB or GiB."""
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:.0f} KiB"
    if nbytes < 10 << 30:
        return f"{nbytes / (1 << 20):.1f} MiB" if nbytes < 100 << 20 else f"{nbytes / (1 << 20):.0f} MiB"
    return f"{nbytes / (1 << 30):.1f} GiB"


@contextmanager
def progress_line():
    """A progress callback (what, done, total, said): one bar on stderr if that is a terminal, cleared at the end. ``said``: shown in place of ``what``."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda what, done, total, said=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def update(what: str, done: int, total: int, said: str | None = None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total, description=said or what)

        yield update


class Interrupt:
    """The first Ctrl-C stops the loop after the current step; the second one ends the process."""

    asked = False

    def __call__(self) -> bool:
        return self.asked

    def _handle(self, signum, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> Self:
        self._old = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc) -> None:
        signal.signal(signal.SIGINT, self._old)


def printable(text: str) -> str:
    """``text`` from a file with control characters escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


class TextOut:
    """stdout as UTF-8 bytes, flushed after every write, regardless of the locale."""

    is_terminal = property(lambda self: sys.stdout is not None and sys.stdout.isatty())

    def write(self, text: str) -> None:
        if text and sys.stdout is not None:  # None if stdout is closed
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.buffer.flush()


Column = tuple[str, Callable[[Any], str]]
"""A title, and what makes the cell of a row."""


def json_line(value, indent: int | None = None) -> str:
    """One line of JSON; NaN and infinity become null. ``indent``: several lines."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value):
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_finite, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(header: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    first, *rows = (f"| {' | '.join(row)} |" for row in [header, *cells])
    return "\n".join([first, "|" + "---|" * len([*header]), *rows])


def written(rows, columns: Sequence[Column], output: str) -> str:
    """The rows as "md" or "csv" tables, or as "jsonl" of their ``as_dict``."""
    if output == "jsonl":
        return "\n".join(json_line(row.as_dict()) for row in rows)
    header, cells = [title for title, _ in columns], [[cell(row) for _, cell in columns] for row in rows]
    if output == "md":
        return table(header, cells)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *cells])
    return out.getvalue().rstrip()
