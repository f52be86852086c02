"""Tiny random targets, each with a drafter that fits it."""

from pathlib import Path

from random_gguf.archs import write_gemma4, write_gpt_oss, write_laguna, write_llama, write_qwen3, write_qwen3moe, write_qwen3next
from random_gguf.eagle3 import write_eagle3
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape, write_dflash, write_qwen35
from random_gguf.mtp import write_mtp_target

WRITERS = {
    "qwen35": write_qwen35, "gemma4": write_gemma4, "laguna": write_laguna, "gpt-oss": write_gpt_oss, "qwen3": write_qwen3,
    "qwen3moe": write_qwen3moe, "qwen3next": write_qwen3next,
}  # fmt: skip


def write_pair(folder: Path, name: str, shape: Shape = Shape()) -> tuple[Path, Path]:
    """Target and drafter of an architecture; "mtp": a qwen35 target that drafts for itself; "eagle3": a llama target and such a drafter;
    "assistant": a gemma4 target and such a drafter.
    """
    if name == "mtp":
        target = write_mtp_target(folder / "t.gguf", shape)
        return target, target
    if name == "assistant":
        return write_gemma4(folder / "t.gguf", shape), write_gemma4_assistant(folder / "d.gguf", shape)
    if name == "eagle3":
        return write_llama(folder / "t.gguf", shape), write_eagle3(folder / "d.gguf", shape, tokens=200)
    return WRITERS[name](folder / "t.gguf", shape), write_dflash(folder / "d.gguf", shape)
