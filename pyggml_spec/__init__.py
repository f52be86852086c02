"""pyggml_spec runs GGUF models with DFlash speculative decoding on ggml, proves that the tokens are the same, and says why when it is not
faster.

    import pyggml_spec as ps

    with ps.load() as session:                      # the embedded pair; or ps.load("target.gguf", draft="drafter.gguf")
        for event in session.stream("def quicksort(", max_tokens=200):
            print(event.text, end="", flush=True)
        print(event.stats.tokens_per_step)
"""

from .errors import ContextError, DeviceError, EngineError, GGUFError, LibraryError, ModelError, PairError, PyspecError
from .ggml.device import Device, devices
from .session import Session, StepEvent, load
from .spec.stats import Stats

__all__ = [
    "ContextError",
    "Device",
    "DeviceError",
    "EngineError",
    "GGUFError",
    "LibraryError",
    "ModelError",
    "PairError",
    "PyspecError",
    "Session",
    "Stats",
    "StepEvent",
    "devices",
    "load",
]
__version__ = "0.1.0"
