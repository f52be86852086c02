"""GGUF and safetensors files, with every limit checked before ggml sees a byte."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
from .reader import GGUFFile, TensorInfo

__all__ = ["GGUFFile", "TensorInfo"]
