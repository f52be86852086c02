"""The steps of loading: devices, files, context, weights, engine. `plan` takes the same steps on counting backends."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from .background import Background
from .cache.kv import KV_BUCKET, MOST_CONTEXT, KVTypes, draft_types, padded
from .checks import path, whole
from .drafters.base import Drafter
from .drafters.model import ModelDrafter
from .drafters.multi import AnyDrafter, combine
from .drafters.names import kind_of
from .drafters.pairs import drafters_for
from .engine.devices import Segment
from .engine.memory import MemoryCount, count_memory, longest
from .engine.options import DEFAULT_CHUNK, MOST_MASKED, MOST_WIDTH, SLOTS_CHUNK, AtMost, EngineOptions, check_masks, check_options
from .engine.resources import P
from .engine.runner import ModelRunner
from .errors import DeviceError, EngineError, ModelError, PairError, PyspecError
from .ggml.device import Backend, build_notes, devices, execution_order, free_bytes, open_backends, pick_devices, present
from .ggml.library import unloaded_gpu_library
from .ggml.peer import enable_peer_access
from .ggml.upload import Uploads
from .gguf_io import GGUFFile
from .load_options import AUTO, LoadOptions
from .models.adapters import Adapters
from .models.decoder import Decoder
from .models.placement import Placement
from .models.registry import embedded_drafter, open_drafter, open_target
from .models.rope import ignored_yarn
from .models.weights import Weights
from .speculation.methods import Methods
from .text.tokenizer import Tokenizer, check_vocabulary, first_difference, vocabulary_note
from .vision.encoder import Encoder, companion

DEMO = Path(__file__).parent / "demo"
DEMO_TARGET, DEMO_DRAFTER, DEMO_MTP = DEMO / "target.gguf", DEMO / "drafter.gguf", DEMO / "mtp.gguf"
TRAINED = "the model's"  # where a context comes from
WIDTH = 16  # rows of the widest block without a drafter
LEAST_CONTEXT = 4096  # tokens that the default context has even where memory has no room for them
CONTEXT_STEP = 1024  # a context that memory limits is a multiple of it
RESERVE = 4 << 30  # bytes of a device, and at most a quarter of what is free, that the default context leaves
ROUGH_BUFFERS = 1 << 30  # bytes, more than all buffers of a default chunk that do not grow with the context
WIDE_CHUNK_ROOM = 16 << 30  # bytes beside the weights from which on the buffers of wide chunks take less than an eighth

Drafts = str | Path | Sequence[str | Path] | None  # files of drafters
Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) during long work: "weights", "drafter weights", "identity of the target" and
"... drafter" (bytes; for a prefix cache on disk only, once per file), "prefill" (tokens)."""


def silent(what: str, done: int, total: int) -> None:
    """A Progress that reports nothing."""


def owned_by(stack: ExitStack) -> Callable[[P], P]:
    """A function that has ``stack`` close a part, and returns it."""

    def own(part: P) -> P:
        stack.callback(part.close)
        return part

    return own


class Loader:
    """Loads a target and its drafters step by step: ``open``, ``choose_context``, ``load_weights``, ``engine``; `plan` counts instead of the last two.

    Everything it opens is given to ``own``, which closes it.

    Attributes:
        backends: in the order in which layers go through them; ``backend`` is the last one.
        engine_options: of the engine; their context is final after ``choose_context``.
        context_from: where the context comes from: TRAINED, "of N: memory", "" if it was requested.
        ngram: the n-gram method, None without one; ``default_ngram``: whether it was chosen by default.
    """

    def __init__(
        self, target: Path, drafts: Sequence[Path], options: LoadOptions, own: Callable[[P], P], progress: Progress = silent
    ) -> None:
        self._path, self._drafts, self.options, self._own, self._progress = target, drafts, options, cast(Any, own), progress
        self.notes: list[str] = []
        self.drafter: AnyDrafter | None = None
        self.context_from = ""
        self._counts: dict[tuple[int, int], MemoryCount] = {}
        self._uploads: Uploads | None = None

    # -- devices and files

    def open(self) -> None:
        """Opens devices and files, and checks everything that can be checked before weights are read. Raises PyspecError: this model cannot
        be loaded with these options."""
        found = pick_devices(self.options.device)
        self._order = execution_order(found)
        backends = [self._own(backend) for backend in open_backends(found, self.options.threads, self.options.kernels)]
        self.backends: tuple[Backend, ...] = tuple(backends[i] for i in self._order)
        if (
            self.options.device is None
            and found[0].kind == "cpu"
            and (why := unloaded_gpu_library()) is not None
            and "libcuda.so" not in why
        ):
            self.notes.append(f"{why}; until then everything runs on the CPU")  # there is a driver, and so a GPU
        self.notes += enable_peer_access([backend.device for backend in self.backends])
        file = self._own(GGUFFile(self._path))
        file.rope = self.options.rope
        self.target = open_target(file)
        for device in dict.fromkeys(backend.device for backend in self.backends):
            self.notes += [note for note in build_notes(device) if note not in self.notes]
        self.notes += ignored_yarn(file, self.target.arch, self.target.rope)
        if self.options.rope is not None:
            self.notes.append(self._rope_note(file))
        check_vocabulary(file)
        self._tokenizer = self._own(Background(partial(Tokenizer, file)))
        self._tokenizer.start()  # a large vocabulary takes libllama a second
        self.notes += filter(None, [vocabulary_note(file)])
        self._open_drafters(file)
        self.encoder: Encoder | None = self._open_encoder()
        self._choose_engine_options()
        self._place_experts()

    @property
    def backend(self) -> Backend:
        return self.backends[-1]

    @property
    def tokenizer(self) -> Tokenizer:
        """Waits for it. Raises PyspecError: libllama cannot load the vocabulary."""
        return self._tokenizer.result()

    def check_tokenizer(self) -> None:
        """Raises PyspecError: libllama cannot load the vocabulary."""
        self._tokenizer.result()

    @property
    def drafters(self) -> Sequence[Drafter]:
        return self.drafter.methods if self.drafter is not None else ()

    def _rope_note(self, file: GGUFFile) -> str:
        """The rope parameters in use, compared with the file's: an option that this scaling ignores changes nothing."""
        requested, used = file.rope, getattr(self.target, "rope")  # noqa: B009  (a model that takes these options has it)
        file.rope = None
        try:
            own = getattr(open_target(file), "rope")  # noqa: B009
        except ModelError:  # a scaling that is not supported
            return f"positions are {used}, as requested"
        finally:
            file.rope = requested
        same = used == own
        return f"positions are {used}" + (", as in the file: the rope options change nothing" if same else f"; the file has {own}")

    def _open_drafters(self, file: GGUFFile) -> None:
        """The named files, or else the one in the target's folder; and the target's own MTP layer where it is requested, or where there are no others."""
        methods = self.options.methods
        members = [self._open_drafter(file, path) for path in self._drafts]
        if not self._drafts and methods.model:
            members = self._companion(file)
        found = {member.method for member in members}
        if "draft-mtp" in (methods.asked - found if methods.asked or members else methods.model):
            own = embedded_drafter(file)
            if own is not None:
                own.check_pair(self.target)
                members.append(own)
                found.add(own.method)
        if missing := sorted(methods.asked - found):
            raise PairError(f"{file.path.name} has nothing that drafts as {' or '.join(missing)}: give its drafter with `draft`")
        if methods.tokens and not members:
            raise PairError("`draft_vocab` is for drafters that are models, and there is none: give one with `draft`, or leave it out")
        if methods.tokens >= self.target.n_vocab:
            self.notes.append(f"`draft_vocab` {methods.tokens} changes nothing: the vocabulary has {self.target.n_vocab} tokens")
        for member in members if methods.tokens else ():
            member.limit_vocab(methods.tokens, self.target)
        self.drafter = combine(members)

    def _companion(self, file: GGUFFile) -> list[Drafter]:
        """The first drafter in the target's folder that fits it, if there is one. A whole model is none: its name says nothing of this target."""
        for found in companions(file.path):
            try:
                drafter = self._open_drafter(file, found, whole_models=False)
                if len(self.backends) > 1:
                    from .multi_device.split import check_drafter

                    check_drafter(drafter)
            except PyspecError as error:
                self.notes.append(f"{found.name}, which is in the target's folder, does not draft: {error}")
                continue
            if not self.options.methods.asked or drafter.method in self.options.methods.asked:
                self.notes.append(f"{found.name}, found in the target's folder, drafts ({drafter.method}); `spec` none turns that off")
                return [drafter]
        return []

    def _open_drafter(self, file: GGUFFile, draft: Path, whole_models: bool = True) -> Drafter:
        draft_file = self._own(GGUFFile(draft))
        drafter = open_drafter(draft_file, file)
        if isinstance(drafter, ModelDrafter) and not whole_models:
            raise PairError("it is a whole model, which drafts only where it is given with `draft`")
        if drafter.method not in self.options.methods.model:
            remedy = "name it with `spec`, or leave the file out"
            raise PairError(f"{draft.name} drafts as {drafter.method}, which is not among what may draft; {remedy}")
        if note := check_fit(drafter, self.target):
            self.notes.append(f"{draft.name} {note}")
        return drafter

    def _open_encoder(self) -> Encoder | None:
        """The named encoder of pictures, or one in the target's folder where that is wanted and it fits."""
        wanted = self.options.mmproj
        found = companion(self._path) if wanted == AUTO else wanted
        if found is None:
            return None
        try:
            encoder = self._own(Encoder(self._own(GGUFFile(found)), self.target, self.backend, self.options.chunk or DEFAULT_CHUNK))
        except PyspecError as error:
            if wanted != AUTO:
                raise
            self.notes.append(f"{Path(found).name}, which is in the target's folder, encodes no pictures: {error}")
            return None
        if wanted == AUTO:
            self.notes.append(f"{Path(found).name}, found in the target's folder, encodes pictures")
        return encoder

    # -- options of the engine

    def _choose_engine_options(self) -> None:
        wanted, methods = self.options, self.options.methods
        one_cpu = [backend.device.kind for backend in self.backends] == ["cpu"]
        self.default_ngram = one_cpu and self.drafter is None and wanted.draft_width is None and methods.implied is not None
        self.ngram = methods.implied if self.default_ngram else methods.lookup
        self.engine_options = EngineOptions(
            n_ctx=self._requested_context(),
            width=self._width(),
            chunk=wanted.chunk or DEFAULT_CHUNK,
            kv=wanted.kv,
            draft_kv=wanted.draft_kv or self._draft_types(),
            given=self.ngram is not None,
            implied=self.default_ngram,
            pictures=self.encoder is not None,
        )
        check_options(self.engine_options, self.target, self.drafter)

    def _draft_types(self) -> KVTypes:
        """What the drafter's rows are stored as where nobody says."""
        types = draft_types(self.drafter.kv_shapes() if self.drafter is not None else (), self.backend)
        if types != KVTypes():
            why = f"which attention of {self.backend.device.name} reads as they lie, in half the memory"
            self.notes.append(f"the drafter's K/V are {types}, {why}; `draft_cache_type_k` and `draft_cache_type_v` f16 turn that off")
        return types

    def _requested_context(self) -> int:
        """The requested context; by default the least that ``choose_context`` gives."""
        n_ctx, trained = self.options.n_ctx, self.target.context_length
        if n_ctx is None:
            return min(LEAST_CONTEXT, trained)
        if not n_ctx and trained > MOST_CONTEXT:
            self.notes.append(f"the context is {MOST_CONTEXT}, the longest there is: the model was trained with {trained} tokens")
        self.context_from = "" if n_ctx else TRAINED
        n_ctx = n_ctx or min(trained, MOST_CONTEXT)
        if n_ctx > trained:
            self.notes.append(f"the context of {n_ctx} is longer than the {trained} tokens that the model was trained with")
        return n_ctx

    def _width(self) -> int:
        """Rows of the widest verified block."""
        width, limit = self.options.draft_width, isinstance(self.options.draft_width, AtMost)
        if self.drafter is None:
            if limit and self.ngram is None:  # a limit of drafts, and there are none
                return WIDTH
            if width not in (None, 1) and self.ngram is None:
                raise PairError(f"a draft width of {width} needs a drafter: give one with `draft`, or leave the width out")
            return WIDTH if width is None else max(2, int(width))
        if width is None:
            return self.drafter.block_size
        first, width = self.drafter.methods[0], max(2, int(whole(width, "the draft width", 1, MOST_WIDTH, PairError)))
        if limit and width > first.block_size:
            most = f"at most {first.block_size - 1} drafts are made where {width - 1} may be"
            self.notes.append(f"{most}: {first.title} was trained for no more")
            return first.block_size
        if len(self.drafter.methods) > 1 and width > first.block_size:
            raise PairError(
                f"a draft width of {width} is wider than the {first.block_size} that {first.method} drafts, which drafts alone where the width is "
                f"given; use `draft_width` {first.block_size} or less"
            )
        return width

    def _place_experts(self) -> None:
        """Where the target's experts go, and the CPU backend that computes those in host memory."""
        self.placement: Placement | None = None
        self._host: Backend | None = None
        experts, copied = self.options.experts, self.options.offload_prompts is not None
        rows = max(self.engine_options.chunk, self.engine_options.width)
        placement = experts.placement(self.target, rows, copied) if experts is not None else None
        all_on_device = placement is None or all(len(hot) == self.target.experts.n_expert for hot in placement.hot.values())  # type: ignore[union-attr]
        if copied and all_on_device and not self._hosts_layers:
            raise EngineError(
                "`offload_prompts` is for routed experts and layers that lie in host memory, and none do: keep some there (`n_cpu_moe`, or a CPU together with "
                "the device; `experts` in Python), or leave it out"
            )
        if placement is not None and placement.hot:
            cpu = next(d for d in devices() if d.kind == "cpu")
            self._host = self._own(Backend(cpu, self.options.threads, self.options.kernels))
            placement = replace(placement, kernels=self._host.kernels)
        self.placement = placement

    @property
    def _hosts_layers(self) -> bool:
        """Whether a CPU has layers of a target whose other layers are on another device."""
        return len(self.backends) > 1 and self.backends[0].device.kind == "cpu"

    # -- context

    def choose_context(self, slots: int = 1, free: int | None = None, reserved: int = 0) -> None:
        """Sets the context where none was requested: the trained one, or the longest that leaves memory on every device.

        Args:
            slots: the caches of so many sequences are counted too, if there are several.
            free: bytes of each device; None for what they report.
            reserved: bytes on the last device for something else.
        """
        if self._wide_chunks(free, reserved):
            self.engine_options = replace(self.engine_options, slots_chunk=SLOTS_CHUNK)
        if self.options.n_ctx is None:
            trained = self.target.context_length
            n_ctx = self._default_context(slots, free, reserved, min(trained, MOST_CONTEXT))
            limit = "memory" if n_ctx < MOST_CONTEXT else "the longest there is"
            self.context_from = TRAINED if n_ctx == trained else f"of {trained}: {limit}"
            self.engine_options = replace(self.engine_options, n_ctx=n_ctx)
        check_masks(self.engine_options, self.backends)

    def _wide_chunks(self, free: int | None, reserved: int) -> bool:
        """Whether several slots compute prompts in wide chunks: on one GPU with memory to spare, where no chunk was requested."""
        if self.options.chunk is not None or self.placement is not None or not self._one_gpu:
            return False
        weights = sum(file.nbytes for file in {self.target.file, *(member.file for member in self.drafters)})
        left = (free_bytes(present(self.backend.device)) if free is None else free) - reserved - weights
        most = self.options.n_ctx or min(self.target.context_length, MOST_CONTEXT)
        return left >= WIDE_CHUNK_ROOM and SLOTS_CHUNK * padded(most) <= MOST_MASKED

    @property
    def _one_gpu(self) -> bool:
        return [backend.device.kind for backend in self.backends] == ["gpu"]

    def narrow_chunks(self) -> None:
        """Several slots compute prompts in chunks of the default width from now on."""
        self.engine_options = self.engine_options.narrow
        self._counts.clear()

    def _default_context(self, slots: int, free: int | None, reserved: int, most: int) -> int:
        rooms = [room(free_bytes(present(b.device)) if free is None else free) for b in self.backends]
        rooms[-1] -= reserved
        options = replace(self.engine_options, n_ctx=most, slots=slots)
        if self.placement is None and self._host is None and len(rooms) == 1:
            weights = sum(file.nbytes for file in {self.target.file, *(member.file for member in self.drafters)})
            if weights + weights // 4 + rough_bytes(self.target, self.drafter, options) <= rooms[0]:
                return most  # without counting

        def taken(n_ctx: int) -> list[int]:
            with self.counted(n_ctx):
                return self.by_device(self.totals(n_ctx, slots))

        return default_context(taken, rooms, most)

    def by_device(self, totals: Sequence[int]) -> list[int]:
        """Of bytes per backend, each with those of the other backends on the same device."""
        names = [backend.device.name for backend in self.backends]
        return [sum(n for n, other in zip(totals, names, strict=True) if other == name) for name in names]

    @contextmanager
    def counted(self, n_ctx: int) -> Iterator[None]:
        """Within, the models have weights for an engine with this context that are counted: nothing is read or allocated."""
        with ExitStack() as stack:
            notes = list(self.notes)
            backends = tuple(backend.counted() for backend in self.backends)
            self._counts.clear()
            self._make_weights(backends, n_ctx, owned_by(stack), silent)
            self._open_streams(backends)
            self.notes = notes
            yield

    def count(self, n_ctx: int, slots: int = 1) -> MemoryCount:
        """Bytes of an engine with this context, within ``counted``."""
        if (n_ctx, slots) not in self._counts:
            options = replace(self.engine_options, n_ctx=n_ctx, slots=slots)
            self._counts[n_ctx, slots] = count_memory(self.backend, self.target, self.drafter, options)
        return self._counts[n_ctx, slots]

    def totals(self, n_ctx: int, slots: int = 1, reserved: int = 0) -> list[int]:
        """The same on each backend, with several ``slots`` those of their engine too; ``reserved``: more on the last one."""
        totals = self.count(n_ctx).totals()
        if slots != 1:
            totals = [a + b for a, b in zip(totals, self.count(n_ctx, slots).totals(weights=False), strict=True)]
        totals[-1] += reserved
        return totals

    def close_copies(self) -> None:
        """Prompts compute without copies of weights in host memory from now on."""
        self.target.weights.close_streams()
        self._counts.clear()

    # -- weights and engine

    def load_weights(self) -> None:
        """Reads the weights onto the devices, or has threads read them until there is a runner."""
        files = {self.target.file, *(member.file for member in self.drafters)}
        if len(self.backends) == 1 and self._host is None and Uploads.worth(self.backend, sum(file.nbytes for file in files)):
            self._uploads = Uploads(self.backend)
        self._make_weights(self.backends, self.engine_options.n_ctx, self._own, self._progress)
        if self._host is not None and self.placement is not None:
            where = "are in pinned memory" if self.target.weights.pinned else "stay mapped"
            mapped = f"{self.target.weights.host_bytes / 2**30:.2f} GiB of the file {where}"
            self.notes.append(f"{self.placement.description(self.target)} ({mapped})")
        self._open_streams(self.backends)

    def _make_weights(self, backends: Sequence[Backend], n_ctx: int, own: Any, progress: Progress) -> None:
        segments, placed = self.segments(backends, n_ctx), (self.placement, self._host)
        report = partial(progress, "weights")
        if segments:
            from .multi_device.split import SplitWeights

            self.target.weights = cast(Weights, own(SplitWeights(self.target, segments, self.drafter, *placed, report)))
        else:
            self.target.weights = own(_weights(self.target, backends[-1], report, *placed, self._uploads))
        if self.options.lora:
            if segments:
                raise DeviceError("adapters need a target on one device; leave out `lora`, or merge the adapters into the model file")
            self.target.weights.adapters = Adapters(backends[-1], self.target, self.options.lora)
        for member in self.drafters:
            member.weights = own(_weights(member, backends[-1], partial(progress, "drafter weights"), None, None, self._uploads))

    def segments(self, backends: Sequence[Backend], n_ctx: int) -> tuple[Segment, ...]:
        """Which layers each device has; empty for one device."""
        shares = self.options.tensor_split
        if len(backends) == 1:
            if shares is not None and (len(shares) != 1 or not 0 < shares[0] < math.inf):
                one = f"there is one for {','.join(f'{share:g}' for share in shares)}: name them with `device`, separated by commas"
                raise EngineError(f"proportions of a split need several devices, and {one}")
            return ()
        from .multi_device.split import check_drafter, split

        check_drafter(self.drafter)
        if shares is not None and len(shares) == len(backends):
            shares = [shares[i] for i in self._order]
        sizes = self.target.file.tensors
        at_last = sizes["output.weight" if "output.weight" in sizes else "token_embd.weight"].nbytes
        at_last += sum(member.file.nbytes for member in self.drafters if member.file is not self.target.file)
        per_layer = n_ctx * token_bytes(self.target, None, self.engine_options) // self.target.n_layer
        return split(self.target, backends, shares, [free_bytes(b.device) for b in backends], at_last, per_layer)

    def runner(self) -> ModelRunner:
        """The engine; without copies of offloaded weights, if it has no memory for both."""
        make = partial(runner_of, self.backend, self.target, self.drafter, self.engine_options, self.notes)
        try:
            runner = make()
        except (DeviceError, EngineError) as error:
            if not self.target.weights.streams:
                raise
            self._without_streams(f"with copies of two layers on the device, {error}")
            runner = make()
        self._own(runner)
        if self._uploads is not None:  # before anything is computed
            self._uploads.wait(partial(self._progress, "weights"))
        self._settle_streams(runner)
        return runner

    # -- prompt chunks that compute with copies of weights in host memory

    def _open_streams(self, backends: Sequence[Backend]) -> None:
        """Memory on the devices for the copies, if they are requested and all devices have room for it."""
        if self.options.offload_prompts is None:
            return None
        rows = self.options.offload_prompts if isinstance(self.options.offload_prompts, int) else 1
        weights: Any = self.target.weights
        parts: Any = [weights] if self._copies_layers else getattr(weights, "parts", [weights])
        for part in parts:
            device = backends[1].device if self._copies_layers else part.backend.device
            if device.kind == "rpc":
                return self._without_streams(f"copies for {device.name} would go over the network")
            try:
                stream = part.stream_layers(rows) if self._copies_layers else part.open_stream(rows)
            except DeviceError as error:
                return self._without_streams(str(error))
            if stream is not None and not stream.fits:
                free, need = free_bytes(present(device)) >> 20, stream.need >> 20
                stream.close()
                return self._without_streams(f"copies of two layers need {need} MiB on {device.name}, which has {free} MiB free")
        return None

    @property
    def _copies_layers(self) -> bool:
        """Whether whole layers are copied, and not experts."""
        return self._hosts_layers and not self.target.weights.hosts_experts

    def _without_streams(self, why: str) -> None:
        what = "layers" if self._copies_layers else "experts"
        self.close_copies()
        self.notes.append(f"prompts of {what} in host memory are computed by the CPU: {why}")

    def _settle_streams(self, engine: ModelRunner) -> None:
        """From how many rows on chunks compute with copies: as requested, or as measured."""
        streams = self.target.weights.streams
        if not streams:
            return None
        chunk, where = None, " and ".join(dict.fromkeys(stream.device.device.name for stream in streams))
        if self.options.offload_prompts == AUTO:
            from .multi_device.offload import settle

            chunk = settle(engine)
            if chunk is None or chunk.copies >= chunk.host:
                engine.graphs.drop("prefill", streamed=True)
                engine.devices.drop_offload()
                took = f"a context of {self.engine_options.n_ctx} holds no chunk that could be measured"
                if chunk is not None:
                    took = f"a chunk of {chunk.rows} rows takes {chunk.host:.0f} ms there, and {chunk.copies:.0f} ms with copies on {where}"
                return self._without_streams(took)
        took = f"; {chunk.rows} rows take {chunk.copies:.0f} ms, by the CPU {chunk.host:.0f} ms" if chunk is not None else ""
        layers, nbytes = sum(len(stream.layers) for stream in streams), sum(stream.nbytes for stream in streams)
        which, more = f"the experts of {layers} layer{'s' * (layers > 1)}", ""
        if (guests := self.target.weights.offloaded) is not None:
            which = f"{layers} layer{'s' * (layers > 1)} of the CPU"
            more = f", {guests.buffer_bytes / 2**30:.2f} GiB of host memory in addition to the layers"
        copies = f"copies of {which} ({nbytes / 2**30:.2f} GiB there{more}{took})"
        self.notes.append(f"chunks of prompts of {streams[0].rows} rows or more compute on {where} with {copies}")
        return None


def _weights(model: Decoder | Drafter, backend: Backend, *more: Any) -> Weights:
    return Weights(backend, model.file, model.specs(), model.groups(), model.fused_alike(), *more)


def files_to_load(target: str | Path | None, draft: Drafts, methods: Methods) -> tuple[Path, tuple[Path, ...]]:
    """The target's file and the drafters'; without a target, the embedded pair: its block drafter, and its MTP layer where that is
    requested. Raises PyspecError: a drafter without a target, something that is no path, or no embedded pair."""
    if target is not None:
        several = isinstance(draft, Sequence) and not isinstance(draft, (str, bytes))
        drafts: Any = () if draft is None else draft if several else (draft,)
        return path(target, "`target`"), tuple(path(one, "the drafter (`draft`)") for one in drafts)
    if draft is not None:
        raise PyspecError(f"the drafter {draft} needs its target: name it with `target`")
    if not DEMO_TARGET.exists():
        raise PyspecError("this installation has no embedded pair; name a target with `target`")
    found = {"draft-dflash": DEMO_DRAFTER} | ({"draft-mtp": DEMO_MTP} if methods.asked else {})
    return DEMO_TARGET, tuple(file for method, file in found.items() if method in methods.model and file.exists())


def companions(target: Path) -> list[Path]:
    """Drafters by name in the folder of ``target``, those of the most tokens per step first."""
    with suppress(OSError):
        names = [path.name for path in target.parent.iterdir() if path.suffix.lower() == ".gguf" and path.name != target.name]
        kinds = {name: kind for name in sorted(names) if (kind := kind_of(name)) is not None}
        return [target.parent / name for name in sorted(kinds, key=kinds.__getitem__)]
    return []


def check_fit(drafter: Drafter, target: Decoder) -> str:
    """Raises PairError unless the drafter fits the target, by shape and vocabulary; returns how far a small model's vocabulary does, or ""."""
    drafter.check_pair(target)
    if isinstance(drafter, ModelDrafter):
        return f"has another vocabulary: {drafter.vocabulary.description()}" if drafter.vocabulary is not None else ""
    if difference := first_difference(target.file, drafter.file):
        fits = f"a drafter only fits the target it was made for: {drafters_for(target.file)}"
        raise PairError(f"{drafter.file.path.name} cannot draft for {target.file.path.name}: {difference}; {fits}")
    return ""


# -- the default context: the trained one, or as much of it as memory has room for


def room(free: int) -> int:
    """Bytes of those that are free that the default context may use."""
    return free - min(free // 4, RESERVE)


def default_context(taken: Callable[[int], Sequence[int]], rooms: Sequence[int], most: int) -> int:
    """The longest context up to ``most`` whose bytes ``taken`` fit ``rooms``; LEAST_CONTEXT fits by definition."""
    least = min(LEAST_CONTEXT, most)
    return least if most == least else max(least, longest(taken, rooms, most, CONTEXT_STEP, least, exact=False))


def runner_of(backend: Backend, target: Decoder, drafter: AnyDrafter | None, options: EngineOptions, notes: list[str]) -> ModelRunner:
    """The runner with these options; several slots compute prompts in chunks of the default width where there is no memory for wide ones, and ``notes``
    says so."""
    try:
        return ModelRunner(backend, target, drafter, options)
    except (DeviceError, EngineError) as error:
        if options.narrow.chunk == options.chunk:
            raise
        why = str(error)
    runner = ModelRunner(backend, target, drafter, options.narrow)
    notes.append(f"several slots compute prompts in chunks of {runner.options.chunk} tokens: with {options.chunk}, {why}")
    return runner


def rough_bytes(target: Decoder, drafter: AnyDrafter | None, options: EngineOptions) -> int:
    """An upper bound of the bytes of caches and graphs on one device, without counting graphs."""
    sequences = options.slots + (options.slots > 1)
    masks = 8 * options.chunk
    return (options.n_ctx + KV_BUCKET) * (token_bytes(target, drafter, options) * sequences + masks) + ROUGH_BUFFERS * -(
        -options.chunk // DEFAULT_CHUNK
    )


def token_bytes(target: Decoder, drafter: AnyDrafter | None, options: EngineOptions) -> int:
    """Bytes of K/V of one token of context, the drafter's included."""
    shapes = drafter.kv_shapes() if drafter is not None else ()
    return sum(map(options.kv.row_bytes, target.kv_shapes())) + sum(map(options.draft_kv.row_bytes, shapes))
