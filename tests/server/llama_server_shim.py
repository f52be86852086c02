#!/usr/bin/env python3
"""Stands in for llama-server in llama.cpp's own server tests (``LLAMA_SERVER_BIN_PATH``): takes their options, ignores the models that they
name, and starts a server on the embedded pair.

    SHIM_SERVER=pyspec|/path/to/llama-server

What no server here could do ends with exit code 2, so that the case fails loudly.
"""

import os
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "pyggml_spec" / "demo"
TRAINED = 2048
VALUES = {  # options with a value: what becomes of them for `pyspec serve`; None: nothing
    "--port": "--port", "--host": "--host", "--temp": "--temp", "--seed": "--seed", "--n-predict": "--n-predict", "--alias": "--alias", "--tags": "--tags",
    "--api-key": "--api-key", "--chat-template": "--chat-template", "--chat-template-file": "--chat-template-file", "--reasoning": "--reasoning",
    "--reasoning-format": "--reasoning-format", "--cors-origins": "--cors-origins", "--spec-draft-n-max": "--spec-draft-n-max",
    "--ubatch-size": "-ub", "-ctk": "-ctk", "-ctv": "-ctv",
    "--hf-repo": None, "--hf-file": None, "--model": None, "--model-url": None, "--threads": None, "--n-gpu-layers": None, "-fa": None,
    "--spec-draft-n-min": None, "--spec-synth-rates": "--spec-synth-rates", "--spec-type": None, "--cache-ram": None,
}  # fmt: skip
FLAGS = {
    "--slots": None, "--no-slots": "--no-slots", "--metrics": "--metrics", "--no-ui": "--no-ui", "--verbose": "--verbose", "--jinja": None, "--no-jinja": None,
    "--cont-batching": None, "--offline": None, "--no-cache-idle-slots": None, "--swa-full": None,
    "--backend_sampling": None, "--no-mmproj": None,
}  # fmt: skip


def options(arguments: list[str]) -> list[str]:
    """The command line of `pyspec serve`."""
    out: list[str] = []
    given: dict[str, str] = {}
    rest = list(arguments)
    unified = metrics = draft = False
    while rest:
        name = rest.pop(0)
        if name in FLAGS:
            metrics = metrics or name == "--metrics"
            out += [FLAGS[name]] if FLAGS[name] else []
        elif name == "--kv-unified":
            unified = True
        elif name in ("--ctx-size", "--parallel", "--batch-size"):
            given[name] = rest.pop(0)
        elif name == "--model-draft":
            draft, _ = True, rest.pop(0)
        elif name in VALUES:
            value = rest.pop(0)
            if name == "--reasoning-format" and value == "nothink":
                value = "none"
            out += [VALUES[name], value] if VALUES[name] else []
        else:
            raise SystemExit(f"shim: {name} is not had here")
    slots, context = int(given.get("--parallel", 4)), int(given.get("--ctx-size", TRAINED))
    out += ["--parallel", str(slots), "-c", str(min(TRAINED, context if unified else context // slots)), "-t", "1", "--device", "CPU"]
    if "--batch-size" in given and "-ub" not in out:
        out += ["-ub", given["--batch-size"]]
    out += [] if metrics else ["--no-metrics"]
    out += [] if "--cors-origins" in out else ["--cors-origins", "*"]  # their default
    if "--spec-draft-n-max" in out and not draft:
        at = out.index("--spec-draft-n-max")
        del out[at : at + 2]
    return ["-m", str(DEMO / "target.gguf"), *(["-md", str(DEMO / "drafter.gguf")] if draft else []), *out]


def original(arguments: list[str]) -> list[str]:
    """The same for llama-server: our files in the place of theirs."""
    out, rest, draft = [], list(arguments), False
    while rest:
        name = rest.pop(0)
        if name in ("--hf-repo", "--hf-file", "--model", "--model-url"):
            rest.pop(0)
        elif name == "--model-draft":
            rest.pop(0)
            draft = True
        elif name == "--spec-type":
            out += [name, "draft-dflash" if rest.pop(0).startswith("draft") else "none"]
        else:
            out.append(name)
    return ["--model", str(DEMO / "target.gguf"), *(["--model-draft", str(DEMO / "drafter.gguf")] if draft else []), "--threads", "1", *out]


def main() -> None:
    server = os.environ.get("SHIM_SERVER", "pyspec")
    if server == "pyspec":
        os.environ["PYTHONPATH"] = str(DEMO.parents[1])
        os.execv(sys.executable, [sys.executable, "-m", "pyggml_spec", "serve", *options(sys.argv[1:])])
    os.execv(server, [server, *original(sys.argv[1:])])


if __name__ == "__main__":
    main()
