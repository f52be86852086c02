#!/usr/bin/env python3
"""`pyspec convert` against llama.cpp's converter, over nine published layouts of drafters: all tensors bit by bit, all keys.

    compare_convert.py --llama-cpp LLAMA_CPP --python PYTHON
    compare_convert.py --llama-cpp LLAMA_CPP --python PYTHON --checkpoint FOLDER -m target.gguf --target-folder FOLDER

LLAMA_CPP: a source tree with convert_hf_to_gguf.py; PYTHON: an interpreter with torch, transformers and sentencepiece. Without a checkpoint, small random
ones of DFlash, DFlash2, DSpark and EAGLE-3 are written in the layouts of z-lab, EAGLE and speculators, and tokenizers are not compared. With one, the
target's GGUF and original folder are needed too. Both write F32. Exit code 1 for a missing or different tensor, or a key not among NAMED.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from random_gguf.archs import write_llama, write_qwen3
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.model import Shape, write_qwen35

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.convert import convert_drafter

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tools.checkpoint import as_dflash2, as_dspark, export, export_eagle3

SMALL = Shape(n_layer=6, n_embd=64, n_ff=128, head_size=32, draft_head_size=32, draft_ff=128, target_layers=(1, 2, 3))
# keys that may differ, or that one of the two does not write, and why
NAMED = {
    **dict.fromkeys(("general.name", "general.basename", "general.version", "general.size_label"), "what a file is called"),
    "attention.causal": "blocks see both ways unless a file says otherwise",
    "general.file_type": "F32 is 0 in both; llama.cpp's says so of mixed files only by what was asked for",
    "general.quantization_version": "says nothing of F32",
    "vocab_size": "the token list says it",
    "rope.dimension_count": "heads that are rotated whole need not say so",
}
# tensors that only pyspec writes, and why
KEPT = {
    "output.weight": "a DSpark's head of the whole vocabulary is its target's as it was in training: llama.cpp leaves it out, here it is kept"
}
DRIVER = """
import runpy, sys
folder, vocabulary = sys.argv[1], sys.argv[2] == "tokenizer"
sys.path[:0] = [folder, folder + "/gguf-py"]
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[3:]]
if not vocabulary:
    from conversion import base
    for name in ("_set_vocab_gpt2", "_set_vocab_sentencepiece", "_set_vocab_llama_hf", "_set_vocab_qwen"):
        if hasattr(base.TextModel, name):
            setattr(base.TextModel, name, lambda self, *args, **more: None)
runpy.run_path(folder + "/convert_hf_to_gguf.py", run_name="__main__")
"""


class Case(NamedTuple):
    """A checkpoint, the GGUF of its target, and the folder that this came from."""

    name: str
    checkpoint: Path
    target: Path
    folder: Path


def target_folder(target: Path, folder: Path) -> Path:
    """The target's files for llama.cpp's converter, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with GGUFFile(target) as file:
        arch = file.get("general.architecture", str)
        config = {
            "architectures": [{"llama": "LlamaForCausalLM"}.get(arch, "Qwen3ForCausalLM")],
            "hidden_size": file.get(f"{arch}.embedding_length", int),
            "num_hidden_layers": file.get(f"{arch}.block_count", int),
            "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        }
        if arch in ("qwen35", "qwen35moe"):
            config["rope_parameters"] = {"mrope_section": [1, 1, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cases(folder: Path) -> Iterator[Case]:
    """Random checkpoints of every layout."""
    targets = {
        "llama": Path(write_llama(folder / "llama.gguf", SMALL)),
        "qwen35": Path(write_qwen35(folder / "qwen35.gguf", SMALL)),
        "qwen3": Path(write_qwen3(folder / "qwen3.gguf", Shape())),
        "embedded": DEMO_TARGET,
    }
    of = {name: (target, target_folder(target, folder / f"of-{name}")) for name, target in targets.items()}
    yield Case("DFlash", export(DEMO_DRAFTER, folder / "dflash"), *of["embedded"])
    for taps in (2, 3):
        drafter = write_dflash2(folder / f"dflash2-{taps}.gguf", Shape(), taps=taps)
        yield Case(f"DFlash2, kernels of {taps}", export(drafter, folder / f"dflash2-{taps}", as_dflash2(drafter)), *of["qwen3"])
    sparks = {
        "DSpark with a confidence head": (False, {"confidence": True, "from_anchor": True}),
        "DSpark with embeddings and a head": (False, {"own": ("head", "embedding"), "from_anchor": True}),
        "DSpark of 100 tokens, as speculators has it": (True, {"own": ("head",), "tokens": 100, "from_anchor": False}),
    }
    for i, (name, (nested, options)) in enumerate(sparks.items()):
        drafter = write_dspark(folder / f"dspark-{i}.gguf", SMALL, **options)
        yield Case(name, export(drafter, folder / f"dspark-{i}", as_dspark(drafter, nested)), *of["qwen35"])
    eagles = {
        "EAGLE-3 of 100 tokens": ("midlayer", {"tokens": 100}),
        "EAGLE-3 with embeddings, norms before fc": ("midlayer", {"own": ("head", "embedding"), "norm_before_fc": True}),
        "EAGLE-3 of 60 tokens, as speculators has it": ("layers.0", {"own": ("head", "embedding"), "tokens": 60, "norm_before_residual": True}),
    }  # fmt: skip
    for i, (name, (layer, options)) in enumerate(eagles.items()):
        drafter = write_eagle3(folder / f"eagle3-{i}.gguf", SMALL, **options)
        yield Case(name, export_eagle3(drafter, folder / f"eagle3-{i}", layer=layer), *of["llama"])


def differences(ours: Path, theirs: Path, tokenizer: bool) -> tuple[list[str], list[str], int]:
    """(differences, expected differences of NAMED, number of bit-equal tensors)."""
    wrong, named, equal = [], [], 0
    with GGUFFile(ours) as a, GGUFFile(theirs) as b:
        for name in sorted({*a.tensors, *b.tensors}):
            one, other = a.tensors.get(name), b.tensors.get(name)
            if other is None and name in KEPT and "markov_w1.weight" in a.tensors:
                named.append(f"tensor {name}: only pyspec writes it ({KEPT[name]})")
            elif one is None or other is None:
                wrong.append(f"tensor {name}: only {'llama.cpp' if one is None else 'pyspec'} writes it")
            elif (one.type_name, shape(one)) != (other.type_name, shape(other)):
                wrong.append(f"tensor {name}: {one.type_name} {shape(one)} here, {other.type_name} {shape(other)} there")
            elif bytes(a.read(name)) != bytes(b.read(name)):
                wrong.append(f"tensor {name}: other bits")
            else:
                equal += 1
        arch = a.get("general.architecture", str)
        for key in sorted({*a.metadata, *b.metadata}):
            one, other = plain(a.metadata.get(key)), plain(b.metadata.get(key))
            if one == other or (key.startswith("tokenizer.") and not tokenizer):
                continue
            why = NAMED.get(key) or NAMED.get(key.removeprefix(f"{arch}."))
            (named if why and (one is None or other is None or key.startswith("general.")) else wrong).append(
                f"key {key}: {brief(one)} here, {brief(other)} there" + (f" ({why})" if why else "")
            )
    return wrong, named, equal


def shape(tensor) -> tuple[int, ...]:
    """Without dimensions of 1 at the end, which files may have or not."""
    sizes = [int(n) for n in tensor.shape]
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return tuple(sizes)


def plain(value):
    """A key's value as one that can be compared."""
    if hasattr(value, "raw"):
        return [bytes(value.raw(i)) for i in range(len(value))]
    return value.tolist() if isinstance(value, np.ndarray) else value


def brief(value) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def compared(case: Case, folder: Path, args) -> bool:
    """Converts with both, prints what differs; whether nothing does that has no name."""
    ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
    theirs.unlink(missing_ok=True)
    convert_drafter(case.checkpoint, case.target, ours, "f32", replace=True)
    options = [str(case.checkpoint), "--outtype", "f32", "--outfile", str(theirs), "--target-model-dir", str(case.folder)]
    tokenizer = args.checkpoint is not None
    command = [args.python, "-c", DRIVER, str(args.llama_cpp.resolve()), "tokenizer" if tokenizer else "none", *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode or not theirs.exists():
        print(f"{case.name}: llama.cpp's converter failed\n{(run.stdout + run.stderr)[-2000:]}", flush=True)
        return False
    wrong, named, equal = differences(ours, theirs, tokenizer)
    print(f"{case.name}: {equal} tensors equal bit by bit, {len(wrong)} differences, {len(named)} with a name", flush=True)
    for line in (*wrong, *(named if args.verbose else ())):
        print(f"  {line}", flush=True)
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--target-folder", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the differences that have a name, too")
    args = parser.parse_args()
    if not (args.llama_cpp / "convert_hf_to_gguf.py").exists():
        parser.error(f"{args.llama_cpp} has no convert_hf_to_gguf.py; name a source tree of llama.cpp")
    if args.checkpoint is not None and (args.model is None or args.target_folder is None):
        parser.error("a checkpoint needs the GGUF of its target (-m) and the folder that this came from (--target-folder)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [Case(args.checkpoint.name, args.checkpoint, args.model, args.target_folder)] if args.checkpoint is not None else None
        results = [compared(case, folder, args) for case in given or cases(folder)]
    print(f"{sum(results)} of {len(results)} checkpoints are converted alike")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
