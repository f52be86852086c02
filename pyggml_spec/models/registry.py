"""Architectures by the name in `general.architecture`. Adding one is one file and one line here."""

from ..errors import ModelError
from ..gguf_io import GGUFFile
from .dflash import DFlash
from .gemma4 import Gemma4
from .laguna import Laguna
from .llama import Llama
from .qwen3 import Qwen3
from .qwen35 import Qwen35
from .qwen35moe import Qwen35MoE

TARGETS = {cls.arch: cls for cls in (Gemma4, Laguna, Llama, Qwen3, Qwen35, Qwen35MoE)}
DRAFTERS = {cls.arch: cls for cls in (DFlash,)}


def _names(table: dict) -> str:
    return ", ".join(sorted(table))


def open_target(file: GGUFFile):
    """The target model of an open file.

    Raises:
        ModelError: an architecture that is not a target here; the message says what is supported.
    """
    arch = file.get("general.architecture", str)
    if arch in DRAFTERS:
        raise ModelError(f"{file.path} is a drafter ({arch}); name it with -md and give its target with -m")
    if arch not in TARGETS:
        raise ModelError(f"{file.path} has the architecture {arch!r}; supported targets: {_names(TARGETS)}")
    return TARGETS[arch](file)


def open_drafter(file: GGUFFile):
    """The drafter of an open file.

    Raises:
        ModelError: an architecture that is not a drafter here.
    """
    arch = file.get("general.architecture", str)
    if arch in TARGETS:
        raise ModelError(f"{file.path} is a target model ({arch}), not a drafter; supported drafters: {_names(DRAFTERS)}")
    if arch not in DRAFTERS:
        raise ModelError(f"{file.path} has the architecture {arch!r}; supported drafters: {_names(DRAFTERS)}")
    return DRAFTERS[arch](file)
