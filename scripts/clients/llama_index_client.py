# pip: llama-index-core llama-index-llms-openai-like llama-index-llms-ollama
"""LlamaIndex through OpenAI's dialect and through Ollama's."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]
for llm in (
    OpenAILike(MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_tokens=12),
    Ollama(MODEL, base_url=URL, request_timeout=120, additional_kwargs={"num_predict": 12}),
):
    assert llm.complete("The sky is").text
    assert llm.chat([ChatMessage(role="user", content="Name a colour.")]).message.content
    assert "".join(part.delta for part in llm.stream_chat([ChatMessage(role="user", content="Name a colour.")]))
