"""A/B of the same requests as raw text, through the chat template, and with thinking on and off."""

from collections.abc import Sequence
from functools import partial

from ..engine.runner import ModelRunner
from ..errors import TemplateError
from ..text.template import KEY, ChatTemplate
from ..text.tokenizer import Tokenizer
from .probe import KNOWN, Probe, Reading, write_passages
from .report import NOT_APPLICABLE, OK, RUNNING, WARN, Check

MATTERS = 0.8  # share of the best variant's accepted drafts below which a variant is reported


def ways(template: ChatTemplate, tokenizer: Tokenizer, prompts: Sequence[str]) -> dict[str, list[list[int]]]:
    """Token ids of each prompt by variant."""
    modes = {"template, thinking": True, "template, no thinking": False} if template.can_think else {"template": None}
    out = {"raw text": [tokenizer.encode(prompt) for prompt in prompts]}
    for name, thinking in modes.items():
        out[name] = [template.encode(tokenizer, [{"role": "user", "content": prompt}], thinking=thinking) for prompt in prompts]
    return out


def compare(engine: ModelRunner, tokenizer: Tokenizer, probe: Probe, reading: Reading, prompts: Sequence[str], tokens: int) -> Check:
    """Acceptance of the target's own text for each variant."""
    check, file = partial(Check, "template and thinking", stage=RUNNING), engine.target.file
    if KEY not in file.metadata:
        return check(NOT_APPLICABLE, "the target has no chat template")
    try:
        asked = ways(ChatTemplate.from_gguf(file), tokenizer, prompts)
    except TemplateError as error:
        return check(WARN, f"the template cannot be measured: {error}", "use a model file with a working template")
    tokens = min(tokens, engine.options.n_ctx - max(len(ids) for both in asked.values() for ids in both) - 1)
    if tokens < KNOWN + 8:
        return check(NOT_APPLICABLE, f"the rendered prompts leave no room in a context of {engine.options.n_ctx}; use a larger `n_ctx`")
    kept, found = probe.passages, {}
    try:
        for way, ids in asked.items():
            probe.passages = write_passages(engine, ids, sorted(kept[0].features), tokens)
            found[way] = probe.measure(reading).tokens_per_block
    finally:
        probe.passages = kept
    best = max(found, key=found.__getitem__)
    text = ", ".join(f"{way} {value:.2f}" for way, value in found.items()) + " tokens per block"
    if any(value - 1 < MATTERS * (found[best] - 1) for value in found.values()):
        return check(WARN, text, f"the drafter was trained for {best!r}: prompt that way where the task allows it", data={"ways": found})
    return check(OK, text, data={"ways": found})
