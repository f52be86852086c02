"""Tiny random targets, each with a drafter that fits it."""

from pathlib import Path

from gguf_io.build import BOOL, I32, STR, U32, Model
from random_gguf.archs import WRITERS
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape, write_dflash
from random_gguf.mtp import write_mtp_target


def write_pair(folder: Path, name: str, shape: Shape = Shape()) -> tuple[Path, Path]:
    """Target and drafter of an architecture; "mtp": a qwen35 target that drafts for itself; "eagle3": a llama target and such a drafter;
    "peagle": a qwen35 target and an eagle3 drafter of three layers, in one pass;
    "assistant": a gemma4 target and such a drafter; "dflash2": a qwen35 target and such a drafter;
    "dspark": a qwen3 target and such a drafter.
    """
    if name == "mtp":
        target = write_mtp_target(folder / "t.gguf", shape)
        return target, target
    if name == "dflash2":
        return WRITERS["qwen35"](folder / "t.gguf", shape), write_dflash2(folder / "d.gguf", shape, block=16)
    if name == "dspark":
        return WRITERS["qwen3"](folder / "t.gguf", shape), write_dspark(folder / "d.gguf", shape, block=15, own=("head",), tokens=200)
    if name == "assistant":
        return WRITERS["gemma4"](folder / "t.gguf", shape), write_gemma4_assistant(folder / "d.gguf", shape)
    if name == "peagle":
        return WRITERS["qwen35"](folder / "t.gguf", shape), write_eagle3(folder / "d.gguf", shape, tokens=200, layers=3, mask=7)
    if name == "eagle3":
        return WRITERS["llama"](folder / "t.gguf", shape), write_eagle3(folder / "d.gguf", shape, tokens=200)
    return WRITERS[name](folder / "t.gguf", shape), write_dflash(folder / "d.gguf", shape)


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
