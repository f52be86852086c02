"""Weights: the tensors that an architecture reads, the buffer of each one, and the matrices that are fused.

Matrices that read the same input are stored as one where their types match: one matmul, one quantisation of the activations, one launch. On the CPU,
matmul weights go into the backend's repacked buffer where it takes them, as in llama.cpp (bit equality needs it), or are packed for native kernels.

Experts may be in host memory (``placement``), as pages of the file. On the CPU no expert is packed then, so that both sides use the same kernel.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from ..errors import DeviceError, ModelError
from ..ggml.device import Backend, device_handle, free_bytes
from ..ggml.graph import Graph
from ..ggml.host_experts import ExpertCounts, HostExperts, fillers
from ..ggml.kernels import LANES, Packed, multiplies_experts, new_packed, pack, pack_experts, packed_shape
from ..ggml.library import Buffer, BufferType, CData, Context, Tensor, check, ffi, lib, new_context, new_err, text
from ..ggml.shapes import NOT_WEIGHTS
from ..ggml.weight_stream import WeightStream
from ..gguf_io import GGUFFile, TensorInfo
from .placement import Placement

MATMUL, EXPERTS, HEADS, ROWS, VECTOR, INDEX = "matmul", "experts", "heads", "rows", "vector", "index"
COMPANIONS = ("scale", "bias")  # of a matrix
NATIVE = None  # in place of a buffer type: packed for native kernels, in the default one
_WHOLE = {"i64": np.int64, "i32": np.int32}
HOST_ALIGNMENT = 32  # bytes; ggml's own for memory that it did not allocate


@dataclass(frozen=True)
class Spec:
    """A tensor that an architecture reads.

    Attributes:
        name: the name in the GGUF.
        shape: ggml order, innermost first.
        use: MATMUL (weight of a matmul), EXPERTS (3-D weight of a routed one), HEADS (3-D: a matrix per head), ROWS (looked up by row), VECTOR
            (elementwise; F32 only), INDEX (numbers of rows; I64 in the file, here I32 [1, n]).
        source: name in the file when it differs (a head tied to the embedding).
        of: the matrix whose products this scale or bias is applied to.
    """

    name: str
    shape: tuple[int, ...]
    use: str = MATMUL
    source: str | None = None
    of: str | None = None


@dataclass(frozen=True)
class Matrix:
    """A matrix with its scale and bias; ``blocks.product`` applies them.

    Attributes:
        weight: [n_in, n_out].
        scale: F32 [1], or [n_out] for several matrices that are stored as one; None where there is none.
        bias: F32 [n_out] or None.
        bias_first: whether the bias is added before the product is scaled.
    """

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    bias_first: bool = False


class Run(NamedTuple):
    """One matrix with the concatenated outputs of one or several. ``rows``: outputs of each."""

    matrix: Matrix
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Matrices that read the same input.

    Attributes:
        runs: all of them, in order. The first one has as many as can be stored as one; the others have one each, unless native kernels multiply.
        parts: the matrices of the first run one by one, inside it, if they are several; empty where the buffer repacks.
    """

    runs: tuple[Run, ...]
    parts: tuple[Matrix, ...]

    @property
    def fused(self) -> Matrix | None:
        """The first run's matrix, if it has the outputs of several."""
        return self.runs[0].matrix if len(self.runs[0].rows) > 1 else None


def _bias_first(name: str) -> bool:
    """llama.cpp's order: products of attention are scaled and then biased, those of an FFN biased and then scaled."""
    return ".ffn_" in name


def _run_name(group: str, i: int) -> str:
    return f"{group}.{i}" if i else group


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def find_tensor(file: GGUFFile, spec: Spec) -> TensorInfo:
    name = spec.source or spec.name
    info = file.tensors.get(name)
    if info is None:
        raise ModelError(f"{file.path} has no tensor {name!r}, which its architecture needs; convert the model again")
    shape = info.shape
    while len(shape) > len(spec.shape) and shape[-1] == 1:
        shape = shape[:-1]
    shape += (1,) * (len(spec.shape) - len(shape))  # of one head, or of one expert
    if shape != spec.shape:
        raise ModelError(
            f"{file.path}: tensor {name!r} has the shape {list(info.shape)}, but its metadata calls for {list(spec.shape)}; "
            "the file was converted with other hyper-parameters"
        )
    if spec.use == INDEX and info.type_name not in _WHOLE:
        raise ModelError(f"{file.path}: tensor {name!r} is {info.type_name}, but it holds numbers of rows and has to be I64")
    if info.type_name in NOT_WEIGHTS and spec.use not in (VECTOR, INDEX):
        raise ModelError(f"{file.path}: tensor {name!r} is {info.type_name}, which is not a type for weights; convert the model again")
    if spec.use == VECTOR and info.type != lib.GGML_TYPE_F32:
        raise ModelError(f"{file.path}: tensor {name!r} is {info.type_name}, but it is used elementwise and has to be F32")
    return info


class Weights:
    """The weights of one model on one backend. Owns their buffers.

    ``weights[name]`` is a tensor; ``weights.matrix(name)`` a matrix with its scale and bias; ``weights.group(name)`` the matrices of one input, fused as
    far as possible. ``alike``: groups that fuse the same number of matrices. ``placement`` and ``host``, a CPU backend: experts in host memory;
    ``weights[name]`` has the hot ones then. ``stream``: copies of the others for wide prompt chunks, in graphs that are built while ``streaming``.
    """

    devices: Any = None  # of a model on several devices: makes what its runners need (multi_device/split.py)
    segments: tuple = ()  # of layers on several devices; see segments.py
    offloaded: "Weights | None" = None  # of layers in host memory that a device computes with copies of; see offloaded.py

    def __init__(
        self,
        backend: Backend,
        file: GGUFFile,
        specs: Iterable[Spec],
        groups: dict[str, tuple[str, ...]],
        alike: Iterable[tuple[str, ...]] = (),
        progress: Callable[[int, int], None] | None = None,
        placement: Placement | None = None,
        host: Backend | None = None,
    ) -> None:
        self.backend, self.file, self.placement = backend, file, placement
        self.host_experts: HostExperts | None = None
        self.host_bytes = 0
        self.stream: WeightStream | None = None
        self.streaming = False
        self._hosted: dict[int, dict[str, Tensor]] = {}  # by layer and name, experts of which some are the host's
        self._here: dict[str, Tensor] = {}  # copies of the layer whose nodes are being added
        self._host_buffers: list[Buffer] = []
        self._held: list[tuple[CData, memoryview]] = []  # views of the file's pages that tensors point into
        self._tensors: dict[str, Tensor] = {}
        self._companions: dict[str, dict[str, str]] = {}  # of a matrix: "scale" and "bias" and the tensors that are these
        self._groups: dict[str, Group] = {}
        self._contexts: list[Context] = []
        self._buffers: list[Buffer] = []
        self.bytes_by_type: dict[str, int] = {}
        self.repacked_bytes = 0
        self.native_bytes, self.other_matrix_bytes = 0, 0  # of matrices whose products native kernels make, and of the others
        self._bufts = self._types_of(backend)
        self._chosen: dict[tuple[int, tuple[int, ...], str], int] = {}
        try:
            specs = list(specs)
            self._load(specs, groups, alike, progress or (lambda done, total: None))
            if placement is not None and placement.hot:
                assert host is not None
                self._load_host(specs, placement, host)
        except BaseException:
            self.close()
            raise

    def _types_of(self, backend: Backend) -> list[BufferType | None]:
        """The buffer types that tensors may lie in, in the order of preference."""
        own = [NATIVE] if backend.level is not None else []
        return [*own, *backend.extra_buffer_types(), backend.default_buffer_type]

    # -- planning

    def _choose_buffer(self, ggml_type: int, shape: tuple[int, ...], use: str) -> int:
        """Index into the buffer types of the first one that can run the tensor's operation; cached per shape, as a worker needs a round trip."""
        key = ggml_type, shape, use
        if key not in self._chosen:
            self._chosen[key] = self._first_that_fits(*key)
        return self._chosen[key]

    def _first_that_fits(self, ggml_type: int, shape: tuple[int, ...], use: str) -> int:
        if use not in (MATMUL, EXPERTS, HEADS):
            return len(self._bufts) - 1
        for i, buft in enumerate(self._bufts):
            if use == EXPERTS and self.placement is not None and i < len(self._bufts) - 1:
                continue
            if buft is NATIVE:
                if use in (MATMUL, EXPERTS) and packed_shape(ggml_type, shape) is not None:
                    return i
                continue
            if not self.backend.supports_matmul(buft, ggml_type, shape):
                continue
            if self._takes(buft, ggml_type, shape, use):
                return i
        raise ModelError(
            f"{self.file.path} stores matrices as {text(lib.ggml_type_name(ggml_type))}, which {self.backend.device.name} cannot multiply; "
            "quantise the model to another type"
        )

    def _takes(self, buft: BufferType, ggml_type: int, shape: tuple[int, ...], use: str) -> bool:
        """Whether the backend runs products of such a tensor in a buffer of this type."""
        probe = new_context(7)
        weight = lib.ggml_new_tensor(probe, ggml_type, len(shape), shape)
        if use != EXPERTS:
            node = lib.ggml_mul_mat(probe, weight, lib.ggml_new_tensor(probe, lib.GGML_TYPE_F32, len(shape), (shape[0], 512, *shape[2:])))
        else:
            x = lib.ggml_new_tensor(probe, lib.GGML_TYPE_F32, 3, (shape[0], 1, 512))
            node = lib.ggml_mul_mat_id(probe, weight, x, lib.ggml_new_tensor(probe, lib.GGML_TYPE_I32, 2, (1, 512)))
        weight.buffer = lib.ggml_backend_buft_alloc_buffer(buft, 0)
        fits = self.backend.supports(node)
        lib.ggml_backend_buffer_free(weight.buffer)
        lib.ggml_free(probe)
        return fits

    def _packs(self, ggml_type: int, shape: tuple[int, ...]) -> bool:
        return self._bufts[self._choose_buffer(ggml_type, shape, MATMUL)] is NATIVE

    def fusable(self, parts: list[tuple[Spec, TensorInfo]]) -> int:
        """How many leading matrices can be stored as one; 0 if fewer than two."""
        kind, n_in = parts[0][1].type, parts[0][0].shape[0]
        home, rows, count = self._choose_buffer(kind, parts[0][0].shape, MATMUL), parts[0][0].shape[1], 1
        # ggml's CPU matmul takes another kernel, with another order of summation, for outputs that are no multiple of four
        step = 4 if self.backend.device.kind == "cpu" and self._bufts[home] is not NATIVE else 1
        if rows % step:
            return 0
        for spec, info in parts[1:]:
            rows += spec.shape[1]
            if (info.type, spec.shape[0]) != (kind, n_in) or spec.shape[1] % step or self._choose_buffer(kind, spec.shape, MATMUL) != home:
                break
            # in another buffer type another kernel would run, and the parts would no longer equal llama.cpp's
            if self._choose_buffer(kind, (n_in, rows), MATMUL) != home:
                break
            count += 1
        return count if count > 1 else 0

    def _runs(self, members: tuple[str, ...], fused: int, found: dict[str, tuple[Spec, TensorInfo]]) -> list[tuple[str, ...]]:
        """A group's runs. All threads synchronise after each product, so where native kernels make it, whatever ``fused`` is, the rest is joined as
        far as it can be: beta and alpha of a delta-net layer, which are 8 to 64 outputs each."""
        runs, rest = [members[:fused]] if fused else [], members[fused:]
        while rest:
            spec, info = found[rest[0]]
            n = self.fusable([found[m] for m in rest]) if runs and self._packs(info.type, spec.shape) else 0
            runs.append(rest[: n or 1])
            rest = rest[n or 1 :]
        return runs

    def _load(self, specs: list[Spec], groups: dict, alike: Iterable[tuple[str, ...]], progress: Callable[[int, int], None]) -> None:
        found = {spec.name: (spec, find_tensor(self.file, spec)) for spec in specs}
        for spec in specs:
            if spec.of is not None:
                self._companions.setdefault(spec.of, {})[spec.name.rsplit(".", 1)[1]] = spec.name
        fused = {name: self.fusable([found[m] for m in members]) for name, members in groups.items()}
        for family in alike:
            fused.update(dict.fromkeys(family, min((fused[name] for name in family), default=0)))
        runs = {name: self._runs(members, fused[name], found) for name, members in groups.items()}
        joint = {_run_name(name, i): run for name, of in runs.items() for i, run in enumerate(of) if len(run) > 1}
        in_fused = {member for run in joint.values() for member in run}

        # jobs: (key, type, shape, use, sources)
        jobs: list[tuple[str, int, tuple[int, ...], str, list[TensorInfo]]] = []
        joined: dict[str, np.ndarray] = {}
        for name, run in joint.items():
            parts = [found[m] for m in run]
            shape = (parts[0][0].shape[0], sum(spec.shape[1] for spec, _ in parts))
            jobs.append((name, parts[0][1].type, shape, MATMUL, [info for _, info in parts]))
            joined |= self._joined(name, [spec for spec, _ in parts])
        jobs += [(key, lib.GGML_TYPE_F32, values.shape, VECTOR, []) for key, values in joined.items()]
        hot = {}
        for spec, info in found.values():
            if self.placement is not None and (mine := self._hot(spec)) is not None:
                # slots of their own for what is not here: its rows must not change which kernel the real ones get
                if 0 < len(mine) < spec.shape[2]:
                    mine += (mine[0],) * fillers(self.placement.n_used, len(mine))
                hot[spec.name] = mine
                if mine:
                    jobs.append((spec.name, info.type, (*spec.shape[:2], len(mine)), spec.use, [info]))
            elif spec.use == INDEX:
                jobs.append((spec.name, lib.GGML_TYPE_I32, (1, *spec.shape), INDEX, [info]))
            elif spec.name not in in_fused:
                jobs.append((spec.name, info.type, spec.shape, spec.use, [info]))

        by_buft: dict[int, list[tuple[str, int, tuple[int, ...], str, list[TensorInfo]]]] = {}
        placed: dict[tuple[str, int], str] = {}
        alias: dict[str, str] = {}
        multiplied = {sources[0].name for _, kind, dims, use, sources in jobs if use == MATMUL and self._packs(kind, dims)}
        for job in jobs:
            key, kind, dims, use, sources = job
            lookup = use == ROWS and sources[0].name in multiplied  # of a table that is packed for a product anyway
            home = self._choose_buffer(kind, dims, MATMUL if lookup else use)
            if len(sources) == 1:
                first = placed.setdefault((sources[0].name, home), key)
                if first != key:
                    alias[key] = first  # a tied head in the same buffer type is the embedding itself
                    continue
            by_buft.setdefault(home, []).append(job)

        total = sum(info.nbytes for job_list in by_buft.values() for job in job_list for info in job[4])
        for home, job_list in by_buft.items():
            self._allocate(home, job_list)
        self._make_groups(runs, found)
        for key, other in alias.items():
            self._tensors[key] = self._tensors[other]
        if self.backend.counting:
            return
        done = 0
        for home, job_list in by_buft.items():
            for key, _, _, use, sources in job_list:
                if use == INDEX:
                    self._upload_values(self._tensors[key], self._numbers(sources[0]))
                elif key in joined:
                    self._upload_values(self._tensors[key], joined[key])
                elif key in hot:
                    self._upload_experts(self._tensors[key], sources[0], hot[key])
                elif self._bufts[home] is NATIVE:
                    self._pack(self._tensors[key], sources)
                else:
                    self.upload(self._tensors[key], sources, whole=home < len(self._bufts) - 1)
                if key not in hot:  # the host's experts stay where they are in the file
                    for info in sources:
                        self.file.forget(info.name)
                done += sum(info.nbytes for info in sources)
                progress(done, total)

    def _new_tensors(self, ctx: Context, home: int, jobs: list) -> list[Tensor]:
        """The tensors of ``jobs``, without memory."""
        out = []
        for key, kind, shape, use, _sources in jobs:
            if self._bufts[home] is NATIVE:
                packed = new_packed(ctx, kind, shape)
                tensor, self._tensors[key] = packed.tensor, cast(Tensor, packed)
                self.native_bytes += lib.ggml_nbytes(tensor)
            else:
                tensor = self._tensors[key] = lib.ggml_new_tensor(ctx, kind, len(shape), shape)
                if use == EXPERTS and multiplies_experts(self.backend.level, kind, shape[0]):
                    self.native_bytes += lib.ggml_nbytes(tensor)
                else:
                    self.other_matrix_bytes += lib.ggml_nbytes(tensor) if use in (MATMUL, EXPERTS, HEADS) else 0
            lib.ggml_set_name(tensor, key.encode()[:63])
            name = text(lib.ggml_type_name(kind))
            self.bytes_by_type[name] = self.bytes_by_type.get(name, 0) + lib.ggml_nbytes(tensor)
            out.append(tensor)
        return out

    def _buffer_type(self, home: int) -> BufferType:
        return self._bufts[home] or self.backend.default_buffer_type

    def _allocate(self, home: int, jobs: list) -> None:
        ctx = self._context(len(jobs))
        self._new_tensors(ctx, home, jobs)
        buft = self._buffer_type(home)
        buffer = self.backend.allocate(ctx, buft)
        if buffer == ffi.NULL:
            need = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, buft)
            raise DeviceError(
                f"{self.file.path} needs {need >> 20} MiB for weights on {self.backend.device.name}, "
                f"which has {free_bytes(self.backend.device) >> 20} MiB free; use a smaller quantisation or another device"
            )
        lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        self._buffers.append(buffer)
        if home < len(self._bufts) - 1:
            self.repacked_bytes += self.backend.size_of(buffer)

    def _pack(self, weight: Tensor, sources: list[TensorInfo]) -> None:
        packed, first = cast(Packed, weight), 0
        if packed.ne[2] > 1:
            assert self.backend.level is not None
            with self.file.read(sources[0].name) as data, ffi.from_buffer(data) as pointer:
                pack_experts(self.backend.level, packed, pointer, self.backend.threads)
            return
        if packed.ne[1] % LANES or packed.ne[0] % 32:  # places that belong to no weight
            lib.ggml_backend_tensor_memset(packed.tensor, 0, 0, lib.ggml_nbytes(packed.tensor))
        for info in sources:
            with self.file.read(info.name) as data, ffi.from_buffer(data) as pointer:
                pack(packed, pointer, first, info.shape[1], self.backend.threads)
            first += info.shape[1]

    def upload(self, tensor: Tensor, sources: list[TensorInfo], whole: bool) -> None:
        if whole and len(sources) > 1:  # a repacking buffer takes a tensor in one piece only
            joined = b"".join(self.file.read(info.name) for info in sources)
            lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(joined), 0, len(joined))
            return
        offset = 0
        for info in sources:
            with self.file.read(info.name) as data, ffi.from_buffer(data) as pointer:
                lib.ggml_backend_tensor_set(tensor, pointer, offset, info.nbytes)
            offset += info.nbytes

    def _upload_values(self, tensor: Tensor, values: np.ndarray) -> None:
        lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(values), 0, values.nbytes)

    def _numbers(self, info: TensorInfo) -> np.ndarray:
        """Numbers of rows, I32."""
        with self.file.read(info.name) as data:
            return np.frombuffer(data, _WHOLE[info.type_name]).astype(np.int32)

    def _values(self, name: str) -> np.ndarray:
        """A tensor of the file that is F32, as a copy."""
        with self.file.read(name) as data:
            return np.frombuffer(data, np.float32).copy()

    def _joined(self, name: str, members: list[Spec]) -> dict[str, np.ndarray]:
        """Scales and biases of matrices that are stored as one, F32 [n_out] each; 1 and 0 for those that have none."""
        out = {}
        for kind, nothing in zip(COMPANIONS, (1.0, 0.0), strict=True):
            names = [self._companions.get(spec.name, {}).get(kind) for spec in members]
            if any(names):
                parts = [np.full(spec.shape[1], nothing, np.float32) for spec in members]
                for part, own in zip(parts, names, strict=True):
                    if own is not None:
                        part[:] = self._values(own)
                out[f"{name}.{kind}"] = np.concatenate(parts)
        return out

    # -- experts in host memory

    def _hot(self, spec: Spec) -> tuple[int, ...] | None:
        """The experts of this tensor that the device has; None if it has all of them as always."""
        return self.placement.hot.get(_layer(spec.name)) if self.placement is not None and spec.use == EXPERTS else None

    def _upload_experts(self, tensor: Tensor, info: TensorInfo, hot: tuple[int, ...]) -> None:
        size = tensor.nb[2]
        with self.file.read(info.name) as data, ffi.from_buffer(data) as pointer:
            for slot, expert in enumerate(hot):
                lib.ggml_backend_tensor_set(tensor, pointer + expert * size, slot * size, size)

    def _load_host(self, specs: list[Spec], placement: Placement, host: Backend) -> None:
        layers: dict[int, dict[str, Tensor]] = {}
        found = [(spec, find_tensor(self.file, spec), hot) for spec in specs if (hot := self._hot(spec)) is not None]
        ctx = self._context(2 * len(found))
        for spec, info, hot in found:
            name = spec.name.split(".")[2].removeprefix("ffn_").removesuffix("_exps")
            layers.setdefault(_layer(spec.name), {})[name] = self._host_tensor(ctx, info, spec.shape)
            if len(hot) < spec.shape[2]:
                self.host_bytes += info.nbytes
                self._hosted.setdefault(_layer(spec.name), {})[spec.name] = layers[_layer(spec.name)][name]
        down = next(iter(layers.values()))["down"]
        sizes = {"n_ff": down.ne[0], "n_embd": down.ne[1], "n_expert": down.ne[2]}
        sizes |= {"n_layer": placement.n_layer, "n_used": placement.n_used, "max_rows": placement.rows}
        self.host_experts = HostExperts(self.backend, host, sizes, placement.glu, sorted({info.type for _, info, _ in found}))
        for layer, weights in layers.items():
            inside = {name: self._companions.get(f"blk.{layer}.ffn_{name}_exps.weight", {}) for name in ("gate", "up")}
            scales = {name: self._values(own["scale"]) for name, own in inside.items() if "scale" in own}
            biases = {
                name: self._host_tensor(ctx, self.file.tensors[own["bias"]], (sizes["n_ff"], sizes["n_expert"]))
                for name, own in inside.items()
                if "bias" in own
            }
            self.host_experts.set_layer(layer, weights, placement.hot[layer], scales, biases)

    def _host_tensor(self, ctx: Context, info: TensorInfo, shape: tuple[int, ...]) -> Tensor:
        """All experts of the tensor, as a tensor over the file's own pages; a copy where the file does not align them."""
        tensor = lib.ggml_new_tensor(ctx, info.type, len(shape), shape)
        if self.backend.counting:
            self._host_buffers.append(lib.pgs_counted_buffer(ctx, lib.ggml_backend_cpu_buffer_type()))
            return tensor
        view = self.file.read(info.name)
        data = ffi.from_buffer(view)
        address, pinned = int(ffi.cast("uintptr_t", data)), self._pinned_type()
        if address % HOST_ALIGNMENT or pinned is not None:
            buffer = lib.ggml_backend_buft_alloc_buffer(pinned or lib.ggml_backend_cpu_buffer_type(), info.nbytes)
            if buffer == ffi.NULL:
                raise DeviceError(f"{self.file.path} needs {info.nbytes >> 20} MiB of host memory for experts, which are not free")
            lib.pgs_attach(buffer, 0, tensor)
            lib.ggml_backend_tensor_set(tensor, data, 0, info.nbytes)
            ffi.release(data)
            view.release()
        else:
            buffer = lib.ggml_backend_cpu_buffer_from_ptr(data, info.nbytes)
            lib.pgs_attach(buffer, 0, tensor)
            self._held.append((data, view))
        lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        self._host_buffers.append(buffer)
        return tensor

    @property
    def pinned(self) -> bool:
        """Whether the host's experts are in memory that the device copies from by itself, and not pages of the file."""
        return self._pinned_type() is not None

    def _pinned_type(self) -> BufferType | None:
        """Of host memory that the device copies from by itself, at the speed of the bus, where it has such and that is requested: pages of a file
        go through a buffer of its driver first."""
        if self.placement is None or not self.placement.pinned:
            return None
        return lib.ggml_backend_dev_host_buffer_type(device_handle(self.backend.device)) or None

    # -- copies of them on the device, for wide chunks of prompts

    def open_stream(self, rows: int, layers: dict[int, dict[str, Tensor]] | None = None) -> WeightStream | None:
        """Chunks of ``rows`` rows and more compute with copies of the host's experts from now on, or of these ``layers``. Owns the stream, unless there
        was no memory for it (see its ``fits``); None where all experts are on the device."""
        sources = self._hosted if layers is None else layers
        if not sources:
            return None
        stream = WeightStream(self.backend, sources, rows)
        if stream.fits:
            self.stream = stream
        return stream

    @property
    def hosts_experts(self) -> bool:
        """Whether some lie in host memory."""
        return bool(self._hosted)

    @property
    def streams(self) -> list[WeightStream]:
        return [self.stream] if self.stream is not None else []

    def close_streams(self) -> None:
        """The host computes all that it has again. No graph over copies may be left."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def streams_layer(self, layer: int) -> bool:
        """Whether nodes of this layer, added now, are to compute with copies of its experts."""
        return self.streaming and self.stream is not None and layer in self.stream.layers

    @contextmanager
    def arrived(self, g: Graph, layer: int) -> Iterator[None]:
        """Within, ``weights[name]`` are the copies of this layer's experts. All nodes that read them have to be in the graph at the end."""
        assert self.stream is not None
        self.stream.begin(g, layer)
        self._here = self.stream.layers[layer]
        try:
            yield
        finally:
            self._here = {}
        self.stream.end(g, layer)

    def _make_groups(self, groups: dict[str, list[tuple[str, ...]]], found: dict) -> None:
        ctx = self._context(sum(len(run) for runs in groups.values() for run in runs))
        for name, runs in groups.items():
            made, parts = [], tuple[Matrix, ...]()
            for i, run in enumerate(runs):
                rows, key = tuple(found[m][0].shape[1] for m in run), _run_name(name, i)
                if len(run) == 1:
                    made.append(Run(self.matrix(run[0]), rows))
                    continue
                scale, bias = (self._tensors.get(f"{key}.{kind}") for kind in COMPANIONS)
                made.append(Run(Matrix(self._tensors[key], scale, bias, _bias_first(run[0])), rows))
                if i == 0 and self.backend.device.kind != "cpu":
                    inside = self._inside(ctx, made[0].matrix.weight, rows)
                    parts = tuple(self._matrix(m, part) for m, part in zip(run, inside, strict=True))
            self._groups[name] = Group(tuple(made), parts)

    def _matrix(self, name: str, weight: Tensor) -> Matrix:
        return Matrix(weight, self.scale(name), self.bias(name), _bias_first(name))

    def _own(self, name: str, kind: str) -> Tensor | None:
        own = self._companions.get(name, {}).get(kind)
        return self._tensors[own] if own is not None else None

    def _inside(self, ctx: Context, whole: Tensor, rows: tuple[int, ...]) -> tuple:
        """Tensors for the matrices inside a fused one. Leaves, not views: a view node between two matmuls keeps ggml-cuda from fusing them."""
        out, err, offset = [], new_err(), 0
        for n in rows:
            part = lib.ggml_new_tensor(ctx, whole.type, 2, (whole.ne[0], n))
            check(lib.pgs_place(whole, offset, part, err), err)
            out.append(part)
            offset += n * whole.nb[1]
        return tuple(out)

    def _context(self, count: int) -> Context:
        self._contexts.append(new_context(count))
        return self._contexts[-1]

    # -- access

    def enter(self, segment: int) -> None:
        """There is one device: everything is on it."""

    def __getitem__(self, name: str) -> Tensor:
        return self._here[name] if name in self._here else self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None where the file has none of that name."""
        return self._tensors.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._here

    def matrix(self, name: str) -> Matrix:
        """The matrix ``name`` with its scale and its bias."""
        return self._matrix(name, self._tensors[name])

    def scale(self, name: str) -> Tensor | None:
        """What products of ``name`` are scaled with, F32 [1], or F32 [n_expert] for a matrix of experts; None where there is nothing."""
        return self._own(name, "scale")

    def bias(self, name: str) -> Tensor | None:
        """What is added to products of ``name``, F32 [n_out], or F32 [n_out, n_expert] for a matrix of experts; None where there is nothing."""
        return self._own(name, "bias")

    def group(self, name: str) -> Group:
        return self._groups[name]

    def expert_counts(self) -> ExpertCounts | None:
        """What was chosen of experts so far, where some are in host memory, or are counted."""
        return self.host_experts.counts() if self.host_experts is not None else None

    def experts_chosen(self) -> dict[int, np.ndarray]:
        """How often each expert was chosen so far, I64 [n_expert] by layer."""
        return self.host_experts.chosen() if self.host_experts is not None else {}

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all weight buffers on the device."""
        return sum(map(self.backend.size_of, self._buffers))

    @property
    def nbytes(self) -> int:
        """Bytes on the device: weights, the rows that go to and from experts in host memory, and copies of those."""
        rows = self.host_experts.nbytes if self.host_experts is not None else 0
        return self.buffer_bytes + rows + sum(stream.nbytes for stream in self.streams)

    def close(self) -> None:
        self.close_streams()
        if self.host_experts is not None:
            self.host_experts.close()
        for buffer in self._host_buffers:
            lib.ggml_backend_buffer_free(buffer)
        for data, view in self._held:
            ffi.release(data)
            view.release()
        self._host_buffers, self._held = [], []
        for buffer in self._buffers:
            lib.ggml_backend_buffer_free(buffer)
        for ctx in self._contexts:
            lib.ggml_free(ctx)
        self._buffers, self._contexts, self._tensors = [], [], {}
