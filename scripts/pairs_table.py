#!/usr/bin/env python3
"""Prints the table of docs/pairs.md: the public drafters that the package knows, and which of them run here."""

import pyggml_spec.models.registry  # noqa: F401  (which targets run)
from pyggml_spec.drafters.pairs import PUBLISHED


def rows() -> list[str]:
    """The table as lines of markdown."""
    out = ["| target | architecture | drafter | method | here |", "|---|---|---|---|---|"]
    for p in PUBLISHED:
        files = "GGUF files" if p.gguf else "safetensors, `pyspec convert`"
        out.append(f"| {p.target} | {p.arch} | {p.drafter} | {p.method} | {p.refused or f'runs; {files}'} |")
    return out


if __name__ == "__main__":
    print("\n".join(rows()))
