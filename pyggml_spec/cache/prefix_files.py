"""Files of the prefix cache: one per chunk and kind, ``<layout>-<key>.rows`` and ``.state``.

    4096 bytes   header: magic, version, kind, key, layout digest, payload size, SHA-256 of the payload; the layout as text; at the end
                 the SHA-256 of the header itself
    payload      the concatenated bytes of the tensors

A file is written under an unguessable name, synced and renamed. On reading, its size has to match this engine's layout before anything is allocated,
and both checksums have to match. Checksums detect damage, not malice, so files or folders that other users can write are not used.
"""

import hashlib
import os
import re
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

import numpy as np

from ..errors import PyspecError
from ..files import PART, make_private, replacing, why_not_private

MAGIC, VERSION, HEADER = b"pyspecPC", 1, 4096
_FIELDS = struct.Struct("<8sI8s32s32sQ32sI")  # magic, version, kind, key, layout, payload bytes, its SHA-256, bytes of the layout text
_NAME = re.compile(r"([0-9a-f]{16})-[0-9a-f]{48}\.(rows|state)")
PART_NAME = re.compile(PART)
ABANDONED_S = 3600  # age of a part file whose writer is gone
READERS = 8  # files read and hashed concurrently: one core's SHA-256 (about 2 GB/s) can be slower than prefill of a small model
MOST_UNWRITTEN = 1 << 28  # bytes queued in host memory


class Refused(PyspecError):
    """A file of the prefix cache that cannot be used, or written."""


class PrefixFiles:
    """The files of one layout in ``folder``, which is created if missing.

    Args:
        layout: text of ``layout_of``.
        budget: bytes of all files in the folder; least recently used ones are deleted first.

    Raises:
        PyspecError: the folder cannot be created or listed, or others can write to it.
    """

    def __init__(self, folder: str | Path, layout: str, budget: int) -> None:
        self.folder, self.layout, self.budget = Path(folder), layout, budget
        self.layout_digest = hashlib.sha256(layout.encode()).digest()
        self.notes: list[str] = []
        self._refused: set[Path] = set()
        self._unreadable, self._said = False, list[str]()
        try:
            make_private(self.folder)
            what = os.stat(self.folder)
            if why := why_not_private(what):
                raise PyspecError(
                    f"the prefix cache {str(folder)!r} {why}, who could put rows of their own into it; name a folder of yours, or take the "
                    f"permission away (chmod go-w)"
                )
            if stat.S_IMODE(what.st_mode) & 0o055:
                self.notes.append(f"others can list the prefix cache {folder}, not read its files; chmod 700 hides the list too")
            entries = self.entries()
            for path, what in entries:
                if what.st_mode & 0o077 and what.st_uid == os.geteuid():  # of this user, and open to others
                    with suppress(OSError), _open(path) as file:
                        os.fchmod(file.fileno(), 0o600)
            self._sweep()
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", error)
            raise PyspecError(f"the prefix cache {str(folder)!r} cannot be opened: {cause}; name a folder that can be written") from None
        if entries and not any(path.name.startswith(self.name_prefix) for path, _ in entries):
            self.notes.append(self._foreign(len(entries), entries[0][0]))

    # -- reading

    def has(self, key: bytes, kind: str) -> bool:
        """Whether a usable file exists. An unreadable folder has none, with one note."""
        path = self.path_of(key, kind)
        if path in self._refused:
            return False
        try:
            os.stat(path)
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if not self._unreadable:
                self._unreadable = True
                self._said.append(
                    f"the prefix cache {self.folder} cannot be looked into: {error.strerror}; prompts are computed without it"
                )
            return False

    def take_notes(self) -> list[str]:
        """Notes since the last call, one sentence each, without those of ``__init__``."""
        notes, self._said = self._said, []
        return notes

    def load(self, key: bytes, kind: str, nbytes: int) -> np.ndarray:
        """The payload, U8 [nbytes].

        Raises:
            Refused: the file is damaged, truncated, or of another layout; ``has`` is False from then on.
        """
        path = self.path_of(key, kind)
        try:
            with _open(path) as file:
                payload = self.read(file, path, key, kind, nbytes)
                os.utime(file.fileno())
            return payload
        except OSError as error:
            self._refused.add(path)
            raise Refused(f"{path} cannot be read ({error.strerror}); this part of the prompt is computed") from None
        except Refused:
            self._refused.add(path)
            raise

    def load_each(self, keys: Iterable[bytes], kind: str, nbytes: int) -> Iterator[np.ndarray]:
        """``load`` of each key in order, with read-ahead."""
        with ThreadPoolExecutor(READERS) as pool:
            coming: deque = deque()
            for key in keys:
                coming.append(pool.submit(self.load, key, kind, nbytes))
                if len(coming) == READERS:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()

    def read(self, file: BufferedReader, path: Path, key: bytes, kind: str, nbytes: int) -> np.ndarray:
        what = os.fstat(file.fileno())
        if not stat.S_ISREG(what.st_mode):
            raise _refuse(path, "is not a file")
        if why := why_not_private(what):
            raise _refuse(path, why)
        header = file.read(HEADER)
        its_kind, its_key, layout, size, sha256, words = self._header(header, path)
        if layout != self.layout_digest:
            raise _refuse(path, f"was made for another model or layout ({_difference(words, self.layout)})")
        if (its_key, its_kind) != (key, kind.encode()):
            raise _refuse(path, "holds another prefix than its name says")
        if what.st_size != HEADER + nbytes or size != nbytes:
            raise _refuse(path, f"has {what.st_size} bytes instead of {HEADER + nbytes}: it was cut short or does not belong here")
        payload = np.empty(nbytes, np.uint8)
        if (got := file.readinto(payload.data)) < nbytes:
            raise _refuse(path, f"ends after {HEADER + got} bytes instead of {HEADER + nbytes}")
        if hashlib.sha256(payload.data).digest() != sha256:
            raise _refuse(path, "is damaged: its contents do not fit their checksum")
        return payload

    def _header(self, header: bytes, path: Path) -> tuple[bytes, bytes, bytes, int, bytes, str]:
        """Kind, key, layout digest, payload bytes and their SHA-256, and the layout."""
        if len(header) < HEADER:
            raise _refuse(path, f"has {len(header)} bytes, which is less than its header: it was cut short")
        magic, version, kind, key, layout, nbytes, sha256, size = _FIELDS.unpack_from(header)
        if magic != MAGIC:
            raise _refuse(path, "is not a file of the prefix cache")
        if version != VERSION:
            raise _refuse(path, f"has version {version}, but {VERSION} is supported")
        if hashlib.sha256(header[:-32]).digest() != header[-32:]:
            raise _refuse(path, "is damaged: its header does not fit its checksum")
        words = header[_FIELDS.size : min(_FIELDS.size + size, HEADER - 32)].decode("utf-8", "replace")
        return kind.rstrip(b"\0"), key, layout, nbytes, sha256, words

    # -- writing

    def store(self, key: bytes, kind: str, payload: np.ndarray) -> None:
        """Writes one file atomically.

        Raises:
            Refused: the folder cannot be written, or the disk is full.
        """
        path = self.path_of(key, kind)
        words = self.layout.encode()[: HEADER - 32 - _FIELDS.size]
        fields = (MAGIC, VERSION, kind.encode(), key, self.layout_digest, payload.nbytes, hashlib.sha256(payload.data).digest(), len(words))
        header = (_FIELDS.pack(*fields) + words).ljust(HEADER - 32, b"\0")
        try:
            with replacing(path, sync=True) as file:
                file.write(header + hashlib.sha256(header).digest())
                file.write(payload.data)
        except OSError as error:
            raise Refused(f"the prefix cache {self.folder} cannot be written: {error.strerror}; the text is not affected") from None
        self._refused.discard(path)

    def trim(self) -> None:
        """Deletes the least recently used files until the rest fits the budget."""
        try:
            entries = sorted(self.entries(), key=lambda entry: entry[1].st_mtime_ns)
            total = sum(what.st_size for _, what in entries)
            for path, what in entries:
                if total <= self.budget:
                    break
                path.unlink(missing_ok=True)
                total -= what.st_size
        except OSError as error:
            raise Refused(f"old files of the prefix cache {self.folder} cannot be deleted: {error.strerror}") from None

    # -- helpers

    @property
    def name_prefix(self) -> str:
        return self.layout_digest.hex()[:16]

    def path_of(self, key: bytes, kind: str) -> Path:
        return self.folder / f"{self.name_prefix}-{key.hex()[:48]}.{kind}"

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """The cache's files with their status; files that vanish meanwhile are skipped."""
        out = []
        with os.scandir(self.folder) as found:
            for entry in found:
                if _NAME.fullmatch(entry.name):
                    try:
                        what = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(what.st_mode):
                        out.append((Path(entry.path), what))
        return out

    def _sweep(self) -> None:
        """Deletes part files of killed writers."""
        with os.scandir(self.folder) as found:
            for entry in found:
                with suppress(FileNotFoundError):  # its writer has just finished
                    if PART_NAME.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
                        os.unlink(entry.path)

    def _foreign(self, count: int, path: Path) -> str:
        try:
            with _open(path) as file:
                why = _difference(self._header(file.read(HEADER), path)[-1], self.layout)
        except (OSError, Refused):
            why = "a sampled file is damaged"
        return f"none of the {count} files in the prefix cache {self.folder} was made for this model and layout ({why}); they are not used"


class PrefixWriter:
    """Writes files in a thread of its own, so that no step waits for the disk. Drops data beyond MOST_UNWRITTEN queued bytes."""

    def __init__(self, files: PrefixFiles) -> None:
        self._files, self._lock, self._pool = files, threading.Lock(), ThreadPoolExecutor(1, "pyggml_spec prefix files")
        self.under_way: set[tuple[bytes, str]] = set()
        self.waiting_bytes, self._closing, self._notes = 0, False, list[str]()

    def wants(self, key: bytes, kind: str, nbytes: int, again: bool = False) -> bool:
        """Whether ``put`` is useful: no such file (or ``again``: it may be damaged), not queued yet, and within the limit."""
        with self._lock:
            if self._closing or (key, kind) in self.under_way or (self.waiting_bytes and self.waiting_bytes + nbytes > MOST_UNWRITTEN):
                return False
        return again or not self._files.has(key, kind)

    def put(self, key: bytes, kind: str, payload: np.ndarray) -> None:
        with self._lock:
            self.under_way.add((key, kind))
            self.waiting_bytes += payload.nbytes
        self._pool.submit(self.write, key, kind, payload)

    def write(self, key: bytes, kind: str, payload: np.ndarray) -> None:
        """Writes one file; failures become notes."""
        note = ""
        try:
            self._files.store(key, kind, payload)
            if len(self.under_way) == 1:
                self._files.trim()
        except Refused as refused:
            note = str(refused)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".replace("\n", " ")
            note = f"the prefix cache {self._files.folder} cannot be written: {why}; the text is not affected"
        with self._lock:
            self.under_way.discard((key, kind))
            self.waiting_bytes -= payload.nbytes
            if note and note not in self._notes:
                self._notes.append(note)

    def take_notes(self) -> list[str]:
        """Failures since the last call, one sentence each."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Waits until the queue is written. Idempotent."""
        self._closing = True
        self._pool.shutdown()


def _refuse(path: Path, why: str) -> Refused:
    return Refused(f"{path} {why}; it is not used, and this part of the prompt is computed")


def _difference(theirs: str, ours: str) -> str:
    """The first line that differs, in both versions."""
    differ = (f"{a[:120]!r} there, {b[:120]!r} here" for a, b in zip(theirs.splitlines(), ours.splitlines()) if a != b)
    return next(differ, "another layout")


def _open(path: Path) -> BufferedReader:
    """Opens for reading without blocking on pipes or following links."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW))
