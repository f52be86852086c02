"""What persists between steps: K/V rows, the recurrent state, and the cursor that says which of it counts."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
