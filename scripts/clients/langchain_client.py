# pip: langchain langchain-openai langchain-anthropic langchain-ollama
"""LangChain's three chat models; calls and structured output."""

import os

from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


openai = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_tokens=40, temperature=0)
for chat in (
    openai, ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_tokens=12), ChatOllama(base_url=URL, model=MODEL, num_predict=12)
):  # fmt: skip
    assert chat.invoke("Name a colour.").content
    assert "".join(str(part.text) for part in chat.stream("Name a colour."))
assert isinstance(openai.with_structured_output(Person, method="json_schema").invoke("Ann is 20."), Person)
calls = ChatOllama(base_url=os.environ["PYSPEC_CALLS"], model="calls", temperature=0).bind_tools([weather])
assert calls.invoke("Weather?").tool_calls[0]["args"] == {"city": "Paris"}
