"""Architectures by the name in `general.architecture`."""

import importlib
import pkgutil
from difflib import get_close_matches

from ..drafters.assistant import Gemma4Assistant
from ..drafters.base import Drafter
from ..drafters.dflash import DFlash
from ..drafters.dflash2 import GATE, DFlash2
from ..drafters.dialects import ARCHS as DRAFTERS
from ..drafters.dialects import SUPPORTED, as_dflash, refuse_other_methods
from ..drafters.dspark import FROM, DSpark
from ..drafters.eagle3 import Eagle3
from ..drafters.model import ModelDrafter
from ..drafters.mtp import MTP, has_layer, is_layer_alone
from ..drafters.pairs import drafters_for
from ..errors import ModelError
from ..gguf_io import GGUFFile
from . import archs
from .decoder import ARCHITECTURES, Decoder

for module in pkgutil.iter_modules(archs.__path__):
    importlib.import_module(f"{archs.__name__}.{module.name}")

TARGETS = ARCHITECTURES
CHAINS = {cls.arch: cls for cls in (Eagle3, Gemma4Assistant)}


def open_target(file: GGUFFile) -> Decoder:
    """The target model of an open file.

    Raises:
        ModelError: an unsupported architecture; the message lists the supported ones.
    """
    arch = file.get("general.architecture", str)
    if arch in DRAFTERS or arch in CHAINS:
        raise ModelError(f"{file.path} is a drafter ({arch}); name it with `draft` and give its target with `target`")
    if arch not in TARGETS:
        refuse_other_methods(file)
        raise ModelError(f"{file.path} {unsupported(file)}")
    if is_layer_alone(file):
        raise ModelError(f"{file.path} is the MTP layer of a {arch} model; name it with `draft` and give its target with `target`")
    return TARGETS[arch](file)


_LIKE = {
    "qwen": "qwen3",
    "mistral": "llama",
    "phi": "llama",
    "granite": "granite",
    "gemma": "gemma4",
    "glm": "glm-dsa",
}  # nearest architecture by prefix
_OTHERWISE = {  # nearest architecture, and what is missing
    "deepseek4": ("glm5-next", "Its attention reads compressed states of 4 and of 128 positions, which no cache here keeps. "),
}
LIMIT = 40  # characters of a name from a file


ENCODERS = "clip"  # the architecture of encoders of images


def unsupported(file: GGUFFile) -> str:
    """The end of a sentence about a file with an unsupported architecture, with a remedy."""
    arch = file.get("general.architecture", str)
    if arch == ENCODERS:
        return "is an encoder of images, and no model: give it with `mmproj`, next to its target"
    family = next((near for name, near in _LIKE.items() if arch.startswith(name)), "llama")
    alike = get_close_matches(arch, TARGETS, 1, 0.7)
    near, missing = _OTHERWISE.get(arch, (alike[0] if alike else family if family in TARGETS else next(iter(TARGETS)), ""))
    return (
        f"has the architecture {arch[:LIMIT]!r}, which does not run here yet, with or without a drafter; the {len(TARGETS)} supported targets are "
        f"listed in docs/supported.md. {missing}The nearest is {near}: docs/adding-an-architecture.md says how one is added, `pyspec inspect` shows what is in the file, and llama.cpp runs it meanwhile"
    )


def open_drafter(file: GGUFFile, target: GGUFFile | None = None) -> Drafter:
    """The drafter of an open file of any converter; of a target's file, its MTP layer. ``target``: the target's file, for better messages.

    Raises:
        ModelError: an unsupported architecture or method, which the message names.
    """
    arch = file.get("general.architecture", str)
    if has_layer(file):
        return MTP(file)
    if arch in TARGETS:
        model = ModelDrafter(file)
        if model.model.long_from or model.model.temperature[0]:  # drafters' graphs have neither n_ctx nor q_scale
            raise ModelError(
                f"{file.path} has positions that depend on the context ({arch}), which do not draft as a whole model here yet: {_instead(target)}"
            )
        return model
    if arch in CHAINS:
        return CHAINS[arch](file)
    refuse_other_methods(file, SUPPORTED if target is None else f"{SUPPORTED}; {drafters_for(target)}")
    if arch not in DRAFTERS:
        raise ModelError(f"{file.path} has the architecture {arch[:LIMIT]!r}, which does not draft here; {_instead(target)}")
    read = as_dflash(file)
    if GATE in read.tensors:
        return DFlash2(read)
    anchored = read.get(f"{read.get('general.architecture', str)}.sample_from_anchor", bool, False)
    return DSpark(read) if FROM in read.tensors or anchored else DFlash(read)


def _instead(target: GGUFFile | None) -> str:
    return SUPPORTED if target is None else f"{drafters_for(target)}; `pyspec inspect` shows what a file is"


def embedded_drafter(file: GGUFFile) -> MTP | None:
    """The MTP layer of a target's file; None without one.

    Raises:
        ModelError: several, or damaged ones.
    """
    return MTP(file) if has_layer(file) else None
