"""What the chat APIs allow reaches templates that do not take it as it is, in the way of llama.cpp."""

import json
from datetime import UTC, datetime

import pytest

from pyggml_spec.errors import TemplateError
from pyggml_spec.text.template import ChatTemplate

EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + EACH
USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]


def render(source, *messages, **options):
    return ChatTemplate(source, "<bos>", "<eos>").render(messages, **options)


@pytest.mark.parametrize("source", [NO_SYSTEM, EACH.replace("%}[", "if m.role != 'system' %}[", 1)])
def test_a_system_message_that_has_no_place_begins_the_next_turn(source):
    assert render(source, SYSTEM, USER, USER) == "[user]Be brief.\nHi[user]Hi"
    assert render(source, USER) == "[user]Hi"
    assert render(EACH, SYSTEM, USER) == "[system]Be brief.[user]Hi"


def test_a_system_message_alone_and_one_in_the_middle_stay_with_the_template():
    with pytest.raises(TemplateError, match="no system"):
        render(NO_SYSTEM, SYSTEM)
    assert render(NO_SYSTEM, USER, SYSTEM) == "[user]Hi[system]Be brief."


def test_developers_are_the_system_where_the_template_does_not_know_them():
    developer = SYSTEM | {"role": "developer"}
    assert render(EACH, developer, USER) == "[system]Be brief.[user]Hi"
    assert render("{#<|channel|>#}" + EACH, developer, USER) == "[developer]Be brief.[user]Hi"


def test_parts_become_text_and_text_becomes_parts():
    each_part = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    assert render(EACH, {"role": "user", "content": PARTS}) == "[user]a\nb"
    assert render(each_part, {"role": "user", "content": PARTS}) == "<a><><b>"
    assert render(each_part, USER) == "<Hi>"


@pytest.mark.parametrize("given", ['{"place": "Zürich"}', {"place": "Zürich"}])
def test_arguments_of_tool_calls_are_what_the_template_takes(given):
    message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": given}}]}
    each = "{% for m in messages %}{% for call in m.tool_calls %}CALL{% endfor %}{{ m.content }}{% endfor %}"
    objects = each.replace("CALL", "{% for name, value in call.function.arguments | items %}{{ name }}={{ value }}{% endfor %}")
    text = each.replace("CALL", "{{ call.function.name + ' ' + call.function.arguments }}")
    assert render(objects, USER, message) == "Hiplace=Zürich"
    assert render(text, USER, message) == ('Hif {"place":"Zürich"}' if isinstance(given, dict) else f"Hif {given}")
    broken = message | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    assert render(text, USER, broken) == "Hif {"


def test_results_of_tools_are_where_the_template_writes_them():
    """In the message that called the tools, if the template knows them there only; else in messages of their own."""
    results = "{% for r in m.tool_responses %}<{{ r.name }} {{ r.response.found }}>{% endfor %}"
    inside = "{% for m in messages %}[{{ m.role }}]{{ m.content }}RESULTS{% endfor %}".replace("RESULTS", results)
    calls = [{"id": str(i), "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}} for i in (1, 2)]
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    talk += [{"role": "tool", "tool_call_id": str(i), "content": f'{{"found": {i}}}'} for i in (1, 2)]
    assert render(inside, *talk, {"role": "assistant", "content": "Both."}, USER) == "[user]Hi[assistant]Both.<f1 1><f2 2>[user]Hi"
    knows = inside + "{% if messages[-1].role == 'tool' %}!{% endif %}"
    assert render(knows, *talk) == '[user]Hi[assistant][tool]{"found": 1}[tool]{"found": 2}!'
    assert render(EACH, *talk) == '[user]Hi[assistant][tool]{"found": 1}[tool]{"found": 2}'


@pytest.mark.parametrize("calls", [3, "f", {}, [], [1], [None], [{}], [{"function": 1}], [{"function": {"name": 1, "arguments": [[]]}}]])
def test_tool_calls_that_are_none_are_the_templates_business(calls):
    source = EACH + "{% if messages[0].tool_responses %}{% endif %}{{ messages[1].tool_calls | tojson }}"
    message = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": 3}
    assert render(source, USER, message, {"role": "tool", "content": None}, {"role": "tool"}).startswith("[user]Hi[assistant]")


def test_reasoning_of_earlier_turns_is_kept_unless_it_is_said():
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    keeps = "{% if preserve_thinking and not clear_thinking %}{{ messages[1].reasoning_content }}{{ messages[1].thinking }}{% endif %}"
    assert render(keeps, USER, message) == "hmhm"
    assert render(keeps, USER, message, variables={"preserve_reasoning": False}) == ""
    blocks = "{% for m in messages %}{% for part in m.content if m.content is not string %}{{ part.type }} {{ part.thinking }}|{% endfor %}{% endfor %}"
    assert render(blocks, USER, message) == "thinking hm|text |"


def test_what_is_not_there_is_not_defined():
    source = "{{ tools is defined }} {{ documents is defined }} {{ functions is defined }} {{ enable_thinking }}"
    assert render(source, USER) == "False False False True"
    assert render(source, USER, tools=[{"name": "f"}], variables={"documents": []}, thinking=False) == "True True True False"
    assert json.loads(render("{{ functions }}", USER, tools=[{"name": "é"}])) == [{"name": "é"}]
    assert render("{{ 'a' + functions + 'b' }}", USER) == "ab"
    with pytest.raises(TemplateError, match="pass them as such"):
        render(EACH, USER, variables={"messages": []})


def test_today_is_today_unless_another_day_is_given():
    source = "{{ date_string }}|{{ datetime }}|{{ strftime_now('%Y-%m-%d') }}"
    assert render(source, now=datetime(2031, 2, 3, tzinfo=UTC)) == "03 Feb 2031|Feb 03 2031|2031-02-03"
    before, told, after = datetime.now().astimezone(), render("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}"), datetime.now().astimezone()
    assert before <= datetime.fromisoformat(told).astimezone() <= after


def test_the_tag_for_training_on_the_assistants_turns_is_no_more_than_what_it_brackets():
    source = (
        "{% for m in messages %}\n{% generation %}\n{% set said = m.content %}\n{{ said }}!\n{% endgeneration %}\n{{ said }}{% endfor %}"
    )
    assert render(source, USER) == "Hi!\nHi"
    with pytest.raises(TemplateError, match="is wrong in line 1"):
        render("{% generation %}", USER)


def test_texts_are_formatted_safely_and_lists_may_grow():
    assert render("{{ '{:>5}|{name}'.format(1, name='x') }}", USER) == "    1|x"
    assert render("{% set l = [1] %}{% set _ = l.append(2) %}{{ l | map('string') | tojson }}", USER) == '["1", "2"]'
    assert render("{{ '<b>' | safe + '<i>' }}", USER) == "<b><i>"
    with pytest.raises(TemplateError, match="must not do"):
        render("{{ '{0.__class__}'.format(1) }}", USER)


def test_nothing_of_one_rendering_is_there_in_the_next():
    template = ChatTemplate("{% set _ = messages.append(1) %}{% set _ = (tools or []).append(2) %}{{ messages | length }}")
    assert [template.render([USER]) for _ in range(3)] == ["2"] * 3


def test_messages_that_are_nested_for_ever():
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested more than 100 times"):
        render(EACH, {"role": "user", "content": deep})
