"""A loaded pair: files, models, tokenizer and engine together, and generation from text."""

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack, cast

from .arguments import GenerateOptions, RequestOptions
from .cache.kv import KV_BUCKET
from .cache.kv_types import MOST_CONTEXT, KVTypes
from .cache.prefix import PrefixCache, Reuse, layout_of
from .cache.prefix_files import PrefixFiles
from .checks import either, numbers, path, token_ids, whole
from .concurrent import ConcurrentSession
from .drafters.base import Drafter
from .drafters.multi import AnyDrafter, combine
from .drafters.pairs import drafters_for
from .engine.graphs import STREAMED
from .engine.lock import ENDED, Turns
from .engine.options import MOST_WIDTH, WIDEST_CHUNK, AtMost, EngineOptions, candidate_widths, check_masks, check_options
from .engine.planned import WEIGHTS, Placed, bytes_taken, largest, plan_weights
from .engine.request import PLAIN, SPECULATIVE, LoopOptions
from .engine.resources import Closable, P
from .engine.runner import ModelRunner
from .engine.scheduler import Scheduler, rests
from .engine.stats import Stats
from .errors import ContextError, DeviceError, EngineError, ModelError, PairError, PyspecError, SamplingError
from .events import StepEvent
from .folders import why_nothing_is_kept
from .ggml.cores import CORE_MONITOR
from .ggml.device import Backend, build_notes, devices, disable_graph_replay, free_bytes, present, release_threads
from .ggml.devices import execution_order, open_backends, pick_devices
from .ggml.library import versions
from .ggml.peer import enable_peer_access
from .gguf_io import GGUFFile
from .models.decoder import Decoder
from .models.placement import ExpertOptions, Placement
from .models.registry import embedded_drafter, open_drafter, open_target
from .models.rope import RopeOptions, ignored_yarn
from .models.weights import Weights
from .multi_device.lanes import GROUPS
from .multi_device.offload_calibration import settle
from .multi_device.split import Segment, SplitWeights, check_drafter, split
from .sampling.recommended import chosen
from .sampling.sampler import Sampler, Sampling
from .speculation.calibrate import cached_costs, cached_kinds, keep_drafts, known_drafts, plain_cost
from .speculation.confidence import Confidence
from .speculation.methods import Methods, methods
from .speculation.ngram_policy import NgramPolicy
from .speculation.policy import NEVER_PAYS, AcceptancePrior, SpeculationPolicy, StepPlan, chain_plans, useful_widths, worth_keeping
from .speculation.synthetic import SyntheticAcceptance
from .text.stream import BlockText, stop_texts
from .text.tokenizer import Tokenizer, first_difference, vocabulary_note

DEMO = Path(__file__).parent / "demo"
DEMO_TARGET, DEMO_DRAFTER, DEMO_MTP = DEMO / "target.gguf", DEMO / "drafter.gguf", DEMO / "mtp-demo.gguf"
LEAST_CONTEXT = 4096  # tokens; what is taken without asking where memory has no room for the model's own context
CONTEXT_STEP = 1024  # what a context that memory limits is a multiple of
SPARED = 4 << 30  # bytes of a device, and at most a quarter of what is free, that a context nobody asked for leaves to others
GREEDY = Sampling(temperature=0)
AUTO = "auto"
THE_MODELS = "the model's"

PREFIX_MEMORY = 1 << 30  # bytes on the device that the prefix cache may take, and at most an eighth of what is free after loading
PREFIX_DISK = 8 << 30
MOST_BYTES = 1 << 60

# operations of ggml's that compute value by value, or move values
BY_ROWS = frozenset(
    [
        "VIEW",
        "RESHAPE",
        "PERMUTE",
        "TRANSPOSE",
        "CONT",
        "CPY",
        "DUP",
        "GET_ROWS",
        "SET_ROWS",
        "ROPE",
        "ADD",
        "SUB",
        "MUL",
        "DIV",
        "SCALE",
        "CLAMP",
        "UNARY",
        "GLU",
        "CONCAT",
        "REPEAT",
        "SQR",
        "SQRT",
        "LOG",
        "SIN",
        "COS",
        "PAD",
    ]
)
OTHERWISE = (
    "some products are ggml's, which round by the rows of a step: where drafts of the text's own repetitions are verified, a near-tie can fall "
    "otherwise than in plain decoding; `spec` none takes such drafts away"
)

MANY = "this session runs many requests at once: submit this one too, or close what concurrent() or batch() gave first"
ONLY = "this session gave up its own caches with concurrent(only=True): submit to that one, or load the model again"
CLOSED = "the session is closed: load the model again"

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while something long goes on: "weights", "drafter weights", "identity of the target" and
"... drafter" (bytes; for a prefix cache on disk only, once per file), "prefill" (tokens)."""


@dataclass(frozen=True)
class Configuration:
    """What is really in use, for the one line that says so.

    ``context``: where ``n_ctx`` comes from: "the model's", "of N: memory" where less fits than the N tokens that it was trained with, "" if it was asked for.
    """

    target: str
    drafter: str | None
    lookup: str | None
    device: str
    threads: int
    width: int
    widths: tuple[int, ...]
    n_ctx: int
    context: str
    kv_type: str
    kernels: str
    memory: dict[str, int]
    notes: tuple[str, ...]


class Session:
    """A target, perhaps a drafter, ready to generate. Use in a ``with`` block, or ``close`` it; closing twice is fine."""

    backend: Backend  # the last of ``backends``, the devices that a step goes through
    backends: tuple[Backend, ...]
    target: Decoder
    tokenizer: Tokenizer
    engine: ModelRunner
    scheduler: Scheduler  # of the engine's only slot
    prefix: PrefixCache

    def __init__(self) -> None:
        self._parts: list[Closable] = []
        self._order: list[int] = [0]  # of the devices as they were named
        self.notes: list[str] = []
        self.load_seconds = 0.0
        self._context_from = ""  # where the context's length comes from; "" if it was asked for
        self.drafter: AnyDrafter | None = None
        self.lookup: NgramPolicy | None = None  # what drafts without a model
        self.costs: dict[int, float] | None = None  # milliseconds per step by width, of the first drafter; None where the width is pinned
        self._verify_costs: dict[int, float] = {}  # of steps that verify given ids, by rows; where a drafter says what its drafts are worth
        self.other_costs: dict[
            StepPlan, float
        ] = {}  # of other kinds of steps: further drafters, and graphs of more rows than there are drafts
        self.costs_cached = False
        self._known_drafts: Mapping[str, AcceptancePrior] = {}  # what texts taught of each drafter, of earlier sessions at first
        self._drafts_count = False  # whether what this session's texts teach is to be kept
        self._costs_under: tuple[tuple[int, bool], ...] | None = None  # of which condition of the engine they are
        self._costs_again = False  # whether they were measured again because others had gone; once, as others may come and go
        self._costs_checked = False  # whether they were measured again because steps ran faster; once, as routed blocks vary with the text
        self._concurrent: ConcurrentSession | None = None  # the ConcurrentSession that was made last
        self._rows_stay = False  # whether rows in place are those that would be computed
        self._last: tuple[int, list[int]] = (-1, [])  # the engine's epoch in it, and its tokens
        self._turns = Turns()  # who has the engine

    def _own(self, part: P) -> P:
        self._parts.append(part)
        return part

    # -- loading

    def _load(
        self,
        target: Path,
        draft: Sequence[Path],
        device: str | None,
        threads: int | None,
        kernels: str | None,
        asked: dict[str, Any],
        width: int | None,
        prefix: tuple[str | Path | None, int | None, int | None],
        experts: ExpertOptions | None,
        spec: Methods,
        progress: Progress,
        tensor_split: Sequence[float] | None,
        offload: int | str | None,
        rope: RopeOptions | None,
    ) -> "Session":
        started = time.perf_counter()
        backends = self._open(device, threads, kernels)
        self.notes += enable_peer_access([backend.device for backend in backends])
        file = self._own(GGUFFile(target))
        file.rope = rope
        self.target = open_target(file)
        for one in dict.fromkeys(backend.device for backend in backends):
            self.notes += [note for note in build_notes(one) if note not in self.notes]
        self.notes += ignored_yarn(file, self.target.arch)
        if rope is not None:
            self.notes.append(self._positions(file))
        self.tokenizer = self._own(Tokenizer(file))
        self.notes += filter(None, [vocabulary_note(file)])
        self.drafter = self._open_drafters(file, draft, spec)
        implied = self._implied(spec, width)
        lookup = spec.lookup or implied
        options = EngineOptions(
            **{**asked, "n_ctx": self._context(asked["n_ctx"])},
            width=self._width(width, lookup is not None),
            given=lookup is not None,
            implied=implied is not None,
        )
        check_options(options, self.target, self.drafter)  # before the weights, which take their time
        offload = check_offload(offload, options.chunk)
        placement, host = self._place_experts(experts, threads, max(options.chunk, options.width), offload is not None, kernels)
        if asked["n_ctx"] is None:
            options = replace(options, n_ctx=self._own_context(options, tensor_split, (placement, host), offload))
        check_masks(options, backends)
        segments = self._split(backends, tensor_split, options)
        self.target.weights = self._target_weights(segments, lambda done, total: progress("weights", done, total), placement, host)
        if host is not None and placement is not None:
            where = "are in pinned memory" if self.target.weights.pinned else "stay mapped"
            self.notes.append(
                f"{placement.description(self.target)} ({self.target.weights.host_bytes / 2**30:.2f} GiB of the file {where})"
            )
        for member in self.drafter.methods if self.drafter is not None else ():
            member.weights = self._weights(member, lambda done, total: progress("drafter weights", done, total))
        self._open_streams(offload)
        self.engine = self._own(self._make_engine(options))
        self._settle_streams(offload)
        if implied is not None:
            self.lookup = NgramPolicy.unmeasured(implied, [w for w in candidate_widths(options.width) if w > 1])
            if not self.batch_invariant:
                self.notes.append(OTHERWISE)
        elif spec.lookup is not None:
            self.lookup = self._lookup_control(spec.lookup)
        self.scheduler = Scheduler(self.engine, options.width, lookup=self.lookup)
        if self.drafter is not None and width is None:
            self._measure_costs()
            self._known_drafts, self._drafts_count = known_drafts(self.engine), True
        self.scheduler.policy = self.new_policy()
        self.prefix = self._own(self._prefix_cache(*prefix, progress))
        members = self.drafter.methods if self.drafter is not None else ()
        exact = self.batch_invariant and not any(member.weights.other_matrix_bytes for member in members)
        self._rows_stay = exact and not self.engine.sequence.stateful and self.prefix.files is None  # files have whole chunks
        self.load_seconds = time.perf_counter() - started
        return self

    def _implied(self, spec: Methods, width: int | None) -> str | None:
        """What drafts from the text itself where no drafter does and nothing else was asked for: on CPUs, where it was measured."""
        on_cpu = all(backend.device.kind == "cpu" for backend in self.backends)
        return spec.implied if self.drafter is None and width is None and len(self.backends) == 1 and on_cpu else None

    @property
    def batch_invariant(self) -> bool:
        """Whether a row of the target's has the same bits in steps of any number of rows: all that sums over values is native kernels' work."""
        graph = self.engine.graphs.get("plain", 1, self.engine.kv.live).graph
        return self.backend.level is not None and all(op.startswith("native ") or op in BY_ROWS for op in graph.op_counts())

    @property
    def methods(self) -> tuple[str, ...]:
        """Who drafts here, by the names of `--spec-type`."""
        models = tuple(member.method for member in self.drafter.methods) if self.drafter is not None else ()
        return models if self.lookup is None else (*models, self.lookup.method)

    def _positions(self, file: GGUFFile) -> str:
        """What the rope options came to, beside what the file says: an option that the scaling in use does not read changes nothing."""
        asked, used = file.rope, getattr(self.target, "rope")  # noqa: B009  (a model that takes these options has it)
        file.rope = None
        try:
            own = getattr(open_target(file), "rope")  # noqa: B009
        except ModelError:  # a scaling that is not supported
            return f"positions are {used}, as asked"
        finally:
            file.rope = asked
        return (
            f"positions are {used}, as in the file: the rope options change nothing"
            if used == own
            else f"positions are {used}; the file says {own}"
        )

    def _open_drafters(self, file: GGUFFile, drafts: Sequence[Path], spec: Methods) -> AnyDrafter | None:
        """Those of the files ``drafts``, and the MTP layer of the target's own ``file`` where it was asked for, or where there are no others;
        None if nobody may draft."""
        members = [self._open_drafter(file, path, spec) for path in drafts]
        found = {member.method for member in members}
        if "draft-mtp" in (spec.asked - found if spec.asked or members else spec.model):
            own = embedded_drafter(file)
            if own is not None:
                own.check_pair(self.target)
                members.append(own)
                found.add(own.method)
        if missing := sorted(spec.asked - found):
            raise PairError(f"{file.path.name} has nothing that drafts as {' or '.join(missing)}: give its drafter with `draft`")
        if spec.tokens and not members:
            raise PairError("`draft_vocab` is for drafters that are models, and there is none: give one with `draft`, or leave it out")
        if spec.tokens and spec.tokens >= self.target.n_vocab:
            self.notes.append(f"`draft_vocab` {spec.tokens} changes nothing: the vocabulary has {self.target.n_vocab} tokens")
        for member in members:
            if spec.tokens:
                member.limit_vocab(spec.tokens, self.target)
        return combine(members)

    def _open_drafter(self, file: GGUFFile, draft: Path, spec: Methods) -> Drafter:
        draft_file = self._own(GGUFFile(draft))
        drafter = open_drafter(draft_file, file)
        if drafter.method not in spec.model:
            raise PairError(
                f"{draft.name} drafts as {drafter.method}, which is not among what may draft; name it with `spec`, or leave the file out"
            )
        drafter.check_pair(self.target)
        self._check_vocabularies(file, draft_file)
        return drafter

    def _weights(
        self,
        model: Decoder | Drafter,
        progress: Callable[[int, int], None],
        placement: Placement | None = None,
        host: Backend | None = None,
    ) -> Weights:
        parts = (self.backend, model.file, model.specs(), model.groups(), model.fused_alike())
        return self._own(Weights(*parts, progress, placement, host))

    def _open(self, device: str | None, threads: int | None, kernels: str | None) -> list[Backend]:
        """The devices, in the order in which layers go through them; ``backend`` is the last one."""
        found = pick_devices(device)
        self._order = execution_order(found)
        backends = [self._own(backend) for backend in open_backends(found, threads, kernels)]
        self.backends = tuple(backends[i] for i in self._order)
        self.backend = self.backends[-1]
        return list(self.backends)

    def _split(self, backends: Sequence[Backend], shares: Sequence[float] | None, options: EngineOptions) -> tuple[Segment, ...]:
        """Which layers each device has."""
        if len(backends) == 1:
            if shares is not None and (len(shares) != 1 or not 0 < shares[0] < math.inf):
                given = ",".join(f"{share:g}" for share in shares)
                raise EngineError(
                    f"proportions of a split need several devices, and there is one for {given}: name them with `device`, separated by commas"
                )
            return ()
        check_drafter(self.drafter)
        if shares is not None and len(shares) == len(backends):
            shares = [shares[i] for i in self._order]
        sizes, drafter = self.target.file.tensors, self.drafter
        at_last = sizes["output.weight" if "output.weight" in sizes else "token_embd.weight"].nbytes
        members = drafter.methods if drafter is not None else ()
        at_last += sum(member.file.nbytes for member in members if member.file is not self.target.file)
        per_layer = options.n_ctx * sum(map(options.kv.row_bytes, self.target.kv_shapes())) // self.target.n_layer
        return split(self.target, backends, shares, [free_bytes(b.device) for b in backends], at_last, per_layer)

    def _target_weights(
        self, segments: tuple[Segment, ...], progress: Callable[[int, int], None], placement: Placement | None, host: Backend | None
    ) -> Weights:
        if not segments:
            return self._weights(self.target, progress, placement, host)
        return cast(Weights, self._own(SplitWeights(self.target, segments, self.drafter, placement, host, progress)))

    def _place_experts(
        self, options: ExpertOptions | None, threads: int | None, rows: int, copied: bool, kernels: str | None = None
    ) -> tuple[Placement | None, Backend | None]:
        """Where the target's experts go, and the CPU that computes those of the host; ``copied``: for prompts, they are to be copied to the device."""
        placement = options.placement(self.target, rows, copied) if options is not None else None
        none_hosted = placement is None or all(len(hot) == self.target.experts.n_expert for hot in placement.hot.values())  # type: ignore[union-attr]
        if copied and none_hosted and not self._hosts_layers:
            raise EngineError(
                "`offload_prompts` is for routed experts and layers that lie in host memory, and none do: keep some there (`n_cpu_moe`, or a CPU beside "
                "the device; `experts` in Python), or leave it out"
            )
        if placement is None:
            return None, None
        if not placement.hot:
            return placement, None
        cpu = next(d for d in devices() if d.kind == "cpu")
        host = self._own(Backend(cpu, threads, kernels))
        return replace(placement, kernels=host.kernels), host

    def _open_streams(self, offload: int | str | None) -> None:
        """Memory on the devices for copies of the host's experts, if all have some for it; ``offload`` as of ``load``."""
        if offload is None:
            return None
        if self._hosts_layers and not self.target.weights.hosts_experts:
            return self._open_guests(offload)
        for part in getattr(self.target.weights, "parts", [self.target.weights]):
            if part.backend.device.kind == "rpc":
                return self._without_streams(f"copies for {part.backend.device.name} would go over the network")
            stream = part.open_stream(offload if isinstance(offload, int) else 1)
            if stream is None or stream.fits:
                continue
            free, need = free_bytes(present(part.backend.device)), stream.need
            stream.close()
            name = part.backend.device.name
            return self._without_streams(f"copies of two layers need {need >> 20} MiB on {name}, which has {free >> 20} MiB free")
        return None

    def _open_guests(self, offload: int | str) -> None:
        """The same for copies of the layers that the CPU has, on the device behind it."""
        weights, device = cast(SplitWeights, self.target.weights), self.backends[1].device
        if device.kind == "rpc":
            return self._without_streams(f"copies for {device.name} would go over the network")
        try:
            stream = weights.open_guests(offload if isinstance(offload, int) else 1)
        except DeviceError as error:
            return self._without_streams(str(error))
        if stream.fits:
            return None
        free, need = free_bytes(present(device)), stream.need
        stream.close()
        return self._without_streams(f"copies of two layers need {need >> 20} MiB on {device.name}, which has {free >> 20} MiB free")

    @property
    def _hosts_layers(self) -> bool:
        """Whether the CPU has layers beside another device."""
        return len(self.backends) > 1 and self.backends[0].device.kind == "cpu"

    def _without_streams(self, why: str) -> None:
        what = "layers" if self._hosts_layers and not self.target.weights.hosts_experts else "experts"
        self.target.weights.close_streams()
        self.notes.append(f"prompts of {what} in host memory are computed by the CPU: {why}")

    def _make_engine(self, options: EngineOptions) -> ModelRunner:
        """Without copies of experts, if it has no memory beside them."""
        try:
            return ModelRunner(self.backend, self.target, self.drafter, options)
        except (DeviceError, EngineError) as error:
            if not self.target.weights.streams:
                raise
            self._without_streams(f"with copies of two layers on the device, {error}")
        return ModelRunner(self.backend, self.target, self.drafter, options)

    def _settle_streams(self, offload: int | str | None) -> None:
        """From how many rows on chunks compute with copies: as it was asked for, or as it was measured."""
        streams = self.target.weights.streams
        if not streams:
            return None
        chunk, where = None, " and ".join(dict.fromkeys(stream.device.device.name for stream in streams))
        if offload == AUTO:
            chunk = settle(self.engine)
            if chunk is None or chunk.copies >= chunk.host:
                self.engine.graphs.drop("prefill", STREAMED)
                self.engine.resources.drop_guests()
                took = f"a chunk of {chunk.rows} rows takes {chunk.host:.0f} ms there, and {chunk.copies:.0f} ms with copies on {where}" if chunk else (
                    f"a context of {self.engine.options.n_ctx} holds no chunk that could be measured"
                )  # fmt: skip
                return self._without_streams(took)
        took = f"; {chunk.rows} rows take {chunk.copies:.0f} ms, by the CPU {chunk.host:.0f} ms" if chunk is not None else ""
        layers, nbytes = sum(len(stream.layers) for stream in streams), sum(stream.nbytes for stream in streams)
        guests = self.target.weights.guests
        if guests is not None:
            self.notes.append(
                f"chunks of prompts of {streams[0].rows} rows or more compute on {where} with copies of {layers} layer{'s' * (layers > 1)} of the CPU "
                f"({nbytes / 2**30:.2f} GiB there, {guests.buffer_bytes / 2**30:.2f} GiB of host memory beside the layers{took})"
            )
            return None
        self.notes.append(
            f"chunks of prompts of {streams[0].rows} rows or more compute on {where} with copies of the experts of {layers} layer{'s' * (layers > 1)} "
            f"({nbytes / 2**30:.2f} GiB there{took})"
        )
        return None

    def _prefix_cache(self, folder: str | Path | None, memory: int | None, disk: int | None, progress: Progress) -> PrefixCache:
        return PrefixCache(self.engine, self._prefix_memory(memory), self._prefix_files(self.engine, folder, disk, progress))

    def _prefix_files(
        self, engine: ModelRunner, folder: str | Path | None, disk: int | None, progress: Progress = lambda what, done, total: None, shared: bool = False
    ) -> PrefixFiles | None:  # fmt: skip
        disk = PREFIX_DISK if disk is None else whole(disk, "the space for the prefix cache's files", 0, MOST_BYTES, PyspecError)
        if folder is None:
            return None
        folder = path(folder, "the folder of the prefix cache (`prefix_cache`)")
        layout = layout_of(engine, versions(), lambda what, done, total: progress(f"identity of the {what}", done, total), shared)
        files = PrefixFiles(folder, layout, disk)
        self.notes += [note for note in files.notes if note not in self.notes]
        return files

    def _prefix_memory(self, asked: int | None) -> int:
        """Bytes for copies of prompts; None: of what is free now."""
        if asked is None:
            return min(PREFIX_MEMORY, free_bytes(present(self.backend.device)) // 8)
        return whole(asked, "the memory for the prefix cache", 0, MOST_BYTES, PyspecError)

    def _check_vocabularies(self, target: GGUFFile, draft: GGUFFile) -> None:
        difference = first_difference(target, draft)
        if difference:
            raise PairError(
                f"{draft.path.name} cannot draft for {target.path.name}: {difference}; a drafter only fits the target it was made for: {drafters_for(target)}"
            )

    def _lookup_control(self, method: str) -> NgramPolicy:
        """Of this session's sequences; what verifying costs is measured, or known from an earlier session."""
        costs, cached = self._given_costs()
        control = NgramPolicy(method, costs)
        control.under(self.engine.threads.quiet if cached else self.engine.threads.condition)
        return control

    def _given_costs(self) -> tuple[dict[int, float], bool]:
        """Milliseconds by rows of steps that verify given ids, and whether they were known."""
        widths = candidate_widths(self.engine.options.width)
        return cached_costs(self.engine, tuple(w for w in widths if w > 1), given=True)

    def _measure_costs(self, fresh: bool = False) -> None:
        assert self.drafter is not None
        widths, (first, *_) = candidate_widths(self.engine.options.width), self.drafter.methods
        self.costs, self.costs_cached = cached_costs(self.engine, tuple(w for w in widths if w <= first.block_size), fresh)
        self._costs_under = self.engine.threads.quiet if self.costs_cached else self.engine.threads.condition
        kinds = [kind for member in self.drafter.methods for kind in _kinds_of(member, widths)]
        if not self.costs_cached and (why := why_nothing_is_kept()) and why not in self.notes:
            self.notes.append(why)
        known = {StepPlan.of(first.method, width): ms for width, ms in self.costs.items() if width > 1}
        costs = known | cached_kinds(self.engine, tuple(kind for kind in kinds if kind not in known), fresh) if known else {}
        self.other_costs = {kind: ms for kind, ms in worth_keeping(costs).items() if kind not in known}

    def new_policy(self) -> SpeculationPolicy | None:
        """A new one, with the costs that were measured of this session; None where the width is pinned."""
        if self.drafter is None or not self.costs:
            return None
        control = SpeculationPolicy.measured_for(self.drafter.method, self.costs, self.other_costs)
        control.under(self.engine.threads.condition if self._costs_under is None else self._costs_under)
        for method, record in control.priors.items():
            if (known := self._known_drafts.get(method)) is not None:
                record.goes_on(known)
        confident = [member.method for member in self.drafter.methods if member.confident]
        if confident and (given := self._verify_costs or self._given_costs()[0]):
            self._verify_costs, control.confidence = given, {method: Confidence(given) for method in confident}
        return control

    def _context(self, n_ctx: int | None) -> int:
        """The context that was asked for; None: the least that ``_own_context`` gives."""
        trained = self.target.context_length
        if n_ctx is None:
            return min(LEAST_CONTEXT, trained)
        n_ctx = whole(n_ctx, "the context (`n_ctx`)", 0, MOST_CONTEXT, ContextError)
        if not n_ctx and trained > MOST_CONTEXT:
            self.notes.append(f"the context is {MOST_CONTEXT}, the longest there is: the model was trained with {trained} tokens")
        self._context_from = "" if n_ctx else THE_MODELS
        n_ctx = n_ctx or min(trained, MOST_CONTEXT)
        if n_ctx > trained:
            self.notes.append(f"the context of {n_ctx} is longer than the {trained} tokens that the model was trained with")
        return n_ctx

    def _own_context(
        self, options: EngineOptions, shares: Sequence[float] | None, placed: Placed, offload: int | str | None,
        free: int | None = None, beside: int = 0,
    ) -> int:  # fmt: skip
        """The model's own context, or the longest that leaves memory on every device; before weights are loaded.

        ``options``: with so many slots, caches of theirs stand beside those of one sequence. ``free``: bytes of each device, None for what they
        report; ``beside``: bytes on the last one that are wanted for something else.
        """
        rooms = [_left(free_bytes(present(b.device)) if free is None else free) for b in self.backends]
        rooms[-1] -= beside
        most = min(self.target.context_length, MOST_CONTEXT)
        members = self.drafter.methods if self.drafter is not None else ()
        files = {id(file): file for file in (self.target.file, *(member.file for member in members))}  # an MTP layer may be in the target's
        weights = sum(file.nbytes for file in files.values())
        alone = placed == (None, None) and len(rooms) == 1

        def fits(asked: EngineOptions) -> bool:
            if alone and asked.n_ctx == most and weights + weights // 4 + self._roughly(asked) <= rooms[0]:
                return True
            return self._fit(asked, shares, placed, offload, rooms)

        n_ctx = self._longest(options, most, fits)
        trained = self.target.context_length
        self._context_from = THE_MODELS if n_ctx == trained else f"of {trained}: {'memory' if n_ctx < most else 'the longest there is'}"
        return n_ctx

    def slots_context(self, slots: int, only: bool = False) -> int:
        """Tokens of context for each of ``slots`` where nobody says how many: the session's, or as many as leave memory on every device.

        ``only``: as of ``concurrent``.
        """
        self._check_open()
        options = replace(self.engine.options, slots=slots)
        if not self._context_from:
            return options.n_ctx
        held = [0] * len(self.backends) if self.engine.graphs.closed else [
            sum(n for name, n in part.items() if name not in WEIGHTS) for part in self.engine.memory_by_segment()
        ]  # fmt: skip
        rooms = []
        for backend, mine in zip(self.backends, held, strict=True):
            on_cpu = backend.device.kind == "cpu"  # whose pages are taken when they are written
            rooms.append(_left(free_bytes(present(backend.device)) + mine * (only - on_cpu)))

        def fits(asked: EngineOptions) -> bool:
            if len(rooms) == 1 and self._roughly(asked) <= rooms[0]:
                return True
            taken = bytes_taken(self.backend, self.target, self.drafter, asked, weights=False)
            return all(n <= room for n, room in zip(taken, rooms, strict=True))

        return self._longest(options, options.n_ctx, fits)

    def _longest(self, options: EngineOptions, most: int, fits: Callable[[EngineOptions], bool]) -> int:
        """The longest context up to ``most`` that fits; LEAST_CONTEXT is taken as if it did."""

        def possible(n_ctx: int) -> bool:
            asked = replace(options, n_ctx=n_ctx)
            try:
                check_masks(asked, self.backends)
                return fits(asked)
            except ContextError:
                return False

        least = min(LEAST_CONTEXT, most)
        return least if most == least else max(least, largest(possible, most, CONTEXT_STEP))

    def _roughly(self, options: EngineOptions) -> int:
        """More bytes than caches and graphs take on one device: only where these are too many, graphs are planned to know."""
        shapes = self.drafter.kv_shapes() if self.drafter is not None else ()
        per_token = sum(map(options.kv.row_bytes, self.target.kv_shapes())) + sum(map(options.draft_kv.row_bytes, shapes))
        sequences = options.slots + (options.slots > 1)
        return (options.n_ctx + KV_BUCKET) * (per_token * sequences + 8 * options.chunk) + (1 << 30)  # masks, and all other buffers

    def _fit(
        self, options: EngineOptions, shares: Sequence[float] | None, placed: Placed, offload: int | str | None, rooms: Sequence[int]
    ) -> bool:
        """Whether weights, caches and graphs fit ``rooms``."""
        notes = list(self.notes)
        with ExitStack() as stack:

            def own(part: P) -> P:
                stack.callback(part.close)
                return part

            plan_weights(self.target, self.drafter, self.backend, self._split(self.backends, shares, options), placed, own)
            self._open_streams(offload)
            self.notes = notes
            taken = bytes_taken(self.backend, self.target, self.drafter, replace(options, slots=1))
            if options.slots > 1:
                more = bytes_taken(self.backend, self.target, self.drafter, options, weights=False)
                taken = [a + b for a, b in zip(taken, more, strict=True)]
            names = [b.device.name for b in self.backends]
            return all(
                sum(n for n, other in zip(taken, names, strict=True) if other == name) <= room
                for name, room in zip(names, rooms, strict=True)
            )

    def _width(self, width: int | None, lookup: bool = False) -> int:
        if self.drafter is None:
            if isinstance(width, AtMost) and not lookup:  # a limit of drafts, and there are none
                return 16
            if width not in (None, 1) and not lookup:
                raise PairError(f"a draft width of {width} needs a drafter: give one with `draft`, or leave the width out")
            return 16 if width is None else max(2, whole(width, "the draft width", 1, MOST_WIDTH, PairError))
        if width is None:
            return self.drafter.block_size
        limit, first = isinstance(width, AtMost), self.drafter.methods[0]
        width = max(2, int(whole(width, "the draft width", 1, MOST_WIDTH, PairError)))
        if limit and width > first.block_size:
            self.notes.append(
                f"at most {first.block_size - 1} drafts are made where {width - 1} may be: {first.title} was trained for no more"
            )
            return first.block_size
        if len(self.drafter.methods) > 1 and width > first.block_size:
            raise PairError(
                f"a draft width of {width} is wider than the {first.block_size} that {first.method} drafts, which drafts alone where the width is "
                f"given; use `draft_width` {first.block_size} or less"
            )
        return width

    # -- generating

    def steps(
        self,
        prompt: str | bytes | Sequence[int],
        max_tokens: int | None = None,
        *,
        mode: str | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
        special: bool = False,
        append: bool = False,
        synthetic: SyntheticAcceptance | None = None,
        prefill_progress: Callable[[int, int], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
        stats: Stats | None = None,
    ) -> Generator[StepEvent, None, None]:
        """Generates from ``prompt`` and yields one event per step; the last event flushes the text.

        Args:
            prompt: text (str, or bytes of UTF-8), or token ids.
            max_tokens: at most this many tokens; None: until the end token or the end of the context.
            mode: "speculative" (the default with a drafter), "plain", or "reference".
            sampling: how tokens are chosen; None: greedily, whatever the file recommends (``sampling()`` makes one of that).
            stop: texts that end the generation; they and what follows are not part of the text. An empty one ends nothing.
            ignore_end: go on after the end token.
            special: whether control tokens are recognised in the prompt text.
            append: go on in the caches if the prompt begins with exactly the tokens that the last generation left there. Rows of tokens that
                were generated come from steps then, not from a prefill, and round differently: a near-tie may fall the other way.
            synthetic: accept drafts at random (benchmarks only: the text is not the target's).
            interrupted: asked between steps; True ends the generation with the stop reason "interrupt".
            stats: of ``new_stats``, filled in as it goes: complete also when the generation is closed early or fails.

        Raises:
            ContextError: the prompt is empty or does not fit the context, or an id is outside the vocabulary.
            SamplingError: the sampling names tokens that do not exist, or a wrong grammar.
            EngineError: an unknown mode, or the speculative one without a drafter; the session is closed, or generating already; its next
                generation began before this one was read to its end.

        A session has one generation at a time. The next one of the same thread ends one that was left half read, which then says so; another
        thread is refused until it has been read to its end, closed or dropped, or its thread has ended.
        """
        self._check_own()
        ids, text = self.prompt_ids(prompt, special), BlockText(self.tokenizer.piece, stop_texts(stop))
        forced, mode = mode in (None, SPECULATIVE), mode or (SPECULATIVE if self.scheduler.drafts else PLAIN)
        options = LoopOptions(
            max_tokens,
            mode,
            self.engine.options.width,
            self.tokenizer.is_end,
            ignore_end,
            synthetic,
            completes=text.completes,
            forced=forced,
        )
        options.check(self.drafter or self.lookup)
        turn, sampler = self._turns.take(), None
        self._drafts_count = self._drafts_count and synthetic is None
        try:
            sampler, started = self._sampler(sampling, ignore_end), time.perf_counter()
            stats = self.new_stats() if stats is None else stats
            reuse, held = self._begin(ids, mode, append, stats)
            stats.seconds["prefill"] = time.perf_counter() - started  # bringing rows back is part of the start
            if sampler is not None:
                stats.seed, stats.sampling = sampler.seed, sampler.sampling.describe()
            self._last = (self.engine.epoch, history := list(ids))

            def prefilled(done: int, total: int) -> None:
                if not held:  # the chunks that the cache knows are those of the prompt that was begun
                    self.prefix.computed()
                if prefill_progress is not None:
                    prefill_progress(reuse.tokens + done, reuse.tokens + total)

            stream = self.scheduler.submit(
                ids,
                replace(options, sampler=sampler),
                stats,
                slot=0,
                known=reuse.tokens,
                progress=prefilled,
                interrupted=interrupted,
            )
            turn.close = stream.close
            for block in stream:
                history += block
                logprobs = sampler.take_logprobs() if sampler is not None else ()
                event = StepEvent(text.take(block), tuple(block), stats.snapshot(), logprobs)
                self._turns.pause(turn)
                yield event
                self._check_open()
                if not self._turns.resume(turn):
                    raise EngineError(ENDED)
            self._turns.pause(turn)
            yield StepEvent(text.finish(), (), stats)
            if self._parts and self._turns.resume(turn):  # files after the text is out
                self.prefix.save()
                stats.notes += self.prefix.take_notes()
        except GeneratorExit:
            raise
        except BaseException:
            if self._turns.holds(turn):
                self._last = (-1, [])  # a step may be in the recurrent state that is not in the cursor: nothing can be appended
            raise
        finally:
            self._turns.end(turn)
            if sampler is not None:
                sampler.close()

    def _begin(self, ids: list[int], mode: str, append: bool, stats: Stats) -> tuple[Reuse, int]:
        """What the caches have of ``ids``, and how much of that the last generation left."""
        widths = self.scheduler.policy
        threads = self.engine.threads
        others_gone = not self._costs_again and self._costs_under not in (None, threads.condition) and threads.calm
        if widths is not None and (others_gone or (widths.costs_outdated and not self._costs_checked)):
            self._costs_again |= others_gone
            self._measure_costs(fresh=True)
            self._costs_checked, self._known_drafts = self._costs_checked or not others_gone, widths.priors
            widths = self.scheduler.policy = self.new_policy()
        drafting = mode == SPECULATIVE and self._needs_drafters_rows(ids, append)
        held = self._held(ids, drafting) if append else 0
        alike = 0 if held else self._alike(ids, drafting)
        reuse = Reuse(held) if held else self.prefix.begin(ids, drafting)
        if alike > reuse.tokens:
            self.prefix.resume(alike)
            reuse.tokens = alike
        stats.reused_tokens, stats.reused_from, stats.notes = reuse.tokens, reuse.chunks, reuse.notes
        return reuse, held

    def _needs_drafters_rows(self, ids: list[int], append: bool) -> bool:
        """Whether a text gets the rows that drafters read. Without drafts they are for nothing; but what its prompt goes on behind has them or has not, and to
        compute that anew takes longer than they do."""
        widths = self.scheduler.policy
        if append and widths is not None and widths.should_disable():
            return self.engine.slots[0].drafting
        return not rests(widths, lambda drafting: self.prefix.known(ids, drafting))

    def _alike(self, ids: list[int], drafting: bool) -> int:
        """How many leading tokens of ``ids`` lie in place, to the token: where rows are all there is, and have the same bits whatever step computed them."""
        (epoch, history), engine, slot = self._last, self.engine, self.engine.slots[0]
        alike = slot.drafting == (drafting and self.drafter is not None)
        if epoch != engine.epoch or not alike or not slot.sound or slot.open_rows or not self._rows_stay:
            return 0
        engine.settle()
        most = min(engine.cursor.committed, len(history), len(ids) - 1)
        return next((i for i in range(most) if ids[i] != history[i]), most)

    def _held(self, ids: list[int], drafting: bool) -> int:
        """How many leading tokens of ``ids`` the last generation left in the caches: all that are there, or 0."""
        epoch, history = self._last
        n, alike = self.engine.cursor.committed, self.engine.slots[0].drafting == (drafting and self.drafter is not None)
        return n if epoch == self.engine.epoch and alike and n < len(ids) and ids[:n] == history[:n] and n <= len(history) else 0

    def prompt_ids(self, prompt: str | bytes | Sequence[int], special: bool = False) -> list[int]:
        """The token ids of a prompt that is text or token ids already. Raises ContextError if it is neither, or empty."""
        if isinstance(prompt, (str, bytes)):
            prompt = self.tokenizer.encode(prompt, special)
            if not prompt:
                raise ContextError("the prompt is empty; give some text")
        return token_ids(prompt, self.target.n_vocab).tolist()

    def _check_open(self) -> None:
        if not self._parts:
            raise EngineError(CLOSED)

    def _check_own(self) -> None:
        """Whether this session can generate alone."""
        self._check_open()
        if self.engine.graphs.closed:
            raise EngineError(ONLY)

    def _sampler(self, sampling: Sampling | None, ignore_end: bool) -> Sampler | None:
        if not isinstance(sampling, (Sampling, type(None))):
            raise SamplingError(f"the sampling is {sampling!r}; give pyggml_spec.Sampling(temperature=...)")
        sampling, forbidden = sampling or GREEDY, self.target.file.array("tokenizer.ggml.suppress_tokens", "i")
        if forbidden is not None:  # by the model file, as in llama.cpp
            ids = [int(i) for i in forbidden if 0 <= i < self.tokenizer.n_vocab]
            sampling = replace(sampling, logit_bias={**sampling.logit_bias, **dict.fromkeys(ids, -math.inf)})
        if sampling.constrained and ignore_end:
            raise SamplingError("a grammar ends with an end token, and end tokens are to be ignored; give one of the two")
        return None if sampling.is_greedy else Sampler(sampling, self.tokenizer, self.tokenizer.n_vocab)

    def stream(
        self, prompt: str | bytes | Sequence[int], max_tokens: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[StepEvent]:
        """``steps``, without the events that carry no text (except the last, which has the final statistics)."""
        last = None
        for last in self.steps(prompt, max_tokens, **options):
            if last.text and last.tokens:
                yield last
        if last is not None:
            yield last

    def generate(
        self, prompt: str | bytes | Sequence[int], max_tokens: int | None = None, **options: Unpack[GenerateOptions]
    ) -> tuple[str, Stats]:
        """The whole text and its statistics."""
        events = list(self.steps(prompt, max_tokens, **options))
        return "".join(event.text for event in events), events[-1].stats

    def generate_all(
        self,
        prompts: Iterable[str | bytes | Sequence[int]],
        max_tokens: int | None = None,
        *,
        slots: int = 4,
        n_ctx: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[tuple[str, Stats]]:
        """The texts of many prompts and their statistics, in the order of the prompts; they share steps, ``slots`` at a time.

        ``n_ctx``: tokens of context of each slot; None takes the session's. ``max_tokens`` and the options hold for each prompt.

        Raises:
            ContextError: the prompts are one text instead of several, or one of them does not fit.
            PyspecError: as ``concurrent`` and ``steps``; no other prompt is gone on with then.
        """
        if isinstance(prompts, (str, bytes)):
            raise ContextError("the prompts are one text; give a list of prompts, or use generate")
        prompts = list(prompts)
        if not prompts:
            return []
        with self.concurrent(min(slots, len(prompts)), n_ctx) as server:
            handles = [server.submit(prompt, max_tokens, **options) for prompt in prompts]
            return [handle.result() for handle in handles]

    def sampling(self, **fields: Any) -> Sampling:
        """The sampling that `pyspec run` uses for these fields of ``Sampling``, named or not: greedy if none of them asks for random numbers;
        or else what the model file recommends, and llama.cpp's defaults, stand for those that are not named.

        Raises:
            SamplingError: a value out of range.
        """
        return chosen(fields, self.target.file)[0]

    def new_stats(self) -> Stats:
        """Empty statistics of this session, load time and versions filled in."""
        stats = Stats(device=self.backend.device.name, versions=versions())
        stats.seconds["load"] = self.load_seconds
        return stats

    def batch(self, slots: int, n_ctx: int | None = None, prefix_memory: int = 0, groups: int | str = 1) -> Scheduler:
        """A scheduler for ``slots`` sequences at once over this session's weights, with caches of its own; close it before the session.

        Args:
            n_ctx: tokens of context of each slot; None takes the session's, or as many as memory has room for where `load` chose that.
            prefix_memory: bytes on the device for the beginnings of prompts, so that what begins alike is computed once.
            groups: of sequences that decode beside each other where the layers are split over several devices: 1 for none, 2 for as often as it is
                possible; "auto" measures what pays.

        This session itself generates nothing until it is closed.

        Raises:
            EngineError: an impossible number of slots; the session is generating, or runs many requests at once already.
            DeviceError: their caches do not fit the device.
        """
        self._check_open()
        turn = self._turns.take(MANY)
        try:
            scheduler = self._scheduler_of(slots, n_ctx, prefix_memory, groups=groups)
        except BaseException:
            self._turns.end(turn)
            raise
        turn.over = lambda: scheduler.engine.graphs.closed
        return scheduler

    def _scheduler_of(
        self, slots: int, n_ctx: int | None, prefix_memory: int, folder: str | Path | None = None, disk: int | None = None,
        groups: int | str = 1,
    ) -> Scheduler:  # fmt: skip
        self._check_open()
        wanted = None if groups == AUTO else whole(groups, f"what `groups` asks for beside {AUTO!r}, groups of sequences,", 1, GROUPS)
        context = self.slots_context(slots) if n_ctx is None else n_ctx
        options = replace(self.engine.options, slots=slots, n_ctx=context, groups=wanted != 1)
        memory = whole(prefix_memory, "the memory for the prefix cache", 0, MOST_BYTES, PyspecError)
        if folder is not None and not memory:
            raise PyspecError(
                "a prefix cache on disk is filled from memory, and `prefix_memory` is 0: give it more, or leave the folder out"
            )
        engine = ModelRunner(self.backend, self.target, self.drafter, options)
        try:
            files = self._prefix_files(engine, folder, disk, shared=True)
        except BaseException:
            engine.close()
            raise
        lookup = self.lookup.for_slots(candidate_widths(options.width)) if self.lookup is not None else None
        scheduler = Scheduler(engine, None if self.costs else options.width, memory, lookup, files, self.other_costs, wanted)
        if slots == 1:  # the same graphs
            scheduler.policy = self.new_policy()
        elif self.costs and (control := self.new_policy()) is not None:
            if control.never_pays:
                scheduler.pin_width(1, NEVER_PAYS)  # where W rows cost W plain steps, those of several sequences are no cheaper
            elif scheduler.policy is not None and not engine.groups:  # whose steps are launched before anybody could look at drafts
                scheduler.policy.confidence = control.confidence
        return scheduler

    def concurrent(
        self, slots: int, n_ctx: int | None = None, prefix_memory: int | None = None, prefix_cache: str | Path | None = None,
        prefix_disk: int | None = None, *, only: bool = False, groups: int | str = 1,
    ) -> ConcurrentSession:  # fmt: skip
        """Many requests at once, from threads or asyncio: ``submit`` returns handles. Arguments and errors as of ``batch``; without
        ``prefix_memory`` it is 1 GiB, or an eighth of what is free if that is less.

        Args:
            prefix_cache, prefix_disk: folder in which the beginnings of prompts outlive the process, and bytes that it may take, as of ``load``.
            only: frees this session's own caches first: from then on it generates through ``concurrent`` alone.

        This session itself generates nothing while it is open: both would use one device stream from two threads.
        """
        if self._concurrent is not None and self._concurrent.ended and self._concurrent in self._parts:
            self._concurrent.close()  # an error may have ended it, and its thread still be about to end: the turn is its own till then
            self._parts.remove(self._concurrent)
        turn = self._turns.take(MANY)
        try:
            if only:
                self._give_up_own_caches()
            memory = self._prefix_memory(prefix_memory)
            scheduler = self._scheduler_of(slots, n_ctx, memory, prefix_cache, prefix_disk, groups)
            made = self._concurrent = self._own(ConcurrentSession(scheduler, self.tokenizer, self.prompt_ids, self._sampler))
        except BaseException:
            self._turns.end(turn)
            raise
        turn.over = lambda: made.closed
        return made

    def _give_up_own_caches(self) -> None:
        for part in (self.prefix, self.engine):
            part.close()
            if part in self._parts:
                self._parts.remove(part)

    def calibrate_plain(self, steps: int = 36, behind: int = 0) -> float:
        """Milliseconds that plain decoding takes per token here and now, the host's work around each step included: the mean of at most ``steps`` steps.

        Forgets the sequence. Steps are measured for 0.15 seconds, slow ones for about half a second. ``behind``: so many tokens stand before them, as in
        the text that is compared; fewer where computing them would take longer than a tenth of a second.

        Raises:
            ContextError: the context is too short for a step.
        """
        self._check_own()
        steps = whole(steps, "the number of steps", 1, 1 << 20)
        behind = whole(behind, "the number of tokens before them", 0, 1 << 30)
        text, stats = BlockText(self.tokenizer.piece, ()), self.new_stats()
        with self._turns.alone():
            return plain_cost(self.scheduler, steps, behind, lambda block: StepEvent(text.take(block), tuple(block), stats.snapshot(), ()))

    def _kv_types(self) -> str:
        kv, draft_kv = self.engine.options.kv, self.engine.options.draft_kv
        return str(kv) if self.drafter is None or kv == draft_kv else f"{kv}, drafter {draft_kv}"

    def _kernels(self) -> str:
        """Whose kernels multiply; on devices other than CPUs ggml's always do."""
        level = next((backend.level for backend in self.backends if backend.level is not None), None)
        if level is None:
            return "ggml"
        loaded = [self.target.weights, *(member.weights for member in (self.drafter.methods if self.drafter is not None else ()))]
        own, rest = sum(w.own_bytes for w in loaded), sum(w.other_matrix_bytes for w in loaded)
        share = "" if not rest else f" for {100 * own / (own + rest):.0f} % of the weights"
        apart = self.target.ggml_attention
        return f"native ({level.name}){share}" + (f", attention by ggml's because {apart}" if apart else "")

    def _devices(self) -> str:
        """What computes, and which layers where there are several."""
        segments = self.target.weights.segments
        return ", ".join(map(str, segments)) if segments else self.backend.device.name

    def configuration(self) -> Configuration:
        """What is in use: read it before trusting a speed."""
        self._check_open()
        drafter = self.drafter.title if self.drafter is not None else None
        width = self.engine.options.width if self.drafter is not None else 1
        return Configuration(
            self.target.file.path.name,
            drafter,
            self.lookup.method if self.lookup is not None else None,
            self._devices(),
            max(backend.threads for backend in self.backends),
            width,
            self._widths_in_use(),
            self.engine.options.n_ctx,
            self._context_from,
            self._kv_types(),
            self._kernels(),
            {} if self.engine.graphs.closed else self.engine.memory(),
            (*self.notes, *self._gave_way()),
        )

    def engaged(self) -> Configuration:
        """The old name of ``configuration``."""
        warnings.warn("Session.engaged is Session.configuration now", DeprecationWarning, stacklevel=2)
        return self.configuration()

    def _gave_way(self) -> list[str]:
        """That other work has cores of the CPU's threads now."""
        CORE_MONITOR.poll()
        threads = self.engine.threads
        if threads.now == threads.most:
            return []
        return [f"other work has the processor: {threads.now} of {threads.most} threads compute now, and all of them when it ends"]

    def _widths_in_use(self) -> tuple[int, ...]:
        """Those that control chooses from, 1 being plain decoding; empty where the width is pinned."""
        if not self.costs:
            return ()
        others = {kind.tokens for kind, ms in self.other_costs.items() if kind.tokens * self.costs[1] > ms}
        return tuple(sorted({*useful_widths(self.costs), *others}))

    def close(self) -> None:
        """Frees everything that ``load`` made.

        Raises:
            EngineError: a step is under way, in another thread or in a call that this one was made from; nothing has been freed then.
        """
        try:
            if self._concurrent is not None:
                self._concurrent.close()
        except BaseException:
            with suppress(Exception):  # that its thread is at work still: what came first says why
                self._free()
            raise
        self._free()

    def _free(self) -> None:
        self._turns.shut(CLOSED)
        if self._drafts_count and (widths := self.scheduler.policy) is not None:
            keep_drafts(self.engine, widths.priors)
            self._drafts_count = False
        with ExitStack() as freed:  # whatever one of them raises, the last one made first
            for part in self._parts:
                freed.callback(part.close)
            self._parts = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _left(free: int) -> int:
    """Bytes that may be taken of those that are free, where nobody asked for so many."""
    return free - min(free // 4, SPARED)


def _kinds_of(member: Drafter, rows: Sequence[int]) -> list[StepPlan]:
    """Kinds of steps in which this drafter drafts, for graphs of these rows."""
    fitting = [r for r in rows if r <= member.block_size]
    return chain_plans(member.method, fitting) if member.chained else [StepPlan.of(member.method, r) for r in fitting]


def check_offload(rows: int | str | None, chunk: int) -> int | str | None:
    """``offload_prompts`` as it is, if it is "auto", None, or a number of rows that a prompt's chunks have."""
    if rows is None or rows == AUTO:
        return rows
    asked = whole(rows, f"what `offload_prompts` asks for beside {AUTO!r}, rows of a chunk,", 1, WIDEST_CHUNK)
    if asked > chunk:
        raise EngineError(
            f"no chunk of a prompt has the {asked} rows that `offload_prompts` asks for: a `chunk` has {chunk}; ask for fewer"
        )
    return asked


def draft_files(draft: "str | Path | Sequence[str | Path] | None") -> tuple[Path, ...]:
    """The drafters' files that a caller named."""
    named: Sequence[Any] = (
        () if draft is None else draft if isinstance(draft, Sequence) and not isinstance(draft, (str, bytes)) else (draft,)
    )
    return tuple(path(one, "the drafter (`draft`)") for one in named)


def demo_drafters(spec: Methods) -> tuple[Path, ...]:
    """Those of the embedded pair: the block drafter, and its MTP layer where that is asked for."""
    found = {"draft-dflash": DEMO_DRAFTER} if not spec.asked else {"draft-dflash": DEMO_DRAFTER, "draft-mtp": DEMO_MTP}
    return tuple(path for method, path in found.items() if method in spec.model and path.exists())


def load(
    target: str | Path | None = None,
    draft: str | Path | Sequence[str | Path] | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    kernels: str | None = None,
    n_ctx: int | None = None,
    draft_width: int | None = None,
    graphs: bool = True,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    draft_cache_type_k: str = "f16",
    draft_cache_type_v: str = "f16",
    chunk: int = 512,
    prefix_cache: str | Path | None = None,
    prefix_memory: int | None = None,
    prefix_disk: int | None = None,
    experts: ExpertOptions | None = None,
    spec: Sequence[str] | None = None,
    no_spec: Sequence[str] = (),
    draft_vocab: int | None = None,
    tensor_split: Sequence[float] | None = None,
    offload_prompts: int | str | None = None,
    rope: RopeOptions | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Session:
    """Loads a target and perhaps its drafter; without a target, the embedded pair.

    Args:
        target, draft: GGUF files. A target without a drafter, and without an MTP layer of its own, has n-grams of the text verified where it repeats (``spec``). Of several drafters, one that
            drafts blocks and one that drafts chains, the one with the most expected tokens per millisecond drafts each step.
        device: name as in ``devices()``; None takes the first GPU, or the CPU. Several, separated by commas: the target's layers are split over
            them; a CPU among GPUs has the first layers, whatever the order.
        threads: CPU threads, always so many; None takes as many as other work leaves cores for, at most 16, and one step may have more of them than another.
        kernels: "native" or "ggml" for products on a CPU; None takes "native" on x86 with AVX2, and ggml's elsewhere, which are llama.cpp's bit for bit.
        n_ctx: tokens of context; 0 takes what the model was trained with; None that too, or as many as memory has room for, three quarters of what
            is free and all but 4 GiB; ``configuration`` names which.
        draft_width: rows per verified block; None lets width control choose, from costs measured here and acceptance seen while running.
        graphs: False launches every step kernel by kernel, for the whole process (a control: what CUDA graph replay is worth).
        cache_type_k, cache_type_v: what K and V rows are stored as, one of ``cache.kv_types.TYPES``; the next two are the drafter's.
        chunk: widest prefill chunk in tokens; also the grain in which prompts that begin alike are computed once.
        prefix_cache: folder in which computed prompts outlive the process; made if it is not there. Without it they are kept in memory.
        prefix_memory: bytes on the device for them; None takes 1 GiB, or an eighth of what is free if that is less. 0 still reuses what the
            prompt before left in place, if the model is attention only.
        prefix_disk: bytes that the folder may take, None for 8 GiB; what was not used for longest is deleted.
        experts: which routed experts of the target stay in host memory; None keeps all of them on the device.
        spec: ways of drafting, of ``speculation.methods.METHODS`` and named as llama.cpp's `--spec-type` names them; None takes the drafter of ``draft``,
            or else the target's own MTP layer if its file has one, or else, on a CPU and without ``draft_width``, n-grams of the text itself ("suffix"), which are
            verified only where that is expected to be faster. An empty one takes none.
        no_spec: ways that are not to draft, whatever there is.
        draft_vocab: drafters choose among the first so many tokens of the vocabulary, which are the frequent ones where it was made of merges: their
            heads take less time, and some drafts are not made. None for all of it.
        tensor_split: how many layers each of several devices gets, in proportion and in the order in which they are named; None takes their free
            memory, and gives a CPU what GPUs have no room for.
        offload_prompts: chunks of prompts of so many rows or more compute on the device with copies of the experts that ``experts`` keeps in host memory,
            or of the layers that a CPU beside it has, layer by layer; "auto" measures from how many rows on that is faster. None: the CPU computes what
            lies in its memory.
        rope: what holds of positions in place of what the target's file says, to stretch its context: as llama.cpp's options of these names.

    Raises:
        PyspecError: any reason why this cannot work, in one sentence.
    """
    if target is None:
        if draft is not None:
            raise PyspecError(f"the drafter {draft} needs its target: name it with `target`")
        if not DEMO_TARGET.exists():
            raise PyspecError("this installation has no embedded pair; name a target with `target`")
        target, draft = DEMO_TARGET, demo_drafters(methods(spec, no_spec, draft_vocab))
    either(experts, ExpertOptions, "`experts`")
    tensor_split = None if tensor_split is None else numbers(tensor_split, "the proportions (`tensor_split`)")
    either(rope, RopeOptions, "`rope`")
    if not graphs:
        disable_graph_replay()
    session = Session()
    try:
        options = {
            "n_ctx": n_ctx,
            "chunk": chunk,
            "kv": KVTypes(cache_type_k, cache_type_v),
            "draft_kv": KVTypes(draft_cache_type_k, draft_cache_type_v),
        }
        prefix = (prefix_cache, prefix_memory, prefix_disk)
        return session._load(
            path(target, "`target`"),
            draft_files(draft),
            device,
            threads,
            kernels,
            options,
            draft_width,
            prefix,
            experts,
            methods(spec, no_spec, draft_vocab),
            progress,
            tensor_split,
            offload_prompts,
            rope,
        )
    except BaseException:
        session.close()
        raise
    finally:
        release_threads()  # costs of steps were measured, and others may be going to run them
