# pip: guidance openai
"""Generation in a chat."""

import os

import guidance
from guidance.models import OpenAI

lm = OpenAI(os.environ["PYSPEC_MODEL"], base_url=f"{os.environ['PYSPEC_URL']}/v1", api_key="none", echo=False)
with guidance.user():
    lm += "Name a colour."
with guidance.assistant():
    lm += guidance.gen("colour", max_tokens=12)
assert lm["colour"]
