"""Native kernels on CPUs (csrc/cpu): selection of the instruction level, and packed weights.

A row of a product has the same bits alone and in a block of any width, with any number of threads, and at every level. ggml's kernels do not
guarantee that, but equal llama.cpp's bit for bit; ``kernels="ggml"`` uses them.
"""

import os
import warnings
from dataclasses import dataclass, field
from itertools import count, takewhile

from ..background import in_threads
from ..errors import DeviceError
from .library import CData, Context, LevelHandle, Tensor, ffi, lib, text

KERNELS = ("native", "ggml")
FEATURES = "PYSPEC_CPU_FEATURES"
ALL_LEVELS = ("avx512vnni", "avxvnni", "avx2", "neondot", "none")
UNTIMED = "neondot"  # correct under emulation but never benchmarked, so only on request
LANES = 16  # outputs packed as one group
PACK_ROWS = 256  # rows that a thread packs at a time, a multiple of LANES


@dataclass(frozen=True)
class Level:
    """An instruction level of the native kernels. ``name``: one of ALL_LEVELS; ``handle`` for csrc."""

    name: str
    handle: LevelHandle = field(repr=False, compare=False)


def levels() -> list[Level]:
    """Levels of this build that the processor supports, best first, each name once."""
    found: dict[str, Level] = {}
    for handle in takewhile(lambda handle: handle != ffi.NULL, map(lib.pgs_level_at, count())):
        name = text(lib.pgs_level_name(handle))
        found.setdefault(name, Level(name, handle))
    return list(found.values())


def pick_level(kernels: str | None, device_kind: str) -> Level | None:
    """The level of native kernels for a device; None for ggml's kernels.

    Args:
        kernels: "native", "ggml", or None: native where they are benchmarked (x86). ``PYSPEC_CPU_FEATURES`` selects a lower level.

    Raises:
        DeviceError: an unknown value, or native kernels where they are not supported.
    """
    if kernels == "own":
        warnings.warn('kernels="own" is now "native"', DeprecationWarning, stacklevel=2)
        kernels = "native"
    if kernels not in (None, *KERNELS):
        raise DeviceError(f"kernels are {' or '.join(KERNELS)}, not {kernels!r}")
    if kernels == "ggml" or (kernels is None and device_kind != "cpu"):
        return None
    if device_kind != "cpu":
        raise DeviceError(
            f"native kernels run on CPUs, and this device is {'a worker' if device_kind == 'rpc' else f'a {device_kind.upper()}'}; leave the kernels to ggml there"
        )
    found = levels()
    wanted = os.environ.get(FEATURES, "").strip().lower()
    if wanted and wanted not in ALL_LEVELS:
        raise DeviceError(f"{FEATURES} is {wanted!r}; it has to be one of {', '.join(ALL_LEVELS)}")
    if wanted and wanted != "none" and wanted not in [level.name for level in found]:
        has = ", ".join(level.name for level in found) or "none"
        raise DeviceError(f"{FEATURES} is {wanted!r}, which this processor or this build does not have; it has {has}")
    if wanted:
        found = [level for level in found if level.name == wanted]
    elif kernels is None:
        found = [level for level in found if level.name != UNTIMED]
    if kernels == "native" and not found:
        raise DeviceError(
            "native kernels do not run on this processor (they need AVX2, or dot products of ARM, or are switched off); leave the kernels to ggml"
        )
    return found[0] if found else None


@dataclass(frozen=True)
class Packed:
    """A matrix [n_in, n_out], or experts [n_in, n_out, n_expert], in the layout of the native kernels; for products and row lookup only.

    Attributes:
        type: its ggml type in the file.
        ne: shape, innermost first.
        tensor: I8, the packed data.
    """

    type: int
    ne: tuple[int, int, int, int]
    tensor: Tensor = field(repr=False)


def packed_shape(kind: int, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of the I8 tensor of a packed matrix or experts; None where no native product supports the type."""
    ne = ffi.new("int64_t[3]")
    fits = len(shape) in (2, 3) and lib.pgs_pack_shape(kind, shape[0], shape[1], ne)
    return (*ne, *shape[2:]) if fits else None


def new_packed(ctx: Context, kind: int, shape: tuple[int, ...]) -> Packed:
    """A packed matrix or packed experts, not yet allocated."""
    ne = packed_shape(kind, shape)
    assert ne is not None
    return Packed(kind, (shape[0], shape[1], shape[2] if len(shape) > 2 else 1, 1), lib.ggml_new_tensor(ctx, lib.GGML_TYPE_I8, len(ne), ne))


def multiplies_experts(level: Level | None, kind: int, n_in: int) -> bool:
    """Whether native kernels multiply experts of this type, packed or unpacked."""
    return level is not None and packed_shape(kind, (n_in, 1)) is not None and lib.pgs_expert_types(level.handle, kind)


def pack_experts(level: Level, packed: Packed, data: CData, threads: int) -> None:
    """Fills packed experts from ``data``: all rows in the file's format, in host memory."""
    n_in, n_out, n_expert = packed.ne[:3]
    size, room = lib.ggml_row_size(packed.type, n_in) * n_out, packed.tensor.nb[3]
    base, to = ffi.cast("char *", data), ffi.cast("char *", packed.tensor.data)

    def part(i: int) -> None:
        start, end = n_expert * i // threads, n_expert * (i + 1) // threads
        lib.pgs_pack_experts(level.handle, packed.type, base + start * size, n_in, n_out, end - start, to + start * room)

    in_threads(part, range(threads), threads)


def pack(packed: Packed, data: CData, first: int, rows: int, threads: int) -> None:
    """Fills the outputs [first, first + rows) from ``data``: rows in the file's format, in host memory."""
    (n_in, n_out), size = packed.ne[:2], lib.ggml_row_size(packed.type, packed.ne[0])
    base = ffi.cast("char *", data)

    def part(row: int) -> None:
        n = min(PACK_ROWS - (first + row) % PACK_ROWS, rows - row)  # threads write disjoint groups of outputs
        lib.pgs_pack_rows(packed.type, base + row * size, n_in, n_out, first + row, n, packed.tensor.data)

    starts = (0, *range(PACK_ROWS - first % PACK_ROWS, rows, PACK_ROWS))
    in_threads(part, starts, threads)
