"""Is the drafter read as it was trained? Hyper-parameters that files often get wrong are swept.

A reading is better if the log-likelihood of the true tokens rises by MIN_GAIN nats and MIN_Z standard errors over the same blocks; accepted
tokens alone are a much coarser measure.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..drafters.dflash import F16_MAX
from ..models.rope import Rope
from .opening import mask_candidates
from .probe import Measured, Probe, Reading
from .report import FAIL, FEATURES, FIT, NOT_APPLICABLE, OK, READING, WARN, Check

MIN_GAIN, MIN_Z = 0.05, 3.0
MIN_RISE = 0.1  # tokens per block
BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
WINDOWS = (128, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Sweep:
    """Alternatives for one hyper-parameter. ``now``: the file's value; ``screen``: drop alternatives that are worse on one passage."""

    check: str
    now: str
    alternatives: list[tuple[str, Reading]]
    remedy: str
    screen: bool = True
    reason: str = ""  # why there are no alternatives


def sweeps(reading: Reading, drafter, target, longest: int) -> list[Sweep]:
    """All sweeps. ``longest``: last position of the passages; longer windows cannot be measured."""
    hp, edit = reading.hp, "with gguf-set-metadata, or convert it again"
    layers = [tuple(v + shift for v in hp.target_layers) for shift in (-1, 1)]
    possible = [ids for ids in layers if all(0 <= v <= target.n_layer for v in ids)]
    shifted = [(f"target layers are {list(ids)}", reading.but(target_layers=ids)) for ids in possible]
    tokens, others = target.file.metadata["tokenizer.ggml.tokens"], [i for i in mask_candidates(drafter.file, target) if i != hp.mask_token]
    masks = [(f"the mask token is {i} ({tokens[i]!r})", reading.but(mask_token=i)) for i in others]
    rows = sorted({hp.block_size // 2, 2 * hp.block_size, 8, 16} - {hp.block_size}, reverse=True)
    blocks = [(f"the block has {n} rows", reading.but(block_size=n)) for n in rows if 2 <= n <= 64]
    rope, theirs = hp.rope, target.rope
    bases = sorted({*BASES, *([theirs.base] if isinstance(theirs, Rope) else [])} - {rope.base})
    turned = sorted({hp.head_size, hp.head_size // 2, hp.head_size // 4} - {rope.n_rot, 0})
    dims = [(f"{n} values of each head are rotated", reading.but(rope=replace(rope, n_rot=n))) for n in turned if n % 2 == 0]
    paired = "neighbouring values" if rope.neox else "halves"
    dims.append((f"{paired} of a head are paired", reading.but(rope=replace(rope, neox=not rope.neox))))
    if rope.scale != 1.0:
        dims.append(("positions are not scaled", reading.but(rope=replace(rope, scale=1.0))))
    return [
        Sweep("target layers", f"target layers {list(hp.target_layers)}", shifted, "convert the drafter again with these dflash.target_layers", False),
        Sweep("mask token", f"mask token {hp.mask_token}", masks, f"set tokenizer.ggml.mask_token_id in the drafter {edit}"),
        Sweep("block size", f"block of {hp.block_size}", blocks, f"set dflash.block_size in the drafter {edit}", False),
        Sweep("rope base", f"rope base {rope.base:g}", [(f"rope base is {b:g}", reading.but(rope=replace(rope, base=b))) for b in bases],
              f"set dflash.rope.freq_base in the drafter {edit}"),
        Sweep("rope sections", f"{rope.n_rot} of {hp.head_size} values rotated", dims, "convert the drafter again with the rope dimensions and sections of its training"),
        _embedding(reading, drafter, target, edit),
        Sweep("attention scale", f"attention scale {hp.attention_scale:.4g}",
              [(f"the attention scale is {s:.4g}", reading.but(attention_scale=s)) for s in (hp.head_size**-0.5, 1.0) if abs(s / hp.attention_scale - 1) > 1e-3],
              f"set dflash.attention.scale in the drafter {edit}"),
        Sweep("activation", "GELU" if hp.gelu else "SiLU", [(f"the activation is {'SiLU' if hp.gelu else 'GELU'}", reading.but(gelu=not hp.gelu))],
              f"set dflash.hidden_activation in the drafter {edit}"),
        _windows(reading, target, longest, edit),
        Sweep("block direction", f"{_direction(reading)} block",
              [(f"the block is {_direction(other)}", other) for other in _directions(reading)],
              f"set dflash.attention.causal in the drafter {edit}"),
    ]  # fmt: skip


def _directions(reading: Reading) -> list[Reading]:
    """Other readings: all layers causal, none, or those with a window."""
    windows = reading.hp.window
    tried = dict.fromkeys([(False,) * len(windows), (True,) * len(windows), tuple(map(bool, windows))])
    return [reading.but(causal=causal) for causal in tried if causal != reading.hp.causal]


def _direction(reading: Reading) -> str:
    causal = reading.hp.causal
    return "causal" if all(causal) else "in sliding layers causal" if any(causal) else "bidirectional"


def _embedding(reading: Reading, drafter, target, edit: str) -> Sweep:
    own = "token_embd.weight" in drafter.file.tensors
    now = reading.hp.embedding_scale or (1.0 if own else target.embedding_scale)
    tried = {1.0, target.embedding_scale, float(np.sqrt(target.n_embd))}
    scales = [(f"block embeddings are scaled by {s:.4g}", reading.but(embedding_scale=s)) for s in sorted(tried) if abs(s / now - 1) > 1e-3]
    return Sweep("embedding scale", f"block embeddings scaled by {now:.4g}", scales, f"set dflash.embedding_scale in the drafter {edit}")


def _windows(reading: Reading, target, longest: int, edit: str) -> Sweep:
    hp, tried = reading.hp, {}
    now = f"windows {list(hp.window)}" if any(hp.window) else "no sliding window"
    if any(hp.window):
        tried["no layer has a sliding window"] = (0,) * hp.n_layer
        window = max(hp.window)
        flipped = tuple(0 if w else window for w in hp.window)
        if window < longest and any(flipped):
            tried[f"windows are {list(flipped)}"] = flipped
    for window in sorted({*WINDOWS, target.window} - {0, *hp.window}):
        if window < longest:
            tried[f"all layers have a window of {window}"] = (window,) * hp.n_layer
    visible = {label: w for label, w in tried.items() if any(0 < x < longest for x in (*w, *hp.window))}
    reason = f"the texts reach position {longest}; no window that could be meant is shorter"
    return Sweep(
        "sliding window", now, [(label, reading.but(window=w)) for label, w in visible.items()],
        f"set dflash.attention.sliding_window and its pattern in the drafter {edit}", reason=reason,
    )  # fmt: skip


def gain(base: Measured, other: Measured) -> tuple[float, float]:
    """Gain in log-likelihood of ``other`` in nats per draft, and in standard errors. Same blocks, common drafts."""
    n, k = min(len(base.matched), len(other.matched)), min(base.likelihood.shape[1], other.likelihood.shape[1])
    return _paired((other.likelihood[:n, :k] - base.likelihood[:n, :k]).mean(axis=1))


def _first(base: Measured, other: Measured) -> Measured:
    """``base`` on the blocks measured for ``other``."""
    return replace(base, matched=base.matched[: len(other.matched)], likelihood=base.likelihood[: len(other.matched)])


def _paired(differences: np.ndarray) -> tuple[float, float]:
    error = differences.std(ddof=1) / np.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return float(differences.mean()), float(differences.mean() / max(error, 1e-6))


def better(base: Measured, other: Measured) -> bool:
    """Whether ``other`` is better: the likelihood rises, and accepted tokens confirm it unless the likelihood is decisive."""
    change, z = gain(base, other)
    rise = other.tokens_per_block - base.tokens_per_block
    decisive = change >= 4 * MIN_GAIN and rise > -0.1 * base.tokens_per_block and other.tokens_per_block > 1.5
    return change >= MIN_GAIN and z >= MIN_Z and (rise >= MIN_RISE or decisive)


def longer_blocks_pay(base: Measured, other: Measured) -> bool:
    """For block sizes: accepted tokens have to rise by more than their noise, or as much with a decisive likelihood."""
    n = min(len(base.matched), len(other.matched))
    rise, z = _paired((other.matched[:n] - base.matched[:n]).astype(float))
    change, likelihood_z = gain(base, other)
    sure = z >= 2.5 or (change >= MIN_GAIN and likelihood_z >= MIN_Z)
    return rise >= max(MIN_RISE, 0.08 * base.tokens_per_block) and sure and change > -MIN_GAIN


def run(sweep: Sweep, probe: Probe, reading: Reading, base: Measured) -> Check:
    """The verdict on one hyper-parameter."""
    check = partial(Check, sweep.check, stage=READING)
    if not sweep.alternatives:
        return check(NOT_APPLICABLE, sweep.reason or f"{sweep.now}: no alternative to try")
    rows: list[dict[str, Any]] = []
    best = None
    for label, other in sweep.alternatives:
        resized = other.hp.block_size != reading.hp.block_size
        judge = longer_blocks_pay if resized else better
        measured = probe.measure(other, slice(0, 1) if sweep.screen else slice(None))
        first = _first(base, measured)
        rise, nats = measured.tokens_per_block - first.tokens_per_block, gain(base, measured)[0]
        if (rise if resized else nats) > 0 and len(measured.matched) < len(base.matched):
            measured = probe.measure(other)
        change, z = gain(base, measured)
        now = _first(base, measured).tokens_per_block  # of the same blocks
        row = {"when": label, "tokens_per_block": measured.tokens_per_block, "now": now, "nats": change, "z": z}
        rows.append({**row, "blocks": len(measured.matched)})
        score = change + measured.tokens_per_block - base.tokens_per_block
        if len(measured.matched) == len(base.matched) and judge(base, measured) and (best is None or score > best[0] + MIN_RISE):
            best = (score, label, measured)
    data = {"now": sweep.now, "tokens_per_block": base.tokens_per_block, "tried": rows, "gain": 0.0}
    if best is None:
        nearest = max(rows, key=lambda row: row["nats"])
        others = ", ".join(f"{row['tokens_per_block']:.2f} when {row['when']}" for row in rows if not sweep.screen or row is nearest)
        blocks = "" if nearest["blocks"] == len(base.matched) else f" on the first text, which gives {nearest['now']:.2f} now"
        found = f"{sweep.now}: {base.tokens_per_block:.2f} tokens per block; {others}{blocks} ({nearest['nats']:+.2f} nats)"
        return check(OK, found, data=data)
    score, label, measured = best
    found = f"acceptance rises from {base.tokens_per_block:.2f} to {measured.tokens_per_block:.2f} tokens per block when {label}"
    if measured.tokens_per_block < base.tokens_per_block + MIN_RISE:
        times = np.exp(gain(base, measured)[0])
        found = f"right drafts become {times:.1f} times as likely when {label}, {measured.tokens_per_block:.2f} tokens per block"
    return check(FAIL, f"{found} (now {sweep.now}, {base.tokens_per_block:.2f})", sweep.remedy, data={**data, "gain": score})


def features(probe: Probe, reading: Reading, base: Measured) -> Check:
    """Magnitude, NaN and overflow of the hidden states that the drafter reads."""
    rows: list[dict[str, Any]] = []
    for v in sorted(set(reading.hp.target_layers)):
        values = np.concatenate([p.features[v].ravel() for p in probe.passages])
        bad = int((~np.isfinite(values)).sum())
        finite = values[np.isfinite(values)].astype(np.float64)
        rows.append({
            "layer": v, "rms": float(np.sqrt(np.mean(finite**2))) if finite.size else None, "largest": float(np.abs(finite).max(initial=0)),
            "not_finite": bad, "clamped": int((np.abs(finite) > F16_MAX).sum()), "values": values.size,
        })  # fmt: skip
    check = partial(Check, "features", stage=FEATURES, data={"layers": rows})
    if broken := next((r for r in rows if r["not_finite"]), None):
        found = f"{broken['not_finite']} of {broken['values']} values of the input of target layer {broken['layer']} are NaN or Inf"
        remedy = "the target's weights are damaged or overflow on this device: check them with `pyspec compare --logits`"
        return check(FAIL, found, remedy)
    found = "inputs of layers " + ", ".join(f"{r['layer']}: RMS {r['rms']:.3g}, largest {r['largest']:.3g}" for r in rows)
    clamped = sum(r["clamped"] for r in rows)
    if not clamped:
        return check(OK, found)
    largest = max(r["largest"] for r in rows)
    fitting = probe.measure(replace(reading, feature_scale=float(2.0 ** np.floor(np.log2(F16_MAX / largest)))))
    found = f"{clamped} values are beyond {F16_MAX:g} and are cut off; the largest is {largest:.3g}"
    if better(base, fitting):
        rises = f"acceptance rises from {base.tokens_per_block:.2f} to {fitting.tokens_per_block:.2f} tokens per block when they are scaled to fit"
        remedy = "use a conversion of the target whose hidden states stay in the range of F16, or a drafter that was trained for this one"
        return check(FAIL, f"{found}; {rises}", remedy)
    return check(WARN, f"{found}; acceptance is not affected", "watch acceptance on long texts")


def fit(probe: Probe, reading: Reading, base: Measured) -> Check:
    """Do the target's hidden states help the drafter? Compared with those of another text."""
    check = partial(Check, "fit to this target", stage=FIT)
    if len(probe.passages) < 2:
        return check(NOT_APPLICABLE, "needs two texts to compare")
    strange = probe.measure(replace(reading, features_of=1))
    change, z = gain(strange, base)
    data = {"right_features": base.tokens_per_block, "other_features": strange.tokens_per_block, "nats": change, "z": z}
    found = f"{base.tokens_per_block:.2f} tokens per block with the hidden states of the text, {strange.tokens_per_block:.2f} with those of another text"
    if change < 0.25 or z < MIN_Z:
        remedy = "use the drafter that was made for exactly this target (same release, same fine-tuning), or the matching target"
        return check(FAIL, found + ": the drafter does not fit this target", remedy, data=data)
    if base.tokens_per_block < 1.3:
        remedy = "check that these prompts resemble the drafter's training data (name others with `prompts`)"
        return check(WARN, found + ": hardly any draft is right", remedy, data=data)
    return check(OK, found, data=data)


def soft_cap(probe: Probe, reading: Reading, base: Measured, drafter, target) -> Check:
    """Does the soft-cap on draft logits change drafts? Saturated logits become ties."""
    check, theirs, ours = partial(Check, "soft-cap", stage=READING), target.softcap, drafter.hp.softcap
    if not theirs and not ours:
        return check(NOT_APPLICABLE, "neither file caps its logits")
    free = probe.measure(replace(reading, capped=False))
    changed, rise = float((base.drafts != free.drafts).mean()), free.tokens_per_block - base.tokens_per_block
    data = {"target_cap": theirs, "drafter_cap": ours, "changed_drafts": changed, "gain": gain(base, free)[0] + rise}
    found = f"cap {theirs:g} in the target, {ours:g} in the drafter: {100 * changed:.1f} % of drafts would differ without"
    remedy = f"set {drafter.arch}.final_logit_softcapping in the drafter to {theirs:g} (gguf-set-metadata)"
    if changed > 0.01 and rise >= MIN_RISE:
        found += f", and acceptance rises from {base.tokens_per_block:.2f} to {free.tokens_per_block:.2f} tokens per block"
        return check(FAIL, found, remedy, data=data)
    mismatch = theirs and ours and theirs != ours
    return check(WARN if mismatch else OK, found, remedy if mismatch else "", data=data)
