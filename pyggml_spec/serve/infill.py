"""/infill, which editors ask: the text between what stands before the cursor and what stands behind it, as llama.cpp's server lays that out for models
that were taught to fill in.

    REPOSITORY myproject  (FILE name  text) of each extra one  FILE filename  PREFIX before  prompt  SUFFIX behind  MIDDLE
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
SNIPPET = "\n\n--- snippet ---\n\n"  # between files, where the vocabulary has no token for that


async def infill(context: Context, request: Request) -> Response:
    asks, n_probs = await context.prepared(request, _read, context, request.json(), request.key)
    return await answered(context, request, asks, lambda job: Answer(job, context.served.tokenizer, None, n_probs is not None))


def _read(context: Context, body: Mapping[str, Any], key: str) -> tuple[list[Ask], int | None]:
    served = context.served
    served.check_model(body)
    fim = _tokens(served)
    fields.whole(body, "id_slot", -1, -1, served.options.slots - 1)
    n_probs, constraint, progress = read_options(body)
    response_fields(body)
    prompt = served.tokenizer.encode(served.short(fields.text(body, "prompt"), "prompt"), special=True, bos=False)
    prefix, suffix = (_part(served, body, name) for name in ("input_prefix", "input_suffix"))
    room = fields.max_tokens(body, served.limits)
    ids = lay_out(served, fim, prompt, prefix, suffix, _extra(served, body, fim), UNLIMITED if room is None else room)
    ids = served.checked(ids, "input_prefix")
    return sequence_asks(served, body, ids, n_probs, constraint, key, progress, fields.flag(body, "speculation")), n_probs


def _tokens(served: Served) -> Fim:
    fim = served.tokenizer.fim()
    missing = [name for name in ("prefix", "suffix", "middle") if getattr(fim, name) is None]
    if missing:
        raise ApiError(
            501, f"{served.name} fills nothing in: its vocabulary has no token for {' and '.join(missing)}; load a model that was taught to"
        )
    return fim


def _part(served: Served, body: Mapping[str, Any], name: str) -> list[int]:
    """Text without control tokens, token ids, or both mixed."""
    if name not in body:
        raise ApiError(400, f"{name} is required; send the text around the cursor", param=name)
    value = body[name]
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, (int, str)) and not isinstance(part, bool) for part in parts):
        raise fields.wrong(name, value, "a text, or a list of texts and token ids")
    return [i for part in parts for i in ([part] if isinstance(part, int) else served.tokenizer.encode(part, special=False, bos=False))]


def _extra(served: Served, body: Mapping[str, Any], fim: Fim) -> list[int]:
    """The other files, and the name of this one."""
    given = body.get("input_extra", [])
    right = isinstance(given, list) and all(
        isinstance(chunk, dict) and isinstance(chunk.get("text"), str) and isinstance(chunk.get("filename", ""), str) for chunk in given
    )
    if not right:
        raise ApiError(400, 'input_extra is no list of files; send a list like [{"filename": "a.h", "text": "..."}]', param="input_extra")

    def encode(text: str) -> list[int]:
        return served.tokenizer.encode(text, special=False, bos=False)

    ids = [fim.repository, *encode("myproject\n")] if fim.repository is not None else []
    for chunk in given:
        ids += encode(SNIPPET) if fim.file is None else [fim.file, *encode(chunk.get("filename", "tmp") + "\n")]
        ids += encode(chunk["text"])
    return ids + ([fim.file, *encode("filename\n")] if fim.file is not None else [])


def lay_out(
    served: Served, fim: Fim, prompt: Sequence[int], prefix: Sequence[int], suffix: Sequence[int], extra: Sequence[int], room: int
) -> list[int]:  # fmt: skip
    """What the model reads; of what is too long the end of the prefix, the beginning of the suffix and the end of the extra files stay. ``room``: tokens
    of the answer."""
    batch = min(BATCH, served.n_ctx // 2)
    prefix = prefix[max(0, len(prefix) - 3 * (batch // 4)) :]
    suffix = suffix[: max(0, batch // 4 - 2 - len(prompt))]
    extra = extra[max(0, len(extra) - max(0, served.n_ctx - batch - max(LEAST_ROOM, 2 * room))) :]
    before, behind = [fim.prefix, *prefix, *prompt], [fim.suffix, *suffix]
    if served.options.suffix_first:
        before, behind = behind, before
    bos = served.tokenizer.bos
    ids = [*extra, *([bos] if bos is not None else ()), *before, *behind, fim.middle]
    return [i for i in ids if i is not None]
