"""Weights of layers that live in host memory, as another device would have them: wide chunks of prompts compute there with copies of them.

The host's own weights may be packed for its kernels, so these are read from the file once more, into memory that the device copies from by itself
where it has such. A layer is copied whole while the one before computes (``ggml/weight_stream.py``).
"""

from collections.abc import Callable, Iterable

from ..errors import DeviceError
from ..ggml.device import Backend, device_handle, free_bytes
from ..ggml.library import BufferType, Tensor, ffi, lib
from ..ggml.weight_stream import WeightStream
from ..gguf_io import GGUFFile, TensorInfo
from ..models.weights import Spec, Weights


class OffloadedWeights(Weights):
    """``weights[name]`` are the copies of a layer that a stream brings, of whichever layer it has brought last.

    Attributes:
        layers: by the number of a layer, its tensors in host memory.
    """

    def __init__(
        self,
        host: Backend,
        device: Backend,
        device_weights: Weights,
        home: Weights,
        file: GGUFFile,
        specs: Iterable[Spec],
        groups: dict[str, tuple[str, ...]],
        alike: Iterable[tuple[str, ...]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """``device_weights``: what every layer may read. ``home``: the same layers on the host."""
        self._host, self._own_of_device = host, device_weights
        self._fused_at_home = {members[0]: len(home.group(name).runs[0].rows) for name, members in groups.items()}
        super().__init__(device, file, specs, groups, alike, progress)
        self.layers: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self._tensors.items():
            self.layers.setdefault(int(name.split(".")[1]), {})[name] = tensor

    def _types_of(self, backend: Backend) -> list[BufferType | None]:
        return [backend.default_buffer_type]

    def fusable(self, parts: list[tuple[Spec, TensorInfo]]) -> int:
        """As many as at home: a recurrent state keeps fused projections whole, and its rows are copied between the two."""
        return self._fused_at_home[parts[0][0].name]

    def _host_type(self) -> BufferType:
        return lib.ggml_backend_dev_host_buffer_type(device_handle(self.backend.device)) or lib.ggml_backend_cpu_buffer_type()

    def _allocate(self, home: int, jobs: list) -> None:
        ctx = self._context(len(jobs))
        self._new_tensors(ctx, home, jobs)
        if self.backend.counting:
            self._buffers.append(self.backend.allocate(ctx, self._host_type()))
            return
        need, free = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, self._host_type()), free_bytes(self._host.device)
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(ctx, self._host_type()) if need <= free else ffi.NULL
        if buffer == ffi.NULL:
            raise DeviceError(f"copies of its layers need {need >> 20} MiB of host memory in addition, of which {free >> 20} are free")
        lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        self._buffers.append(buffer)

    def _make_groups(self, groups: dict[str, list[tuple[str, ...]]], found: dict) -> None:
        self._grouped = groups, found
        super()._make_groups(groups, found)

    def lend(self, stream: WeightStream) -> None:
        """From now on names are those of the stream's tensors on the device."""
        for tensors in stream.layers.values():
            self._tensors.update(tensors)
        self._groups.clear()
        super()._make_groups(*self._grouped)

    # -- what every layer may read

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name] if name in self._tensors else self._own_of_device[name]

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name) or self._own_of_device.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._own_of_device
