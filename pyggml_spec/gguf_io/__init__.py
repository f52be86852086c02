"""GGUF files: reading with every limit checked before ggml sees a byte, and writing."""

from .reader import GGUFFile, TensorInfo

__all__ = ["GGUFFile", "TensorInfo"]
