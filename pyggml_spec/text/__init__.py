"""Text and tokens: tokenizer, incremental detokenisation, stop strings, chat templates, tool-call formats."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
