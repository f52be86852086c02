"""Drafter files of other converters, mapped to llama.cpp's dflash names; and recognition of unsupported methods.

dialect                                     keys                    tensors
dflash (llama.cpp)                          dflash.*                fc, enc.output_norm, ffn_norm
dflash, before it was merged                dflash.*, *_layer_ids   the same, or hidden_norm
dflash-draft                                <arch>.dflash.*         dflash_fc, dflash_hidden_norm, post_attention_norm as the FFN's norm
qwen35-dflash-draft, gemma4-dflash-draft    <arch>.dflash.*         dflash.fc, dflash.hidden_norm

`target_layer_ids` counts layers by their outputs, `target_layers` by their inputs, so it is 1 larger.
"""

import re

from ..errors import ModelError
from ..gguf_io import GGUFFile

ARCH = "dflash"
ARCHS = (ARCH, "dflash-draft", "qwen35-dflash-draft", "gemma4-dflash-draft")
SUPPORTED = f"DFlash drafters with the architecture {', '.join(ARCHS)}, EAGLE-3 drafters (eagle3), gemma4-assistant and MTP layers are supported instead"

RUN = ("eagle3", "gemma4-assistant")  # supported drafters other than DFlash

_TENSORS = {f"{prefix}fc.weight": "fc.weight" for prefix in ("dflash.", "dflash_")}
_TENSORS |= {f"{prefix}hidden_norm.weight": "enc.output_norm.weight" for prefix in ("dflash.", "dflash_", "")}
# method: prefixes of its architecture, keys (without the architecture) or tensors
_OTHERS = {
    "DeepSeek-V4 DSpark": ("hyper_connection.", "dspark", "dflash.dspark", "deepseek4-dflash-draft"),
    "Domino": ("domino", "dflash.domino"),
    "EAGLE": ("eagle",),
    "MTP": ("mtp", "nextn."),
    "reduced-vocabulary": ("t2d",),
    "Laguna-style DFlash": ("dflash.aux_hidden_norm", "dflash.context_kv_layer_norm", "aux_hidden_norm"),
}
_DRAFTS = re.compile("draft|dflash|dspark|domino|eagle|mtp|assistant")  # architectures of drafters


def refused_methods() -> tuple[str, ...]:
    """Methods whose drafters are recognised but not supported."""
    return tuple(_OTHERS)


def method(file: GGUFFile) -> tuple[str, str] | None:
    """(method, telling name) of an unsupported drafter; None for others.

    Only for drafter architectures: targets have such keys and tensors too, and llama.cpp writes keys with 0 for absent features.
    """
    arch = file.get("general.architecture", str)
    if arch in RUN or not _DRAFTS.search(arch):
        return None
    keys = [key for key, value in file.metadata.items() if not isinstance(value, (int, float, str)) or value]
    names = [arch, *(key.removeprefix(f"{arch}.") for key in keys if key.startswith(f"{arch}."))]
    names += [name.split(".", 2)[2] if name.startswith("blk.") and name.count(".") > 1 else name for name in file.tensors]
    for other, beginnings in _OTHERS.items():
        sign = next((name for name in names if name.startswith(beginnings)), None)
        if sign is not None:
            return other, sign
    return None


def refuse_other_methods(file: GGUFFile, instead: str = SUPPORTED) -> None:
    """Raises ModelError naming the method if this is an unsupported drafter."""
    found = method(file)
    if found is not None:
        raise ModelError(f"{file.path} is a {found[0]} drafter (it has {found[1]!r}), which is not supported; {instead}")


def as_dflash(file: GGUFFile) -> GGUFFile:
    """The file under the names of the dflash architecture: itself, or a view that borrows its memory."""
    arch = file.get("general.architecture", str)
    metadata = {_key(key, arch): value for key, value in file.metadata.items()} | {"general.architecture": ARCH}
    ids = file.array(f"{arch}.dflash.target_layer_ids", "iu")
    ids = file.array(f"{arch}.target_layer_ids", "iu") if ids is None else ids
    if ids is not None:
        metadata.setdefault(f"{ARCH}.target_layers", ids.astype("int64") + 1)
    if f"{ARCH}.mask_token_id" in metadata:
        metadata.setdefault("tokenizer.ggml.mask_token_id", metadata[f"{ARCH}.mask_token_id"])
    return file.under_other_names(metadata, {_TENSORS.get(name, name): info for name, info in file.tensors.items()})


def _key(key: str, arch: str) -> str:
    for prefix in (f"{arch}.dflash.", f"{arch}."):
        if key.startswith(prefix):
            return f"{ARCH}.{key.removeprefix(prefix)}"
    return key
