"""Cost of quantisation: noise of the quantisation's own magnitude is added once more, and the drop in acceptance measured.

Errors of two quantisations are independent, so adding the same noise again costs about as much as the first did.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any
from zlib import crc32

import numpy as np

from ..errors import PyspecError
from ..ggml.library import lib, text
from ..models.weights import MATMUL
from ..tools.quants import TYPES, dequantise, quantise, type_id
from .probe import Measured, Passage, Probe, Reading, capture
from .readings import MIN_Z, gain
from .report import FAIL, NOT_APPLICABLE, OK, PRECISION, WARN, Check

MOST_BYTES = 1 << 30  # of the perturbed copy
LOSS_FAIL, LOSS_WARN = 0.15, 0.05  # share of accepted drafts
NATS_FAIL = 0.15


@cache
def relative_error(kind: int) -> float:
    """RMS relative error of a ggml type on normally distributed weights, where ggml can quantise without calibration data."""
    name = text(lib.ggml_type_name(kind))
    if name == "f32":
        return 0.0
    if name not in TYPES:
        bits = 8 * lib.ggml_type_size(kind) / lib.ggml_blck_size(kind)
        return float(2.0**-bits)  # lower bound for any code with so many bits
    values = np.random.default_rng(0).standard_normal((16, 1024), np.float32)
    back = dequantise(quantise(values, kind).tobytes(), kind, values.size).reshape(values.shape)
    return float(np.sqrt(np.mean((back - values) ** 2)))


class NoisyFile:
    """An open GGUF whose matrices in ``noisy`` get the quantisation noise of their type; stored as Q8_0 or F16.

    The noise depends on a matrix's name, not on the reading order, but differs across devices.
    """

    def __init__(self, file, noisy: set[str], seed: int = 0):
        self._file, self._seed = file, seed
        self.path, self.metadata, self.rope = file.path, file.metadata, file.rope
        self.tensors = dict(file.tensors)
        for name in noisy:
            info = file.tensors[name]
            kind = type_id("q8_0" if info.shape[0] % 32 == 0 else "f16")
            self.tensors[name] = replace(info, type=kind, nbytes=lib.ggml_row_size(kind, info.shape[0]) * int(np.prod(info.shape[1:])))

    def read(self, name: str) -> memoryview:
        old, new = self._file.tensors[name], self.tensors[name]
        if new is old:
            return self._file.read(name)
        with self._file.read(name) as data:
            values = dequantise(bytes(data), old.type, int(np.prod(old.shape))).reshape(-1, old.shape[0])
        size = relative_error(old.type) * np.sqrt(np.mean(values.astype(np.float64) ** 2, axis=1, keepdims=True))
        rng = np.random.default_rng([self._seed, crc32(name.encode())])
        values = values + rng.standard_normal(values.shape, np.float32) * size.astype(np.float32)
        return quantise(values, new.type).data.cast("B")

    def forget(self, name: str) -> None:
        self._file.forget(name)


def _matrices(model) -> set[str]:
    """Names of the model's matrices in its file."""
    names = {spec.source or spec.name for spec in model.specs() if spec.use == MATMUL}
    return {n for n in names if n in model.file.tensors and len(model.file.tensors[n].shape) == 2}


def _noisy_model(weights_of: Callable[[Any], Any], model: Any) -> Any:
    """The model with noisy weights from ``weights_of``; the caller closes them."""
    noisy = copy(model)
    noisy.file = NoisyFile(model.file, _matrices(model))
    noisy.weights = weights_of(noisy)
    return noisy


def _verdict(name: str, what: str, base: Measured, noisy: Measured, remedy: str, data: dict) -> Check:
    change, z = gain(base, noisy)
    lost = 1 - (noisy.tokens_per_block - 1) / max(base.tokens_per_block - 1, 1e-6)
    data |= {"tokens_per_block": base.tokens_per_block, "with_as_much_noise_again": noisy.tokens_per_block, "nats": change, "z": z}
    check, real = partial(Check, name, stage=PRECISION, data=data), z <= -MIN_Z
    acceptance = f"{base.tokens_per_block:.2f} to {noisy.tokens_per_block:.2f} tokens per block"
    found = f"{what}: as much noise again takes acceptance from {acceptance}"
    if real and -change >= NATS_FAIL and lost >= LOSS_FAIL:
        return check(FAIL, found + ", so about that much is lost already", remedy)
    if real and -change >= NATS_FAIL / 3 and lost >= LOSS_WARN:
        return check(WARN, found, remedy)
    return check(OK, found)


def _described(model) -> tuple[str, dict, str | None]:
    """The model's matrices in words and figures: mean bits per weight, RMS relative error, types by size; and why noise is not measured."""
    infos = [model.file.tensors[name] for name in _matrices(model)]
    if not infos:
        return "", {}, "it has no matrices"
    counts, by_type = np.array([np.prod(info.shape, dtype=float) for info in infos]), Counter[str]()
    for info in infos:
        by_type[info.type_name] += info.nbytes
    bits, types = 8 * by_type.total() / counts.sum(), ", ".join(name for name, _ in by_type.most_common())
    error = float(np.sqrt(np.average([relative_error(info.type) ** 2 for info in infos], weights=counts)))
    size = counts.sum() * 34 / 32
    what = f"{types}, {bits:.1f} bits per weight, relative error {error:.2g}"
    reason = None
    if size > MOST_BYTES:
        reason = f"{what}; measuring what that costs would take a second copy of {size / (1 << 30):.1f} GiB"
    elif error < 1e-3:
        reason = f"{what}: nothing to lose"
    return what, {"bits_per_weight": bits, "relative_error": error, "types": types}, reason


def drafter(weights_of, backend, target, model, probe: Probe, reading: Reading, base: Measured) -> Check:
    """Cost of the drafter's quantisation."""
    name, (what, data, reason) = "drafter quantisation", _described(model)
    if reason is not None:
        return Check(name, NOT_APPLICABLE, reason, stage=PRECISION, data=data)
    noisy = _noisy_model(weights_of, model)
    with closing(noisy.weights), closing(Probe(backend, target, noisy, probe.passages, probe.blocks)) as other:
        measured = other.measure(reading)
    remedy = "use the drafter in Q8_0 or F16: it is small, and each wrong draft costs part of a target step"
    return _verdict(name, what, base, measured, remedy, data)


def noisy_passage(make_engine, weights_of, model, passage: Passage) -> Passage:
    """The passage read with noisy target weights. ``make_engine(target)``: an engine without drafter; ``weights_of(target)``: its weights.
    Raises PyspecError: no memory for a noisy copy."""
    noisy = _noisy_model(weights_of, model)
    try:
        with closing(make_engine(noisy)) as engine:
            return capture(engine, passage.tokens, passage.n_prompt, sorted(passage.features))
    finally:
        noisy.weights.close()


def target(changed: Callable[[], Passage], model, probe: Probe, reading: Reading) -> Check:
    """Cost of the target's quantisation for the drafter; ``changed()``: the first passage with noise."""
    name, (what, data, reason) = "target quantisation", _described(model)
    if reason is not None:
        return Check(name, NOT_APPLICABLE, reason, stage=PRECISION, data=data)
    try:
        noisy = Probe(probe.backend, probe.target, probe.drafter, [changed()], probe.blocks)
    except PyspecError as error:
        return Check(name, NOT_APPLICABLE, f"{what}; a copy with noise cannot be made: {error}", stage=PRECISION, data=data)
    with closing(noisy):
        base, measured = probe.measure(reading, slice(0, 1)), noisy.measure(reading)
    remedy = "use the target with more bits per weight: the drafter was trained on its own hidden states"
    return _verdict(name, what, base, measured, remedy, data)
