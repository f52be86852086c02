#!/usr/bin/env python3
"""Constrained texts with masks on the device against masking on the host, in every mode, with one and several slots.

    check_masks.py DEVICE [TARGET DRAFTER]

Exit code 1 if reference texts differ.
"""

import json
import sys

import pyggml_spec as ps
from pyggml_spec.sampling.sampler import Sampling

SCHEMA = {
    "type": "object",
    "properties": {
        "the_name_of_the_function": {"type": "string", "maxLength": 12},
        "number_of_arguments": {"type": "integer", "maximum": 99},
    },
    "required": ["the_name_of_the_function", "number_of_arguments"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": r"def [a-z]{3,9}\(self, (name|number)\):\n    return [^\n]{3,20}\n"},
    "gbnf": {"grammar": 'root ::= "x = [" d (", " d){0,3} "]" \nd ::= [0-9] | "(" d ")"'},
}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 7, "temperature": 1.2},
    "penalties": {"temperature": 0.0, "repeat_penalty": 1.3, "repeat_last_n": 20},
    "whole rows": {"seed": 7, "top_k": 0},
}
PROMPT, TOKENS, SLOTS = "import os\n\n", 60, 3


def main(device: str, *files: str) -> int:
    wrong = 0
    with ps.load(*files, device=device, n_ctx=512) as masked, ps.load(*files, device=device, n_ctx=512) as whole:
        whole.runner._tried_masked = True  # as if there were no memory for kept logits
        for constraint, asked in CONSTRAINTS.items():
            for name, values in SAMPLINGS.items():
                sampling, texts = Sampling(**asked, **values), {}
                for who, session in (("device", masked), ("host", whole)):
                    for mode in ("speculative", "plain", "reference"):
                        texts[who, mode], stats = session.generate(PROMPT, TOKENS, sampling=sampling, mode=mode)
                        print(who, mode, constraint, name, f"{stats.read_bytes} bytes read in {stats.steps} steps", flush=True)
                with masked.concurrent(slots=SLOTS) as server:
                    handles = [server.submit(PROMPT, TOKENS, sampling=sampling) for _ in range(SLOTS)]
                    for i, handle in enumerate(handles):
                        texts["slot", i] = handle.result()[0]
                print(f"{constraint}, {name}: {len({*texts.values()})} texts", flush=True)
                wrong += texts["device", "reference"] != texts["host", "reference"]
    print(f"{wrong} of {len(CONSTRAINTS) * len(SAMPLINGS)} differ between device and host")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
