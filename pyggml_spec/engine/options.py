"""Options of an engine, and the widths that follow from them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..cache.kv import MOST_CONTEXT, KVTypes, padded
from ..checks import whole
from ..drafters.multi import AnyDrafter
from ..errors import ContextError, PairError
from ..ggml.device import Backend
from ..models.decoder import Decoder

WIDTHS = (2, 4, 8, 16)
MOST_SLOTS, MOST_WIDTH, WIDEST_CHUNK = 64, 1024, 1 << 14
MOST_CANDIDATES = 1024  # of a row's largest logits; beyond, whole rows are read
MOST_MASKED = (1 << 31) - 1  # values of a mask: ggml-cuda counts those of most operations in an int
CHUNKS = (32, 128, 512)  # prefill widths that are planned for; a device pads a tail to the smallest one that holds it
IMPLIED_ROWS = 64  # of several slots' blocks together, where drafting is on by default
DEFAULT_CHUNK, SLOTS_CHUNK = 512, 2048  # of one slot, whose prefixes are reused in whole chunks, and of several on a GPU
WIDER_CHUNKS = (1024, 2048)  # further ones up to wider chunks: a tail of 600 tokens would be padded to all of it


@dataclass(frozen=True)
class EngineOptions:
    """Attributes:
    n_ctx: tokens that the context holds.
    width: rows of a verified block (draft width), 1 for none; never more than the drafter's trained block.
    chunk: widest prefill chunk in tokens.
    slots_chunk: that of several slots, if not 0.
    kv, draft_kv: what the target's and the drafter's K and V rows are stored as.
    slots: sequences at once, each with ``n_ctx`` tokens of context.
    groups: whether a split target gets the buffers to decode two micro-batches concurrently (pipeline).
    given: whether n-gram drafts are verified, with or without a drafter.
    pictures: whether prompts may have rows of pictures.
    implied: whether they are on by default: blocks of several slots are then narrower, so that their logits take little memory.
    """

    n_ctx: int = 4096
    width: int = 16
    chunk: int = DEFAULT_CHUNK
    slots_chunk: int = 0
    kv: KVTypes = KVTypes()
    draft_kv: KVTypes = KVTypes()
    slots: int = 1
    groups: bool = False
    given: bool = False
    implied: bool = False
    pictures: bool = False

    def __post_init__(self) -> None:
        if self.slots_chunk and self.several:
            object.__setattr__(self, "chunk", self.slots_chunk)
        if self.implied and self.several:
            object.__setattr__(self, "width", min(self.width, max(2, IMPLIED_ROWS // self.slots)))

    @property
    def several(self) -> bool:
        """Whether there are several slots, whatever else a caller may have given as their number."""
        return isinstance(self.slots, int) and self.slots > 1

    @property
    def narrow(self) -> "EngineOptions":
        """Those with which several slots compute prompts in chunks of the default width, if they have wider ones."""
        return replace(self, slots_chunk=0, chunk=DEFAULT_CHUNK if self.several and self.slots_chunk else self.chunk)

    @property
    def alone(self) -> "EngineOptions":
        """Those of one slot."""
        return replace(self.narrow, slots=1)


class AtMost(int):
    """A block width that a drafter of narrower blocks reduces instead of refusing it: llama.cpp's option is a limit."""


def candidate_widths(block_size: int) -> tuple[int, ...]:
    """The block widths that are planned for at load, and that width control chooses from."""
    return tuple(sorted({*(w for w in WIDTHS if w < block_size), block_size}))


def prefill_widths(chunk: int) -> tuple[int, ...]:
    """Rows of the graphs that prompts are computed by, the widest of ``chunk``."""
    return tuple(sorted({*(c for c in CHUNKS + WIDER_CHUNKS if c < chunk), chunk}))


def fine_width(rows: int) -> int:
    """Rows of the graph that computes ``rows`` of a prompt on a CPU, where each costs time and a new graph costs less than one: 1/16 more at most."""
    step = max(1, 1 << (rows - 1).bit_length() - 5) if rows > 32 else 1
    return -(-rows // step) * step


def check_masks(options: EngineOptions, backends: Iterable[Backend]) -> None:
    """Raises ContextError where a step's mask, a value for each of its rows and each position, has more of them than a device can count."""
    device = next((backend.device for backend in backends if backend.device.kind != "cpu"), None)
    rows = max(options.chunk, options.slots * options.width)
    if device is not None and rows * padded(options.n_ctx) > MOST_MASKED:
        raise ContextError(
            f"steps of {rows} rows over a context of {options.n_ctx} tokens need masks of more than {MOST_MASKED} values, which {device.name} cannot "
            "count; use a smaller `chunk` or a smaller `n_ctx`"
        )


def check_options(options: EngineOptions, target: Decoder, drafter: AnyDrafter | None) -> None:
    """Raises ContextError, EngineError or PairError for options that no engine can have, or a pair that does not fit."""
    whole(options.slots, "the number of slots", 1, MOST_SLOTS)
    whole(options.n_ctx, "the context (`n_ctx`)", 1, MOST_CONTEXT, ContextError)
    whole(options.width, "the block width", 1, MOST_WIDTH)
    whole(options.chunk, "the prefill chunk", 1, WIDEST_CHUNK)
    if drafter is not None:
        drafter.check_pair(target)
        if options.width > drafter.block_size:
            raise PairError(
                f"a draft width of {options.width} is wider than the block of {drafter.block_size} that {drafter.title} "
                f"was trained for; use `draft_width` {drafter.block_size} or less"
            )
