"""Architectures by the name in `general.architecture`. Adding one is one file and one line here."""

from ..errors import ModelError
from ..gguf_io import GGUFFile
from .base import Target
from .deepseek2 import DeepSeek2
from .dflash import DFlash
from .dflash2 import GATE, DFlash2
from .dialects import ARCHS as DRAFTERS
from .dialects import SUPPORTED, as_dflash, refuse_other_methods
from .drafter import Drafter
from .dspark import FROM, DSpark
from .eagle3 import Eagle3
from .gemma4 import Gemma4
from .gemma4_assistant import Gemma4Assistant
from .glm_dsa import GlmDsa
from .gpt_oss import GptOss
from .laguna import Laguna
from .llama import Llama
from .minimax_m2 import MiniMaxM2
from .mtp import MTP, has_layer, is_layer_alone
from .muse_glimmer import MuseGlimmer
from .qwen3 import Qwen3
from .qwen3moe import Qwen3MoE
from .qwen3next import Qwen3Next
from .qwen35 import Qwen35
from .qwen35moe import Qwen35MoE

TARGETS = {
    cls.arch: cls
    for cls in (DeepSeek2, Gemma4, GlmDsa, GptOss, Laguna, Llama, MiniMaxM2, MuseGlimmer, Qwen3, Qwen3MoE, Qwen3Next, Qwen35, Qwen35MoE)
}
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
