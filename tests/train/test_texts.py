"""What a drafter is trained on: how files are read, and on which side of the split a prompt is. Needs no torch."""

import json
from collections import defaultdict

import pytest
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.chat import chat_template
from pyggml_spec.errors import TrainingError
from pyggml_spec.train.texts import Text, answer, as_line, files_of, read_texts, split


@pytest.fixture(scope="module")
def session(talkers):
    with ps.load(talkers[0], device="CPU", threads=1, n_ctx=256, spec=["none"]) as session:
        yield session


def test_all_answers_to_a_prompt_are_on_one_side():
    """Or what a drafter is validated on are texts that it has learnt."""
    texts = [Text((*range(prompt, prompt + 9), *[heat] * 9), 9, temperature=float(heat)) for prompt in range(200) for heat in (0, 1, 2)]
    train, held = split(texts)
    sides = defaultdict(set)
    for side, some in (("train", train), ("held", held)):
        for text in some:
            sides[text.tokens[:9]].add(side)
    assert len(sides) == 200 and all(len(side) == 1 for side in sides.values()) and 0 < len(held) < 60
    assert split([*texts[:1], Text((1, 2, 3), 2), *texts[3:4]]) == (texts[:1], texts[3:4])  # an answer of one token teaches nothing
    fails_with(TrainingError, "1 texts are too few", split, texts[:1])


def test_prompts_answers_and_texts_of_files(session, tmp_path):
    template = chat_template(session)[0]
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd" * 40}]
    asked = len(template.encode(session.tokenizer, turns[:1]))
    kept = as_line(Text(tuple(range(40)), 30, "own", 0.7))
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in ({"messages": turns}, {"prompt": "xyz"}, {"prompt": "x" * 90})) + kept
    )
    (tmp_path / "b.txt").write_text("t" * (64 * 9))
    done, prompts = read_texts([tmp_path], session, template, 64)
    assert [(text.prompt_tokens, len(text.tokens), text.temperature) for text in done[:2]] == [(asked, 64, None), (30, 40, 0.7)]
    assert session.tokenizer.decode(list(prompts[0].tokens)) == "xyz" and prompts[0].prompt_tokens == len(prompts[0].tokens)
    assert len(done) == 3 and len(done[2].tokens) == 64  # one piece of eight as it is
    assert len(prompts) == 1 + 8 and all(text.prompt_tokens == len(text.tokens) == 32 for text in prompts[1:])
    (tmp_path / "a.jsonl").write_text(json.dumps({"tokens": [1, session.target.n_vocab], "prompt_tokens": 1}))
    fails_with(TrainingError, "line 1 of .*a.jsonl needs .tokens. of this vocabulary", read_texts, [tmp_path], session, template, 64)
    fails_with(TrainingError, "nowhere does not exist", files_of, [tmp_path / "nowhere"])


def test_answers_end_where_a_text_does(session):
    made, prompts = [], [Text(tuple(range(1, n)), n - 1) for n in (5, 50, 60)]
    answer(session, prompts, 100, 2, 3, most=64, progress=lambda *_: None, interrupted=lambda: False, kept=made.append)
    assert {text.prompt_tokens for text in made} <= {4, 49, 59} and max(len(text.tokens) for text in made) == 64
    assert all(
        text.temperature in (0.0, 0.7) and text.tokens[: text.prompt_tokens] == tuple(range(1, text.prompt_tokens + 1)) for text in made
    )
