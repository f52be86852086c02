#!/usr/bin/env python3
"""Writes a random-weight target and its dflash drafter with the shapes of a real model. llama.cpp loads both.

    make_random_gguf.py 35B-A3B --quant Q4_K --out models/
    make_random_gguf.py 27B 4B --mtp --out models/          (targets with an MTP layer, and no drafter)
    make_random_gguf.py 4B --twin --drafter dflash2 --out models/
    make_random_gguf.py smolvlm 4B --mmproj --out models/   (with an encoder of pictures)

``--quant``: a tensor type, or Q4_K_M or Q5_K_M, mixed as llama-quantize does, or UD-IQ3_XXS. Shapes are those of the published configurations; a
drafter without one has the target's width. ``--layers`` reduces the target.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from random_gguf.archs import (
    write_deepseek2,
    write_gemma4,
    write_glm_dsa,
    write_gpt_oss,
    write_laguna,
    write_llama,
    write_minimax_m2,
    write_qwen3,
    write_qwen3moe,
    write_qwen3next,
    write_qwen35moe,
)
from random_gguf.dflash2 import write_dflash2
from random_gguf.mmproj import CONTROL, QWEN35, SMOLVLM, Encoder, write_mmproj
from random_gguf.model import Shape, write_dflash, write_qwen35
from random_gguf.mtp import write_mtp_target
from random_gguf.twin import write_twin


@dataclass(frozen=True)
class Model:
    """A published model: writer, shape, and options of the writers of target and drafter."""

    write: Callable
    shape: Shape
    options: dict = field(default_factory=dict)
    draft_options: dict = field(default_factory=dict)


def drafter(layers: int, heads: int, heads_kv: int, n_ff: int, *target_layers: int) -> dict:
    """Shape of a drafter with heads of 128 values that reads the inputs of ``target_layers``."""
    return {
        "draft_layers": layers,
        "draft_heads": heads,
        "draft_heads_kv": heads_kv,
        "draft_ff": n_ff,
        "draft_head_size": 128,
        "target_layers": target_layers,
    }


HYBRID = {"head_size": 256, "n_rot": 64, "delta_head": 128, "n_vocab": 248320, "n_ctx": 262144, "rope_base": 1e7}
QWEN3 = {"head_size": 128, "n_head_kv": 8, "n_vocab": 151936, "n_ctx": 40960, "rope_base": 1e6}
GPT_OSS = {"n_embd": 2880, "n_ff": 2880, "n_head": 64, "n_head_kv": 8, "head_size": 64, "n_vocab": 201088, "n_ctx": 131072, "rope_base": 1.5e5,
           "target_window": 128, "n_used": 4, "n_ff_expert": 2880}  # fmt: skip
GEMMA4 = {"head_size": 256, "n_vocab": 262144, "n_ctx": 262144, "rope_base": 1e6, "target_window": 1024, "full_every": 6, "tied": True}
MODELS = {
    "tiny": Model(write_qwen35, Shape()),
    "0.8B": Model(write_qwen35, Shape(n_layer=24, n_embd=1024, n_ff=3584, n_head=8, n_head_kv=2, delta_k=16, delta_v=16,
                                      **drafter(5, 16, 8, 3072, 2, 7, 12, 17, 22), **HYBRID)),
    "4B": Model(write_qwen35, Shape(n_layer=32, n_embd=2560, n_ff=9216, n_head=16, n_head_kv=4, delta_k=16, delta_v=32,
                                    **drafter(5, 32, 8, 9728, 2, 9, 16, 23, 30), **HYBRID)),
    "9B": Model(write_qwen35, Shape(n_layer=32, n_embd=4096, n_ff=12288, n_head=16, n_head_kv=4, delta_k=16, delta_v=32,
                                    **drafter(5, 32, 8, 12288, 2, 9, 16, 23, 30), **HYBRID)),
    "27B": Model(write_qwen35, Shape(n_layer=64, n_embd=5120, n_ff=17408, n_head=24, n_head_kv=4, delta_k=16, delta_v=48,
                                     **drafter(5, 32, 8, 17408, 2, 17, 32, 47, 62), **HYBRID)),
    "35B-A3B": Model(write_qwen35moe, Shape(n_layer=40, n_embd=2048, n_head=16, n_head_kv=2, delta_k=16, delta_v=32,
                                            n_expert=256, n_used=8, n_ff_expert=512, n_ff_shared=512,
                                            **drafter(8, 32, 4, 6144, 2, 11, 20, 29, 38), **HYBRID)),
    "coder-next": Model(write_qwen3next, Shape(n_layer=48, n_embd=2048, n_head=16, n_head_kv=2, delta_k=16, delta_v=32,
                                               n_expert=512, n_used=10, n_ff_expert=512, n_ff_shared=512,
                                               **drafter(5, 32, 4, 6144, 2, 13, 24, 35, 46), **(HYBRID | {"n_vocab": 151936, "rope_base": 5e6}))),
    "gemma4-31B": Model(write_gemma4, Shape(n_layer=60, n_embd=5376, n_ff=21504, n_head=32, n_head_kv=16, n_head_kv_full=4,
                                            embedding_scale=5376**0.5, **drafter(5, 32, 8, 21504, 2, 13, 24, 36, 47, 58), **GEMMA4),
                        {"n_per_layer": 0, "shared": False}),
    "gemma4-26B-A4B": Model(write_gemma4, Shape(n_layer=30, n_embd=2816, n_ff=2112, n_head=16, n_head_kv=8, n_head_kv_full=2,
                                                n_expert=128, n_used=8, n_ff_expert=704, embedding_scale=2816**0.5,
                                                **drafter(5, 32, 8, 8192, 2, 7, 12, 18, 23, 28), **GEMMA4),
                            {"n_per_layer": 0, "shared": False, "routed": True, "alike": True}),
    "laguna-XS.2": Model(write_laguna, Shape(n_layer=40, n_embd=2048, n_ff=8192, n_head=48, n_head_sliding=64, n_head_kv=8, head_size=128,
                                             n_rot_full=64, n_rot_sliding=128, n_vocab=100352, n_ctx=131072, rope_base=5e5,
                                             target_window=512, n_expert=256, n_used=8, n_ff_expert=512, n_ff_shared=512,
                                             **drafter(5, 32, 8, 6144, 2, 10, 18, 37, 40)),
                         {"yarn": 32.0}, {"feature_norms": True, "gate": "head", "causal": True}),
    "qwen3-0.6B": Model(write_qwen3, Shape(n_layer=28, n_embd=1024, n_ff=3072, n_head=16, tied=True, **drafter(5, 16, 8, 3072, 2, 8, 14, 20, 26), **QWEN3)),
    "qwen3-4B": Model(write_qwen3, Shape(n_layer=36, n_embd=2560, n_ff=9728, n_head=32, tied=True,
                                         **drafter(5, 32, 8, 9728, 2, 10, 18, 26, 34), **QWEN3)),
    "qwen3-8B": Model(write_qwen3, Shape(n_layer=36, n_embd=4096, n_ff=12288, n_head=32,
                                         **drafter(5, 32, 8, 12288, 2, 10, 18, 26, 34), **QWEN3)),
    "qwen3-14B": Model(write_qwen3, Shape(n_layer=40, n_embd=5120, n_ff=17408, n_head=40,
                                          **drafter(5, 32, 8, 17408, 2, 11, 20, 29, 38), **QWEN3)),
    "qwen3-32B": Model(write_qwen3, Shape(n_layer=64, n_embd=5120, n_ff=25600, n_head=64,
                                          **drafter(5, 32, 8, 25600, 2, 17, 32, 47, 62), **QWEN3)),
    "qwen3-30B-A3B": Model(write_qwen3moe, Shape(n_layer=48, n_embd=2048, n_head=32, n_expert=128, n_used=8, n_ff_expert=768,
                                                 **drafter(5, 32, 4, 6144, 2, 13, 24, 35, 46), **(QWEN3 | {"n_head_kv": 4}))),
    "gpt-oss-20b": Model(write_gpt_oss, Shape(n_layer=24, n_expert=32, **drafter(5, 32, 8, 8640, 2, 7, 12, 17, 22), **GPT_OSS), {"yarn": 32.0}),
    "gpt-oss-120b": Model(write_gpt_oss, Shape(n_layer=36, n_expert=128, **drafter(5, 32, 8, 8640, 2, 10, 18, 26, 34), **GPT_OSS), {"yarn": 32.0}),
    "minimax-m2": Model(write_minimax_m2, Shape(n_layer=62, n_embd=3072, n_head=48, n_head_kv=8, head_size=128, n_rot=64, n_vocab=200064, n_ctx=196608,
                                                rope_base=5e6, n_expert=256, n_used=8, n_ff_expert=1536, **drafter(5, 32, 8, 9216, 2, 17, 31, 45, 60))),
    "kimi-k2": Model(write_deepseek2, Shape(n_layer=61, n_embd=7168, n_ff=18432, n_head=64, head_size=192, n_rot=64, n_lora_q=1536, n_latent=512,
                                            head_size_v=128, n_vocab=163840, n_ctx=262144, rope_base=5e4, n_expert=384, n_used=8, n_ff_expert=2048,
                                            **drafter(6, 64, 8, 18432, 2, 14, 25, 36, 47, 58)), {"yarn": 64.0, "shared": 1}),
    "glm-5.1": Model(write_glm_dsa, Shape(n_layer=78, n_embd=6144, n_ff=12288, n_head=64, head_size=256, n_rot=64, n_lora_q=2048, n_latent=512,
                                          head_size_v=256, n_vocab=154880, n_ctx=202752, rope_base=1e6, n_expert=256, n_used=8, n_ff_expert=2048,
                                          n_dense=3, index_heads=32, index_size=128, top_k=2048, **drafter(5, 64, 8, 12288, 2, 20, 39, 57, 75)),
                     {"yarn": 0.0, "shared": 1}),
    "smolvlm": Model(write_llama, Shape(n_layer=30, n_embd=576, n_ff=1536, n_head=9, n_head_kv=3, head_size=64, n_rot=64, n_vocab=49280, n_ctx=8192, rope_base=1e5,
                                        **drafter(2, 9, 3, 1536, 2, 15, 28))),
    "llama-8B": Model(write_llama, Shape(n_layer=32, n_embd=4096, n_ff=14336, n_head=32, n_head_kv=8, head_size=128, n_vocab=128256,
                                         n_ctx=131072, rope_base=5e5, **drafter(5, 32, 8, 14336, 2, 9, 16, 23, 30))),
}  # fmt: skip


ENCODERS: dict[str, tuple[str, Encoder]] = {"4B": ("qwen3vl_merger", QWEN35), "smolvlm": ("idefics3", SMOLVLM)}


def cut(shape: Shape, layers: int) -> Shape:
    """The same model with fewer layers, its drafter reading the deepest that are left."""
    n_dense = min(shape.n_dense, layers)
    return replace(shape, n_layer=layers, n_dense=n_dense, target_layers=tuple(min(v, layers - 1) for v in shape.target_layers))


DRAFTERS = {"dflash": write_dflash, "dflash2": partial(write_dflash2, block=16, group_size=128, rank=256)}


def write_pair(name: str, quant: str, out: Path, layers: int | None = None, drafter: str = "dflash") -> tuple[Path, Path]:
    """Writes target and drafter of ``MODELS[name]`` unless they are there. Returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    model, label = MODELS[name], name if layers is None else f"{name}-{layers}-layers"
    shape = model.shape if layers is None else cut(model.shape, layers)
    paths = []
    for kind in ("target", "drafter" if drafter == "dflash" else drafter):
        path = out / f"{label}-{quant}-{kind}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            if kind == "target":
                model.write(part, shape, quant, **model.options)
            else:
                DRAFTERS[drafter](part, shape, "Q8_0" if quant == "MXFP4" else quant, **model.draft_options)  # a type of experts
            part.rename(path)
        paths.append(path)
    return paths[0], paths[1]


MTP_ARCHS: dict[Callable, str] = {write_qwen35: "qwen35", write_qwen35moe: "qwen35moe", write_qwen3next: "qwen3next"}


def write_with_mtp(name: str, quant: str, out: Path, layers: int | None = None) -> Path:
    """Writes the target of ``MODELS[name]`` with one MTP layer, which shares embedding, last norm and head, unless it is there. Returns its path.

    Raises:
        SystemExit: no MTP layer belongs to this architecture.
    """
    out.mkdir(parents=True, exist_ok=True)
    model, label = MODELS[name], name if layers is None else f"{name}-{layers}-layers"
    if model.write not in MTP_ARCHS:
        raise SystemExit(f"{name} has no MTP layer; models of {', '.join(MTP_ARCHS.values())} have")
    path = out / f"{label}-mtp-{quant}.gguf"
    if not path.exists():
        shape = model.shape if layers is None else cut(model.shape, layers)
        part = path.with_suffix(".part")
        write_mtp_target(part, shape, quant, arch=MTP_ARCHS[model.write])
        part.rename(path)
    return path


def write_seeing(name: str, quant: str, out: Path) -> tuple[Path, Path]:
    """Writes the target of ``MODELS[name]`` whose vocabulary has tokens for pictures, and its encoder, unless they are there. Returns their paths."""
    folder, model, (kind, encoder) = out / f"{name}-{quant}-seeing", MODELS[name], ENCODERS[name]
    target, mmproj = folder / "target.gguf", folder / "mmproj.gguf"
    if not mmproj.exists():
        folder.mkdir(parents=True, exist_ok=True)
        model.write(target, replace(model.shape, control=CONTROL[kind]), quant, **model.options)
        write_mmproj(folder / "part", kind, model.shape.n_embd, encoder, "F16").rename(mmproj)
    return target, mmproj


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS, nargs="+")
    parser.add_argument("--quant", default="Q4_K")
    parser.add_argument("--layers", type=int, help="layers of the target (default: as published)")
    parser.add_argument("--out", type=Path, default=Path("models"))
    parser.add_argument("--mtp", action="store_true", help="targets with an MTP layer, without drafters")
    parser.add_argument(
        "--mmproj", action="store_true", help=f"targets of {', '.join(ENCODERS)} with encoders of pictures, without drafters"
    )
    parser.add_argument("--drafter", choices=DRAFTERS, default="dflash")
    parser.add_argument("--twin", action="store_true", help="the same target in F32 too, for scripts/parity_table.py --twin")
    args = parser.parse_args()
    for name in args.model:
        started = time.perf_counter()
        wanted = name, args.quant, args.out, args.layers
        paths: tuple[Path, ...] = (
            (write_with_mtp(*wanted),) if args.mtp else write_pair(*wanted, args.drafter) if not args.mmproj else write_seeing(*wanted[:3])
        )
        if args.twin:
            paths += (write_twin(paths[0], paths[0].with_suffix(".f32.gguf")),)
        print(*(f"{path}  {path.stat().st_size / 1e9:.2f} GB" for path in paths), f"{time.perf_counter() - started:.1f} s", sep="  ")


if __name__ == "__main__":
    main()
