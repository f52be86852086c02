"""Published drafters, by architecture and shape of their targets.

A file of a target does not say which checkpoint it was made of; its shape does nearly, and checkpoints of one shape are all named. The page docs/pairs.md
shows the table.
"""

from dataclasses import dataclass

from ..gguf_io import GGUFFile
from ..models.decoder import ARCHITECTURES
from .dialects import refused_methods
from .mtp import has_layer

UNKNOWN = 0  # a size not known from any file


@dataclass(frozen=True)
class Published:
    """A published drafter.

    Attributes:
        target: its target checkpoint.
        arch, n_layer, n_embd, n_expert: of that checkpoint's GGUF; layers without those that only draft, 0 experts for a dense model. UNKNOWN
            for ``n_embd`` fits every width.
        drafter: repository of the Hugging Face hub.
        method: "DFlash" or another name that its makers use.
        gguf: whether the repository has files for llama.cpp, named `dflash-*` or `*-DFlash-*`; others are converted (`pyspec convert`).
        layout: the layout of its safetensors, if the converter does not support it.
    """

    target: str
    arch: str
    n_layer: int
    n_embd: int
    n_expert: int
    drafter: str
    method: str = "DFlash"
    gguf: bool = False
    layout: str = ""

    @property
    def refused(self) -> str:
        """Why the pair is not supported; empty if it is."""
        if self.arch not in ARCHITECTURES:
            return f"targets of the architecture {self.arch} do not run here yet"
        if self.method in refused_methods():
            return f"{self.method} drafters do not run here yet"
        return f"checkpoints of the layout {self.layout} are not converted here yet" if self.layout else ""


_SHAPES = {  # architecture, layers, width, experts of targets with several drafters
    "Llama-3.1-8B-Instruct": ("llama", 32, 4096, 0), "Llama-3.3-70B-Instruct": ("llama", 80, 8192, 0), "Qwen3-4B": ("qwen3", 36, 2560, 0),
    "Qwen3-8B": ("qwen3", 36, 4096, 0), "Qwen3-14B": ("qwen3", 40, 5120, 0), "Qwen3-32B": ("qwen3", 64, 5120, 0),
    "Qwen3-30B-A3B": ("qwen3moe", 48, 2048, 128), "Qwen3-30B-A3B-Instruct-2507": ("qwen3moe", 48, 2048, 128),
    "Qwen3-Coder-30B-A3B": ("qwen3moe", 48, 2048, 128), "Qwen3-235B-A22B": ("qwen3moe", 94, 4096, 128),
    "Qwen3-235B-A22B-Instruct-2507": ("qwen3moe", 94, 4096, 128), "Qwen3.6-27B": ("qwen35", 64, 5120, 0), "Qwen3.8-27B": ("qwen35", 64, 5120, 0),
    "Qwen3.6-35B-A3B": ("qwen35moe", 40, 2048, 256), "gemma-4-12B-it": ("gemma4", 48, 3840, 0), "gemma-4-26B-A4B-it": ("gemma4", 30, 2816, 128),
    "gemma-4-31B-it": ("gemma4", 60, 5376, 0), "gpt-oss-20b": ("gpt-oss", 24, 2880, 32), "gpt-oss-120b": ("gpt-oss", 36, 2880, 128),
}  # fmt: skip
_JETSPEC = {
    "Qwen3-8B": "qwen3-8b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen3.6-35B-A3B": "Qwen3.6-35B-A3B", "gemma-4-26B-A4B-it": "gemma4-26B-A4B0-it",
    "gpt-oss-20b": "gpt-oss-20b",
}  # fmt: skip
_SPECULATORS = {
    "Llama-3.1-8B-Instruct": "eagle3", "Llama-3.3-70B-Instruct": "eagle3", "Qwen3-8B": "dflash eagle3 peagle", "Qwen3-14B": "eagle3", "Qwen3-32B": "eagle3",
    "Qwen3-30B-A3B": "dflash", "Qwen3-30B-A3B-Instruct-2507": "dflash eagle3", "Qwen3-235B-A22B": "eagle3", "Qwen3-235B-A22B-Instruct-2507": "eagle3",
    "Qwen3.6-35B-A3B": "dspark", "gemma-4-26B-A4B-it": "eagle3", "gemma-4-31B-it": "dflash eagle3", "gpt-oss-20b": "eagle3", "gpt-oss-120b": "eagle3",
}  # fmt: skip
_NAMES = {"dflash": "DFlash", "dspark": "DSpark", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
_DEEPSPEC = {"qwen3_4b": "Qwen3-4B", "qwen3_8b": "Qwen3-8B", "qwen3_14b": "Qwen3-14B", "gemma4_12b": "gemma-4-12B-it"}
_SPECFORGE = {
    "Llama-3.1-8B-Instruct": "", "Llama-3.3-70B-Instruct": "", "Qwen3-30B-A3B-Instruct-2507": "-Nex", "Qwen3-235B-A22B-Instruct-2507": "-Meituan",
}  # fmt: skip


def _for(target: str, drafter: str, method: str, layout: str = "") -> Published:
    return Published(target, *_SHAPES[target], drafter, method, layout=layout)


_QWEN35 = (("4B", 32, 2560), ("9B", 32, 4096), ("27B", 64, 5120))
PUBLISHED = (
    *(Published(f"Qwen3.5-{size}", "qwen35", n, width, 0, f"z-lab/Qwen3.5-{size}-DFlash") for size, n, width in _QWEN35),
    Published("Qwen3.5-27B", "qwen35", 64, 5120, 0, "spiritbuun/Qwen3.5-27B-DFlash-GGUF", gguf=True),
    Published("Qwen3.6-27B", "qwen35", 64, 5120, 0, "z-lab/Qwen3.6-27B-DFlash"),
    Published("Qwen3.8-27B", "qwen35", 64, 5120, 0, "incoai/Qwen3.8-27B-DFlash2", "DFlash2"),
    Published("Qwen3.8-27B", "qwen35", 64, 5120, 0, "incoai/Qwen3.8-27B-DFlash2-GGUF", "DFlash2", gguf=True),
    Published("Qwen3.5-35B-A3B", "qwen35moe", 40, 2048, 256, "z-lab/Qwen3.5-35B-A3B-DFlash"),
    Published("Qwen3.6-35B-A3B", "qwen35moe", 40, 2048, 256, "z-lab/Qwen3.6-35B-A3B-DFlash"),
    Published("Qwen3.5-122B-A10B", "qwen35moe", 48, UNKNOWN, 256, "z-lab/Qwen3.5-122B-A10B-DFlash"),
    Published("Qwen3-4B, not thinking", "qwen3", 36, 2560, 0, "z-lab/Qwen3-4B-DFlash-b16"),
    Published("Qwen3-8B, not thinking", "qwen3", 36, 4096, 0, "z-lab/Qwen3-8B-DFlash-b16"),
    Published("Qwen3-Coder-30B-A3B", "qwen3moe", 48, 2048, 128, "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    Published("Qwen3-Coder-Next", "qwen3next", 48, 2048, 512, "z-lab/Qwen3-Coder-Next-DFlash"),
    Published("Llama-3.1-8B-Instruct", "llama", 32, 4096, 0, "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    Published("gpt-oss-20b", "gpt-oss", 24, 2880, 32, "z-lab/gpt-oss-20b-DFlash"),
    Published("gpt-oss-120b", "gpt-oss", 36, 2880, 128, "z-lab/gpt-oss-120b-DFlash"),
    Published("gemma-4-26B-A4B-it", "gemma4", 30, 2816, 128, "z-lab/gemma-4-26B-A4B-it-DFlash"),
    Published("gemma-4-31B-it", "gemma4", 60, 5376, 0, "z-lab/gemma-4-31B-it-DFlash"),
    Published("Laguna-XS-2.1", "laguna", 40, 2048, 256, "poolside/Laguna-XS-2.1-DFlash"),
    Published("Laguna-S-2.1", "laguna", 48, UNKNOWN, 256, "poolside/Laguna-S-2.1-DFlash"),
    Published("Laguna-S-2.1", "laguna", 48, UNKNOWN, 256, "poolside/Laguna-S-2.1-GGUF", gguf=True),
    Published("MiniMax-M2.5", "minimax-m2", 62, 3072, 256, "z-lab/MiniMax-M2.5-DFlash"),
    Published("MiniMax-M2.7", "minimax-m2", 62, 3072, 256, "z-lab/MiniMax-M2.7-DFlash"),
    Published("Muse-Glimmer-30B", "muse-glimmer", 52, 6656, 0, "incoai/Muse-Glimmer-30B-DFlash2", "DFlash2"),
    Published("Kimi-K2.5", "deepseek2", 61, 7168, 384, "z-lab/Kimi-K2.5-DFlash"),
    Published("Kimi-K2.6", "deepseek2", 61, 7168, 384, "z-lab/Kimi-K2.6-DFlash"),
    Published("GLM-5.1", "glm-dsa", 78, 6144, 256, "z-lab/GLM-5.1-FP8-DFlash"),
    *(_for(target, f"JetSpec/jetspec-{name}", "JetSpec") for target, name in _JETSPEC.items()),
    *(
        _for(target, f"RedHatAI/{target}-speculator.{kind}", _NAMES[kind])
        for target, kinds in _SPECULATORS.items()
        for kind in kinds.split()
    ),
    _for("Qwen3.6-27B", "satgeze/Qwen3.6-27B-DSpark", "DSpark"),
    _for("Qwen3.8-27B", "RadixArk/Qwen3.8-27B-DSpark", "DSpark"),
    *(
        _for(target, f"deepseek-ai/{kind}_{name}_block7", _NAMES[kind])
        for kind in ("dspark", "dflash")
        for name, target in _DEEPSPEC.items()
    ),
    *(
        _for(target, f"deepseek-ai/eagle3_{name}_ttt7", "EAGLE-3", "Gemma4Eagle3Model" if "gemma" in name else "")
        for name, target in _DEEPSPEC.items()
    ),
    *(_for(target, f"lmsys/SGLang-EAGLE3-{target}-SpecForge{end}", "EAGLE-3") for target, end in _SPECFORGE.items()),
    _for("Qwen3-Coder-30B-A3B", "lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge", "EAGLE-3"),
    _for("gpt-oss-120b", "nvidia/gpt-oss-120b-Eagle3-v3", "EAGLE-3"),
)


def published(file: GGUFFile) -> list[Published]:
    """Published drafters for targets of this file's shape; none for other files."""
    arch = file.metadata.get("general.architecture")

    def size(key: str) -> int:
        value = file.metadata.get(f"{arch}.{key}", 0)
        return value if isinstance(value, int) else -1

    layers, width, experts = size("block_count") - size("nextn_predict_layers"), size("embedding_length"), size("expert_count")
    return [p for p in PUBLISHED if (p.arch, p.n_layer, p.n_expert) == (arch, layers, experts) and p.n_embd in (UNKNOWN, width)]


def drafters_for(target: GGUFFile) -> str:
    """The end of a sentence that lists drafting methods for this target."""
    ways = ["its own MTP layer, which is in its file (leave `draft` out)"] if has_layer(target) else []
    ways.append("n-gram drafting, which needs no file (`spec` suffix)")
    if fitting := [pair.drafter for pair in published(target) if not pair.refused]:
        ways.append(f"the published {' or '.join(fitting[:2])} (`pyspec drafters` lists all)")
    return f"for {target.path.name} there {'is' if len(ways) == 1 else 'are'} {' and '.join([', '.join(ways[:-1]), ways[-1]] if ways[1:] else ways)}"
