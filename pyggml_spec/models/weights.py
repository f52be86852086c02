"""Weights: which tensors an architecture needs, where each one is stored, and which of them are fused.

Matrices that read the same input are stored as one where their types match: each matmul less is also one quantisation of the activations
and one fix-up launch less (4B shape on one H200: 8.54 -> 7.42 ms per step). On the CPU, matmul weights go into the backend's repacked
buffer where it takes them (13.0 against 16.5 ms per token at one row, 0.8B shape on two cores), which is also what llama.cpp does, and
therefore what bit-equality with it needs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import DeviceError, ModelError
from ..ggml.device import Backend
from ..ggml.library import ffi, lib, text
from ..gguf_io import GGUFFile, TensorInfo

MATMUL, ROWS, VECTOR = "matmul", "rows", "vector"
NOT_WEIGHTS = {"q8_1", "q8_K", "i8", "i16", "i32", "i64", "f64"}  # ggml has no product of these, and ends the process on one


@dataclass(frozen=True)
class Spec:
    """A tensor that an architecture reads.

    Attributes:
        name: the name in the GGUF.
        shape: ggml order, innermost first.
        use: MATMUL (weight of a matmul), ROWS (looked up by row), VECTOR (elementwise; F32 only).
        source: name in the file when it differs (a head tied to the embedding).
    """

    name: str
    shape: tuple[int, ...]
    use: str = MATMUL
    source: str | None = None


@dataclass(frozen=True)
class Group:
    """Matrices that read the same input, in the order of their outputs. ``fused`` holds all of them, or is None."""

    parts: tuple
    rows: tuple[int, ...]
    fused: object | None


def _find(file: GGUFFile, spec: Spec) -> TensorInfo:
    name = spec.source or spec.name
    info = file.tensors.get(name)
    if info is None:
        raise ModelError(f"{file.path} has no tensor {name!r}, which its architecture needs; convert the model again")
    shape = info.shape
    while len(shape) > len(spec.shape) and shape[-1] == 1:
        shape = shape[:-1]
    if shape != spec.shape:
        raise ModelError(
            f"{file.path}: tensor {name!r} has the shape {list(info.shape)}, but its metadata calls for {list(spec.shape)}; "
            "the file was converted with other hyper-parameters"
        )
    if info.type_name in NOT_WEIGHTS and spec.use != VECTOR:
        raise ModelError(f"{file.path}: tensor {name!r} is {info.type_name}, which is not a type for weights; convert the model again")
    if spec.use == VECTOR and info.type != lib.GGML_TYPE_F32:
        raise ModelError(f"{file.path}: tensor {name!r} is {info.type_name}, but it is used elementwise and has to be F32")
    return info


class Weights:
    """The weights of one model on one backend. Owns their buffers.

    ``weights[name]`` is a tensor; ``weights.group(name)`` a fused (or, where types differ, not fused) group.
    """

    def __init__(
        self,
        backend: Backend,
        file: GGUFFile,
        specs: Iterable[Spec],
        groups: dict[str, tuple[str, ...]],
        all_or_none: Iterable[tuple[str, ...]] = (),
        progress: Callable[[int, int], None] | None = None,
    ):
        self.backend, self.file = backend, file
        self._tensors: dict[str, object] = {}
        self._groups: dict[str, Group] = {}
        self._contexts: list = []
        self._buffers: list = []
        self.bytes_by_type: dict[str, int] = {}
        self.repacked_bytes = 0
        self._bufts = [*backend.extra_buffer_types(), backend.default_buffer_type]
        try:
            self._load(list(specs), groups, all_or_none, progress or (lambda done, total: None))
        except BaseException:
            self.close()
            raise

    # -- planning

    def _choose_buffer(self, ggml_type: int, shape: tuple[int, ...], use: str) -> int:
        """Index into the buffer types of the first one that can run the tensor's operation."""
        if use != MATMUL:
            return len(self._bufts) - 1
        for i, buft in enumerate(self._bufts):
            probe = lib.ggml_init(ffi.new("struct ggml_init_params *", {"mem_size": 8 * lib.ggml_tensor_overhead(), "no_alloc": True})[0])
            weight = lib.ggml_new_tensor(probe, ggml_type, len(shape), shape)
            x = lib.ggml_new_tensor(probe, lib.GGML_TYPE_F32, 2, (shape[0], 512))
            node = lib.ggml_mul_mat(probe, weight, x)
            weight.buffer = lib.ggml_backend_buft_alloc_buffer(buft, 0)
            fits = self.backend.supports(node)
            lib.ggml_backend_buffer_free(weight.buffer)
            lib.ggml_free(probe)
            if fits:
                return i
        raise ModelError(
            f"{self.file.path} stores matrices as {text(lib.ggml_type_name(ggml_type))}, which {self.backend.device.name} cannot multiply; "
            "quantise the model to another type"
        )

    def _fusable(self, parts: list[tuple[Spec, TensorInfo]]) -> bool:
        types = {info.type for _, info in parts}
        if len(types) != 1 or len({spec.shape[0] for spec, _ in parts}) != 1:
            return False
        kind, n_in = parts[0][1].type, parts[0][0].shape[0]
        homes = {self._choose_buffer(kind, spec.shape, MATMUL) for spec, _ in parts}
        # a fused matrix in another buffer type would run another kernel, and its parts would no longer equal llama.cpp's
        return homes == {self._choose_buffer(kind, (n_in, sum(spec.shape[1] for spec, _ in parts)), MATMUL)}

    def _load(self, specs: list[Spec], groups: dict, all_or_none, progress) -> None:
        found = {spec.name: (spec, _find(self.file, spec)) for spec in specs}
        fused = {name for name, members in groups.items() if self._fusable([found[m] for m in members])}
        for family in all_or_none:
            if not fused.issuperset(family):
                fused.difference_update(family)
        in_fused = {member: name for name in fused for member in groups[name]}

        # jobs: (key, type, shape, use, sources)
        jobs = []
        for name in fused:
            parts = [found[m] for m in groups[name]]
            shape = (parts[0][0].shape[0], sum(spec.shape[1] for spec, _ in parts))
            jobs.append((name, parts[0][1].type, shape, MATMUL, [info for _, info in parts]))
        for spec, info in found.values():
            if spec.name not in in_fused:
                jobs.append((spec.name, info.type, spec.shape, spec.use, [info]))

        by_buft: dict[int, list] = {}
        placed: dict[tuple[str, int], str] = {}
        alias: dict[str, str] = {}
        for job in jobs:
            key, kind, shape, use, sources = job
            home = self._choose_buffer(kind, shape, use)
            if len(sources) == 1:
                first = placed.setdefault((sources[0].name, home), key)
                if first != key:
                    alias[key] = first  # a tied head in the same buffer type is the embedding itself
                    continue
            by_buft.setdefault(home, []).append(job)

        total = sum(info.nbytes for job_list in by_buft.values() for job in job_list for info in job[4])
        for home, job_list in by_buft.items():
            self._allocate(home, job_list)
        done = 0
        for home, job_list in by_buft.items():
            for key, *_, sources in job_list:
                self._upload(self._tensors[key], sources, whole=home < len(self._bufts) - 1)
                done += sum(info.nbytes for info in sources)
                progress(done, total)
        for key, other in alias.items():
            self._tensors[key] = self._tensors[other]
        self._views(groups, found, fused)

    def _allocate(self, home: int, jobs: list) -> None:
        params = ffi.new("struct ggml_init_params *", {"mem_size": (len(jobs) + 1) * lib.ggml_tensor_overhead(), "no_alloc": True})
        ctx = lib.ggml_init(params[0])
        self._contexts.append(ctx)
        for key, kind, shape, _, sources in jobs:
            tensor = lib.ggml_new_tensor(ctx, kind, len(shape), shape)
            lib.ggml_set_name(tensor, key.encode()[:63])
            self._tensors[key] = tensor
            name = text(lib.ggml_type_name(kind))
            self.bytes_by_type[name] = self.bytes_by_type.get(name, 0) + sum(info.nbytes for info in sources)
        buft = self._bufts[home]
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)
        if buffer == ffi.NULL:
            need = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, buft)
            raise DeviceError(
                f"{self.file.path} needs {need >> 20} MiB for weights on {self.backend.device.name}, "
                f"which has {self.backend.device.memory_free >> 20} MiB free; use a smaller quantisation or another device"
            )
        lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        self._buffers.append(buffer)
        if home < len(self._bufts) - 1:
            self.repacked_bytes += lib.ggml_backend_buffer_get_size(buffer)

    def _upload(self, tensor, sources: list[TensorInfo], whole: bool) -> None:
        if whole and len(sources) > 1:  # a repacking buffer takes a tensor in one piece only
            data = b"".join(self.file.read(info.name) for info in sources)
            lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, len(data))
            return
        offset = 0
        for info in sources:
            with self.file.read(info.name) as data:
                pointer = ffi.from_buffer(data)
                lib.ggml_backend_tensor_set(tensor, pointer, offset, info.nbytes)
                ffi.release(pointer)
            offset += info.nbytes

    def _views(self, groups: dict, found: dict, fused: set) -> None:
        for name, members in groups.items():
            rows = tuple(found[m][0].shape[1] for m in members)
            if name in fused:
                self._groups[name] = Group((), rows, self._tensors[name])
            else:
                self._groups[name] = Group(tuple(self._tensors[m] for m in members), rows, None)

    # -- access

    def __getitem__(self, name: str):
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def group(self, name: str) -> Group:
        return self._groups[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all weight buffers."""
        return sum(lib.ggml_backend_buffer_get_size(b) for b in self._buffers)

    @property
    def fused_groups(self) -> int:
        return sum(group.fused is not None for group in self._groups.values())

    def close(self) -> None:
        for buffer in self._buffers:
            lib.ggml_backend_buffer_free(buffer)
        for ctx in self._contexts:
            lib.ggml_free(ctx)
        self._buffers, self._contexts, self._tensors = [], [], {}
