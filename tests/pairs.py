"""Tiny random targets, each with a drafter that fits it."""

from pathlib import Path

from random_gguf.archs import WRITERS
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape, write_dflash
from random_gguf.mtp import write_mtp_target


def write_pair(folder: Path, name: str, shape: Shape = Shape()) -> tuple[Path, Path]:
    """Target and drafter of an architecture; "mtp": a qwen35 target that drafts for itself; "eagle3": a llama target and such a drafter;
    "assistant": a gemma4 target and such a drafter; "dflash2": a qwen35 target and such a drafter;
    "dspark": a qwen3 target and such a drafter.
    """
    if name == "mtp":
        target = write_mtp_target(folder / "t.gguf", shape)
        return target, target
    if name == "dflash2":
        return WRITERS["qwen35"](folder / "t.gguf", shape), write_dflash2(folder / "d.gguf", shape, block=16)
    if name == "dspark":
        return WRITERS["qwen3"](folder / "t.gguf", shape), write_dspark(folder / "d.gguf", shape, block=15, own=("head",), tokens=200)
    if name == "assistant":
        return WRITERS["gemma4"](folder / "t.gguf", shape), write_gemma4_assistant(folder / "d.gguf", shape)
    if name == "eagle3":
        return WRITERS["llama"](folder / "t.gguf", shape), write_eagle3(folder / "d.gguf", shape, tokens=200)
    return WRITERS[name](folder / "t.gguf", shape), write_dflash(folder / "d.gguf", shape)
