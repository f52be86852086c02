"""Drafters: models that propose tokens for a target, one file per kind."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
