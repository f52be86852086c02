"""State that persists between steps: K/V rows, recurrent states, hidden states, and the cursor."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
