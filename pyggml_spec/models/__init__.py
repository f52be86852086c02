"""One file per architecture. ``registry`` names them; ``blocks`` holds what they share."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
