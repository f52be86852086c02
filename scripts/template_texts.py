#!/usr/bin/env python3
"""Writes tests/text/llama_cpp_texts.json: llama-server's prompts of three conversations with each template in llama.cpp's models/templates.

    template_texts.py --tools FOLDER --tree LLAMA_CPP [--texts FOLDER] [--only NAME]

FOLDER holds llama-server, of the same tree. Only hashes are kept; --texts FOLDER keeps the texts too, to see where ours differ. A text that tells
the day was made on the day that the file names. `tests/text/test_template.py` holds ours against it.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import urllib.error
from datetime import datetime
from pathlib import Path

from llama_server import LlamaServer, ServerEnded

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from pairs import with_control_tokens
from random_gguf.archs import write_qwen3
from random_gguf.model import Shape
from text.conversations import CONVERSATIONS

OUT = Path(__file__).resolve().parents[1] / "tests" / "text" / "llama_cpp_texts.json"


def asked(server: LlamaServer, conversation: dict) -> str | None:
    """The text of a conversation, None where llama-server refuses it."""
    body = {name: value for name, value in conversation.items() if name != "thinking"}
    if (thinking := conversation.get("thinking")) is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinking}
    try:
        return server.post("/apply-template", **body)["prompt"]
    except urllib.error.HTTPError as error:
        print(f"    refused: {error.read().decode(errors='replace')[:200]}", file=sys.stderr)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", type=Path, required=True, help="folder of llama-server")
    parser.add_argument("--tree", type=Path, required=True, help="the llama.cpp tree that it was built from")
    parser.add_argument("--texts", type=Path, help="folder for the whole texts")
    parser.add_argument("--only", help="one template; nothing is written but to --texts")
    args = parser.parse_args()
    now, found = datetime.now().astimezone(), {}
    with tempfile.TemporaryDirectory() as folder:
        plain = write_qwen3(Path(folder) / "plain.gguf", Shape())
        model = with_control_tokens(plain, Path(folder) / "model.gguf", end=301, begin=302)
        for path in sorted((args.tree / "models" / "templates").glob("*.jinja")):
            if args.only not in (None, path.stem):
                continue
            print(path.stem, file=sys.stderr)
            options = ("-m", model, "--jinja", "--chat-template-file", path, "-c", 256, "-np", 1, "-ngl", 0)
            try:
                with LlamaServer(args.tools, Path(folder) / "log", *options) as server:
                    server.wait(60)
                    texts = {name: asked(server, conversation) for name, conversation in CONVERSATIONS.items()}
            except ServerEnded as ended:
                print(f"    {ended}", file=sys.stderr)
                texts = dict.fromkeys(CONVERSATIONS)
            found[path.stem] = {
                name: None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()
            }
            for name, text in texts.items():
                if args.texts and text is not None:
                    args.texts.mkdir(parents=True, exist_ok=True)
                    (args.texts / f"{path.stem}.{name}").write_text(text)
    if datetime.now().astimezone().date() != now.date():
        raise SystemExit("midnight passed meanwhile: texts of two days; run it again")
    if args.only is None:
        OUT.write_text(json.dumps({"now": now.isoformat(timespec="minutes"), "texts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
