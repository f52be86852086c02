"""Three conversations that every template is asked to render: a plain one, one with tools, one in which the model thought."""

import json


def _tool(name: str, description: str, required: list[str], **properties: tuple[str, str]) -> dict:
    described = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": described, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = {"place": ("string", "Name of a town"), "days": ("integer", "How many days ahead")}
TOOLS = [
    _tool("get_weather", "Tells the weather of a place.", ["place"], **WEATHER),
    _tool("add", "Adds two numbers.", ["a", "b"], a=("number", "One"), b=("number", "The other")),
]
CONVERSATIONS = {
    "plain": {
        "messages": [
            {"role": "system", "content": "You are brief and polite."},
            {"role": "user", "content": "Hello, who are you?"},
            {"role": "assistant", "content": "I am a test, and <b>small</b>."},
            {"role": "user", "content": "What is 2 + 2, in \"Grüße\" & 'é'?"},
        ],
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "Use the tools."},
            {"role": "user", "content": "Will it rain in Zürich tomorrow?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call00001",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": json.dumps({"place": "Zürich", "days": 1}, ensure_ascii=False)},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"rain": true, "mm": 4.5}'},
        ],
        "tools": TOOLS,
    },
    "thinking": {
        "messages": [
            {"role": "user", "content": "Is 91 prime?"},
            {"role": "assistant", "reasoning_content": "91 = 7 * 13.", "content": "No, it is 7 times 13."},
            {"role": "user", "content": "And 97?"},
        ],
        "thinking": True,
    },
}
