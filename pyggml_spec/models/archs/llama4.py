"""llama4 (Llama 4 Scout and Maverick): three layers see the current part of CHUNK positions; every fourth sees all, has no RoPE, and scaled queries.

q and k of rotated layers are normalised after RoPE, without weights, but not in Maverick. Routed experts, whose input is weighted, one in Llama 4, and a shared one.
Source of the formulae: llama.cpp, src/models/llama4.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import UNIT, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN, SHARED
from ..moe import SIGMOID

CHUNK, TEMPERATURE = 8192, 0.1  # as in llama.cpp
EVERY, MAVERICK = 4, 128  # layers without RoPE; experts of the model without norms


@register("llama4")
def llama4(f: Hparams) -> Decoder:
    if f.get("attention.sliding_window", int, CHUNK) == 0:
        raise f.refuse("attention.sliding_window is 0, as of MobileLLM, whose layers see all positions; Llama 4 is supported")
    size = f.head_dim()
    rope, period = f.rope(size, neox=False, windowed=True), f.file.array(f"{f.arch}.attention.sliding_window_pattern")
    chunked = [i % EVERY < EVERY - 1 for i in range(f.n_layer)] if period is None else [bool(v) for v in period[: f.n_layer]]
    if len(chunked) != f.n_layer:
        raise f.refuse(f"attention.sliding_window_pattern names {len(chunked)} of {f.n_layer} layers")
    experts = f.experts(gating=SIGMOID, normalise=False, weighted_input=True)
    moe, step = MoE(experts, GatedMLP(experts.n_ff, suffix="_shexp")), f.positive("interleave_moe_layer_step")
    norm, layers = "" if experts.n_expert == MAVERICK else UNIT, []
    for i, s in enumerate(chunked):
        turned = (i + 1) % EVERY != 0
        own = (f.sliding_base(rope) if s else rope) if turned else None
        attention = Attention(f.heads, f.kv_heads, size, own, factors=True, norm=norm if turned else "", sliding=s, tempered=not turned)
        layers.append(Layer(attention, GatedMLP(f.ff) if (i + 1) % step else moe))
    return Decoder(
        f, layers, window=CHUNK, chunked=True, temperature=(TEMPERATURE, CHUNK), temperature_from=1, biased=ATTENTION,
        unscaled=(*FFN, *EXPERT, *SHARED),
    )  # fmt: skip
