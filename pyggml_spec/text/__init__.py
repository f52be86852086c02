"""Text in and out of tokens: llama.cpp's own tokenizer, incremental decoding, stop strings."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
