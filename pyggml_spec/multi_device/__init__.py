"""Several devices: splits, chains of graphs, pipelines, layers and experts in host memory. An engine on one device needs none of it."""

from ..ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)
