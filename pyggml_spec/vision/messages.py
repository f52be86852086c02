"""Conversations with pictures and sounds: messages whose content has parts {"type": "picture", "data": bytes of a file} as prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..engine.prompt import Prompt
from ..errors import PictureError
from ..text.template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .encoder import Encoder
from .pictures import LIMITS, PictureLimits

PICTURE = "picture"  # the type of such parts, of sounds too
NO_ENCODER = "this model was loaded without an encoder of pictures or sounds: name its file with `mmproj`"
MARKS = range(0xF0000, 0xFFFFE)  # private-use characters, one of which stands for a picture while the template renders


def marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes], str]:
    """The messages with a mark in place of each picture, the pictures in order, and the mark."""
    files: list[bytes] = []
    text = "".join(str(message) for message in messages if not _has_pictures(message)) + "".join(
        str(part.get("text")) for message in messages if _has_pictures(message) for part in message["content"]
    )
    mark = next(chr(c) for c in MARKS if chr(c) not in text)
    out = []
    for message in messages:
        message = dict(message)
        if _has_pictures(message):
            files += [part["data"] for part in message["content"] if part["type"] == PICTURE]
            message["content"] = _joined(message["content"], mark)
        out.append(message)
    return out, files, mark


def _has_pictures(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(part, Mapping) and part.get("type") == PICTURE for part in content)


def _joined(parts: Sequence[Mapping[str, Any]], mark: str) -> str:
    """Texts in lines of their own, pictures without, as in llama.cpp."""
    out, after_picture = "", False
    for part in parts:
        picture = part["type"] == PICTURE
        line = "\n" if not picture and not after_picture and out else ""
        out += line + (mark if picture else str(part.get("text") or ""))
        after_picture = picture
    return out


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    encoder: Encoder | None,
    messages: Sequence[Mapping[str, Any]],
    fits: Callable[[str], object] | None = None,
    limits: PictureLimits = LIMITS,
    **options: Any,
) -> Prompt:
    """The prompt of a conversation; ``fits`` and ``options`` as of ``ChatTemplate.encode``.

    Raises:
        PictureError: there is no encoder, a picture is damaged or too large, or the template does not show it where it stands.
        TemplateError: as of ``ChatTemplate.render``.
    """
    messages, files, mark = marked(messages)
    if not files:
        return Prompt([template.encode(tokenizer, messages, fits, **options)])
    if encoder is None:
        raise PictureError(NO_ENCODER)
    texts = template.encode_around(mark, tokenizer, messages, fits, **options)
    if len(texts) != len(files) + 1:
        raise PictureError(
            f"the chat template shows {len(texts) - 1} of {len(files)} pictures and sounds of this conversation; send them in messages of the user"
        )
    parts: list[Sequence[int] | bytes] = [texts[0]]
    for file, text in zip(files, texts[1:], strict=True):
        parts += [file, text]
    return encoder.prompt(parts, limits)
