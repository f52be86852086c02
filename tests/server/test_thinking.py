"""Budgets of thinking over HTTP, by the names of each dialect, on a model that would think for longer."""

import pytest
from server.test_formats import Scripted, templated

pytestmark = pytest.mark.slow

WORDS = "one two three four five six seven eight nine ten"
TEXTS = {"long": f"{WORDS}</think>The answer."}  # the template opens the reasoning, and its end is one token, which the text goes on after


def test_the_limit_is_that_of_the_request_its_effort_or_the_server(templates, tmp_path):
    with Scripted(
        tmp_path / "model.gguf", TEXTS, templated(templates, "GLM"), "--reasoning-budget", 6, control=("<think>", "</think>")
    ) as model:

        def thought(path="/v1/chat/completions", **more) -> tuple[str, str, int]:
            whole = model.server.ok(path, **model.body("long", **more))
            if "content" in whole:
                blocks = {b["type"]: b.get("thinking", b.get("text")) for b in whole["content"]}
                return blocks.get("thinking", ""), blocks["text"], -1
            message = whole["choices"][0]["message"]
            count = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert whole["timings"]["n_reasoning_tokens"] == count
            return message["reasoning_content"], message["content"], count

        whole, answer, free = thought(thinking_budget_tokens=1 << 20)
        assert whole.strip() == WORDS and answer == "The answer."
        for name in ("thinking_budget_tokens", "reasoning_budget_tokens"):
            cut, answer, count = thought(**{name: 4})
            assert WORDS.startswith(cut.strip()) and 0 < len(cut) < len(whole) and answer == "The answer." and 4 <= count < free
        served, _, count = thought()
        assert 6 <= count < free and len(cut) < len(served) < len(whole)
        message = thought(thinking_budget_tokens=4, reasoning_budget_message=" Enough.")
        assert message[0].strip().endswith("Enough.") and message[1] == "The answer."
        anthropic = thought("/v1/messages", thinking={"type": "enabled", "budget_tokens": 4})
        assert anthropic[:2] == (cut, "The answer.")
        low, _, count = thought(reasoning_effort="low", max_tokens=25)  # the template does not know it: a fifth
        assert 5 <= count < 6 + 3 and len(cut) <= len(low) < len(served)
        assert thought(speculative=False, thinking_budget_tokens=4)[0] == cut
        refused = model.server.post("/v1/messages", **model.body("long", output_config={"effort": "extreme"}))
        assert refused.status_code == 400 and refused.json()["error"]["message"].startswith('output_config.effort is "extreme"')
        assert thought(reasoning_effort="xhigh")[0] == served
