"""pyggml_spec runs GGUF models with speculative decoding on ggml, proves that the tokens are the same, and reports why when it is not
faster.

    import pyggml_spec as ps

    with ps.load() as session:                      # the embedded pair; or ps.load("target.gguf", draft="drafter.gguf")
        for event in session.stream("def quicksort(", max_tokens=200):
            print(event.text, end="", flush=True)
        print(event.stats.tokens_per_step)
"""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    ConstraintError,
    ContextError,
    ConvertError,
    DeviceError,
    EngineError,
    GGUFError,
    HubError,
    LibraryError,
    ModelError,
    PairError,
    PatchError,
    PyspecError,
    SamplingError,
    TemplateError,
)

if TYPE_CHECKING:
    from .api import Session, load
    from .chat import Chat
    from .concurrent import ConcurrentSession, Handle
    from .embedding import Embedder
    from .engine.stats import Stats
    from .events import StepEvent
    from .ggml.device import Device, devices
    from .hub import fetch
    from .load_options import LoadOptions
    from .models.placement import ExpertOptions
    from .sampling.sampler import Sampling
    from .sampling.thinking import ThinkingBudget

# what needs ggml is imported when it is first used: a wrong llama-cpp-python is then a LibraryError at that point, and --help loads nothing
_LAZY = {
    "Chat": "chat",
    "ConcurrentSession": "concurrent",
    "Device": "ggml.device",
    "Embedder": "embedding",
    "ExpertOptions": "models.placement",
    "Handle": "concurrent",
    "LoadOptions": "load_options",
    "devices": "ggml.device",
    "fetch": "hub",
    "Sampling": "sampling.sampler",
    "Session": "api",
    "Stats": "engine.stats",
    "StepEvent": "events",
    "ThinkingBudget": "sampling.thinking",
    "load": "api",
}

__all__ = [
    "Chat",
    "ConcurrentSession",
    "ConstraintError",
    "ContextError",
    "ConvertError",
    "Device",
    "DeviceError",
    "Embedder",
    "EngineError",
    "ExpertOptions",
    "GGUFError",
    "Handle",
    "HubError",
    "LibraryError",
    "LoadOptions",
    "ModelError",
    "PairError",
    "PatchError",
    "PyspecError",
    "Sampling",
    "SamplingError",
    "Session",
    "Stats",
    "StepEvent",
    "TemplateError",
    "ThinkingBudget",
    "devices",
    "fetch",
    "load",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
