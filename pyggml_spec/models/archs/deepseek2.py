"""deepseek2 (DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash), mistral4: latent attention, leading dense layers, then routed plus shared experts.

Scores are divided by sqrt(D) of a whole head and, under yarn, multiplied with the square of its magnitude.
Source of the formulae: llama.cpp, src/models/deepseek2.cpp, mistral4.cpp.
"""

import math
from dataclasses import replace

import numpy as np

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import GatedMLP, Layer, MoE
from ..mla import MLA
from ..model import EXPERT, FFN, SHARED
from ..moe import SIGMOID, SOFTMAX
from ..rope import Rope
from .qwen35 import MTP_LAYERS

SMALL = (26, 27)  # layer counts of models with a direct q projection
KANANA = (48, 128256)  # the same: layers and vocabulary
GLM_FLASH = ((47, 48), 154880)  # its first files lack the key of its sigmoid router
SIZES = ("attention.key_length_mla", "attention.value_length_mla")


@register("deepseek2", "mistral4")
def deepseek2(f: Hparams) -> Decoder:
    small = f.n_layer in SMALL or (f.n_layer, f.n_vocab) == KANANA
    mixer = latent_attention(f, 0 if small else f.positive("attention.q_lora_rank"), multiplier(f))
    router = SIGMOID if f.n_layer in GLM_FLASH[0] and f.n_vocab == GLM_FLASH[1] else SOFTMAX
    layers = [Layer(mixer, ffn) for ffn in ffns(f, router)]
    drafts = f.arch == "deepseek2" and not small and isinstance(layers[-1].ffn, MoE)
    mtp, why = (layers[-1:], MTP_LAYERS) if drafts else ([], "MTP layers, which do not draft for this model here")
    unscaled = ("attn_q", "output", *FFN, *SHARED, *EXPERT)
    return Decoder(f, layers, temperature=f.temperature(), unscaled=unscaled, mtp=mtp, drafting_layers=why)


def multiplier(f: Hparams) -> float:
    """Of yarn's logarithm; the key is a tenth of the checkpoint's `mscale_all_dim`."""
    return float(np.float32(f.get("rope.scaling.yarn_log_multiplier", float, 0.0)) / np.float32(0.1))


def latent_attention(f: Hparams, lora_q: int, multiplier: float) -> MLA:
    """Latent attention from the keys; ``multiplier``: factor of yarn's logarithm in the score scale."""
    if not all(f.get(name, int, 0) for name in SIZES):
        raise f.refuse(
            f"it has no {' and '.join(SIZES)}: its K/V rows would be those of every head, the layout of files from before latent rows; "
            "convert the model again"
        )
    size, size_v = (f.positive(name, limit=4096) for name in SIZES)
    latent = f.positive("attention.kv_lora_rank", limit=4096)
    stored = latent + f.get("rope.dimension_count", int, 0)
    for name, expected in (("key_length", stored), ("value_length", latent), ("head_count_kv", 1)):
        if f.get(f"attention.{name}", int, expected) != expected:
            raise f.refuse(f"attention.{name} is not the {expected} that latent rows of {latent} values call for")
    rope = f.rope(size, neox=False)
    if rope.n_rot == size:
        raise f.refuse(f"rope.dimension_count is {rope.n_rot}, which leaves nothing of heads of {size} that is not rotated")
    if rope.yarn[0] and multiplier:
        # mscale is 1, but equals mscale_all_dim in deepseek2, so that rows keep their norm: ggml's magnitude is cancelled
        magnitude = np.float32(f.get("rope.scaling.attn_factor", float, 1.0))
        magnitude *= Rope.magnitude(rope.scale, 1.0 if f.arch == "deepseek2" else multiplier)
        rope = replace(rope, yarn=(rope.yarn[0], float(magnitude), *rope.yarn[2:]))
    return MLA(f.heads, lora_q, latent, size, size_v, rope, _scale(rope, size, multiplier))


def ffns(f: Hparams, router: int | None) -> list[GatedMLP | MoE]:
    """FFN per layer: leading dense ones, then experts. ``router``: the default gating, None for none."""
    n_dense = f.leading_dense(0)
    out: list[GatedMLP | MoE] = [GatedMLP(f.ff)] * n_dense if n_dense else []
    if n_dense == f.n_layer:
        f.routed = True  # expert_count without a layer of experts
        return out
    experts = f.experts(
        gating=f.gating(router),
        normalise=f.get("expert_weights_norm", bool, False),
        scale=f.get("expert_weights_scale", float, 0.0),
        biased=f.shape(f"blk.{n_dense}.exp_probs_b.bias") is not None,
    )
    moe = MoE(experts, GatedMLP(experts.n_ff * f.positive("expert_shared_count", limit=64), suffix="_shexp"))
    return out + [moe] * (f.n_layer - n_dense)


def _scale(rope: Rope, size: int, multiplier: float) -> float:
    """Scale of the scores, in single precision like llama.cpp."""
    magnitude = np.float32(rope.yarn[1]) * _grown(rope.scale) * _grown(rope.scale, multiplier)
    return float(magnitude * magnitude / np.sqrt(np.float32(size)))


def _grown(scale: float, multiplier: float = 1.0) -> np.float32:
    """1 + 0.1 m ln(1 / scale), the magnitude of yarn, in single precision."""
    stretch = np.float32(1) / np.float32(scale)
    return np.float32(1) + np.float32(0.1) * np.float32(multiplier) * np.float32(math.log(stretch))
