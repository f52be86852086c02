"""One file per family of architectures. ``registry`` names them; ``layers`` holds what they share."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
