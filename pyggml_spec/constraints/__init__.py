"""Constraints on generated text: GBNF, JSON schemas, regular expressions, Lark."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
