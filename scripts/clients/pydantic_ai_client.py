# pip: pydantic-ai-slim[openai,anthropic]
"""Agents whose output is a pydantic model, and plain ones, over both dialects."""

import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int


models = (
    OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none")),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
)
for model in models:
    agent = Agent(model, output_type=Person, model_settings={"max_tokens": 120, "temperature": 0})
    assert isinstance(agent.run_sync("Ann is 20.").output, Person)
    assert Agent(model, model_settings={"max_tokens": 12}).run_sync("Name a colour.").output
