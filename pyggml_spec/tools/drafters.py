"""Drafters for a target: in its own file, in its folder, in the caches of the hub and of llama.cpp, and published; and whether they fit."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..drafters.mtp import has_layer
from ..drafters.names import KINDS, kind_of
from ..drafters.pairs import published
from ..errors import PyspecError
from ..gguf_io import GGUFFile
from ..hub import cached_files, is_later_part
from ..loading import check_fit
from ..models.decoder import Decoder
from ..models.registry import open_drafter, open_target

OWN, FOLDER, CACHE, HUB = "target", "folder", "cache", "hub"


@dataclass(frozen=True)
class Candidate:
    """A drafter, or a file that is none for this target.

    Attributes:
        where: "target", its own file; "folder", the target's; "cache"; "hub", a published repository.
        name: a path, or a repository of the Hugging Face hub.
        method: llama.cpp's name, or what publishers call it; empty for files that do not fit.
        fits: whether it can draft for this target: shape and vocabulary of a file, architecture and shape of what is published.
        said: why it does not fit, or how well.
        commands: shell commands that run it.
    """

    where: str
    name: str
    method: str
    fits: bool
    said: str
    commands: tuple[str, ...]

    def as_dict(self) -> dict:
        return asdict(self)


def find_drafters(target: str | Path) -> list[Candidate]:
    """Drafters for the GGUF ``target``. Of the caches only those that fit.

    Raises:
        GGUFError, ModelError: it cannot be read, or is no supported target.
    """
    with GGUFFile(target) as file:
        model = open_target(file)
        return [*_own(file), *_files(model, file), *_published(file)]


def _run(target: Path, *options: str) -> str:
    return shlex.join(["pyspec", "run", "-m", str(target), *options])


def _own(file: GGUFFile) -> Iterator[Candidate]:
    if has_layer(file):
        yield Candidate(OWN, str(file.path), "draft-mtp", True, "its MTP layer", (_run(file.path),))


def _files(model: Decoder, file: GGUFFile) -> Iterator[Candidate]:
    """Of the target's folder all GGUFs that are not part of it, of the caches those that fit; each file once."""
    folder = sorted(path for path in file.path.absolute().parent.iterdir() if path.suffix.lower() == ".gguf")
    folder.sort(key=lambda path: len(KINDS) if (kind := kind_of(path.name)) is None else kind)
    seen = {file.path.resolve()}
    for where, paths in ((FOLDER, folder), (CACHE, cached_files())):
        for path in paths:
            if path.resolve() in seen or is_later_part(path.name):
                continue
            seen.add(path.resolve())
            one = _judged(model, file, path, where)
            if one.fits or where == FOLDER:
                yield one


def _judged(model: Decoder, file: GGUFFile, path: Path, where: str) -> Candidate:
    try:
        with GGUFFile(path) as draft:
            drafter = open_drafter(draft, file)
            if drafter.whole_model and draft.nbytes >= file.nbytes:
                return Candidate(where, str(path), "", False, "it is as large as the target, and would gain nothing", ())
            note = check_fit(drafter, model)
            return Candidate(where, str(path), drafter.method, True, note, (_run(file.path, "-md", str(path)),))
    except (PyspecError, OSError) as error:
        return Candidate(where, str(path), "", False, str(error), ())


def _published(file: GGUFFile) -> Iterator[Candidate]:
    for pair in published(file):
        folder = pair.drafter.rsplit("/")[-1]
        commands = [_run(file.path, "-hfd", pair.drafter)]
        if not pair.gguf:
            made = f"{folder}.gguf"
            commands = [
                shlex.join(["hf", "download", pair.drafter, "--local-dir", folder]),
                shlex.join(["pyspec", "convert", folder, "-m", str(file.path), "-o", made]),
                _run(file.path, "-md", made),
            ]
        said = pair.refused or f"for {pair.target}"
        yield Candidate(HUB, pair.drafter, pair.method, not pair.refused, said, () if pair.refused else tuple(commands))
