"""What is in a GGUF, and what this package would do with it. No weights are loaded."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..drafters.dialects import method
from ..drafters.mtp import has_layer, is_layer_alone
from ..drafters.pairs import Published, published
from ..errors import PyspecError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief
from ..models.registry import CHAINS, DRAFTERS, TARGETS, open_drafter, open_target, unsupported


@dataclass(frozen=True)
class Inspection:
    """Attributes:
    path, nbytes, version: the file.
    metadata: key to a short printable value.
    tensors: (name, type, shape in ggml order, bytes) in file order.
    bytes_by_type: bytes of all tensors of each type.
    parameters: elements of all tensors.
    verdict: one sentence: how this package would use the file, or why it cannot.
    unused: tensors that it would leave aside, by name, with the reason.
    drafters: public drafters for targets of this architecture and shape.
    """

    path: str
    nbytes: int
    version: int
    metadata: dict[str, str]
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    bytes_by_type: dict[str, int]
    parameters: int
    verdict: str
    usable: bool
    unused: dict[str, str]
    drafters: list[Published]

    def as_dict(self) -> dict:
        out = dict(self.__dict__)
        out["tensors"] = [{"name": n, "type": t, "shape": list(s), "bytes": b} for n, t, s, b in self.tensors]
        out["drafters"] = [{"for": p.target, "drafter": p.drafter, "method": p.method, "refused": p.refused} for p in self.drafters]
        return out


def inspect_file(path: str | Path) -> Inspection:
    """Reads the file's metadata and tensor list.

    Raises:
        GGUFError: not a GGUF, or damaged.
    """
    with GGUFFile(path) as file:
        tensors = [(t.name, t.type_name, t.shape, t.nbytes) for t in file.tensors.values()]
        by_type: dict[str, int] = {}
        for _, kind, _, nbytes in tensors:
            by_type[kind] = by_type.get(kind, 0) + nbytes
        verdict, unused = _verdict(file)
        return Inspection(
            str(file.path),
            file.nbytes,
            file.version,
            {key: brief(value) for key, value in file.metadata.items()},
            tensors,
            by_type,
            sum(int(np.prod(shape, dtype=object)) for _, _, shape, _ in tensors),
            verdict,
            unused is not None,
            unused or {},
            published(file),
        )


def _verdict(file: GGUFFile) -> tuple[str, dict[str, str] | None]:
    """What to do with the file, and what of it is left aside; None where it cannot be run."""
    arch = file.metadata.get("general.architecture")
    try:
        if arch in TARGETS and not is_layer_alone(file):
            model = open_target(file)
            heads = "; its MTP layer drafts for it" if has_layer(file) else "; without a drafter, n-grams of its text draft for it on CPUs"
            said = f"a {arch} target of {model.n_layer} layers, trained for {model.context_length} tokens; give it with `target`{heads}"
            return said, model.unused_in_file()
        if arch in TARGETS:
            drafter = open_drafter(file)
            return (
                f"the MTP layer of a {arch} model, which drafts up to {drafter.block_size - 1} tokens; give it with `draft`",
                drafter.unused_in_file(),
            )
        if arch in CHAINS:
            drafter = open_drafter(file)
            layers = ", ".join(str(v) for v in drafter.captures)
            read = "K/V of its target" if drafter.shares_kv else f"inputs of target layers {layers}"
            said = f"{'an' if arch[0] in 'aeiou' else 'a'} {arch} drafter that reads the {read} and drafts up to {drafter.block_size - 1} tokens"
            return f"{said}, one by one; give it with `draft`", drafter.unused_in_file()
        if arch in DRAFTERS or method(file):
            drafter = open_drafter(file)
            layers = ", ".join(str(v) for v in drafter.captures)
            said = f"a {arch} drafter with blocks of {drafter.block_size} that reads the inputs of target layers {layers}; give it with `draft`"
            return said, drafter.unused_in_file()
    except PyspecError as error:
        return f"cannot be run: {error}", None
    return f"cannot be run: it {unsupported(file)}", None
