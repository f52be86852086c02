"""What is in a GGUF, and what this package would do with it. No weights are loaded."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..drafters.dialects import method
from ..drafters.mtp import has_layer, is_layer_alone
from ..drafters.pairs import Published, published
from ..drafters.vocabulary import TOKENS, map_vocabulary
from ..errors import PyspecError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray, brief
from ..models.registry import CHAINS, DRAFTERS, ENCODERS, TARGETS, open_drafter, open_target, unsupported
from ..vision.encoder import check_encoder, encoder_kinds


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
        by_type = Counter[str]()
        for _, kind, _, nbytes in tensors:
            by_type[kind] += nbytes
        verdict, unused = _verdict(file)
        return Inspection(
            path=str(file.path),
            nbytes=file.nbytes,
            version=file.version,
            metadata={key: brief(value) for key, value in file.metadata.items()},
            tensors=tensors,
            bytes_by_type=dict(by_type),
            parameters=sum(math.prod(shape) for _, _, shape, _ in tensors),
            verdict=verdict,
            usable=unused is not None,
            unused=unused or {},
            drafters=published(file),
        )


def compare_vocabularies(target: str | Path, draft: str | Path) -> str:
    """How many of the target's tokens a small model can draft, in one phrase.

    Raises:
        GGUFError: a file cannot be read.
    """
    with GGUFFile(target) as theirs, GGUFFile(draft) as ours:
        if any(not isinstance(file.metadata.get(TOKENS), StringArray) for file in (theirs, ours)):
            return "one of the files has no token list"
        found = map_vocabulary(theirs, ours)
        return "it has all of its tokens, with the same ids" if found is None else found.description()


def _verdict(file: GGUFFile) -> tuple[str, dict[str, str] | None]:
    """What to do with the file, and what of it is left aside; None where it cannot be run."""
    arch = file.metadata.get("general.architecture")
    try:
        if arch == ENCODERS:
            check_encoder(file)
            words = {"vision": "images", "audio": "sounds"}
            encodes = " and ".join(f"{words[what]} ({kind})" for what, kind in encoder_kinds(file).items())
            return f"an encoder of {encodes} for the target that it was made for; give it with `mmproj`", {}
        if arch in TARGETS and not is_layer_alone(file):
            model = open_target(file)
            heads = "; its MTP layer drafts for it" if has_layer(file) else "; without a drafter, n-grams of its text draft for it on CPUs"
            said = f"a {arch} target of {model.n_layer} layers, trained for {model.context_length} tokens; give it with `target`{heads}"
            return said, model.unused_in_file()
        if arch in (*TARGETS, *CHAINS, *DRAFTERS) or method(file):
            drafter = open_drafter(file)
            most, layers = drafter.block_size - 1, f"inputs of target layers {', '.join(map(str, drafter.captures))}"
            if arch in TARGETS:
                said = f"the MTP layer of a {arch} model, which drafts up to {most} tokens"
            elif arch in CHAINS:
                read = "K/V of its target" if drafter.shares_kv else layers
                article = "an" if arch[0] in "aeiou" else "a"
                said = f"{article} {arch} drafter that reads the {read} and drafts up to {most} tokens, {'in one pass' if drafter.parallel else 'one by one'}"
            else:
                said = f"a {arch} drafter with blocks of {most + 1} that reads the {layers}"
            return f"{said}; give it with `draft`", drafter.unused_in_file()
    except PyspecError as error:
        return f"cannot be run: {error}", None
    return f"cannot be run: it {unsupported(file)}", None
