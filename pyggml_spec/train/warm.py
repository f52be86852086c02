"""A new drafter that begins with layers of its target instead of noise."""

import torch
from torch import Tensor

from ..drafters.base import Drafter
from ..drafters.dflash import DFlash
from ..drafters.mtp import MTP
from ..models.decoder import Decoder
from .features import Target
from .weights import read_tensor

ATTENTION = "attn_q", "attn_k", "attn_v", "attn_output"
FFN = "ffn_gate", "ffn_up", "ffn_down"


@torch.no_grad()
def begin_with_target(drafter: Drafter, source: Target, values: dict[str, Tensor], tokens: Tensor) -> int:
    """Copies attention and feed-forward parts of target layers, spread from the first to the last, into ``values`` where the shapes are the same; their norms
    go into the matrices that read them. ``fc`` becomes the mean of the captured states, scaled as they are over ``tokens`` [B, T]. Returns the number of parts that were copied."""
    target, states = source.decoder, source.states(tokens)
    specs, copied, layers = {spec.name: spec for spec in target.specs()}, 0, sorted({*map(_layer, values)} - {-1})
    device = next(iter(values.values())).device

    def read(layer: int, name: str) -> Tensor:
        return read_tensor(target.file, specs[f"blk.{layer}.{name}.weight"]).float().to(device)

    def alike(layer: int, i: int, names: tuple[str, ...]) -> bool:
        pairs = [(specs.get(f"blk.{layer}.{name}.weight"), values.get(f"blk.{i}.{name}.weight")) for name in names]
        return all(
            theirs is not None and mine is not None and theirs.shape[1:] == mine.shape[-2::-1] and mine.shape[-1] % theirs.shape[0] == 0
            for theirs, mine in pairs
        )

    for names, norm in ((ATTENTION, "attn_norm"), (FFN, "ffn_norm")):
        for at, i in enumerate(layers):
            found = [layer for layer in range(target.n_layer) if alike(layer, i, names)]
            if not found:
                continue
            layer = found[round(at * (len(found) - 1) / max(1, len(layers) - 1))] if len(layers) > 1 else found[-1]
            scale = read(layer, norm) if f"blk.{layer}.{norm}.weight" in specs else 1.0
            for name in names:
                value, mine = read(layer, name), values[f"blk.{i}.{name}.weight"]
                value = value if name == names[-1] else value * scale
                if name in ("attn_q", "attn_k"):
                    value = _paired(value, target, drafter)
                    size = target.f.head_dim()
                    own = f"blk.{layer}.{name}_norm.weight"
                    if (vector := values.get(f"blk.{i}.{name}_norm.weight")) is not None:
                        vector.copy_(
                            _paired(read(layer, f"{name}_norm"), target, drafter)
                            if own in specs and specs[own].shape == (size,)
                            else value.square().sum(-1).mean().sqrt()
                        )
                times = mine.shape[-1] // value.shape[-1]  # EAGLE-3's first layer reads [embedding ; hidden state]
                mine.copy_(value.repeat(1, times) / times**0.5)
            copied += 1
    if (fc := values.get("fc.weight")) is not None and fc.shape[-1] == fc.shape[0] * len(states.features):
        scales = [1 / float(f.float().square().mean().sqrt()) for f in states.features]
        fc.add_(torch.cat([torch.eye(fc.shape[0], device=device) * s / sum(scales) for s in scales], -1))
    return copied


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def _paired(rows: Tensor, target: Decoder, drafter: Drafter) -> Tensor:
    """Rows of q or k, or a norm of their heads, in the order in which the drafter's RoPE pairs them."""
    rope, size = target.rope, target.f.head_dim()
    mine = drafter.hp.rope.neox if isinstance(drafter, DFlash) else isinstance(drafter, MTP) and rope is not None and rope.neox
    if rope is None or rope.neox == mine or rope.n_rot != size:
        return rows
    pairs = (size // 2, 2) if mine else (2, size // 2)
    return rows.unflatten(0, (-1, *pairs)).transpose(1, 2).flatten(0, 2)
