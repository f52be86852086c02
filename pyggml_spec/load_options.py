"""How a model is loaded: one declaration for Python, the command line, the server and `plan`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .cache.kv import MOST_CONTEXT, KVTypes
from .checks import either, numbers, path, whole
from .engine.options import DEFAULT_CHUNK, MOST_WIDTH, WIDEST_CHUNK
from .errors import ContextError, EngineError, PairError, PyspecError
from .models.placement import ExpertOptions
from .models.rope import RopeOptions
from .speculation.methods import Methods, methods

AUTO = "auto"
MOST_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a target and its drafters are loaded.

    Attributes:
        device: name as in ``devices()``; None takes the first GPU, or the CPU. Several, separated by commas: the target's layers are split over
            them; a CPU among GPUs has the first layers, whatever the order.
        threads: CPU threads, fixed; None takes as many as other work leaves cores for, at most 16, and adapts while running.
        kernels: "native" or "ggml" for products on a CPU; None takes "native" on x86 with AVX2, and "ggml" elsewhere, whose results equal llama.cpp's bit for bit.
        n_ctx: tokens of context; 0 takes the trained context; None that too, or as many as fit three quarters of the free memory and all but 4 GiB of
            it; ``Session.configuration`` reports which.
        draft_width: rows per verified block; None lets the speculation policy choose, from costs and acceptance of the steps so far.
        graphs: False disables CUDA graph replay for the whole process (a control).
        cache_type_k, cache_type_v: types of the target's K and V rows, of ``cache.kv.TYPES``.
        draft_cache_type_k, draft_cache_type_v: of the drafter's. Without any of them "q8_0" where the device's attention reads such rows as they lie (patches/0037), and "f16"
            elsewhere; without one of them that one is "f16".
        chunk: widest prefill chunk in tokens; with one slot also the unit in which prompt prefixes are reused. None takes 512, and 2,048 for several slots on a GPU with
            memory for it.
        prefix_cache: folder in which computed prompts outlive the process; made if it does not exist. Without it they are kept in memory.
        prefix_memory: bytes on the device for them; None takes 1 GiB, or an eighth of what is free if that is less. 0 still reuses what the
            previous prompt left in place, if the model is attention only.
        prefix_disk: bytes that the folder may take, None for 8 GiB; the least recently used files are deleted.
        experts: routed experts of the target that stay in host memory; None keeps all of them on the device.
        spec: drafting methods, of ``speculation.methods.METHODS`` and named as in llama.cpp's `--spec-type`: a list, or one text with commas; None takes the drafter of ``draft``,
            or else a drafter in the target's folder (`dflash-*.gguf`, `*eagle3*.gguf`, ... that fits), or else the target's own MTP layer if its file has one, or else, on a CPU and without ``draft_width``, n-grams of the text itself ("suffix"), which are
            verified only where that is expected to be faster. "none" or an empty list disables drafting.
        no_spec: drafting methods that are excluded, listed in the same way.
        draft_vocab: drafters choose among the first so many tokens of the vocabulary, which are the frequent ones where it was made of merges: their
            heads take less time, and some drafts are not made. None for all of it.
        tensor_split: layers of each of several devices, in proportion and in the order in which they are named; None takes their free
            memory, and gives a CPU what GPUs have no room for.
        offload_prompts: prompt chunks of so many rows or more compute on the device with copies of the experts that ``experts`` keeps in host memory,
            or of the layers that a CPU has, layer by layer; "auto" measures from how many rows on that is faster. None: the CPU computes what
            lies in its memory.
        mmproj: encoder of pictures (`mmproj-*.gguf`) that was made for the target: prompts may have pictures then. "auto" takes one in the target's folder, if it fits.
        lora: LoRA adapters of the target, (file, scale) each; requests may choose other scales.
        rope: replaces what the target's file has about positions, to stretch its context: as llama.cpp's options of these names.

    Raises:
        PyspecError: a value out of range or of another type; the message names it.
    """

    device: str | None = None
    threads: int | None = None
    kernels: str | None = None
    n_ctx: int | None = None
    draft_width: int | None = None
    graphs: bool = True
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    draft_cache_type_k: str | None = None
    draft_cache_type_v: str | None = None
    chunk: int | None = None
    prefix_cache: str | Path | None = None
    prefix_memory: int | None = None
    prefix_disk: int | None = None
    experts: ExpertOptions | None = None
    spec: Sequence[str] | str | None = None
    no_spec: Sequence[str] | str = ()
    draft_vocab: int | None = None
    tensor_split: Sequence[float] | None = None
    offload_prompts: int | str | None = None
    rope: RopeOptions | None = None
    mmproj: str | Path | None = None
    lora: Sequence[tuple[str | Path, float]] = ()

    def __post_init__(self) -> None:
        either(self.experts, ExpertOptions, "`experts`")
        either(self.rope, RopeOptions, "`rope`")
        if self.tensor_split is not None:
            object.__setattr__(self, "tensor_split", tuple(numbers(self.tensor_split, "the proportions (`tensor_split`)")))
        if self.n_ctx is not None:
            whole(self.n_ctx, "the context (`n_ctx`)", 0, MOST_CONTEXT, ContextError)
        if self.draft_width is not None:
            whole(self.draft_width, "the draft width", 1, MOST_WIDTH, PairError)
        if self.chunk is not None:
            whole(self.chunk, "the prefill chunk", 1, WIDEST_CHUNK)
        if self.mmproj is not None:
            path(self.mmproj, "the encoder of pictures (`mmproj`)")
        if self.prefix_cache is not None:
            path(self.prefix_cache, "the folder of the prefix cache (`prefix_cache`)")
        for value, what in (
            (self.prefix_memory, "the memory for the prefix cache"),
            (self.prefix_disk, "the space for the prefix cache's files"),
        ):
            if value is not None:
                whole(value, what, 0, MOST_BYTES, PyspecError)
        if (rows := self.offload_prompts) not in (None, AUTO):
            rows = whole(rows, f"`offload_prompts`, rows of a chunk if it is not {AUTO!r},", 1, WIDEST_CHUNK)
            if rows > (chunk := self.chunk or DEFAULT_CHUNK):
                raise EngineError(f"no chunk of a prompt has the {rows} rows of `offload_prompts`: a `chunk` has {chunk}; use fewer")
        pairs = [(path(name, "an adapter (`lora`)"), *numbers([scale], "the scale of an adapter (`lora`)")) for name, scale in self.lora]
        object.__setattr__(self, "lora", tuple(pairs))
        _ = self.kv, self.draft_kv, self.methods

    @classmethod
    def of(cls, options: "LoadOptions | None", fields: Mapping[str, Any]) -> "LoadOptions":
        """``options``, or the defaults, with these fields replaced."""
        return replace(options, **fields) if options is not None else cls(**fields)

    @property
    def kv(self) -> KVTypes:
        """``cache_type_k`` and ``cache_type_v``."""
        return KVTypes(self.cache_type_k, self.cache_type_v)

    @property
    def draft_kv(self) -> KVTypes | None:
        """``draft_cache_type_k`` and ``draft_cache_type_v``; None without any of them."""
        if self.draft_cache_type_k is None and self.draft_cache_type_v is None:
            return None
        k, v = ("f16" if kind is None else kind for kind in (self.draft_cache_type_k, self.draft_cache_type_v))
        return KVTypes(k, v)

    @property
    def methods(self) -> Methods:
        """The drafting methods that ``spec``, ``no_spec`` and ``draft_vocab`` allow."""
        return methods(self.spec, self.no_spec, self.draft_vocab)
