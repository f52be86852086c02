"""Speculation: which method drafts how many tokens, what that costs, and which drafts are accepted."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
