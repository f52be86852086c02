"""The `pyspec` command line. Only this folder prints: results to stdout, everything else to stderr."""

from .main import main

__all__ = ["main"]
