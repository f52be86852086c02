"""/infill, which editors ask: the text between what stands before the cursor and what stands behind it, as llama.cpp's server lays that out for models
that were taught to fill in.

    REPOSITORY myproject  (FILE name  text) of each extra one  FILE filename  PREFIX before  prompt  SUFFIX behind  MIDDLE
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Any

from ..cancel import check
from ..text.tokenizer import Fim
from . import fields
from .answer import Answer
from .conversation import sequence_asks
from .errors import ApiError
from .http import Request, Response
from .jobs import Ask
from .native import answered, read_options, response_fields
from .reading import Context
from .served import Served

BATCH = 2048  # tokens of what stands around the cursor, three quarters of them before it; extra files get what the context has beside them
UNLIMITED = 128  # tokens of an answer without a limit for which room is kept
LEAST_ROOM = 8  # for the model's own tokens, and one of the answer
BESIDE = 64  # tokens further away that are encoded with those that stay
SNIPPET = "\n\n--- snippet ---\n\n"  # between files, where the vocabulary has no token for that


async def infill(context: Context, request: Request) -> Response:
    asks, n_probs = await context.prepared(request, _read, context, request.json_object(), request.key)
    return await answered(context, request, asks, lambda job: Answer(job, context.served.tokenizer, None, n_probs is not None))


def _read(context: Context, body: Mapping[str, Any], key: str) -> tuple[list[Ask], int | None]:
    served = context.served
    served.check_model(body)
    fim = _tokens(served)
    fields.whole(body, "id_slot", -1, -1, served.options.slots - 1)
    n_probs, constraint, progress = read_options(body)
    response_fields(body)
    prompt = served.encoded(fields.text(body, "prompt"), "prompt", special=True, bos=False)
    room = fields.max_tokens(body, served.limits)
    ids = lay_out(served, fim, body, prompt, UNLIMITED if room is None else room)
    ids = served.checked(ids)  # all but the prompt is cut to what there is room for
    return sequence_asks(served, body, ids, n_probs, constraint, key, progress, fields.flag(body, "speculation")), n_probs


def _tokens(served: Served) -> Fim:
    fim = served.tokenizer.fim()
    missing = [name for name in ("prefix", "suffix", "middle") if getattr(fim, name) is None]
    if missing:
        raise ApiError(
            501,
            f"{served.name} fills nothing in: its vocabulary has no token for {' and '.join(missing)}; load a model that was taught to fill in",
        )
    return fim


def _near(served: Served, body: Mapping[str, Any], name: str, most: int, before: bool) -> list[int]:
    """What stands around the cursor: text without control tokens, token ids, or both mixed. Its last ``most`` tokens, which end before the cursor, or
    its first ones."""
    if name not in body:
        raise ApiError(400, f"{name} is required; send the text around the cursor", param=name)
    value = body[name]
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, (int, str)) and not isinstance(part, bool) for part in parts):
        raise fields.wrong(name, value, "a text, or a list of texts and token ids")
    served.known([part for part in parts if isinstance(part, int)], name)
    return _cut(served, parts, most, before)


def _cut(served: Served, parts: Sequence[int | str], most: int, last: bool) -> list[int]:
    """The ``last`` tokens of texts and tokens, or the first ones. What is further away is not encoded: 4 MB took a thread three seconds."""
    # characters; the tokens at the edge of the text that is left are not among those that stay
    reach = (most + BESIDE) * served.longest_piece
    encoded: list[list[int]] = []
    count = 0
    for part in reversed(parts) if last else parts:
        check()
        if count >= most:
            break
        if isinstance(part, str):
            encoded.append(served.tokenizer.encode(part[-reach:] if last else part[:reach], special=False, bos=False))
        else:
            encoded.append([part])
        count += len(encoded[-1])
    ids = list(chain.from_iterable(reversed(encoded) if last else encoded))
    return ids[max(0, count - most) :] if last else ids[:most]


def _files(body: Mapping[str, Any], fim: Fim) -> list[int | str]:
    """The other files, and the name of this one."""
    given = body.get("input_extra", [])
    right = isinstance(given, list) and all(
        isinstance(chunk, dict) and isinstance(chunk.get("text"), str) and isinstance(chunk.get("filename"), (str, NoneType))
        for chunk in given
    )
    if not right:
        raise ApiError(400, 'input_extra is no list of files; send a list like [{"filename": "a.h", "text": "..."}]', param="input_extra")
    parts: list[int | str] = [fim.repository, "myproject\n"] if fim.repository is not None else []
    for chunk in given:
        name = chunk.get("filename")
        parts += [SNIPPET] if fim.file is None else [fim.file, f"{'tmp' if name is None else name}\n"]
        parts.append(chunk["text"])
    return parts + ([fim.file, "filename\n"] if fim.file is not None else [])


def lay_out(served: Served, fim: Fim, body: Mapping[str, Any], prompt: Sequence[int], room: int) -> list[int]:
    """What the model reads; of what is too long the end of the prefix, the beginning of the suffix and the end of the extra files stay. ``room``: tokens
    of the answer."""
    batch = min(BATCH, served.n_ctx // 2)
    prefix = _near(served, body, "input_prefix", 3 * (batch // 4), True)
    suffix = _near(served, body, "input_suffix", max(0, batch // 4 - 2 - len(prompt)), False)
    extra = _cut(served, _files(body, fim), max(0, served.n_ctx - batch - max(LEAST_ROOM, 2 * room)), True)
    before, behind = [fim.prefix, *prefix, *prompt], [fim.suffix, *suffix]
    if served.options.suffix_first:
        before, behind = behind, before
    bos = served.tokenizer.bos
    ids = [*extra, *([bos] if bos is not None else ()), *before, *behind, fim.middle]
    return [i for i in ids if i is not None]
