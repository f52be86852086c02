"""Weights: the tensors that an architecture reads, the buffer of each one, and the matrices that are fused.

Matrices that read the same input are stored as one where their types match: one matmul, one quantisation of the activations, one launch. On the CPU,
matmul weights go into the backend's repacked buffer where it takes them, as in llama.cpp (bit equality needs it), or are packed for native kernels.

Experts may be in host memory (``placement``), as pages of the file. On the CPU no expert is packed then, so that both sides use the same kernel.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from ..errors import DeviceError, ModelError
from ..ggml.device import Backend, device_handle, free_bytes
from ..ggml.graph import NOT_WEIGHTS, Graph
from ..ggml.host_experts import ExpertCounts, HostExperts
from ..ggml.kernels import LANES, Packed, multiplies_experts, new_packed, pack, pack_experts, packed_shape
from ..ggml.library import Buffer, BufferType, Context, Tensor, check, ffi, lib, new_context, new_err, text
from ..ggml.upload import Uploads
from ..ggml.weight_stream import WeightStream
from ..gguf_io import GGUFFile, TensorInfo
from .adapters import Adapters, Chosen, Delta
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
        layer: the one that reads a tensor without its number in the name, -1 for none or several.
    """

    name: str
    shape: tuple[int, ...]
    use: str = MATMUL
    source: str | None = None
    of: str | None = None
    layer: int = -1


class Matrix(NamedTuple):
    """A matrix with its scale and bias; ``blocks.product`` applies them.

    Attributes:
        weight: [n_in, n_out].
        scale: F32 [1], or [n_out] for several matrices that are stored as one; None where there is none.
        bias: F32 [n_out] or None.
        bias_first: whether the bias is added before the product is scaled, in llama.cpp of an FFN only.
        deltas: of adapters, in graphs that are built while some are chosen.
    """

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    bias_first: bool = False
    deltas: tuple[Delta, ...] = ()


class Run(NamedTuple):
    """One matrix with the concatenated outputs of one or several. ``rows``: outputs of each; ``deltas``: as of ``Matrix``, of each of several."""

    matrix: Matrix
    rows: tuple[int, ...]
    deltas: tuple[tuple[Delta, ...], ...] = ()


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

    @property
    def adapted(self) -> bool:
        """Whether an adapter changes some of them."""
        return any(run.matrix.deltas or any(run.deltas) for run in self.runs)


class _Job(NamedTuple):
    """A tensor to store: the bytes of ``sources`` in the file, only the experts ``hot`` of them, or ``values``."""

    key: str
    type: int
    shape: tuple[int, ...]
    use: str
    sources: list[TensorInfo]
    values: np.ndarray | None = None
    hot: tuple[int, ...] | None = None


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
    ``uploads``: what is read by its threads, which the caller waits for before anything is computed.
    """

    devices: Any = None  # of a model on several devices: makes what its runners need (multi_device/split.py)
    segments: tuple = ()  # of layers on several devices; see segments.py
    adapters: Adapters | None = None
    chosen: Chosen = ()  # adapters that graphs which are built now apply
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
        uploads: Uploads | None = None,
    ) -> None:
        self.backend, self.file, self.placement = backend, file, placement
        # the host's experts are in memory that the device copies from at the speed of the bus: pages of a file go through its driver's buffer first
        wanted = placement is not None and placement.pinned
        self._pinned_type = (lib.ggml_backend_dev_host_buffer_type(device_handle(backend.device)) or None) if wanted else None
        self.pinned = self._pinned_type is not None
        self.host_experts: HostExperts | None = None
        self.host_bytes = 0
        self.hosts_experts = False  # whether some are in host memory
        self.stream: WeightStream | None = None
        self.streaming = False
        self._hosted: dict[int, dict[str, Tensor]] = {}  # by layer and name, experts of which some are the host's
        self._here: dict[str, Tensor] = {}  # copies of the layer whose nodes are being added
        self._uploads = uploads
        self._owned = ExitStack()  # contexts, buffers, and views of the file's pages that tensors point into
        self._tensors: dict[str, Tensor] = {}
        self._companions: dict[str, dict[str, str]] = {}  # of a matrix: "scale" and "bias" and the tensors that are these
        self._groups: dict[str, Group] = {}
        self._members: dict[str, list[tuple[str, ...]]] = {}  # names of a group's matrices, by runs
        self.adapted: set[str] = set()  # matrices that adapters have changed in some graph
        self._buffers: list[Buffer] = []
        self.bytes_by_type = Counter[str]()
        self.repacked_bytes = 0
        self.native_bytes = self.other_matrix_bytes = 0  # of matrices whose products native kernels make, and of the others
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

        jobs: list[_Job] = []
        for name, run in joint.items():
            parts = [found[m] for m in run]
            shape = (parts[0][0].shape[0], sum(spec.shape[1] for spec, _ in parts))
            jobs.append(_Job(name, parts[0][1].type, shape, MATMUL, [info for _, info in parts]))
            for key, values in self._joined(name, [spec for spec, _ in parts]).items():
                jobs.append(_Job(key, lib.GGML_TYPE_F32, values.shape, VECTOR, [], values))
        for spec, info in found.values():
            if self.placement is not None and (hot := self._hot(spec)) is not None:
                # slots of their own for what is not here: its rows must not change which kernel the real ones get
                if 0 < len(hot) < spec.shape[2]:
                    hot += (hot[0],) * lib.pgs_experts_fillers(self.placement.n_used, len(hot))
                if hot:
                    jobs.append(_Job(spec.name, info.type, (*spec.shape[:2], len(hot)), spec.use, [info], hot=hot))
            elif spec.use == INDEX:
                jobs.append(_Job(spec.name, lib.GGML_TYPE_I32, (1, *spec.shape), INDEX, [info]))
            elif spec.name not in in_fused:
                jobs.append(_Job(spec.name, info.type, spec.shape, spec.use, [info]))

        by_buft: dict[int, list[_Job]] = {}
        placed: dict[tuple[str, int], str] = {}
        alias: dict[str, str] = {}
        multiplied = {job.sources[0].name for job in jobs if job.use == MATMUL and self._packs(job.type, job.shape)}
        for job in jobs:
            lookup = job.use == ROWS and job.sources[0].name in multiplied  # of a table that is packed for a product anyway
            home = self._choose_buffer(job.type, job.shape, MATMUL if lookup else job.use)
            if len(job.sources) == 1:
                first = placed.setdefault((job.sources[0].name, home), job.key)
                if first != job.key:
                    alias[job.key] = first  # a tied head in the same buffer type is the embedding itself
                    continue
            by_buft.setdefault(home, []).append(job)

        for home, of_home in by_buft.items():
            self._allocate(home, of_home)
        self._make_groups(runs, found)
        for key, other in alias.items():
            self._tensors[key] = self._tensors[other]
        done, total = 0, sum(info.nbytes for of_home in by_buft.values() for job in of_home for info in job.sources)
        for home, of_home in by_buft.items() if not self.backend.counting else ():
            for job in of_home:
                if self._queue(home, job):
                    continue
                self._upload(home, job)
                for info in job.sources if job.hot is None else ():  # the host's experts stay where they are in the file
                    self.file.forget(info.name)
                done += sum(info.nbytes for info in job.sources)
                progress(done, total)

    def _allocate(self, home: int, jobs: list[_Job]) -> None:
        ctx = self._context(len(jobs))
        for key, kind, shape, use, *_ in jobs:
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
            self.bytes_by_type[name] += lib.ggml_nbytes(tensor)
        buffer = self._new_buffer(ctx, home)
        lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        self._buffers.append(buffer)
        self._owned.callback(lib.ggml_backend_buffer_free, buffer)
        if home < len(self._bufts) - 1:
            self.repacked_bytes += self.backend.size_of(buffer)

    def _new_buffer(self, ctx: Context, home: int) -> Buffer:
        buft, device = self._bufts[home] or self.backend.default_buffer_type, self.backend.device
        buffer = self.backend.allocate(ctx, buft)
        if buffer == ffi.NULL:
            need = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, buft)
            raise DeviceError(
                f"{self.file.path} needs {need >> 20} MiB for weights on {device.name}, which has {free_bytes(device) >> 20} MiB free; "
                "use a smaller quantisation or another device"
            )
        return buffer

    def _queue(self, home: int, job: _Job) -> bool:
        """Leaves a tensor that lies on the device as in the file to threads, if there are some."""
        if self._uploads is None or home < len(self._bufts) - 1 or job.values is not None or job.hot is not None or job.use == INDEX:
            return False
        tensor, offset = self._tensors[job.key], 0
        for info in job.sources:
            if not self._uploads.add(self.file, info, tensor, offset):
                return False
            offset += info.nbytes
        return True

    def _upload(self, home: int, job: _Job) -> None:
        tensor, values, offset = self._tensors[job.key], job.values, 0
        if job.use == INDEX:
            values = self._values(job.sources[0].name, _WHOLE[job.sources[0].type_name]).astype(np.int32)
        elif len(job.sources) > 1 and home < len(self._bufts) - 1 and self._bufts[home] is not NATIVE:
            values = np.concatenate(
                [self._values(info.name, np.uint8) for info in job.sources]
            )  # a repacking buffer takes it in one piece only
        if values is not None:
            lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(values), 0, values.nbytes)
            return
        packed = cast(Packed, tensor) if self._bufts[home] is NATIVE else None
        if packed is not None and packed.ne[2] == 1 and (packed.ne[1] % LANES or packed.ne[0] % 32):  # places that belong to no weight
            lib.ggml_backend_tensor_memset(packed.tensor, 0, 0, lib.ggml_nbytes(packed.tensor))
        for info in job.sources:
            with self.file.read(info.name) as data, ffi.from_buffer(data) as pointer:
                if packed is not None and packed.ne[2] > 1:
                    assert self.backend.level is not None
                    pack_experts(self.backend.level, packed, pointer, self.backend.threads)
                elif packed is not None:
                    pack(packed, pointer, offset, info.shape[1], self.backend.threads)
                    offset += info.shape[1]
                elif job.hot is not None:
                    for slot, expert in enumerate(job.hot):
                        lib.ggml_backend_tensor_set(tensor, pointer + expert * tensor.nb[2], slot * tensor.nb[2], tensor.nb[2])
                else:
                    lib.ggml_backend_tensor_set(tensor, pointer, offset, info.nbytes)
                    offset += info.nbytes

    def _values(self, name: str, kind: type = np.float32) -> np.ndarray:
        """A copy of a tensor of the file."""
        with self.file.read(name) as data:
            return np.frombuffer(data, kind).copy()

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

    def _load_host(self, specs: list[Spec], placement: Placement, host: Backend) -> None:
        layers: dict[int, dict[str, Tensor]] = {}
        found = [(spec, find_tensor(self.file, spec), hot) for spec in specs if (hot := self._hot(spec)) is not None]
        ctx = self._context(2 * len(found))
        for spec, info, hot in found:
            name = spec.name.split(".")[2].removeprefix("ffn_").removesuffix("_exps")
            layers.setdefault(_layer(spec.name), {})[name] = self._host_tensor(ctx, info, spec.shape)
            if len(hot) < spec.shape[2]:
                self.hosts_experts = True
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
            self._owned.callback(lib.ggml_backend_buffer_free, lib.pgs_counted_buffer(ctx, lib.ggml_backend_cpu_buffer_type()))
            return tensor
        with ExitStack() as views:
            data = views.enter_context(ffi.from_buffer(views.enter_context(self.file.read(info.name))))
            pinned, in_place = self._pinned_type, False
            if pinned is None and not int(ffi.cast("uintptr_t", data)) % HOST_ALIGNMENT:
                buffer, in_place = lib.ggml_backend_cpu_buffer_from_ptr(data, info.nbytes), True
                self._owned.push(views.pop_all())
            else:
                buffer = lib.ggml_backend_buft_alloc_buffer(pinned or lib.ggml_backend_cpu_buffer_type(), info.nbytes)
            if buffer == ffi.NULL:
                raise DeviceError(f"{self.file.path} needs {info.nbytes >> 20} MiB of host memory for experts, which are not free")
            self._owned.callback(lib.ggml_backend_buffer_free, buffer)
            lib.pgs_attach(buffer, 0, tensor)
            if not in_place:
                lib.ggml_backend_tensor_set(tensor, data, 0, info.nbytes)
        lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        return tensor

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
    def streams(self) -> list[WeightStream]:
        return [self.stream] if self.stream is not None else []

    def close_streams(self) -> None:
        """The host computes all that it has again. No graph over copies may be left."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    @contextmanager
    def arrived(self, g: Graph, layer: int) -> Iterator[None]:
        """Within, ``weights[name]`` are the copies of this layer's experts. All nodes that read them have to be in the graph at the end."""
        assert self.stream is not None
        self.stream.cut(g, layer, True)
        self._here = self.stream.layers[layer]
        try:
            yield
        finally:
            self._here = {}
        self.stream.cut(g, layer, False)

    def _make_groups(self, groups: dict[str, list[tuple[str, ...]]], found: dict) -> None:
        self._members = groups
        ctx = self._context(sum(len(run) for runs in groups.values() for run in runs))
        for name, runs in groups.items():
            made, parts = [], tuple[Matrix, ...]()
            for i, run in enumerate(runs):
                rows, key = tuple(found[m][0].shape[1] for m in run), _run_name(name, i)
                if len(run) == 1:
                    made.append(Run(self.matrix(run[0]), rows))
                    continue
                scale, bias = (self._tensors.get(f"{key}.{kind}") for kind in COMPANIONS)
                made.append(Run(Matrix(self._tensors[key], scale, bias, ".ffn_" in run[0]), rows))
                if i == 0 and self.backend.device.kind != "cpu":
                    inside = self._inside(ctx, made[0].matrix.weight, rows)
                    parts = tuple(self.matrix(m, part) for m, part in zip(run, inside, strict=True))
            self._groups[name] = Group(tuple(made), parts)

    def _inside(self, ctx: Context, whole: Tensor, rows: tuple[int, ...]) -> list[Tensor]:
        """Tensors for the matrices inside a fused one. Leaves, not views: a view node between two matmuls keeps ggml-cuda from fusing them."""
        out, err, offset = [], new_err(), 0
        for n in rows:
            part = lib.ggml_new_tensor(ctx, whole.type, 2, (whole.ne[0], n))
            check(lib.pgs_place(whole, offset, part, err), err)
            out.append(part)
            offset += n * whole.nb[1]
        return out

    def _context(self, count: int) -> Context:
        ctx = new_context(count)
        self._owned.callback(lib.ggml_free, ctx)
        return ctx

    def adopt(self, ctx: Context, buffer: Buffer) -> None:
        """Counts these with the weights, and frees them."""
        self._owned.callback(lib.ggml_free, ctx)
        self._owned.callback(lib.ggml_backend_buffer_free, buffer)
        self._buffers.append(buffer)

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

    def matrix(self, name: str, weight: Tensor | None = None) -> Matrix:
        """The matrix ``name`` with its scale and its bias, as ``weight`` if given."""
        return Matrix(self._tensors[name] if weight is None else weight, *self.companions(name), ".ffn_" in name, self._deltas(name))

    def _deltas(self, name: str) -> tuple[Delta, ...]:
        if self.adapters is None or not self.chosen:
            return ()
        deltas = self.adapters.deltas(name, self.chosen)
        self.adapted |= {name} if deltas else set()
        return deltas

    def companions(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Scale and bias of products of ``name``: F32 [1] and [n_out], or F32 [n_expert] and [n_out, n_expert] for a matrix of experts; None without."""
        own = self._companions.get(name)
        return (self.get(own.get("scale", "")), self.get(own.get("bias", ""))) if own else (None, None)

    def group(self, name: str) -> Group:
        group = self._groups[name]
        if not self.chosen:
            return group
        deltas = [tuple(self._deltas(member) for member in run) for run in self._members[name]]
        runs = [
            run._replace(deltas=of) if len(of) > 1 else run._replace(matrix=run.matrix._replace(deltas=of[0]))
            for run, of in zip(group.runs, deltas, strict=True)
        ]
        return Group(tuple(runs), group.parts)

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
        if self._uploads is not None:  # which may still write
            self._uploads.close()
        self.close_streams()
        if self.host_experts is not None:
            self.host_experts.close()
        self._owned.close()
        self._buffers, self._tensors = [], {}
