"""New drafters: the metadata and tensor shapes of a file that does not exist yet, by the shape of its target."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..drafters.base import Drafter
from ..drafters.dflash import DFlash
from ..drafters.eagle3 import Eagle3
from ..drafters.mtp import EMBEDDING, HEAD, LAYERS, MTP, NORM
from ..errors import ModelError
from ..ggml.library import lib
from ..gguf_io import GGUFFile
from ..gguf_io.reader import TensorInfo
from ..models.decoder import Decoder
from ..tools.checkpoint import tokenizer

METHODS = ("dflash", "eagle3", "mtp")
CONTROL, UNUSED = 3, 5  # token types


@dataclass(frozen=True)
class Shape:
    """Of a new drafter; 0 for what fits the target. ``block``: rows of a DFlash block."""

    method: str = "dflash"
    layers: int = 0
    block: int = 0
    n_ff: int = 0


def new_drafter(target: Decoder, shape: Shape) -> Drafter:
    """A drafter without weights. Raises ModelError: a method that the target's architecture does not have, or sizes that do not fit."""
    return {"dflash": _dflash, "eagle3": _eagle3, "mtp": _mtp}[shape.method](target, shape)


def _view(target: Decoder, metadata: dict[str, Any], kind: Any, seeds: list[str], shared: tuple[str, ...] = ()) -> Drafter:
    """``kind`` opened on a file of ``metadata``, with the tensors that it then lists; ``seeds`` are optional ones that it shall have, ``shared`` ones of the
    target that stay in its file."""
    file: GGUFFile = target.file
    ends = {name: file.tensors[name] for name in shared if name in file.tensors}
    listed = kind(file.under_other_names(metadata, ends | {name: _info(name, (1,)) for name in seeds})).tensors()
    own = {spec.name: _info(spec.name, spec.shape) for spec in listed if spec.name not in shared}
    drafter = kind(file.under_other_names(metadata, ends | own))
    drafter.check_pair(target)
    return drafter


def _info(name: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, lib.GGML_TYPE_F32, shape, 0, 4 * math.prod(shape))


def _metadata(target: Decoder, arch: str, layers: int, captures: list[int], shape: Shape) -> dict[str, Any]:
    f = target.f
    size = f.head_dim()
    heads = max(1, target.n_embd // size)
    kv = next((n for n in range(min(heads, max(1, heads // 3)), 0, -1) if heads % n == 0), 1)
    rope = target.rope
    values: dict[str, Any] = {
        "context_length": target.context_length,
        "embedding_length": target.n_embd,
        "block_count": layers,
        "feed_forward_length": shape.n_ff or _feed_forward(target),
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(target.eps),
        "rope.freq_base": float(rope.base if rope is not None else 10000.0),
        "rope.dimension_count": size,
        "target_layers": np.array(captures, np.uint32),
    }
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in values.items()}, **tokenizer(target.file)}


def _feed_forward(target: Decoder) -> int:
    """The target's, or of one with experts three times its width."""
    size = target.file.metadata.get(f"{target.arch}.feed_forward_length")
    most = 4 * target.n_embd
    return min(size, most) if isinstance(size, int) and size else 3 * target.n_embd


def _spread(target: Decoder, count: int, most: int) -> list[int]:
    """``count`` layers from the second to the last but one, none above ``most``."""
    last = min(max(1, target.n_layer - 2), most)
    return sorted({int(v) for v in np.linspace(min(1, last), last, count).round()})


def _dflash(target: Decoder, shape: Shape) -> Drafter:
    deep = target.n_layer >= 16
    layers, block = shape.layers or (4 if deep else 2), shape.block or 8
    meta = _metadata(target, "dflash", layers, _spread(target, 5 if deep else 4, target.n_layer), shape)
    meta |= {"dflash.block_size": block, "dflash.attention.causal": False, "tokenizer.ggml.mask_token_id": mask_token(target.file)}
    if target.file.array(f"{target.arch}.rope.dimension_sections") is not None:
        meta["dflash.rope.dimension_sections"] = np.array([target.f.head_dim() // 2, 0, 0, 0], np.int32)
    return _view(target, meta, DFlash, [f"blk.{i}.{name}.weight" for i in range(layers) for name in ("attn_v", "ffn_norm")])


def mask_token(file: GGUFFile) -> int:
    """The file's, or else the last control or unused token that ends or begins no text. Raises ModelError: there is none."""
    given = file.metadata.get("tokenizer.ggml.mask_token_id")
    if isinstance(given, int):
        return given
    kinds = file.array("tokenizer.ggml.token_type")
    names = ("bos", "eos", "eot", "eom", "padding", "unknown")
    used = {file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    free = [] if kinds is None else [i for i in np.flatnonzero(np.isin(kinds, (CONTROL, UNUSED))).tolist() if i not in used]
    if not free:
        raise ModelError(
            f"{file.path.name} has no control or unused token that could stand for masked rows of a block; use `method` eagle3"
        )
    return int(free[-1])


def _eagle3(target: Decoder, shape: Shape) -> Drafter:
    layers = shape.layers or 1
    meta = _metadata(target, "eagle3", layers, _spread(target, 3, target.n_layer - 1), shape)
    meta |= {"eagle3.target_hidden_size": target.n_embd, "eagle3.norm_before_fc": True, "eagle3.norm_before_residual": False}
    return _view(target, meta, Eagle3, [])


def _mtp(target: Decoder, shape: Shape) -> Drafter:
    arch, n = target.arch, target.n_layer
    if arch not in LAYERS or not target.mtp:
        raise ModelError(f"{arch} files have no MTP layers: use `method` dflash or eagle3; MTP is of {', '.join(LAYERS)}")
    if len(target.mtp) > 1:
        raise ModelError(
            f"{arch} models draft with {len(target.mtp)} MTP layers, and one is supported in training; use `method` dflash or eagle3"
        )
    meta = dict(target.file.metadata) | {f"{arch}.block_count": n + 1, f"{arch}.nextn_predict_layers": 1}
    if shape.n_ff:
        meta[f"{arch}.feed_forward_length"] = shape.n_ff
    return _view(target, meta, MTP, [f"blk.{n}.nextn.{name}.weight" for name in ("eh_proj", "shared_head_norm")], (EMBEDDING, NORM, HEAD))
