"""Writes tests/constraints/json_schema_suite.json from a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite, with counts over all of it.

    python scripts/make_schema_suite.py CHECKOUT [--write] [--generate SEEDS]

Per schema of draft 2020-12, optional tests included: whether it is refused, else which documents match; invalid matches are printed. ``--generate``: the
embedded pair writes documents for every accepted schema at temperature 1.5 (needs jsonschema), of which complete ones are validated. The slice has
every fourth accepted schema and every fifth refused one.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pyggml_spec as ps
from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.errors import SamplingError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.text.tokenizer import Tokenizer

OUT = Path(__file__).parent.parent / "tests/constraints/json_schema_suite.json"


def accepted(tokenizer: Tokenizer, schema: str, document: str) -> bool:
    """Whether the constraint accepts ``document`` completely."""
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


def generate(checkout: str, seeds: int) -> None:
    import jsonschema

    counts: Counter = Counter()
    with ps.load(device="CPU", threads=1, n_ctx=256) as session:
        for path in sorted(Path(checkout, "tests/draft2020-12").rglob("*.json")):
            for group in json.loads(path.read_text("utf-8")):
                validator, schema = jsonschema.Draft202012Validator(group["schema"]), json.dumps(group["schema"])
                for seed in range(seeds):
                    try:
                        text, stats = session.generate("x = ", 60, sampling=ps.Sampling(json_schema=schema, temperature=1.5, seed=seed))
                    except SamplingError:
                        counts["schemas refused"] += 1
                        break
                    try:
                        ended = "cut" if stats.cut else "valid" if validator.is_valid(json.loads(text)) else "invalid"
                    except re.error:  # of Python's: it has no \p{...}
                        ended = "not judged"
                    counts["schemas kept"] += not seed
                    counts[ended] += 1
                    if ended == "invalid":
                        print("invalid:", path.stem, "/", group["description"], "/", text)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1], "--write" in sys.argv)
    if "--generate" in sys.argv:
        generate(sys.argv[1], int(sys.argv[sys.argv.index("--generate") + 1]))
