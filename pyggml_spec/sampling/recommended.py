"""Sampling defaults recommended by a model file: the `general.sampling.*` keys."""

from collections.abc import Mapping
from typing import Any

from ..errors import SamplingError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief
from .sampler import KNOWN, Sampling

_FIELDS = {
    "temp": ("temperature", float), "top_k": ("top_k", int), "top_p": ("top_p", float), "min_p": ("min_p", float),
    "penalty_last_n": ("repeat_last_n", int), "penalty_repeat": ("repeat_penalty", float), "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float), "mirostat": ("mirostat", int), "mirostat_tau": ("mirostat_tau", float), "mirostat_eta": ("mirostat_eta", float),
}  # fmt: skip
_ALIASES = {"temp": "temperature", "nucleus": "top_p", "typ": "typ_p"}


RANDOM = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "samplers", "seed", "dynatemp_range", "top_n_sigma", "xtc_probability", "mirostat", "adaptive_target"
)  # fmt: skip
"""Fields of ``Sampling`` that imply random sampling. Without them decoding is greedy, whatever the file recommends."""


def chosen(asked: Mapping[str, Any], file: GGUFFile | None = None) -> tuple[Sampling, list[str]]:
    """The Sampling of the fields in ``asked``, and notes about what the file recommends. Recommended values are defaults, unless decoding
    is greedy. Raises SamplingError: a value out of range."""
    if unknown := [name for name in asked if name not in Sampling.__dataclass_fields__]:
        raise SamplingError(f"a sampling has no field {unknown[0]!r}; it has {', '.join(Sampling.__dataclass_fields__)}")
    values, refused = recommended(file.metadata) if file is not None else ({}, [])
    if any(name in asked for name in RANDOM):
        notes = [f"{file.path.name} recommends {what}, which is not supported here" for what in refused] if file is not None else []
        return Sampling(**{**values, **asked}), notes
    notes = []
    if file is not None and values:
        notes.append(f"{file.path.name} recommends {Sampling(**values).describe()}; this is greedy decoding: any sampling option, such as "
                     "`seed` 1, enables the rest")  # fmt: skip
    return Sampling(**{**asked, "temperature": 0.0}), notes


def recommended(metadata: Mapping) -> tuple[dict, list[str]]:
    """Fields of ``Sampling`` set by a file's metadata, and the unsupported ones as text."""
    values, refused = {}, []
    for key, (name, kind) in _FIELDS.items():
        if (given := metadata.get(f"general.sampling.{key}")) is None:
            continue
        try:
            value = round(kind(given), 6)  # llama.cpp stores six decimals
            Sampling(**{name: value})
            values[name] = value
        except (SamplingError, TypeError, ValueError, OverflowError):
            refused.append(f"{key} {brief(given)}")
    if (order := metadata.get("general.sampling.sequence")) is not None:
        plain = [name.strip().lower().replace("-", "_") for name in (order.split(";") if isinstance(order, str) else [""])]
        samplers = tuple(_ALIASES.get(name) or next((s for s in KNOWN if name == s.replace("_", "")), name) for name in plain)
        try:
            Sampling(samplers=samplers)
            values["samplers"] = samplers
        except SamplingError:
            refused.append(f"the order {brief(order)}")
    return values, refused
