"""libmtmd's encoders: pictures and sounds as rows of a prompt.

The encoder is a file of its own (`mmproj-*.gguf`), made for one target. libmtmd resizes and cuts a picture, or makes a spectrum of a sound, says which tokens stand around its parts, and computes
their rows on the device. Rows are kept within a budget by the hash of the picture: the next turn of a conversation does not encode it again.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.prompt import AXES, Picture, Prompt, row_ids
from ..errors import ModelError, PictureError
from ..ggml.device import Backend, device_handle
from ..ggml.library import ffi, lib
from ..gguf_io import GGUFFile
from ..models.decoder import Decoder
from ..models.registry import ENCODERS
from .pictures import LIMITS, PictureLimits, decode
from .sounds import decode_sound, is_sound

GEMMA4_PATCHES = 1120 * 9  # of a picture of the most rows, if all lie in one line
WHISPER_POSITIONS = 1500  # of 30 seconds, which these encoders compute at least
WHISPER = "ultravox", "voxtral", "qwen2a", "qwen2.5o", "glma", "meralion", "musicflamingo"
BREAK = "v.token_embd.img_break"
BUDGET = 256 << 20  # bytes of rows that are kept


def check_encoder(file: GGUFFile) -> None:
    """Raises ModelError unless the file is an encoder of pictures or sounds."""
    if file.get("general.architecture", str, "") != ENCODERS:
        raise ModelError(
            f"{file.path} is no encoder of pictures or sounds, but a model of the architecture {file.get('general.architecture', str, '')!r}"
        )
    kinds = encoder_kinds(file)
    if not kinds:
        raise ModelError(
            f"{file.path} encodes neither pictures nor sounds (clip.has_vision_encoder and clip.has_audio_encoder are false); name another file with `mmproj`"
        )
    if kinds.get("vision") == "gemma4v" and _positions(file, "v") < GEMMA4_PATCHES:  # which libmtmd does not check
        raise ModelError(f"{file.path} has positions for fewer than {GEMMA4_PATCHES} patches in a line; convert it again")
    if kinds.get("audio") in WHISPER and _positions(file, "a") < WHISPER_POSITIONS:
        raise ModelError(f"{file.path} has positions for fewer than {WHISPER_POSITIONS} frames of a sound; convert it again")
    if kinds.get("audio") == "voxtral" and WHISPER_POSITIONS // 2 % (factor := file.get("clip.audio.projector.stack_factor", int, 4) or 1):
        raise ModelError(
            f"{file.path} joins {factor} frames of {WHISPER_POSITIONS // 2}, which the libmtmd of this version counts wrongly, and ends the process; "
            "voxtral's sounds cannot be used"
        )


def encoder_kinds(file: GGUFFile) -> dict[str, str]:
    """libmtmd's names of what it encodes, like {"vision": "qwen3vl_merger", "audio": "ultravox"}."""
    found = [kind for kind in ("vision", "audio") if file.get(f"clip.has_{kind}_encoder", bool, False)]
    return {kind: file.get("clip.projector_type", str, "") or file.get(f"clip.{kind}.projector_type", str, "") for kind in found}


def _positions(file: GGUFFile, prefix: str) -> int:
    table = file.tensors.get(f"{prefix}.position_embd.weight")
    return table.shape[1] if table is not None and len(table.shape) > 1 else 0


def repair_breaks(values: np.ndarray, file: GGUFFile) -> None:
    """Pixtral's graph makes the rows between lines of a picture of memory that nothing has written, times 0, plus a tensor of the file: NaN where that
    memory was. F32 [rows, n]; rows that have other values than that tensor's, and pictures that are mostly NaN, stay, as do those of files without it."""
    if BREAK not in file.tensors or file.tensors[BREAK].type_name != "f32":
        return
    bad = ~np.isfinite(values)
    (rows,) = np.nonzero(bad.any(1))
    with file.read(BREAK) as data:
        breaks = np.frombuffer(data, np.float32)
        if 2 * rows.size <= len(values) and (bad[rows] | (values[rows] == breaks)).all():
            values[rows] = breaks


class Encoder:
    """Owns libmtmd's context, and a model of libllama without weights, which it reads the target's vocabulary and sizes from.

    Attributes:
        file: the encoder's.
        sees, rate: whether it encodes pictures, and samples per second of the sounds that it encodes; 0: none.
    """

    def __init__(self, file: GGUFFile, target: Decoder, backend: Backend, chunk: int, budget: int = BUDGET) -> None:
        check_encoder(file)
        if target.no_pictures:
            raise ModelError(f"{file.path.name} cannot be used with {target.file.path.name}: {target.no_pictures}; leave `mmproj` out")
        self.file, self._target, self._budget, self._lock = file, target, budget, threading.Lock()
        self._kept: OrderedDict[bytes, list[Sequence[int] | Picture]] = OrderedDict()
        self._kept_bytes = 0
        self.encoded = 0  # pictures and sounds so far that were not kept
        self._context: Any = None
        self._mtmd, self._ffi = _library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers, params.no_alloc, params.load_mode = 0, True, lib.LLAMA_LOAD_MODE_NONE
        lib.keep_errors()
        self._model: Any = lib.llama_model_load_from_file(os.fsencode(target.file.path), params)
        if not self._model:
            raise ModelError(f"llama.cpp cannot read {target.file.path}, which its encoders need: {ffi.string(lib.kept_errors()).decode()}")
        try:
            if (size := lib.llama_model_n_embd_inp(self._model)) != self.row_size:
                raise ModelError(
                    f"{target.file.path.name} reads rows of {size} values, of which {target.arch} models here know {self.row_size}; leave `mmproj` out"
                )
            self._open(backend, chunk)
        except BaseException:
            self.close()
            raise

    def _open(self, backend: Backend, chunk: int) -> None:
        mtmd, their = self._mtmd, self._ffi
        model = their.cast("struct llama_model *", int(ffi.cast("uintptr_t", self._model)))
        params = mtmd.mtmd_context_params_default()
        # a warm-up allocates its buffers before the context takes what is free
        params.use_gpu = params.warmup = backend.device.kind not in ("cpu", "rpc")
        params.print_timings = False
        if params.use_gpu:
            params.device = their.cast("ggml_backend_dev_t", int(ffi.cast("uintptr_t", device_handle(backend.device))))
        params.n_threads = backend.threads or os.cpu_count() or 1
        if not params.use_gpu:  # what a warm-up would find: without it a picture of 4096 rows takes gigabytes
            params.flash_attn_type = mtmd.LLAMA_FLASH_ATTN_TYPE_ENABLED
        mtmd.keep_errors()
        self._context = mtmd.mtmd_init_from_file(os.fsencode(self.file.path), model, params)
        if self._context and mtmd.mtmd_decode_use_non_causal(self._context, their.NULL):  # a step computes all rows of a picture
            mtmd.mtmd_free(self._context)
            params.image_max_tokens = chunk
            self._context = mtmd.mtmd_init_from_file(os.fsencode(self.file.path), model, params)
        if not self._context:
            raise ModelError(f"{self.file.path.name} cannot be used with {self._target.file.path.name}: {self._said()}")
        self.sees, self.rate = bool(mtmd.mtmd_support_vision(self._context)), max(0, mtmd.mtmd_get_audio_sample_rate(self._context))
        if bool(mtmd.mtmd_decode_use_mrope(self._context)) != self._target.by_axis:
            raise ModelError(
                f"{self.file.path.name} gives pictures other positions than {self._target.arch} reads (M-RoPE); leave `mmproj` out"
            )

    @property
    def row_size(self) -> int:
        """Values of a row."""
        return self._target.n_embd * (1 + self._target.deepstack)

    def _said(self) -> str:
        text = self._ffi.string(self._mtmd.kept_errors()).decode("utf-8", "replace")
        return " ".join(text.split())[-400:] or "libmtmd does not say why"

    @property
    def identity(self) -> bytes:
        """Hash of the encoder's file."""
        return self.file.identity(lambda done, total: None).encode()

    # -- pictures

    def encode(self, data: bytes, limits: PictureLimits = LIMITS) -> list[Sequence[int] | Picture]:
        """The parts that take the place of a file of a picture or a sound in a prompt: tokens and rows. From any thread.

        Raises:
            PictureError: as of ``decode`` and ``decode_sound``, or this encoder does not take it.
        """
        key = hashlib.sha256(data).digest()
        with self._lock:
            if (parts := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return parts
        media = self._decoded(data, limits)
        with self._lock:
            if self._context is None:
                raise PictureError("the encoder is closed: load the model again")
            parts = self._encode(media, limits.rows, hashlib.sha256(key + self.identity + str(self._target.arch).encode()).digest())
            self._keep(key, parts)
        return parts

    def prompt(self, parts: Sequence[Sequence[int] | bytes], limits: PictureLimits = LIMITS) -> Prompt:
        """A prompt of tokens and files of pictures and sounds."""
        pictures = sum(isinstance(part, bytes) for part in parts)
        if pictures > limits.count:
            raise PictureError(f"the prompt has {pictures} pictures and sounds, and {limits.count} are taken; send fewer")
        out = Prompt()
        for part in parts:
            for piece in self.encode(part, limits) if isinstance(part, bytes) else [part]:
                out.add(piece)
        return out

    def _decoded(self, data: bytes, limits: PictureLimits) -> np.ndarray:
        """Pixels U8 [height, width, 3], or samples F32 [n]."""
        sound = is_sound(data)
        if not (self.rate if sound else self.sees):
            what, other = ("sounds", "pictures") if sound else ("pictures", "sounds")
            raise PictureError(f"{self.file.path.name} encodes {other}, and no {what}; leave them out")
        return decode_sound(data, self.rate, limits) if sound else decode(data, limits)

    def _encode(self, media: np.ndarray, most: int, identity: bytes) -> list[Sequence[int] | Picture]:
        mtmd, their, media = self._mtmd, self._ffi, np.ascontiguousarray(media)
        mtmd.keep_errors()
        if media.ndim == 1:
            what = f"a sound of {len(media) / self.rate:.1f} s"
            bitmap = mtmd.mtmd_bitmap_init_from_audio(len(media), their.from_buffer("float[]", media))
        else:
            height, width, _ = media.shape
            what = f"a picture of {width} x {height} pixels"
            bitmap = mtmd.mtmd_bitmap_init(width, height, their.from_buffer("unsigned char[]", media))
        chunks, out = mtmd.mtmd_input_chunks_init(), list[Sequence[int] | Picture]()
        try:
            part = their.new("struct mtmd_input_part *", {"bitmap": bitmap})
            if mtmd.mtmd_tokenize_from_parts(self._context, chunks, their.new("struct mtmd_input_part *[]", [part]), 1, False):
                raise PictureError(f"the encoder refuses {what}: {self._said()}")
            rows = mtmd.mtmd_helper_get_n_tokens(chunks)
            if rows > most:
                raise PictureError(f"{what} takes {rows} rows of the context, and there are {most}; send a smaller one")
            for i in range(mtmd.mtmd_input_chunks_size(chunks)):
                chunk = mtmd.mtmd_input_chunks_get(chunks, i)
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    n = their.new("size_t *")
                    tokens = their.unpack(mtmd.mtmd_input_chunk_get_tokens_text(chunk, n), n[0])
                    if min(tokens) < 0:
                        raise PictureError(f"{self._target.file.path.name} lacks tokens that {self.file.path.name} puts around {what}")
                    out.append(tokens)
                else:
                    out.append(self._picture(chunk, identity + i.to_bytes(4, "little")))
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)
        self.encoded += 1
        return out

    def _picture(self, chunk: Any, identity: bytes) -> Picture:
        mtmd, their, size = self._mtmd, self._ffi, self.row_size
        rows = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        if mtmd.mtmd_encode_chunk(self._context, chunk):
            raise PictureError(f"the encoder failed: {self._said()}")
        values = (
            np.frombuffer(their.buffer(mtmd.mtmd_get_output_embd(self._context), 4 * rows * size), np.float32).reshape(rows, size).copy()
        )
        repair_breaks(values, self.file)
        if not np.isfinite(values).all():
            raise PictureError(
                f"{self.file.path.name} made NaN or Inf of a picture or sound: its weights are damaged, or overflow on this device"
            )
        positions = None
        if self._target.by_axis:
            image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)  # NULL of a sound, whose rows are one after the other
            positions = np.zeros((AXES, rows), np.int64)
            positions[:-1] = np.arange(rows)
            for i in range(rows if image else 0):
                at = mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, i)
                positions[:, i] = at.t, at.y, at.x, at.z
        n_pos = mtmd.mtmd_input_chunk_get_n_pos(chunk)
        both_ways = bool(mtmd.mtmd_decode_use_non_causal(self._context, chunk))
        return Picture(row_ids(identity, rows), values, positions, n_pos, both_ways)

    # -- what is kept

    def _keep(self, key: bytes, parts: list[Sequence[int] | Picture]) -> None:
        self._kept[key] = parts
        self._kept_bytes += _nbytes(parts)
        while self._kept_bytes > self._budget and self._kept:
            self._kept_bytes -= _nbytes(self._kept.popitem(last=False)[1])

    def close(self) -> None:
        """Frees it. Closing twice is fine."""
        with self._lock:
            if self._context:
                self._mtmd.mtmd_free(self._context)
            if self._model:
                lib.llama_model_free(self._model)
            self._context, self._model, self._kept = None, None, OrderedDict()


def _nbytes(parts: list[Sequence[int] | Picture]) -> int:
    return sum(part.embeddings.nbytes for part in parts if isinstance(part, Picture))


def companion(target: Path) -> Path | None:
    """The encoder beside ``target``: the only `*mmproj*.gguf` in its folder, or the one with the most of the target's name."""
    with suppress(OSError):
        found = sorted(path for path in target.parent.iterdir() if "mmproj" in path.name.lower() and path.suffix.lower() == ".gguf")
        found = [path for path in found if path.name != target.name]
        return max(found, key=partial(_alike, target.name.lower()), default=None)
    return None


def _alike(name: str, path: Path) -> int:
    """Letters of the target's name that the encoder's has, after "mmproj-"."""
    pairs = zip(name, path.name.lower().replace("mmproj-", "", 1))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _library() -> tuple[Any, Any]:
    try:
        from .. import _mtmd
    except ImportError as error:
        raise ModelError(
            f"this installation has no libmtmd, llama.cpp's encoders of pictures ({error}); run `pyspec build`, then install pyggml_spec again"
        ) from None
    return _mtmd.lib, _mtmd.ffi
