"""The old name of ``pyggml_spec.api``."""

import warnings
from typing import Any

from . import api

_RENAMED = {"Engaged": "Configuration"}


def __getattr__(name: str) -> Any:
    value = getattr(api, _RENAMED.get(name, name))
    if not name.startswith("__"):
        warnings.warn(f"pyggml_spec.session.{name} is pyggml_spec.api.{_RENAMED.get(name, name)} now", DeprecationWarning, stacklevel=2)
    return value
