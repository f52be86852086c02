# pip: outlines[openai]
"""A JSON schema through an OpenAI client."""

import json
import os

import openai
import outlines
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int


model = outlines.from_openai(openai.OpenAI(base_url=f"{os.environ['PYSPEC_URL']}/v1", api_key="none"), os.environ["PYSPEC_MODEL"])
assert isinstance(json.loads(model("Ann is 20.", Person, max_tokens=120, temperature=0))["age"], int)
