"""A session with a drafter and llama.cpp (llama_oracle.py) with the same files, block after block."""

from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
from engine.helpers import count_matched
from llama_oracle import LlamaDFlash, LlamaEagle3, LlamaMTP, LlamaSimple
from random_gguf.archs import WRITERS
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape
from random_gguf.mtp import write_mtp, write_mtp_target

import pyggml_spec as ps
from pyggml_spec.cache.kv import KVTypes

UB = 32  # tokens of a micro-batch, and of a chunk
LAST = 3 * UB + 7
LENGTHS = (0, 1, 2, 3, 4, 4, 0, 0, 2, 4, 1, 1, 3)


def write_simple(path, shape=Shape(), quant="F32", small="llama", seed=5, layers=3, **options):
    """A whole small model."""
    return WRITERS[small](path, replace(shape, n_layer=layers, n_ff=256), quant, seed=seed, **options)


WRITE = {
    "assistant": write_gemma4_assistant, "dflash2": write_dflash2, "dspark": write_dspark, "eagle3": write_eagle3, "mtp": write_mtp,
    "simple": write_simple,
}  # fmt: skip
USUAL = {"assistant": "gemma4", "dflash2": "qwen3", "dspark": "qwen3", "eagle3": "llama", "mtp": "qwen35", "simple": "qwen3"}  # targets


def write_files(folder, method, quant="F32", arch=None, of_target=None, **of_drafter):
    """A random target and its drafter; without a file of the drafter's own, None."""
    arch = arch or USUAL[method]
    target, draft = folder / "t.gguf", folder / "d.gguf"
    if method == "mtp":
        apart = of_drafter.pop("apart", False)
        write_mtp_target(target, Shape(), quant, arch=arch, **(of_target or {}))
        return target, write_mtp(draft, Shape(), quant, arch=arch, **of_drafter) if apart else None
    WRITERS[arch](target, Shape(), quant, **(of_target or {}))
    # in the drafter's file, as the converter writes it: llama.cpp does not take the target's
    scale = 16.0 if arch == "gemma4" and method != "assistant" else 0.0
    return target, WRITE[method](draft, Shape(embedding_scale=scale), quant, **of_drafter)


@contextmanager
def both(method, target, draft, prompt, n_ctx=512, width=5, kv=KVTypes()):
    """A session and llama.cpp with the same files; the prompt is in both."""
    types = {"cache_type_k": kv.k, "cache_type_v": kv.v}
    sizes = {"n_ctx": n_ctx, "n_ubatch": UB, "kv": kv, "draft_kv": kv}
    with ps.load(
        target, draft or target, device="CPU", threads=1, kernels="ggml", n_ctx=n_ctx, draft_width=width, chunk=UB, **types
    ) as session:
        drafter = session.drafter
        if method in ("dflash", "dflash2", "dspark"):
            names = {"dflash": (), "dflash2": ("top_k",), "dspark": ("from_anchor", "confident")}[method]
            options = {"causal": all(drafter.hp.causal)} | {name: getattr(drafter, name) for name in names}
            made = LlamaDFlash(target, draft, drafter.hp.target_layers, drafter.hp.mask_token, block=width, **sizes, **options)
        elif method == "simple":
            made = LlamaSimple(target, draft, width=width, **sizes)
        elif method == "eagle3":
            made = LlamaEagle3(target, draft, Shape().target_layers, width=width, **sizes)
        else:
            made = LlamaMTP(
                target, draft, width=width, shared=method == "assistant", heads=drafter.n_layer if method == "mtp" else 1, **sizes
            )
        with closing(made) as oracle:
            assert session.runner.prefill(prompt) == oracle.prefill(prompt)
            yield session, oracle


def disagreement(session, oracle, blocks, lengths=LENGTHS):
    """The first block whose drafts differ, None if none does; ``lengths``: how many drafts of each block are accepted."""
    engine, width = session.runner, session.runner.options.width
    for i in range(blocks):
        result, accepted = engine.fused_step(), min(lengths[i % len(lengths)], width - 1)
        drafts = result.tokens[1:].tolist()
        if drafts != oracle.draft(width):
            return i
        ids, _ = oracle.verify(drafts, accepted)
        assert result.ids.tolist() == ids.tolist(), f"verified ids of block {i}"
        engine.accept(accepted + 1, int(result.ids[accepted]))
    return None


def assert_blocks_equal(session, target, draft, prompt, blocks):
    """A DFlash drafter and llama.cpp in step, as many drafts accepted as are right; returns how many in all."""
    engine, hp, opt = session.runner, session.drafter.hp, session.runner.options
    kv, accepted = {"kv": opt.kv, "draft_kv": opt.draft_kv}, 0
    with closing(
        LlamaDFlash(target, draft, hp.target_layers, hp.mask_token, n_ctx=opt.n_ctx, block=hp.block_size, causal=all(hp.causal), **kv)
    ) as oracle:
        assert engine.prefill(prompt) == oracle.prefill(prompt)
        for i in range(blocks):
            result = engine.fused_step()
            assert result.tokens[1:].tolist() == oracle.draft_logits().argmax(axis=1).tolist(), f"block {i}"
            ids, matched = oracle.verify(result.tokens[1:].tolist())
            assert np.where(oracle.unsure, ids, result.ids).tolist() == ids.tolist(), f"verified ids of block {i}"
            assert matched == count_matched(result)
            engine.accept(matched + 1, int(result.ids[matched]))
            accepted += matched
    return accepted
