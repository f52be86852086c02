"""The command line: `pyspec`. Only this folder prints. stdout carries the result and nothing else; stderr carries the rest."""

from .main import main

__all__ = ["main"]
