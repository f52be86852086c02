#!/usr/bin/env python3
"""Pictures and sounds on a device: rows of the encoder, logits and greedy text behind two of them, of random targets and encoders, against llama.cpp's own path
(libmtmd over a libllama context) on the same device and on the CPU.

    check_pictures.py --device CUDA0 [--only gemma3] [--quant F32,Q8_0] [--wide] [--chunk 512] [--kv f16,q8_0] [--libraries DIR]

Columns are NMSEs: of the encoder's rows and of the logits, of this engine to llama.cpp on the device, of this engine to itself on the CPU, and of llama.cpp to itself
on the CPU, which is what rounding does; then how many of 24 greedy tokens are llama.cpp's, and how far apart the logits of the first two that differ are here (of a
random model, whose logits have a standard deviation of 1). The other side runs without the kernels of patches/; --libraries: of another llama.cpp. --wide: sizes at which a
GPU's kernels are those of real models. Exit code 1 where logits are farther from llama.cpp's than 4 times its own rounding, and than 1e-5 (1e-3 with weights or K/V of
few bits), or where tokens differ that are farther apart than 0.05 (0.2).

Then the drafters: tokens, and a picture of their embeddings, which has to give the same text, drafts and acceptance; also from the prefix cache.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from vision.families import FAMILIES, SOUNDS, file_of, wav, write_family

import pyggml_spec as ps
from pyggml_spec.engine.prompt import Prompt
from pyggml_spec.tools.compare import nmse

GREEDY, N_CTX = 24, 2048
WIDE = {
    "n_embd": 1024,
    "n_ff": 2048,
    "n_head": 8,
    "n_head_kv": 2,
    "head_size": 128,
    "n_rot": 64,
    "delta_head": 128,
    "delta_k": 4,
    "delta_v": 8,
}
WIDE_ENCODER = {"n_embd": 512, "n_head": 8, "n_layer": 4, "n_ff": 1024, "image_size": 256, "patch": 16, "longest": 512}
WIDE_SIZES = (640, 480), (200, 330)
MARKER = "<__media__>"
PATCHED = [f"GGML_CUDA_{name}" for name in ("SMALL_BATCH", "LARGE_BATCH", "SHARED_EXPERT", "DELTA_CHUNKS", "ROW_BY_MMA", "QUANTIZED_KV")]


def case(folder: Path, name: str, quant: str, args) -> tuple[Path, Path, list[str], list[bytes]]:
    """Target, encoder, texts and files; with a picture in front where the encoder takes those, a sound at the end where it takes those."""
    sizes, shape, encoder = FAMILIES[name].sizes, {}, FAMILIES[name].encoder
    if args.wide:
        sizes, shape, encoder = sizes and WIDE_SIZES, WIDE, replace(encoder, **WIDE_ENCODER)
    files = [file_of(size, i) for i, size in enumerate(sizes)] or [wav(rate=16000)]
    if name in SOUNDS:
        files = [files[0], wav(2.5, 16000, 1, 1)]
    target, mmproj = write_family(folder, name, quant, encoder, n_vocab=320, **shape)
    return target, mmproj, ["What is in ", " and so on" * 20 + ", and in ", "? Say it."], files


def ours(case: tuple, device: str, args, kv: str, ids: np.ndarray) -> dict[str, Any]:
    """Logits by the graphs that generate, all rows of pictures, how many greedy tokens are ``ids``, and how far apart the logits of the first two are that differ."""
    target, mmproj, texts, files = case
    options = {"device": device, "n_ctx": N_CTX, "chunk": args.chunk, "cache_type_k": kv, "cache_type_v": kv, "spec": ["none"]}
    with ps.load(target, mmproj=mmproj, **options, **({"threads": args.threads, "kernels": "ggml"} if device == "CPU" else {})) as session:
        prompt = session.picture_prompt(texts[0], files[0], texts[1], files[1], texts[2], special=True)
        runner = session.runner
        runner.reset()
        runner.read_candidates(None)
        runner.prefill(prompt)
        logits = runner.candidates(0)[1].copy()
        runner.read_candidates(0)
        mine = np.array([t for event in session.steps(prompt, GREEDY, ignore_end=True) for t in event.tokens][:GREEDY])
        same, apart = GREEDY, 0.0
        if (mine != ids).any():
            same = int((mine != ids).argmax())
            runner.reset()
            after = runner.logits(Prompt([prompt, ids[:same].tolist()]))[-1]
            apart = float(after.max() - after[ids[same]]) / float(after.std())
        return {"logits": logits, "rows": np.concatenate([p.embeddings for _, p in prompt.pictures]), "same": same, "apart": apart}


def theirs(inputs: Path, libraries: str) -> dict[str, np.ndarray]:
    """llama.cpp's, in a process of its own."""
    env = os.environ | dict.fromkeys(PATCHED, "0")
    if libraries:  # the bindings load those of their own folder
        site, spec = inputs.with_suffix(".site"), find_spec("llama_cpp")
        assert spec is not None and spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, site / "llama_cpp", ignore=shutil.ignore_patterns("lib"))
        (site / "llama_cpp" / "lib").symlink_to(Path(libraries).resolve())
        first = {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": site}
        env |= {"LLAMA_CPP_LIB_PATH": libraries} | {name: f"{path}:{env.get(name, '')}" for name, path in first.items()}
    subprocess.run([sys.executable, __file__, "--theirs", inputs], check=True, env=env, stdout=sys.stderr)
    return dict(np.load(inputs.with_suffix(".out.npz")))


def answer(inputs: Path) -> None:
    """What the process of ``theirs`` does."""
    from vision.mtmd_oracle import after_pictures

    given = np.load(inputs, allow_pickle=True)["given"].item()
    logits, ids, rows = after_pictures(*given.pop("args"), **given)
    np.savez(inputs.with_suffix(".out.npz"), logits=logits, ids=np.array(ids), rows=np.concatenate(rows))


def compare(folder: Path, name: str, quant: str, kv: str, args) -> bool:
    files, found = case(folder, name, quant, args), {}
    for gpu in {args.device != "CPU", False}:
        inputs = folder / f"{gpu}.npz"
        more = {"greedy": GREEDY, "n_ctx": N_CTX, "gpu": gpu, "kv": kv, "threads": args.threads}
        np.savez(inputs, given={"args": (*files[:2], MARKER.join(files[2]), files[3]), **more})
        found[gpu] = theirs(inputs, args.libraries)
    other, cpu = found[args.device != "CPU"], found[False]
    here, there = (ours(files, device, args, kv, other["ids"]) for device in (args.device, "CPU"))
    few_bits = quant != "F32" or kv != "f16" or args.device == "CPU"  # whose attention of short chunks adds up in 16 bits
    rounding = nmse(other["logits"], cpu["logits"])
    figures = [nmse(here[k], other[k]) for k in ("rows", "logits")] + [nmse(here["logits"], there["logits"]), rounding]
    right = figures[1] <= max(4 * rounding, 1e-3 if few_bits else 1e-5) and here["apart"] <= (0.2 if few_bits else 0.05)
    print(
        f"{name:8} {quant:5} {kv:5}",
        *(f"{x:12.2g}" for x in figures),
        f"{here['same']:4} of {GREEDY}, {here['apart']:.2g}",
        "" if right else "  TOO FAR",
        flush=True,
    )
    return right


def drafters(folder: Path, args) -> bool:
    from engine.test_pictures import behind_rows_of_tokens

    good = True
    for pair in ("embedded", "qwen35", "mtp", "peagle", "eagle3"):
        with ExitStack() as stack:
            (folder / pair).mkdir()
            seen = behind_rows_of_tokens(stack, folder / pair, pair, device=args.device)
        same, (drafted, matched, _) = seen[0][:2] == seen[1][:2] == seen[2][:2], seen[0][1]
        said = f"{matched} of {drafted} drafts accepted; rows from the prefix cache {[one[2] for one in seen]}"
        print(f"{pair:9} {said}:", "equal" if same else f"DIFFERENT {seen}", flush=True)
        good &= same
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--quant", default="F32,Q8_0")
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--no-drafters", action="store_true")
    parser.add_argument("--libraries", default="", metavar="DIR")
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.theirs:
        answer(args.theirs)
        return
    good = True
    print(f"{'':20} {'rows':>12} {'logits':>12} {'to our CPU':>12} {'their CPU':>12}")
    for name in filter(None, args.only.split(",")):
        for quant in args.quant.split(","):
            for kv in args.kv.split(","):
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        good &= compare(Path(folder), name, quant, kv, args)
                    except Exception:  # the others still run
                        good = False
                        print(f"{name} {quant} {kv} FAILED", flush=True)
                        traceback.print_exc()
    if not args.no_drafters:
        with tempfile.TemporaryDirectory() as folder:
            good &= drafters(Path(folder), args)
    sys.exit(not good)


if __name__ == "__main__":
    main()
