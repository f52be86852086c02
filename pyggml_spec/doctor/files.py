"""Checks before anything runs: build, tokenizers, mask-token embedding, weights."""

from functools import partial

import numpy as np

from ..drafters.model import is_whole_model
from ..drafters.vocabulary import LEAST_COVERAGE, TOKENS, map_vocabulary
from ..ggml.device import Device, build_notes, reads_quantised
from ..ggml.library import FITNESS, GGML_VERSION, lib
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray, brief
from ..models.weights import INDEX, MATMUL
from ..pin import LLAMA_CPP_PYTHON, pip_command
from ..text.tokenizer import first_difference
from ..tools.quants import dequantise
from .report import FAIL, NOT_APPLICABLE, OK, WARN, Check

SCANNED, SCANNED_TARGET = 8 << 20, 1 << 20  # values checked per tensor
_BEHAVIOUR = ("model", "pre", "add_bos_token", "bos_token_id", "eos_token_id")


def tokenizer(target: GGUFFile, draft: GGUFFile) -> Check:
    """Same tokens, merges, types and pre-tokenizer?"""
    check = partial(Check, "tokenizer")
    remedy = "convert the drafter again with this target's tokenizer, or use the target that it was made for"
    if "tokenizer.ggml.tokens" not in draft.metadata:
        return check(NOT_APPLICABLE, "the drafter has no vocabulary of its own and uses the target's")
    if is_whole_model(draft):
        if (found := map_vocabulary(target, draft)) is None:
            return check(OK, f"the target's {len(target.metadata[TOKENS])} tokens are the drafter's")
        misfit = found.coverage < LEAST_COVERAGE
        remedy = "use a small model of the target's family: tokens that it lacks are not drafted"
        return check(FAIL if misfit else WARN if found.lost else OK, f"another vocabulary: {found.description()}", remedy)
    if difference := first_difference(target, draft):
        return check(FAIL, difference, remedy)
    for key in ("tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
        if (differs := _lists_differ(target.metadata.get(key), draft.metadata.get(key))) is not None:
            return check(FAIL, f"the tokens are equal, but {key} differs at {differs}", remedy)
    for key in (f"tokenizer.ggml.{name}" for name in _BEHAVIOUR):
        theirs, ours = target.metadata.get(key), draft.metadata.get(key)
        if ours is not None and theirs != ours:
            return check(WARN, f"{key} is {brief(theirs)} in the target and {brief(ours)} in the drafter", remedy)
    return check(OK, f"{len(target.metadata['tokenizer.ggml.tokens'])} tokens and their merges are equal")


def _lists_differ(a, b) -> int | None:
    """First index where the lists differ; None if they do not, or if ``b`` is absent."""
    if b is None:
        return None
    if a is None or len(a) != len(b):
        return 0
    if isinstance(a, StringArray):
        return None if a.same(b) else next(i for i, (x, y) in enumerate(zip(a.raws(), b.raws())) if x != y)
    return int(np.flatnonzero(a != b)[0]) if (a != b).any() else None


def mask_embedding(target, drafter) -> Check:
    """Is the mask token's embedding finite and of the usual magnitude?"""
    check, own = partial(Check, "mask embedding"), "token_embd.weight" in drafter.file.tensors
    file, mask = (drafter if own else target).file, drafter.hp.mask_token
    info = file.tensors["token_embd.weight"]
    where = f"the {'drafter' if own else 'target'}'s embedding"
    if not 0 <= mask < info.shape[1]:
        return check(NOT_APPLICABLE, f"the mask token is {mask}, but {where} has {info.shape[1]} rows")
    rows = np.unique(np.linspace(0, info.shape[1] - 1, 256).astype(int))
    usual = float(np.nanmedian([np.sqrt(np.mean(_row(file, info, r) ** 2)) for r in rows]))
    row = _row(file, info, mask)
    rms = float(np.sqrt(np.mean(row**2)))
    text = brief(target.file.metadata["tokenizer.ggml.tokens"][mask])
    data = {"mask_token": mask, "text": text, "rms": rms, "usual_rms": usual}
    if not np.isfinite(row).all():
        found = f"{(~np.isfinite(row)).sum()} of the {row.size} values that {where} has for token {mask} ({text}) are NaN or Inf"
        remedy = "fetch or convert the file again: no block can be drafted from this embedding"
        return check(FAIL, found, remedy, data={**data, "rms": None})
    found = f"token {mask} ({text}) has an embedding of RMS {rms:.3g}, usual is {usual:.3g}"
    if rms == 0 or not 0.02 < rms / usual < 50:
        remedy = "check whether the drafter was trained with this token; some vocabularies have several unused ones"
        return check(WARN, found, remedy, data=data)
    return check(OK, found, data=data)


def _row(file: GGUFFile, info, i: int) -> np.ndarray:
    nbytes = lib.ggml_row_size(info.type, info.shape[0])
    with file.read(info.name) as data:
        return dequantise(bytes(data[i * nbytes : (i + 1) * nbytes]), info.type, info.shape[0])


def weights(name: str, model, most: int, known: Check | None = None) -> Check:
    """Are all tensors finite and non-zero? At most ``most`` values per matrix.

    ggml's CPU kernels quantise activations, so NaN weights can give wrong text without NaN logits.
    ``known``: the check of the mask embedding, which is not repeated.
    """
    bad, looked = [], 0
    for spec in model.specs():
        info = model.file.tensors.get(spec.source or spec.name)
        if info is None or spec.source or spec.use == INDEX:
            continue
        if known is not None and known.verdict == FAIL and spec.name == "token_embd.weight":
            continue
        count = int(np.prod(info.shape))
        whole = min(count, max(info.shape[0], most // info.shape[0] * info.shape[0]))
        with model.file.read(info.name) as data:
            values = dequantise(bytes(data[: lib.ggml_row_size(info.type, whole)]), info.type, whole)
        looked += whole
        if not np.isfinite(values).all():
            bad.append(f"{info.name} has {int((~np.isfinite(values)).sum())} values that are NaN or Inf")
        elif not values.any() and (spec.use != MATMUL or whole == count):
            bad.append(f"{info.name} is all zeros")
    if bad:
        more = f" (and {len(bad) - 1} tensors more)" if len(bad) > 1 else ""
        remedy = "fetch or convert the file again; `pyspec compare --weights` compares it with another copy"
        return Check(name, FAIL, bad[0] + more, remedy, data={"bad": bad})
    return Check(name, OK, f"{looked} values checked, all finite, no tensor all zero")


def build(device: Device) -> Check:
    """Buffer types that crash, and faster kernels that are missing."""
    check = partial(Check, "build", data={"features": list(FITNESS.features), "refused": dict(FITNESS.refused)})
    if FITNESS.refused and device.kind == "cpu":
        died = "; ".join(f"products in the buffer type {name} {how}, so it is not used" for name, how in FITNESS.refused.items())
        return check(WARN, died, f"build llama-cpp-python again without pip's cache: {pip_command()}")
    notes = build_notes(device) + ["attention reads q8_0 K/V as it lies, which drafters get by default"] * reads_quantised(device)
    if any("ggml's own" in note for note in notes):
        return check(WARN, "verification uses ggml's stock kernels on this GPU", "run `pyspec build --cuda`, which builds faster kernels")
    uses = f", with {' '.join(FITNESS.features)}" if FITNESS.features else ""
    return check(OK, f"llama-cpp-python {LLAMA_CPP_PYTHON}, ggml {GGML_VERSION}{uses}{''.join(f', {note}' for note in notes)}")
