"""llama.cpp through libllama: the reference for parity checks."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.kv import KVTypes
from ..errors import DeviceError, ModelError
from ..ggml.device import Device, devices
from ..ggml.library import FITNESS, ffi, lib
from ..models.rope import KINDS, RopeOptions

PER_HEAD = ffi.new("char[]", rb"(attn_[kv]_b|altup_proj|altup_unembd_proj)\.weight$")  # stacks of matrices


def stacks_as_they_are() -> Any:
    """Overrides of ``llama_model_params`` that keep llama.cpp from repacking stacks of matrices: ggml's AMX kernels abort on permuted rows (patches/0012), and
    give NaN for some.

    A buffer type of caller memory prevents it; the CPU's own type would still be repacked.
    """
    buffer = lib.ggml_backend_cpu_buffer_from_ptr(ffi.cast("void *", 4096), 0)  # not inspected
    plain = lib.ggml_backend_buffer_get_type(buffer)
    lib.ggml_backend_buffer_free(buffer)
    return ffi.new("struct llama_model_tensor_buft_override[2]", [(PER_HEAD, plain)])  # terminated by a NULL pattern


class LlamaReference:
    """A llama.cpp model and context with flash attention and micro-batches as large as the chunk. Owns both."""

    def __init__(
        self,
        path: str | Path,
        device: Device,
        n_ctx: int,
        chunk: int,
        threads: int,
        kv: KVTypes = KVTypes(),
        rope: RopeOptions | None = None,
        watch: bool = False,
    ):
        """``watch``: keep the last values of nodes named in ``watched`` in ``nodes``."""
        lib.keep_errors()  # llama.cpp logs every tensor
        params = lib.llama_model_default_params()
        here = device.kind not in ("cpu", "rpc")  # workers are compared with this machine's CPU
        params.n_gpu_layers = -1 if here else 0
        # a worker computes with weights as in the file, so none are repacked
        params.use_extra_bufts = device.kind != "rpc" and not FITNESS.refused
        if here:
            gpus = [d.name for d in devices() if d.kind in ("gpu", "igpu")]
            params.split_mode, params.main_gpu = lib.LLAMA_SPLIT_MODE_NONE, gpus.index(device.name)
        else:
            overrides = stacks_as_they_are()
            params.tensor_buft_overrides = overrides
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {path}, so there is no reference to compare with")
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, chunk, chunk
        options.n_threads = options.n_threads_batch = max(1, threads)
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        options.type_k, options.type_v = kv.ids
        if rope is not None:
            names = {"freq_base": "rope_freq_base", "freq_scale": "rope_freq_scale"}
            for name in ("freq_base", "freq_scale", "orig_ctx", "ext_factor", "attn_factor", "beta_slow", "beta_fast"):
                if (value := getattr(rope, name)) is not None:
                    setattr(options, names.get(name, f"yarn_{name}"), value)
            if rope.scaling is not None:
                options.rope_scaling_type = KINDS.index(rope.scaling)
        self.nodes: dict[str, np.ndarray] = {}
        self.watched: Collection[str] = ()
        if watch:
            self._watcher = ffi.callback("bool(struct ggml_tensor *, bool, void *)", self._seen)
            options.cb_eval = self._watcher
        self._ctx = lib.llama_init_from_model(self._model, options)
        if not self._ctx:
            lib.llama_model_free(self._model)
            raise DeviceError(f"llama.cpp has no memory for a context of {n_ctx} tokens with {path}")
        self._batch = lib.llama_batch_init(chunk, 0, 1)
        self.chunk, self.used = chunk, 0
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def _seen(self, tensor: Any, ask: bool, _: Any) -> bool:
        name = ffi.string(lib.ggml_get_name(tensor)).decode("utf-8", "replace")
        if ask:
            return name in self.watched
        if tensor.type == lib.GGML_TYPE_F32 and lib.ggml_is_contiguous(tensor):
            self.nodes[name] = values = np.empty(lib.ggml_nbytes(tensor) // 4, np.float32)
            lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(values), 0, values.nbytes)
        return True

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every token after the previous ones. F32 [T, n_vocab]."""
        out = np.empty((len(tokens), self.n_vocab), np.float32)
        for first in range(0, len(tokens), self.chunk):
            part = tokens[first : first + self.chunk]
            self._batch.n_tokens = len(part)
            for i, token in enumerate(part):
                self._batch.token[i], self._batch.pos[i] = token, self.used + i
                self._batch.n_seq_id[i], self._batch.seq_id[i][0], self._batch.logits[i] = 1, 0, 1
            if lib.llama_decode(self._ctx, self._batch) != 0:
                raise ModelError("llama.cpp failed to compute the reference")
            for i in range(len(part)):
                row = ffi.buffer(lib.llama_get_logits_ith(self._ctx, i), 4 * self.n_vocab)
                out[first + i] = np.frombuffer(row, np.float32)
            self.used += len(part)
        return out

    def reset(self) -> None:
        """The next tokens begin a text."""
        lib.llama_memory_clear(lib.llama_get_memory(self._ctx), True)
        self.used = 0

    def close(self) -> None:
        if self._ctx:
            lib.llama_batch_free(self._batch)
            lib.llama_free(self._ctx)
            lib.llama_model_free(self._model)
            self._ctx = ffi.NULL
