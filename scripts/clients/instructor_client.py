# pip: instructor
"""Answers that are pydantic models, by calls and by schemas."""

import os

import instructor
import openai
from pydantic import BaseModel, Field

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    made = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Ann is 20."}], response_model=Person, max_tokens=100, temperature=0
    )  # fmt: skip
    assert isinstance(made, Person)
