"""Writes tests/spec/json_schema_suite.json from a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite, and counts over all of it.

    python scripts/make_schema_suite.py CHECKOUT [--write]

For each schema of draft 2020-12 (the optional tests included): is it refused, and if not, which documents fit. An invalid one that fits
is printed. The slice that is written has every fourth kept schema and every fifth refused one.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from pyggml_spec.errors import SamplingError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.session import DEMO_TARGET
from pyggml_spec.spec.grammar import Grammar
from pyggml_spec.text.tokenizer import Tokenizer

OUT = Path(__file__).parent.parent / "tests/spec/json_schema_suite.json"


def accepted(tokenizer: Tokenizer, schema: str, document: str) -> bool:
    """Whether the constraint lets the tokens of ``document`` pass and end."""
    grammar, tokens = Grammar("json_schema", schema, tokenizer), tokenizer.encode(document, bos=False)
    if grammar.fits(tokens) < len(tokens):
        return False
    for token in tokens:
        grammar.accept(token)
    return grammar.complete


def main(checkout: str, write: bool) -> None:
    tokenizer, counts, groups = Tokenizer(GGUFFile(DEMO_TARGET)), Counter(), []
    for path in sorted(Path(checkout, "tests/draft2020-12").rglob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            schema = json.dumps(group["schema"])
            name = f"{path.stem}: {group['description']}"
            try:
                Grammar("json_schema", schema, tokenizer)
            except SamplingError:
                counts["refused"] += 1
                groups.append({"description": name, "schema": group["schema"], "kept": False, "tests": []})
                continue
            counts["kept"] += 1
            tests = []
            for test in group["tests"]:
                fits = accepted(tokenizer, schema, json.dumps(test["data"], ensure_ascii=False))
                counts[("valid" if test["valid"] else "invalid") + (" accepted" if fits else " not accepted")] += 1
                tests.append({"description": test["description"], "data": test["data"], "valid": test["valid"], "accepted": fits})
                if fits and not test["valid"]:
                    print("accepted, though invalid:", name, "/", test["description"])
            groups.append({"description": name, "schema": group["schema"], "kept": True, "tests": tests})
    print(dict(counts))
    if write:
        kept, refused = ([g for g in groups if g["kept"] is yes and len(json.dumps(g)) < 3000 and "ecmascript" not in g["description"]]
                         for yes in (True, False))  # fmt: skip
        text = {
            "licence": "MIT, Copyright (c) 2012 Julian Berman; from github.com/json-schema-org/JSON-Schema-Test-Suite, draft 2020-12",
            "groups": [*kept[::4], *refused[::5]],
        }
        OUT.write_text(json.dumps(text, ensure_ascii=True, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], "--write" in sys.argv)
