#!/usr/bin/env python3
"""Runs the programs of scripts/clients, each a client of `pyspec serve` in an environment of its own, and prints the table of docs/clients.md.

    python scripts/try_clients.py -m SmolLM2-135M-Instruct.Q4_1.gguf --folder /tmp/clients            # all; what is missing is installed into the folder
    python scripts/try_clients.py -m SmolLM2-135M-Instruct.Q4_1.gguf --folder /tmp/clients ollama_client.py

The model answers; what a small model would not do, three scripted models say: a call of a tool, an edit of a file, and code that is run; a random one embeds. All are models of
one server.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / "scripts" / "clients"
SAID = {
    "calls": '{"name": "weather", "arguments": {"city": "Paris"}}',
    "edits": "hello.py\n```\nprint('hello')\n```\n",
    "code": "Thought: I multiply.\n<code>\nfinal_answer(6 * 7)\n</code>",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True, type=Path, help="a small chat model")
    parser.add_argument("--folder", required=True, type=Path, help="for the environments")
    parser.add_argument("names", nargs="*", help="files of scripts/clients; default: all")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        server, url = serve(Path(made), args.model)
        try:
            print("| client | versions | seconds | |\n|---|---|---|---|")
            for path in sorted(CLIENTS.iterdir()):
                if path.suffix in (".py", ".mjs") and (not args.names or path.name in args.names):
                    wrong = row(path, args.folder, url)
                    failed += bool(wrong)
        finally:
            server.terminate()
            server.wait(60)
    sys.exit(3 if failed else 0)


def serve(folder: Path, model: Path) -> tuple[subprocess.Popen, str]:
    """One server with all models; its address."""
    sys.path.insert(0, str(ROOT / "tests"))
    import embedders
    import scripted

    tables = [f'["*"]\nctx-size = 8192\nslots = 2\nprefix-memory = 64\n[small]\nmodel = "{model.resolve()}"\n']
    for name, text in SAID.items():
        scripted.write(folder / f"{name}.gguf", [text], None)
        tables.append(f'[{name}]\nmodel = "{name}.gguf"\nctx-size = 32768\n')  # each character of a prompt is a token
    embedders.write_encoder(folder / "embeds.gguf", "nomic-bert")
    tables.append('[embeds]\nmodel = "embeds.gguf"\nctx-size = 128\nembeddings = true\n')
    (folder / "preset.toml").write_text("".join(tables))
    command = [
        sys.executable,
        "-m",
        "pyggml_spec",
        "serve",
        "--models-preset",
        str(folder / "preset.toml"),
        "--port",
        "0",
        "--device",
        "CPU",
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.match(r"serving .* at (http://\S+)/ ", line):
            log = (folder / "log").open("w")
            subprocess.Popen(["cat"], stdin=server.stderr, stdout=log)
            return server, found[1]
    raise SystemExit("the server did not start")


def row(path: Path, folder: Path, url: str) -> str:
    """Runs one client, prints its row, and returns what it said if it failed."""
    kind, *packages = re.sub(r"^\W+", "", path.read_text().splitlines()[0]).replace(":", "").split()
    home = folder / (path.stem.removesuffix("_client") if kind == "pip" else "js")
    program, versions = install(kind, packages, home)
    env = {**os.environ, "PYSPEC_URL": url, "PYSPEC_MODEL": "small", **{f"PYSPEC_{name.upper()}": url for name in SAID}}
    began = time.monotonic()
    command = [*program, str(path)]
    if kind == "npm":  # modules are looked for beside the file
        (home / path.name).write_text(path.read_text())
        command = [*program, str(home / path.name)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    said = "" if done.returncode == 0 else (done.stderr or done.stdout)[-3000:]
    print(f"| `{path.name}` | {versions} | {time.monotonic() - began:.1f} | {'FAILED' if said else 'passes'} |", flush=True)
    if said:
        print(said, file=sys.stderr)
    return said


def install(kind: str, packages: list[str], home: Path) -> tuple[list[str], str]:
    """The interpreter with the packages, and their versions."""
    if kind == "npm":
        home.mkdir(parents=True, exist_ok=True)
        missing = [name for name in packages if not (home / "node_modules" / name).exists()]
        if missing:
            subprocess.run(["npm", "install", "--silent", *missing], cwd=home, check=True)
        about = {name: json.loads((home / "node_modules" / name / "package.json").read_text()) for name in packages}
        found = [f"{name} {package['version']}" for name, package in about.items()]
        return ["node"], ", ".join(found)
    python = home / "bin" / "python"
    names = [re.split(r"[\[=<>]", package)[0] for package in packages]
    show = [str(python), "-c", f"from importlib.metadata import version as v; print(', '.join(n + ' ' + v(n) for n in {names!r}))"]
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    if subprocess.run(show, capture_output=True, check=False).returncode:
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    return [str(python)], subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
