"""Loads pairs in a process of its own, so that an abort is the failure of one case and not the end of the test run.

python load_many.py < pairs.json      one JSON line per pair: what was raised, or null; a line starts before and ends after its pair
"""

import json
import sys

import pyggml_spec as ps


def outcome(target: str, draft: str | None, tokens: int) -> list[str] | None:
    try:
        with ps.load(target, draft, device="CPU", threads=1, n_ctx=64) as session:
            session.generate("ab", max_tokens=tokens)
    except ps.PyspecError as error:
        return ["PyspecError", str(error)]
    except BaseException as error:
        return [type(error).__name__, str(error)]
    return None


if __name__ == "__main__":
    for pair in json.load(sys.stdin):
        print(json.dumps(outcome(*pair)), flush=True)
