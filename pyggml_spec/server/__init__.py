"""The HTTP server of `pyspec serve`. Its libraries are the package's extra `serve`; ``missing`` names those that are not installed."""

import importlib.util

LIBRARIES = {  # of the extra `serve`: their modules
    "uvicorn": "uvicorn", "httptools": "httptools", "msgspec": "msgspec", "starlette": "starlette", "prometheus-client": "prometheus_client",
}  # fmt: skip


def missing() -> str | None:
    """The sentence about libraries of the extra that are not installed; None if all are."""
    absent = [name for name, module in LIBRARIES.items() if importlib.util.find_spec(module) is None]
    return f"the server needs {' and '.join(absent)}: run: pip install {' '.join(LIBRARIES)}" if absent else None
