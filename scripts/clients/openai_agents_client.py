# pip: openai-agents
"""An agent whose tool runs, over chat completions and over responses."""

import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{os.environ['PYSPEC_URL']}/v1", api_key="none")
calls = AsyncOpenAI(base_url=f"{os.environ['PYSPEC_CALLS']}/v1", api_key="none")
cities = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    cities.append(city)
    return "rain"


for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    agent = Agent("short", model=kind("edits", client), model_settings=ModelSettings(temperature=0))
    assert Runner.run_sync(agent, "Name a colour.").final_output
    caller = Agent("caller", model=kind("calls", calls), tools=[weather], model_settings=ModelSettings(temperature=0))
    try:
        Runner.run_sync(caller, "Weather?", max_turns=2)
    except MaxTurnsExceeded:  # the scripted model calls in every turn
        pass
assert set(cities) == {"Paris"} and len(cities) >= 2, cities
