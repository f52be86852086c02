"""Converts published drafters from safetensors to GGUF, without torch, one tensor in memory at a time."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from gguf import GGUFValueType as Kind

from ..api import Progress
from ..errors import ConvertError
from ..files import new_file
from ..ggml.cores import default_threads
from ..ggml.library import lib, text
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray, brief
from ..gguf_io.safetensors import SafetensorsFile, parse_json
from . import eagle3, zlab
from .checkpoint import AGAIN, SUPPORTED, TOKENS, Files, Layout, architectures
from .quants import TYPES, quantise, type_id

CHUNK_VALUES = 4 << 20
MAX_CONFIG = 1 << 20
F16_MAX = 65504.0
_MADE = {np.dtype(np.float32): lib.GGML_TYPE_F32, np.dtype(np.int64): lib.GGML_TYPE_I64}
_FILE_TYPES = {"f32": "ALL_F32"} | {f"q{bits}_K": f"MOSTLY_Q{bits}_K_S" for bits in (2, 3, 4, 5)}
_ITEMS = {"u1": Kind.UINT8, "i1": Kind.INT8, "u2": Kind.UINT16, "i2": Kind.INT16, "u4": Kind.UINT32, "i4": Kind.INT32, "f4": Kind.FLOAT32}
_ITEMS |= {"u8": Kind.UINT64, "i8": Kind.INT64, "f8": Kind.FLOAT64, "b1": Kind.BOOL}


class Rows(Protocol):
    """Where tensors come from: F32 rows [first, first + count) of one, as of ``SafetensorsFile``."""

    @property
    def path(self) -> Path: ...

    def rows(self, name: str, first: int, count: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Conversion:
    """What was written. ``types``: tensors by type; ``block_size``, ``mask_token``: None for sequential drafters; ``target_layers``: layer
    inputs; ``draft_vocab``: size of a reduced vocabulary, or None."""

    path: str
    nbytes: int
    types: dict[str, int]
    block_size: int | None
    mask_token: int | None
    target_layers: tuple[int, ...]
    draft_vocab: int | None
    notes: tuple[str, ...]


def _sources(source: Path) -> tuple[Path, list[Path]]:
    """config.json and its safetensors files."""
    folder = source if source.is_dir() else source.parent
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not source.exists():
        raise ConvertError(f"{source} does not exist; name a folder with config.json and *.safetensors, or one safetensors file")
    if not files:
        raise ConvertError(f"{source} has no *.safetensors file; name the folder of the drafter's checkpoint")
    if (folder / "mask_embedding.pt").exists():
        remedy = "convert it with llama.cpp's converter"
        raise ConvertError(f"{folder} has a mask_embedding.pt (a mask vector of its own), which is not supported; {remedy}")
    return folder / "config.json", files


def _read_config(path: Path) -> dict:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG + 1)
    except OSError as error:
        hint = "the checkpoint's config.json has to be in the folder of its tensors"
        raise ConvertError(f"{path} cannot be read ({error.strerror}); {hint}") from None
    return parse_json(data, str(path), MAX_CONFIG)


def _place(files: list[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    out: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.tensors:
            if name in out:
                both = f"{out[name].path.name} and in {file.path.name}"
                raise ConvertError(f"the tensor {brief(name)} is in {both}; leave one checkpoint in the folder")
            out[name] = file
    return out


def _choose(name: str, shape: tuple[int, ...], kind: int, notes: list[str]) -> int:
    """Storage type of a tensor: F32 for vectors, single rows and convolution kernels; Q8_0 or F16 if rows do not fill the type's blocks."""
    if len(shape) < 2 or shape[0] == 1 or not name.endswith(".weight"):
        return lib.GGML_TYPE_F32
    if shape[1] % lib.ggml_blck_size(kind) == 0:
        return kind
    other = type_id("q8_0") if shape[1] % 32 == 0 else lib.GGML_TYPE_F16
    wanted, wrote = (text(lib.ggml_type_name(one)) for one in (kind, other))
    notes.append(f"{name} has rows of {shape[1]}, which {wanted} cannot store: wrote {wrote}")
    return other


def _chunk(file: Rows, source: str, first: int, count: int, kind: int, head: int = 0) -> np.ndarray:
    """Rows of a tensor as stored; halves of each head of ``head`` rows are interleaved."""
    values = file.rows(source, first, count)
    if head:
        values = values.reshape(-1, 2, head // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    top = np.abs(values).max()
    if not np.isfinite(top):
        raise ConvertError(f"{file.path.name}: the tensor {brief(source)} holds NaN or Inf; fetch the checkpoint again")
    if kind == lib.GGML_TYPE_F16 and top > F16_MAX:
        raise ConvertError(f"{file.path.name}: the tensor {brief(source)} reaches {top:g}, which F16 cannot hold; use `kind` bf16")
    return values if kind == lib.GGML_TYPE_F32 else quantise(values, kind)


@contextmanager
def written_whole(out: Path, replace: bool):
    """A temporary path that replaces ``out`` on success and is removed otherwise, also on Ctrl-C. Raises ConvertError: ``out`` exists and
    may not be replaced, or cannot be written."""
    if out.exists() and not replace:
        raise ConvertError(f"{out} exists; name another output, or `replace` it")
    if out.exists() and not out.is_file():
        raise ConvertError(f"{out} is not a file; name another output")
    try:
        with new_file(out.parent, 0o666) as (part, _):
            yield part
            os.replace(part, out)
    except OSError as error:
        why = error.strerror or error
        raise ConvertError(f"{out} cannot be written: {why}; free some space or name another place with `out`") from None


def convert_drafter(
    source: str | Path,
    target: str | Path,
    out: str | Path,
    kind: str = "q8_0",
    *,
    replace: bool = False,
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Conversion:
    """Writes ``out``, a GGUF with the drafter of ``source`` and the tokenizer of ``target``.

    Args:
        source: a folder with config.json and safetensors files, or one safetensors file with config.json in its folder.
        target: GGUF of the drafter's target.
        kind: type of the matrices, one of ``quants.TYPES``; vectors stay F32.
        replace: replace an existing ``out``, atomically.

    Raises:
        ConvertError: an unsupported layout, an inconsistent checkpoint, or ``out`` cannot be written.
    """
    names = {name.lower(): name for name in TYPES}
    if kind.lower() not in names:
        raise ConvertError(f"{kind!r} is not a type to convert to; use one of {', '.join(TYPES)}")
    kind, out, notes = names[kind.lower()], Path(out), []
    config_path, paths = _sources(Path(source))
    for read in (Path(target), config_path, *paths):
        if out.exists() and read.exists() and out.samefile(read):
            raise ConvertError(f"the output {out} is also an input ({read}); name another output")
    with ExitStack() as stack:
        config = _read_config(config_path)
        places = _place([stack.enter_context(SafetensorsFile(path)) for path in paths])
        target_file = stack.enter_context(GGUFFile(target))
        layout = read_layout(config, places, target_file)
        notes += layout.notes
        for source_of in layout.tensors.values():
            if (seen := places[source_of.name].tensors[source_of.name].shape) != source_of.stored:
                wanted = f"config.json calls for {list(source_of.stored)}; {AGAIN}"
                raise ConvertError(f"the tensor {brief(source_of.name)} has the shape {list(seen)}, but {wanted}")
        resolved = Path(source).resolve()
        name = resolved.name if resolved.is_dir() else resolved.parent.name
        nbytes, types = write_layout(layout, places, out, kind, name=name, notes=notes, replace=replace, threads=threads, progress=progress)
    meta = layout.metadata
    block, mask = meta.get("block_size"), meta["tokenizer.ggml.mask_token_id"] if "block_size" in meta else meta.get("mask_token_id")
    few = len(layout.made[TOKENS]) if TOKENS in layout.made else None
    return Conversion(str(out), nbytes, dict(types), block, mask, tuple(meta["target_layers"].tolist()), few, tuple(notes))


def write_layout(
    layout: Layout, places: Mapping[str, Rows], out: Path, kind: str, *, name: str, notes: list[str], replace: bool = False,
    threads: int | None = None, progress: Progress = lambda what, done, total: None,
) -> tuple[int, Counter[str]]:  # fmt: skip
    """Writes the GGUF of ``layout``, whose sources are in ``places``: its bytes, and its tensors by type. Arguments as of ``convert_drafter``.

    ``name``: of the model. ``notes`` receives sentences about tensors that are not stored as ``kind``. Raises ConvertError: as ``convert_drafter``.
    """
    kinds = {ours: _choose(ours, source.shape, type_id(kind), notes) for ours, source in layout.tensors.items()}
    with ExitStack() as stack:
        part = stack.enter_context(written_whole(out, replace))
        writer = gguf.GGUFWriter(str(part), layout.arch)
        stack.callback(writer.close)
        _write_header(writer, layout, kinds, name, kind)
        pool = stack.enter_context(ThreadPoolExecutor(threads or default_threads()))
        _write_tensors(writer, layout, kinds, places, pool, progress)
        writer.close()
        nbytes = part.stat().st_size
    stored = [*kinds.values(), *(_MADE[values.dtype] for values in layout.made.values()), *(t.type for _, t in layout.copied.values())]
    return nbytes, Counter(text(lib.ggml_type_name(one)) for one in stored)


def typed(value: Any) -> tuple[Any, Kind, Kind | None]:
    """A value of metadata, its type, and that of its items."""
    if isinstance(value, StringArray):
        return list(value.raws()), Kind.ARRAY, Kind.STRING
    if isinstance(value, np.ndarray):
        return value.tolist(), Kind.ARRAY, _ITEMS[value.dtype.str[1:]]
    if isinstance(value, int):
        return value, Kind.BOOL if isinstance(value, bool) else Kind.UINT32 if 0 <= value < 1 << 32 else Kind.INT64, None
    return value, Kind.FLOAT32 if isinstance(value, float) else Kind.STRING, None


def _write_header(writer: gguf.GGUFWriter, layout: Layout, kinds: dict[str, int], title: str, kind: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(title)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(int(gguf.LlamaFileType[_FILE_TYPES.get(kind, f"MOSTLY_{kind.upper()}")]))
    for key, value in layout.metadata.items():
        writer.add_key_value(key if key.startswith(("tokenizer.", "general.")) else f"{layout.arch}.{key}", *typed(value))
    for name, tensor in layout.tensors.items():
        dtype: Any = np.dtype(np.float32)
        raw, stored = None, tensor.shape
        if kinds[name] != lib.GGML_TYPE_F32:
            dtype, raw = np.dtype(np.uint8), gguf.GGMLQuantizationType(kinds[name])
            stored = (*stored[:-1], lib.ggml_row_size(kinds[name], stored[-1]))
        writer.add_tensor_info(name, stored, dtype, int(np.prod(stored)) * dtype.itemsize, raw)
    for name, values in layout.made.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes, gguf.GGMLQuantizationType(_MADE[values.dtype]))
    for name, (_, info) in layout.copied.items():
        rows = (*info.shape[:0:-1], info.nbytes // math.prod(info.shape[1:]))
        writer.add_tensor_info(name, rows, np.dtype(np.uint8), info.nbytes, gguf.GGMLQuantizationType(info.type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write_tensors(writer: gguf.GGUFWriter, layout: Layout, kinds, places, pool: ThreadPoolExecutor, progress: Progress) -> None:
    total = sum(math.prod(tensor.shape) for tensor in layout.tensors.values())
    done = 0
    for name, (theirs, shape, head, first, _) in layout.tensors.items():
        rows, unit = int(np.prod(shape[:-1])), max(1, head)
        step = unit * max(1, CHUNK_VALUES // (shape[-1] * unit))
        jobs = [
            pool.submit(_chunk, places[theirs], theirs, first + i, min(step, rows - i), kinds[name], head) for i in range(0, rows, step)
        ]
        try:
            parts = [job.result() for job in jobs]
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
        writer.write_tensor_data(np.concatenate(parts))
        done += math.prod(shape)
        progress("conversion", 4 * done, 4 * total)
    for values in layout.made.values():
        writer.write_tensor_data(values)
    for file, info in layout.copied.values():
        with file.read(info.name) as data:
            writer.write_tensor_data(np.frombuffer(data, np.uint8))


# -- layouts of published drafters; unsupported ones are refused by name


def read_layout(config: dict, files: Files, target: GGUFFile) -> Layout:
    """The GGUF for ``target`` from ``config`` and the tensors of ``files`` (by name, with prefix). Raises ConvertError: an unsupported
    layout or feature, or a drafter for another target."""
    _refuse_other_layouts(config, files)
    return (eagle3 if eagle3.is_eagle3(config, files) else zlab).read_layout(config, files, target)


def _refuse_other_layouts(config: dict, files: Files) -> None:
    archs = architectures(config)
    named, dflash = " ".join(archs), isinstance(config.get("dflash_config"), dict)

    def any_name(*parts: str) -> str | None:
        return next((name for name in files if any(part in name for part in parts)), None)

    def any_arch(*parts: str) -> str | None:
        return next((arch for arch in archs if any(part in arch.lower() for part in parts)), None)

    if "Gemma4Eagle3Model" in archs:
        raise ConvertError(
            "this is DeepSpec's EAGLE-3 for Gemma 4 (Gemma4Eagle3Model), whose layer has norms after attention and FFN and a scalar; files of the "
            "architecture eagle3 have no tensors for these. DSpark of Gemma 4 (Gemma4DSparkModel) is supported"
        )
    ours = eagle3.is_eagle3(config, files)
    dspark = zlab.is_dspark(config, files)
    other_spark = any_arch("dspark") if not {*archs} & {*zlab.DSPARK} else None
    scalars = zlab.GEMMA not in archs and any_name("layer_scalar")
    found = (
        ("a DeepSeek V4 or other DSpark", other_spark or any_name("hc_attn") or scalars),
        ("a Domino", any_name("domino") or any_arch("domino")),
        ("an EAGLE", None if ours else any_arch("eagle") or any_name("eagle")),
        ("an MTP", any_name("mtp.", "nextn.", "eh_proj") or any_arch("mtp", "nextn")),
        (
            "a speculators",
            "speculators_config" in config and not ours and not dspark and not {*archs} & {*zlab.ARCHITECTURES} and "speculators_config",
        ),
        ("a reduced-vocabulary", None if ours or dspark or "transformer_layer_config" in config else any_name("d2t", "t2d")),
    )
    for layout, sign in found:
        if sign:
            raise ConvertError(f"this is {layout} drafter (it has {brief(sign)}), which is not supported; {SUPPORTED}")
    if not ours and archs and not {*archs} & {*zlab.ARCHITECTURES, *zlab.DSPARK}:
        raise ConvertError(f"config.json names the architecture {brief(named)}; {SUPPORTED}")
    if not ours and not archs and not dflash and not dspark:
        raise ConvertError(f"config.json has neither architectures nor dflash_config; {SUPPORTED}")
