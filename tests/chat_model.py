"""A tiny random model that can be talked to: control tokens, an end token, a chat template."""

from gguf_io.build import BOOL, I32, STR, U32, Model

CONTROL = {300: "<|im_start|>", 301: "<|im_end|>", 302: "<bos>", 303: "<turn>", 304: "<|eot_id|>"}
CHATML = """{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system message has to come first') }}{% endif %}
{%- set text = m.content %}
{%- if m.role == 'assistant' and '</think>' in text %}
    {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def with_control_tokens(path, out, end: int | None = None, begin: int | None = None):
    """A copy of a model file with CONTROL tokens, one merge, and CHATML; ``end`` becomes its end token, ``begin`` the one that is not put first."""
    model = Model(path)
    names, types = model.keys["tokenizer.ggml.tokens"][1][1], model.keys["tokenizer.ggml.token_type"][1][1]
    for i, name in CONTROL.items():
        names[i], types[i] = name.encode(), 3
    names[305], types[305] = b"he", 1
    model.keys["tokenizer.ggml.merges"] = (9, (STR, [b"h e"]))
    model.keys["tokenizer.ggml.token_type"] = (9, (I32, types))
    model.keys["tokenizer.chat_template"] = (STR, CHATML)
    if end is not None:
        model.keys["tokenizer.ggml.eos_token_id"] = (U32, end)
    if begin is not None:
        model.keys["tokenizer.ggml.bos_token_id"] = (U32, begin)
        model.keys["tokenizer.ggml.add_bos_token"] = (BOOL, False)
    return model.write(out)
