# pip: smolagents[openai]
"""A code agent that runs what the scripted model says."""

import os

from smolagents import CodeAgent, OpenAIServerModel

model = OpenAIServerModel("code", api_base=f"{os.environ['PYSPEC_CODE']}/v1", api_key="none", temperature=0, max_tokens=200)
assert CodeAgent(tools=[], model=model, verbosity_level=0).run("What is six times seven?", max_steps=2) == 42
