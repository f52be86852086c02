"""Tables for people, spreadsheets and programs."""

import csv
import io
import json


def written(rows, header: list[str], cells: list[list[str]], output: str) -> str:
    """``output``: "md" or "csv" of the cells, or "jsonl" of the rows' ``as_dict``."""
    if output == "jsonl":
        return "\n".join(json.dumps(row.as_dict()) for row in rows)
    if output == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([header, *cells])
        return out.getvalue().rstrip()
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])
