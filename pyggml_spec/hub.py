"""Model files of the Hugging Face hub, by the names that llama.cpp's -hf takes. The package huggingface_hub downloads and keeps them."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .drafters.names import kind_of
from .errors import HubError

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_QUANT = re.compile(r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4))(?=[.-])", re.IGNORECASE)
_OTHERS = ("mmproj", "imatrix")  # parts of the names of GGUFs that are neither targets nor drafters
ENCODERS = ("f16", "bf16", "q8_0", "f32")  # the order in which encoders of pictures are preferred
_DEFAULTS = ("Q4_K_M", "Q8_0")
PATIENCE = 10  # seconds until the hub has to answer
_SHOWN = 8  # names of files in a message

Progress = Callable[[str, int, int], None]


def fetch(repo: str, *, file: str | None = None, drafter: bool = False, progress: Progress = lambda what, done, total: None) -> Path:
    """Where a GGUF of the hub lies on this machine; it is downloaded if it is not there yet, or has changed. Of a model in several files, all
    are downloaded, and it is the first one.

    Environment variables and settings are those of huggingface_hub: ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``. Without
    a connection, what was downloaded before is used.

    Args:
        repo: "USER/MODEL" or "USER/MODEL:QUANT", in any case. Without QUANT: Q4_K_M, else Q8_0, else the first file.
        file: this file of the repository, instead of QUANT.
        drafter: files that are named like drafters (``drafters.names``) come before others.
        progress: called with ("download", done, total) in bytes; for a model in several files ("download 2 of 5", done, total), file by file.

    Raises:
        HubError: huggingface_hub is not installed, there is no such repository or file, or it cannot be had now.
    """
    return _fetch_all(repo, file, drafter, False, progress)[0]


def fetch_pair(repo: str, *, file: str | None = None, progress: Progress = lambda what, done, total: None) -> tuple[Path, Path | None]:
    """A target as of ``fetch``, and the drafter that its repository has; None if it has none."""
    return _fetch_all(repo, file, False, True, progress)


def fetch_encoder(repo: str, *, progress: Progress = lambda what, done, total: None) -> Path | None:
    """The encoder of pictures that the repository of ``fetch`` has, F16 before others; None if it has none."""
    if (match := _NAME.fullmatch(repo)) is None:
        raise HubError(f"{repo!r} names no repository of the hub; give USER/MODEL or USER/MODEL:QUANT")
    hub, name = _package(), match[1]
    names, cached = _names(hub, name)
    found = [other for other in names if "mmproj" in other.rsplit("/", maxsplit=1)[-1].lower()]
    chosen = next(
        (other for kind in ENCODERS for other in found if re.search(rf"(?<![a-z0-9]){kind}[.-]", other, re.IGNORECASE)),
        next(iter(found), None),
    )
    return _fetch(hub, name, names, cached, None, chosen, False, progress) if chosen is not None else None


def _fetch_all(repo: str, file: str | None, drafter: bool, companion: bool, progress: Progress) -> tuple[Path, Path | None]:
    """A model, and with ``companion`` the repository's drafter."""
    if not isinstance(repo, str) or not (match := _NAME.fullmatch(repo)):
        raise HubError(f"{repo!r} names no repository of the hub; give USER/MODEL or USER/MODEL:QUANT")
    name, quant = match.groups()
    try:
        hub = _package()
        names, cached = _names(hub, name)
        # all files may be named like drafters, as those of a model called "...-assistant" are
        found = companion and len({kind_of(other) is None for other in names if not is_other(other)}) == 2
        model = _fetch(hub, name, names, cached, quant, file, drafter, progress)
        return model, _fetch(hub, name, names, cached, None, None, True, progress) if found else None
    except Exception as error:
        if not isinstance(error, ValueError) and type(error).__name__ != "InvalidURL":  # httpx's is none
            raise
        # of settings that huggingface_hub cannot read, or what it stands on
        look = "look at HF_ENDPOINT, HF_TOKEN, other variables that begin with HF_, and those of proxies"
        raise HubError(f"{name} cannot be requested: {_line(error)}; {look}") from None


def _fetch(
    hub: Any,
    name: str,
    names: list[str],
    cached: dict[str, Path] | None,
    quant: str | None,
    file: str | None,
    drafter: bool,
    progress: Progress,
) -> Path:
    """One model of ``names``."""
    chosen = _chosen(names, quant, drafter) if file is None else file if file in names else None
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    there = f"; it has {', '.join(names[:_SHOWN])}{more}" if names else ""
    if chosen is None:
        wanted = f"GGUF of the quantisation {quant}" if quant is not None else "GGUF of a model"
        raise HubError(f"{name} has no {wanted if file is None else f'file {file!r}'}{there}")
    parts = _parts(chosen)
    if chosen not in parts:
        raise HubError(f"{chosen} of {name} is no part that its own name counts; name another file{there}")
    if missing := [part for part in parts if part not in names]:
        raise HubError(f"{chosen} of {name} is one of {len(parts)} parts, and {missing[0]} is not there{there}")
    if cached is not None:
        return cached[parts[0]]
    labels = ["download"] if len(parts) == 1 else [f"download {i} of {len(parts)}" for i in range(1, len(parts) + 1)]
    paths = [_download(hub, name, part, partial(progress, label)) for part, label in zip(parts, labels)]
    return paths[0]


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _package() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise HubError("files of the hub need the package huggingface_hub; run: pip install huggingface_hub") from None
    return huggingface_hub


def _names(hub: Any, repo: str) -> tuple[list[str], dict[str, Path] | None]:
    """The GGUFs of the repository, and where they lie if the hub cannot be reached: then it is those that were downloaded before."""
    try:
        return [s.rfilename for s in hub.HfApi().model_info(repo, timeout=PATIENCE).siblings or [] if s.rfilename.endswith(".gguf")], None
    except hub.errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code < 500:
            raise HubError(_said(repo, error)) from None
        reason = _said(repo, error)
    except hub.errors.HFValidationError as error:
        raise HubError(f"{repo!r} names no repository of the hub: {_line(error)}") from None
    except (OSError, hub.errors.HTTPError) as error:  # no connection, or none is wanted
        offline = "offline mode is on" if hub.constants.HF_HUB_OFFLINE else f"the hub cannot be reached ({type(error).__name__})"
        reason = f"{repo}: {offline}, and no file of it was downloaded before"
    cached = _cached(hub, repo)
    if not cached:
        raise HubError(reason)
    return sorted(cached), cached


def _cached(hub: Any, repo: str) -> dict[str, Path]:
    try:
        repos = hub.scan_cache_dir().repos
    except hub.errors.CacheNotFound:
        return {}
    revisions = [r for one in repos if (one.repo_type, one.repo_id.lower()) == ("model", repo.lower()) for r in one.revisions]
    revisions.sort(key=lambda r: ("main" in r.refs, r.last_modified))
    files = [(r.snapshot_path, f.file_path) for r in revisions for f in r.files]
    return {path.relative_to(top).as_posix(): path for top, path in files if path.suffix == ".gguf"}


def _chosen(names: Sequence[str], quant: str | None, drafter: bool) -> str | None:
    """The file of this quantisation, or the default one; None if there is none."""
    first = [n for n in names if (part := _PART.search(n)) is None or int(part[1]) == 1]
    usable = [n for n in first if not is_other(n)]
    drafters = [n for n in usable if kind_of(n) is not None]
    models = [n for n in usable if kind_of(n) is None] or drafters
    best = min(map(kind_of, drafters), default=None)  # type: ignore[type-var]
    usable = [n for n in drafters if kind_of(n) == best] if drafter and drafters else models
    for wanted in _DEFAULTS if quant is None else (quant,):
        pattern = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        for name in usable:
            if pattern.search(name):
                return name
    return usable[0] if usable and quant is None else None


def is_other(name: str) -> bool:
    """Whether a GGUF is neither a target nor a drafter, by its name."""
    return any(word in name.rsplit("/", maxsplit=1)[-1] for word in _OTHERS)


def is_later_part(name: str) -> bool:
    """Whether a file is a part of a model, and not the first one."""
    part = _PART.search(name)
    return part is not None and int(part[1]) > 1


def cached_files() -> list[Path]:
    """GGUFs in the caches of the hub and of llama.cpp, by the variables that both read; without huggingface_hub, too."""
    home, get = Path.home() / ".cache", os.environ.get
    of_hub = Path(get("HF_HUB_CACHE") or Path(get("HF_HOME") or home / "huggingface") / "hub")
    found = [*of_hub.glob("models--*/snapshots/*/**/*.gguf"), *Path(get("LLAMA_CACHE") or home / "llama.cpp").glob("**/*.gguf")]
    return sorted(path for path in found if path.is_file())


@dataclass(frozen=True)
class Cached:
    """A model file of a cache. ``name``: "USER/MODEL:QUANT" as -hf takes it, or the file's; ``size``: bytes of all its parts; ``modified``: seconds since 1970."""

    name: str
    path: Path
    size: int
    modified: float


def cached_models() -> list[Cached]:
    """The models of ``cached_files``, drafters too, by name; parts of one model are one."""
    out: dict[str, Cached] = {}
    for path in cached_files():
        if not is_later_part(path.name) and not is_other(path.name):
            parts = [part for name in _parts(path.name) if (part := path.parent / name).is_file()]
            made = Cached(_cached_name(path), path, sum(part.stat().st_size for part in parts), path.stat().st_mtime)
            if made.name not in out or out[made.name].modified < made.modified:  # the newest revision
                out[made.name] = made
    return [out[name] for name in sorted(out)]


def _cached_name(path: Path) -> str:
    repo = _repository(path)
    if repo is None:
        return path.name
    quant = _QUANT.findall(_PART.sub(".gguf", path.name))
    return f"{repo.name.removeprefix('models--').replace('--', '/', 1)}:{quant[-1] if quant else path.stem}"


def _repository(path: Path) -> Path | None:
    """The folder of its repository in the hub's cache."""
    return next(
        (folder for folder in path.parents if folder.name.startswith("models--") and path.is_relative_to(folder / "snapshots")), None
    )


def remove(name: str) -> list[tuple[Path, int]]:
    """Deletes the files of "USER/MODEL:QUANT", or all of "USER/MODEL", or a file by its name, from the caches.

    Returns:
        What was deleted, with its bytes.

    Raises:
        HubError: there is none of this name, or it cannot be deleted.
    """
    found = [
        one for one in cached_models() if name.lower() in (one.name.lower(), one.name.lower().partition(":")[0], one.path.name.lower())
    ]
    if not found:
        raise HubError(f"there is no model {name!r} in the caches; `pyspec list` names them")
    out = []
    try:
        for one in found:
            repo = _repository(one.path)
            same = one.path.relative_to(repo / "snapshots").parts[1:-1] if repo is not None else ()
            folders = repo.glob(str(Path("snapshots", "*", *same))) if repo is not None else [one.path.parent]  # in every revision
            links = [path for folder in folders for part in _parts(one.path.name) if (path := folder / part).is_file()]
            blobs = {link.resolve() for link in links}
            for link in links:
                link.unlink()
            left = {path.resolve() for path in repo.glob("snapshots/**/*") if path.is_symlink()} if repo is not None else set()
            for blob in blobs - left:
                blob.unlink(missing_ok=True)
            if repo is not None and not left and not any(path.is_file() for path in repo.glob("snapshots/**/*")):
                shutil.rmtree(repo)
            out.append((one.path, one.size))
    except OSError as error:
        raise HubError(f"{error.filename} cannot be deleted: {error.strerror}") from None
    return out


def _parts(name: str) -> list[str]:
    """The names of all files of the model of which ``name`` is one."""
    if (part := _PART.search(name)) is None:
        return [name]
    return [f"{name[: part.start()]}-{i:05}-of-{part[2]}.gguf" for i in range(1, int(part[2]) + 1)]


def _download(hub: Any, repo: str, name: str, progress: Callable[[int, int], None]) -> Path:
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        """huggingface_hub's progress bar, as calls of ``progress``."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **{**more, "disable": True})
            self._done, self._size = more.get("initial") or 0, more.get("total") or 0

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            progress(self._done, max(self._size, self._done))

    try:
        return Path(hub.hf_hub_download(repo, name, tqdm_class=Bar))
    except hub.errors.HfHubHTTPError as error:
        raise HubError(_said(f"{name} of {repo}", error)) from None
    except (OSError, hub.errors.HTTPError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        raise HubError(f"{name} of {repo} cannot be downloaded: {reason}") from None


def _said(what: str, error: Any) -> str:
    """What the hub answered, as a sentence."""
    status = error.response.status_code if error.response is not None else 0
    reasons = {
        401: "does not exist, or needs a token that may read it (HF_TOKEN)",
        403: "is closed to you; ask for access on its page, and give a token (HF_TOKEN)",
        404: "does not exist on the hub; check the name",
    }
    return f"{what} {reasons.get(status, f'cannot be had: the hub answered {status or error}; try again later')}"
