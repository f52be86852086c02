"""/infill, which editors use: the text between what is before the cursor and what is after it, laid out as in llama.cpp's server.

REPOSITORY myproject  (FILE name  text) of each extra file  FILE filename  PREFIX before  prompt  SUFFIX after  MIDDLE
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from ..cancel import check
from ..text.tokenizer import Fim
from . import sampling
from .bodies import Infill, parse, wrong
from .conversation import task_requests
from .errors import ApiError
from .http import Request, Response
from .native import Encoder, check_slot
from .reading import Context, respond
from .served import Served, texts_and_ids
from .tasks import TaskRequest

BATCH = 2048  # tokens around the cursor, three quarters of them before it; extra files get the rest of the context
RESERVED_OUTPUT = 128  # tokens, where max_tokens has no limit
MIN_RESERVED = 8  # for the model's own tokens, and one of the output
EDGE_TOKENS = 64  # encoded beyond what is kept: the cut changes tokens near it
SNIPPET = "\n\n--- snippet ---\n\n"  # between files, where the vocabulary has no token for that


class File(msgspec.Struct):
    text: str
    filename: str | None = None


async def infill(context: Context, request: Request) -> Response:
    body = parse(request, Infill)
    return await respond(context, request, body, await context.prepared(request, read_infill, context, body, request.key), Encoder)


def read_infill(context: Context, body: Infill, key: str) -> list[TaskRequest]:
    """The one sequence of a request. Raises ApiError."""
    served = context.served
    ids = filled_ids(served, body)
    check_slot(context, body)
    return task_requests(served, body, ids, body.n_probs or None, sampling.constraint(body), key)


def filled_ids(served: Served, body: Infill) -> list[int]:
    """The prompt of what is to be filled in. Raises ApiError: the model has no tokens for that."""
    fim = served.tokenizer.fim()
    if missing := [name for name in ("prefix", "suffix", "middle") if getattr(fim, name) is None]:
        why = f"its vocabulary has no token for {' and '.join(missing)}"
        raise ApiError(501, f"{served.name} fills nothing in: {why}; load a model that was taught to fill in")
    prompt = served.encoded(body.prompt, "prompt", special=True, bos=False)
    room = sampling.max_tokens(body, served.limits)
    return served.checked(lay_out(served, fim, body, prompt, RESERVED_OUTPUT if room is None else room))


def _near(served: Served, body: Infill, name: str, most: int, before: bool) -> list[int]:
    """Text without control tokens, token ids, or both mixed: the last ``most`` tokens before the cursor, or the first ones after it."""
    value = getattr(body, name)
    if value is None:
        raise ApiError(400, f"{name} is required; send the text around the cursor", param=name)
    if (parts := texts_and_ids(value)) is None:
        raise wrong(name, value, "a text, or a list of texts and token ids")
    served.known([part for part in parts if isinstance(part, int)], name)
    return _cut(served, parts, most, before)


def _cut(served: Served, parts: Sequence[int | str], most: int, last: bool) -> list[int]:
    """The ``last`` tokens of texts and tokens, or the first ones. What is further away is not encoded: 4 MB take a thread three seconds."""
    reach = (most + EDGE_TOKENS) * served.longest_piece  # characters
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


def _files(given: Any, fim: Fim) -> list[int | str]:
    """The other files, and the name of this one."""
    try:
        files = msgspec.convert(given, list[File])
    except msgspec.ValidationError:
        sentence = 'input_extra is no list of files; send a list like [{"filename": "a.h", "text": "..."}]'
        raise ApiError(400, sentence, param="input_extra") from None
    parts: list[int | str] = [fim.repository, "myproject\n"] if fim.repository is not None else []
    for file in files:
        parts += (
            [SNIPPET, file.text] if fim.file is None else [fim.file, f"{'tmp' if file.filename is None else file.filename}\n", file.text]
        )
    return parts + ([fim.file, "filename\n"] if fim.file is not None else [])


def lay_out(served: Served, fim: Fim, body: Infill, prompt: Sequence[int], room: int) -> list[int]:
    """The tokens that the model reads. What is too long is cut: the prefix at its beginning, the suffix at its end, extra files at their beginning.
    ``room``: tokens of the output."""
    batch = min(BATCH, served.n_ctx // 2)
    prefix = _near(served, body, "input_prefix", 3 * (batch // 4), True)
    suffix = _near(served, body, "input_suffix", max(0, batch // 4 - 2 - len(prompt)), False)
    extra = _cut(served, _files(body.input_extra, fim), max(0, served.n_ctx - batch - max(MIN_RESERVED, 2 * room)), True)
    first, second = [fim.prefix, *prefix, *prompt], [fim.suffix, *suffix]
    if served.options.suffix_first:
        first, second = second, first
    bos = served.tokenizer.bos
    ids = [*extra, *([bos] if bos is not None else ()), *first, *second, fim.middle]
    return [i for i in ids if i is not None]
