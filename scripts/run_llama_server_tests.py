#!/usr/bin/env python3
"""Runs llama.cpp's server tests, unmodified, against llama-server or `pyspec serve` with the embedded pair, and writes the results.

    python scripts/run_llama_server_tests.py .../llama.cpp/tools/server/tests results.json [--server /path/to/llama-server] [FILE ...]

The tests start ``LLAMA_SERVER_BIN_PATH``, set to ``tests/server/llama_server_shim.py``, which replaces downloaded models by the embedded pair. Needs
pip install pytest requests openai wget aiohttp filelock numpy prometheus-client.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
import requests

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "basic", "completion", "chat_completion", "template", "compat_anthropic", "compat_oai_responses", "security", "metrics", "ignore_eos", "tokenize",
    "ctx_shift", "tool_call", "speculative", "stream", "slot_save", "kv_keep_only_active",
)  # fmt: skip
SECONDS = 120
KNOWN = ROOT / "tests" / "serve" / "llama_server_tests.json"


class Outcomes:
    """A plugin of pytest: keeps the tests from downloading models, and notes how each of them ended."""

    def __init__(self, path: Path) -> None:
        self.path, self.passed, self.why = path, {}, {}

    def pytest_configure(self, config) -> None:
        sys.path.insert(0, os.getcwd())
        import utils

        utils.ServerPreset.load_all = staticmethod(lambda: None)
        utils.download_file = lambda url, output_file_path=None: os.path.basename(url)
        utils.DEFAULT_REQUEST_TIMEOUT = SECONDS
        build = requests.adapters.HTTPAdapter.build_response

        def build_response(adapter, request, response):
            """Case-insensitive headers: the tests look them up in llama-server's case."""
            made = build(adapter, request, response)
            made.headers = requests.structures.CaseInsensitiveDict({name.title(): value for name, value in made.headers.items()})
            return made

        requests.adapters.HTTPAdapter.build_response = build_response

    def pytest_runtest_logreport(self, report) -> None:
        case = report.nodeid.removeprefix("unit/")
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.passed[case] = report.outcome
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                self.why[case] = (crash.message if crash is not None else str(report.longrepr))[:300]
            self.path.write_text(json.dumps({"outcomes": self.passed, "why": self.why}, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--server", default="pyspec")
    parser.add_argument("--port", type=int, default=8180)
    parser.add_argument("--passed-in", type=Path, help="only the cases that passed in these results")
    parser.add_argument(
        "--known", action="store_true", help="only the cases that llama-server passes; exit code 1 if one fails without a reason"
    )
    args = parser.parse_intermixed_args()
    os.environ.update(
        LLAMA_SERVER_BIN_PATH=str(ROOT / "tests" / "serve" / "llama_server_shim.py"), SHIM_SERVER=args.server, PORT=str(args.port),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )  # fmt: skip
    sys.dont_write_bytecode = True
    results, passed_in = args.results.resolve(), args.passed_in.resolve() if args.passed_in is not None else None
    os.chdir(args.tests)
    files = [f"unit/test_{name}.py" for name in args.files or FILES]
    if args.passed_in is not None:
        known = json.loads(passed_in.read_text())["outcomes"]
        files = [f"unit/{case}" for case, outcome in known.items() if outcome == "passed" and f"unit/{case.partition('::')[0]}" in files]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "--timeout",
        str(SECONDS + 60),
        "--tb",
        "line",
    ]
    known = json.loads(KNOWN.read_text())["cases"] if args.known else {}
    files = [f"unit/{case}" for case in known if f"unit/{case.partition('::')[0]}" in files] if args.known else files
    outcomes = Outcomes(results)
    pytest.main([*files, *options], plugins=[outcomes])
    counts = {name: list(outcomes.passed.values()).count(name) for name in ("passed", "failed", "skipped")}
    print(json.dumps(counts))
    if wrong := [case for case, outcome in outcomes.passed.items() if known.get(case) == "passes" and outcome != "passed"]:
        print("failed without a reason in tests/server/llama_server_tests.json:", *wrong, sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
