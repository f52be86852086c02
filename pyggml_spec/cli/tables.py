"""Tables as Markdown, CSV or JSON lines."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
