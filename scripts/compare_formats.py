#!/usr/bin/env python3
"""`pyspec serve` and llama-server on the same scripted model outputs: a table, and tests/server/llama_server_formats.json.

    compare_formats.py --tools FOLDER --tree LLAMA_CPP [--only TEXT] [--write] [--ours]

FOLDER holds llama-server, of the same tree, whose models/templates are used. --write keeps llama-server's responses, the reference of
`tests/server/test_formats.py`; --ours also runs `pyspec serve`.
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
from server.formats import FAMILIES, Case, cases, plain, told, tools_of
from server.running import Running

OUT = Path(__file__).resolve().parents[1] / "tests" / "server" / "llama_server_formats.json"


def request(case: Case, begin: int, count: int) -> dict:
    body = {"messages": list(case.messages), "logit_bias": [[begin, 50]], "temperature": 0, "max_tokens": count}
    if case.tools:
        body |= {"tools": tools_of(case.family), "parallel_tool_calls": case.parallel}
    return body | {"chat_template_kwargs": {"enable_thinking": case.thinking}}


def begun(case: Case, answer: dict) -> dict:
    """pyspec's response, which does not repeat a prefilled beginning, in llama-server's form."""
    last = case.messages[-1]
    if last["role"] != "assistant" or "refused" in answer:
        return answer
    return answer | {"content": last["content"] + answer["content"], "reasoning": last.get("reasoning_content", "") + answer["reasoning"]}


def count(case: Case, made: list[str]) -> int:
    """How many tokens the answer may have."""
    return next(i for i in range(1, len(made) + 1) if case.cut in "".join(made[:i])) if case.cut else 300


def theirs(server: LlamaServer, body: dict, text: str, end: str) -> dict:
    """llama-server's answer; ``same``: whether its grammar let the model say ``text``."""
    try:
        answer = server.post("/v1/chat/completions", **body, verbose=True)
    except urllib.error.HTTPError as error:
        return {"refused": json.loads(error.read())["error"]["message"][:200]}
    return told(answer["choices"][0]) | {"same": answer["__verbose"]["content"].removesuffix(end) == text}


def asked(server: Running, bodies: list[dict]) -> list[dict]:
    """Answers of `pyspec serve`, which ends then."""
    try:
        answers = [server.post("/v1/chat/completions", **body) for body in bodies]
    finally:
        server.end()
    return [told(a.json()["choices"][0]) if a.status_code == 200 else {"refused": a.text[:200]} for a in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", type=Path, required=True, help="folder of llama-server")
    parser.add_argument("--tree", type=Path, required=True, help="the llama.cpp tree that it was built from")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", action="store_true", help="keep llama-server's answers")
    parser.add_argument("--ours", action="store_true", help="ask `pyspec serve`, too")
    args = parser.parse_args()
    found, differing = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for name, family in FAMILIES.items():
            told_of = [case for case in cases() if case.family == name and args.only in case.key]
            if not told_of:
                continue
            model, texts = Path(folder) / "model.gguf", [case.text for case in told_of]
            template = (args.tree / "models" / "templates" / f"{family.template}.jinja").read_text("utf-8")
            begins = scripted.write(model, texts, template, family.control, family.end)
            made = scripted.cut(texts, family.control)
            bodies = [request(case, *both) for case, *both in zip(told_of, begins, map(count, told_of, made))]
            with LlamaServer(args.tools, Path(folder) / "log", "-m", model, "--jinja", "-c", 8192, "-np", 1, "-ngl", 0) as server:
                server.wait(60)
                for case, body, parts in zip(told_of, bodies, made):
                    found[case.key] = theirs(server, body, "".join(parts[: body["max_tokens"]]), family.end)
            ours = asked(Running("-m", model, "-c", "8192"), bodies) if args.ours else [{}] * len(bodies)
            for case, answer in zip(told_of, ours):
                line = json.dumps(found[case.key], ensure_ascii=False)
                if args.ours:
                    alike = plain(begun(case, answer)) == plain(found[case.key])
                    differing += not alike
                    shown = json.dumps(answer, ensure_ascii=False)
                    line = "the same" if alike else f"\n    llama-server: {line}\n    pyspec serve: {shown}"
                print(f"{case.key}: {line}", flush=True)
    print(f"{len(found)} cases" + (f", {len(found) - differing} alike" if args.ours else ""))
    if args.write:
        known = {case.key for case in cases()}
        kept = {key: answer for key, answer in json.loads(OUT.read_text()).items() if key in known} if args.only else {}
        lines = (f" {json.dumps(key)}: {json.dumps(answer, ensure_ascii=False)}" for key, answer in (kept | found).items())
        OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
