"""The same request as raw text, through the template, with thinking and without: each is measured."""

import pytest
from gguf_io.build import STR, Model

from pyggml_spec.doctor.examine import Effort, Subject, examine_drafter
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}{% endfor %}{% if enable_thinking %}\n# thinking:\n{% else %}\n{% endif %}"
)


def test_ways_of_asking_are_compared(tmp_path):
    model = Model(DEMO_TARGET)
    model.keys["tokenizer.chat_template"] = (STR, TEMPLATE)
    model.write(tmp_path / "target.gguf")
    subject = Subject(
        tmp_path / "target.gguf", device="CPU", threads=1, effort=Effort(prompts=2, prompt_tokens=48, tokens=48, blocks=4, generated=8)
    )
    try:
        check = examine_drafter(subject, DEMO_DRAFTER).check("template and thinking")
    finally:
        subject.close()
    assert set(check.data["ways"]) == {"raw text", "template, thinking", "template, no thinking"}
    assert check.verdict in ("ok", "warn") and all(value >= 1 for value in check.data["ways"].values())
