"""The HTTP server of `pyspec serve`. Its libraries are the package's extra `serve`; ``missing`` names those that are not installed."""

import importlib.util
from collections.abc import Sequence

LIBRARIES = {  # of the extra `serve`: their modules
    "uvicorn": "uvicorn", "httptools": "httptools", "msgspec": "msgspec", "starlette": "starlette", "prometheus-client": "prometheus_client",
}  # fmt: skip


def missing(more: Sequence[str] = ()) -> str | None:
    """The sentence about libraries of the extra that are not installed, and ``more`` that a router needs; None if all are."""
    needed = {**LIBRARIES, **dict(zip(more, more))}
    absent = [name for name, module in needed.items() if importlib.util.find_spec(module) is None]
    return f"the server needs {' and '.join(absent)}: run: pip install {' '.join(needed)}" if absent else None
