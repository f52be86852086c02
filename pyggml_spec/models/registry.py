"""Architectures by the name in `general.architecture`. Adding one is one file and one line here."""

import importlib
import pkgutil

from ..errors import ModelError
from ..gguf_io import GGUFFile
from . import archs
from .base import Target
from .decoder import ARCHITECTURES
from .dflash import DFlash
from .dflash2 import GATE, DFlash2
from .dialects import ARCHS as DRAFTERS
from .dialects import SUPPORTED, as_dflash, refuse_other_methods
from .drafter import Drafter
from .dspark import FROM, DSpark
from .eagle3 import Eagle3
from .gemma4_assistant import Gemma4Assistant
from .mtp import MTP, has_layer, is_layer_alone

for module in pkgutil.iter_modules(archs.__path__):
    importlib.import_module(f"{archs.__name__}.{module.name}")

TARGETS = ARCHITECTURES
CHAINS = {cls.arch: cls for cls in (Eagle3, Gemma4Assistant)}  # as ``dialects.RUN`` has them
SUPPORTED_TARGETS = ", ".join(sorted(TARGETS))


def open_target(file: GGUFFile) -> Target:
    """The target model of an open file.

    Raises:
        ModelError: an architecture that is not a target here; the message says what is supported.
    """
    arch = file.get("general.architecture", str)
    if arch in DRAFTERS or arch in CHAINS:
        raise ModelError(f"{file.path} is a drafter ({arch}); name it with `draft` and give its target with `target`")
    if arch not in TARGETS:
        refuse_other_methods(file)
        raise ModelError(f"{file.path} has the architecture {arch!r}; supported targets: {SUPPORTED_TARGETS}")
    if is_layer_alone(file):
        raise ModelError(f"{file.path} is the MTP layer of a {arch} model; name it with `draft` and give its target with `target`")
    return TARGETS[arch](file)


def open_drafter(file: GGUFFile) -> Drafter:
    """The drafter of an open file, whichever converter wrote it; of a target's file, its MTP layer.

    Raises:
        ModelError: an architecture that is not a drafter here, or a drafter of another method, which the message names.
    """
    arch = file.get("general.architecture", str)
    if has_layer(file):
        return MTP(file)
    if arch in TARGETS:
        heads = " (its own MTP layers do not draft here)" if file.get(f"{arch}.nextn_predict_layers", int, 0) else ""
        raise ModelError(f"{file.path} is a target model ({arch}), not a drafter{heads}; {SUPPORTED}")
    if arch in CHAINS:
        return CHAINS[arch](file)
    refuse_other_methods(file)
    if arch not in DRAFTERS:
        raise ModelError(f"{file.path} has the architecture {arch!r}; {SUPPORTED}")
    read = as_dflash(file)
    if GATE in read.tensors:
        return DFlash2(read)
    return DSpark(read) if FROM in read.tensors else DFlash(read)


def own_drafter(file: GGUFFile) -> MTP | None:
    """The layer of a target's file that drafts for it; None if it has none.

    Raises:
        ModelError: it has several, or they are damaged.
    """
    return MTP(file) if has_layer(file) else None
