#!/usr/bin/env python3
"""What `pyspec serve` and llama-server make of the same scripted answers, case by case: a table, and tests/serve/llama_server_formats.json.

    compare_formats.py --tools FOLDER --tree LLAMA_CPP [--only TEXT] [--write] [--ours]

FOLDER holds llama-server, of the same tree, whose models/templates are used. --write keeps llama-server's answers, which `tests/serve/test_formats.py`
holds the parser against; --ours asks `pyspec serve`, too.
"""

import argparse
import json
import sys
import tempfile
import urllib.error
from pathlib import Path

from llama_server import LlamaServer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import scripted
from serve.formats import FAMILIES, TOOLS, Case, cases, plain, told
from serve.running import Running

OUT = Path(__file__).resolve().parents[1] / "tests" / "serve" / "llama_server_formats.json"


def request(case: Case, begin: int, count: int) -> dict:
    body = {"messages": list(case.messages), "logit_bias": [[begin, 50]], "temperature": 0, "max_tokens": count}
    if case.tools:
        body |= {"tools": TOOLS, "parallel_tool_calls": case.parallel}
    return body | {"chat_template_kwargs": {"enable_thinking": case.thinking}}


def begun(case: Case, answer: dict) -> dict:
    """Ours, which does not repeat what the request has begun, as llama-server tells it."""
    last = case.messages[-1]
    if last["role"] != "assistant" or "refused" in answer:
        return answer
    return answer | {"content": last["content"] + answer["content"], "reasoning": last.get("reasoning_content", "") + answer["reasoning"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", type=Path, required=True, help="folder of llama-server")
    parser.add_argument("--tree", type=Path, required=True, help="the llama.cpp tree that it was built from")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", action="store_true", help="keep llama-server's answers")
    parser.add_argument("--ours", action="store_true", help="ask `pyspec serve`, too")
    args = parser.parse_args()
    found, differing, asked = {}, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            if args.only not in case.key:
                continue
            family, model = FAMILIES[case.family], Path(folder) / "model.gguf"
            template = (args.tree / "models" / "templates" / f"{family.template}.jinja").read_text("utf-8")
            begin = scripted.write(model, [case.text], template, family.control, family.end)[0]
            made, count = scripted.pieces(case.text, family.control), 300
            if case.cut:
                count = next(i for i in range(len(made)) if case.cut in "".join(made[: i + 1])) + 1
            body = request(case, begin, count)
            with LlamaServer(args.tools, Path(folder) / "log", "-m", model, "--jinja", "-c", 4096, "-np", 1, "-ngl", 0) as server:
                server.wait(60)
                try:
                    answer = server.post("/v1/chat/completions", **body, verbose=True)
                    found[case.key] = told(answer["choices"][0]) | {
                        "same": answer["__verbose"]["content"].removesuffix(family.end) == "".join(made[:count])
                    }
                except urllib.error.HTTPError as error:
                    found[case.key] = {"refused": json.loads(error.read())["error"]["message"][:200]}
            asked += 1
            line = json.dumps(found[case.key], ensure_ascii=False)
            if args.ours:
                server = Running("-m", model, "-c", "4096")
                try:
                    response = server.post("/v1/chat/completions", **body)
                    ours = told(response.json()["choices"][0]) if response.status_code == 200 else {"refused": response.text[:200]}
                finally:
                    server.end()
                alike = plain(begun(case, ours)) == plain(found[case.key])
                differing += not alike
                line = "the same" if alike else f"\n    llama-server: {line}\n    pyspec serve: {json.dumps(ours, ensure_ascii=False)}"
            print(f"{case.key}: {line}", flush=True)
    print(f"{asked} cases" + (f", {asked - differing} alike" if args.ours else ""))
    if args.write:
        kept = json.loads(OUT.read_text()) if args.only else {}
        lines = (f" {json.dumps(key)}: {json.dumps(answer, ensure_ascii=False)}" for key, answer in (kept | found).items())
        OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
