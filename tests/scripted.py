"""A small model that says a text which was chosen beforehand, whatever it is asked: for tests of what becomes of an answer's text."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import gguf
import numpy as np

WIDTH, HEADS, HIDDEN, CONTEXT = 64, 2, 32, 8192
NORMAL, CONTROL = 1, 3


def _byte_names() -> list[str]:
    """How byte-level vocabularies write the 256 bytes."""
    shown, others = [*range(33, 127), *range(161, 173), *range(174, 256)], iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(others)) for b in range(256)]


BYTES = _byte_names()


def pieces(text: str, control: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """``text`` in pieces of which no two are alike, nor any is ``taken``: control tokens where they come for the first time, a few characters each elsewhere."""
    out: list[str] = []
    for part in re.split("(" + "|".join(map(re.escape, sorted(control, key=len, reverse=True))) + ")", text) if control else [text]:
        made = [part] if part in control and part not in out else _cut(part, {*taken, *out})
        if made is None:  # a short text between two control tokens, which came before: one control token less
            assert control, f"{part!r} cannot be cut into pieces of which no two are alike"
            return pieces(text, control[:-1], taken)
        out += made
    return out


def cut(texts: Sequence[str], control: Sequence[str] = ()) -> list[list[str]]:
    """The pieces of texts that one model says: a control token is one in the first of them that has it."""
    out: list[list[str]] = []
    for text in texts:
        taken = {piece for made in out for piece in made}
        out.append(pieces(text, [name for name in control if name not in taken], taken))
    return out


def _cut(text: str, taken: set[str]) -> list[str] | None:
    if not text:
        return []
    for size in (*range(3, len(text) - 2), len(text)):
        piece = text[:size]
        if piece not in taken and (rest := _cut(text[size:], taken | {piece})) is not None:
            return [piece, *rest]
    return None


def write(
    path: Path, texts: Sequence[str], template: str | None, control: Sequence[str] = (), end: str = "<|im_end|>", more: dict | None = None
) -> list[int]:
    """A llama model that says one of ``texts``; the token that begins each: a request biases it by 50.

    Args:
        control: texts of control tokens, of which each is one token in the first of the texts that has it; the end token too.
        more: metadata alongside the usual; None leaves out what is usual.
    """
    names, types, ids = list(BYTES), [NORMAL] * 256, {name: i for i, name in enumerate(BYTES)}

    def token(text: str, kind: int) -> int:
        name = text if kind == CONTROL else "".join(BYTES[b] for b in text.encode())
        if name not in ids:
            ids[name] = len(names)
            names.append(name)
            types.append(kind)
        return ids[name]

    last, follows, begins = token(end, CONTROL), {}, []
    for text in control:
        token(text, CONTROL)
    for made in cut(texts, control):
        chain = [token(piece, CONTROL if piece in control else NORMAL) for piece in made]
        begins.append(chain[0])
        for a, b in zip(chain, [*chain[1:], last]):
            if follows.setdefault(a, b) != b:
                raise ValueError(f"{names[a]!r} has two successors; change one of the texts")
    width = -(-(len(follows) + 2) // WIDTH) * WIDTH
    embedding, head = np.zeros((len(names), width), np.float32), np.zeros((len(names), width), np.float32)
    embedding[:, 0] = 1
    for state, (a, b) in enumerate(follows.items(), 1):
        embedding[a] = 0
        embedding[a, state], head[b, state] = 1, 60
    for first in begins:
        head[first, 0] = 1
    values = {
        "llama.context_length": CONTEXT, "llama.embedding_length": width, "llama.block_count": 1, "llama.feed_forward_length": HIDDEN, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": width // HEADS, "llama.vocab_size": len(names),
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eos_token_id": last, "tokenizer.ggml.bos_token_id": last,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": template, **(more or {}),
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, (list, tuple)):
            writer.add_array(key, value)
        elif value is not None:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    zeros = {"attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width), "attn_output": (width, width),
             "ffn_gate": (HIDDEN, width), "ffn_up": (HIDDEN, width), "ffn_down": (width, HIDDEN)}  # fmt: skip
    tensors = {"token_embd": embedding, "output": head, "output_norm": np.ones(width, np.float32), "blk.0.attn_norm": np.ones(width, np.float32),
               "blk.0.ffn_norm": np.ones(width, np.float32), **{f"blk.0.{name}": np.zeros(shape, np.float32) for name, shape in zeros.items()}}  # fmt: skip
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return begins
