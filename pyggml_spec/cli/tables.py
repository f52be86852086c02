"""Tables as Markdown, CSV or JSON lines."""

import csv
import io
import json
import math


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


def written(rows, header: list[str], cells: list[list[str]], output: str) -> str:
    """``output``: "md" or "csv" of the cells, or "jsonl" of the rows' ``as_dict``."""
    if output == "jsonl":
        return "\n".join(json_line(row.as_dict()) for row in rows)
    if output == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([header, *cells])
        return out.getvalue().rstrip()
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])
