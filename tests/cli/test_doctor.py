"""`pyspec doctor` as a process: verdicts on stdout, exit code 3, one line that says what failed."""

import json

import pytest
from cli.process import one_sentence, pyspec

pytestmark = pytest.mark.slow

ON_CPU = ("--device", "CPU", "-t", 1, "-c", 256)


def test_a_failed_check_is_exit_code_3(pair):
    """The random drafter was never trained for its random target: nothing it reads helps it."""
    done = pyspec("doctor", "-m", pair[0], "-md", pair[1], *ON_CPU)
    assert done.returncode == 3, done.stderr
    text = done.stdout.decode()
    assert text.startswith(f"target {pair[0]}\ndrafter {pair[1]}\n") and "no check failed" not in text
    assert "fit to this target" in text and "FAIL" in text and "\nfit to this target: use the drafter that was made for" in text
    assert done.stderr.splitlines() == [done.stderr.strip()] and "checks failed" in done.stderr


def test_json_is_one_object(pair, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc def ghi"}\n\n{"name": "x", "prompt": "jkl"}\n')
    done = pyspec("doctor", "-m", pair[0], "-md", pair[1], *ON_CPU, "--prompts", prompts, "--json")
    report = json.loads(done.stdout)
    assert report["passed"] is (done.returncode == 0) and report["prompts"] == 2 and report["checks"]


def test_what_cannot_be_examined_is_one_sentence(pair, tmp_path):
    bad = tmp_path / "bad.jsonl"
    one_sentence(pyspec("doctor", "-m", pair[0]), "-md")
    one_sentence(pyspec("doctor", "-m", pair[1], "-md", pair[0]), "drafter")
    one_sentence(pyspec("doctor", "-m", pair[0], "-md", pair[1], "--prompts", bad), str(bad), "cannot be read")
    for content, word in (("[1]\n", "line 1"), ('{"prompt": 3}\n', '"prompt"'), ("\n", "no prompt"), ('{"prompt": ""}', "empty")):
        bad.write_text(content)
        one_sentence(pyspec("doctor", "-m", pair[0], "-md", pair[1], "--prompts", bad, *ON_CPU), word)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(pair[1].read_bytes()[:3000])
    one_sentence(pyspec("doctor", "-m", pair[0], "-md", cut, *ON_CPU), "cut.gguf")
