"""Changes that parsers get wrong: flipped bits, extreme numbers, parts removed, repeated, cut off, or taken from another file; and, in files
whose structure stays right, keys and tensors that contradict each other."""

import random
import struct
from collections.abc import Sequence

from gguf_io.build import ARR, F32, I32, U32, Model

EXTREMES = [struct.pack("<Q", n) for n in (0, 1, 255, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1)]


def mutated(data: bytes, rng: random.Random, places: Sequence[range]) -> bytes:
    """``data`` with one to three changes inside ``places``: a flipped bit, another byte, an extreme number, bytes removed, added or cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(places)
        at = rng.randrange(place.start, min(place.stop, len(out))) if len(out) > place.start else 0
        match rng.randrange(6):
            case 0:
                out[at : at + 1] = bytes([out[at] ^ 1 << rng.randrange(8)]) if at < len(out) else b""
            case 1:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                extreme = rng.choice(EXTREMES)[: rng.choice((1, 4, 8))]
                out[at : at + len(extreme)] = extreme
            case 3:
                del out[at : at + rng.randint(1, 16)]
            case 4:
                out[at:at] = rng.randbytes(rng.randint(1, 16))
            case 5 if rng.random() < 0.3:
                del out[at:]
    return bytes(out)


def header_places(data: bytes) -> list[range]:
    """The header of a model file without its token list, which would take nearly all mutations."""
    first, last = data.index(b"tokenizer.ggml.tokens") + 40, data.index(b"tokenizer.ggml.token_type")
    end = data.rindex(b".weight") + 60
    return [range(400), range(400, first), range(last, last + 60), range(data.index(b"tokenizer.ggml.merges"), end)]


def spliced(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """``data`` with a part of ``other`` put in, over its own bytes or between them."""
    first = rng.randrange(len(other) + 1)
    part, at = other[first : first + rng.choice((4, 8, 16, 64, 256))], rng.randrange(len(data) + 1)
    return data[:at] + part + data[at + (len(part) if rng.random() < 0.5 else 0) :]


def with_words(data: bytes, words: Sequence[bytes], rng: random.Random) -> bytes:
    """``data`` with up to four of ``words``, or pieces of them, put in anywhere."""
    for _ in range(rng.randint(1, 4)):
        word = rng.choice(words)
        if rng.random() < 0.25:
            cut = rng.randrange(len(word) + 1)
            word = word[:cut] if rng.random() < 0.5 else word[cut:]
        at = rng.randrange(len(data) + 1)
        data = data[:at] + word + data[at:]
    return data


NUMBERS = {
    "I": (0, 1, 2, 3, 4, 7, 16, 255, 1000, 1 << 16, 1 << 31, (1 << 32) - 1), "i": (-1, 0, 1, 2, 3, 64, 1 << 20, -(1 << 31), (1 << 31) - 1),
    "f": (0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, 3e38, float("nan"), float("inf"), 0.5, 1e6),
}  # fmt: skip
KINDS = {"I": U32, "i": I32, "f": F32}


def lied(model: Model, rng: random.Random) -> bytes:
    """A file whose structure is right and whose contents are not: one to three keys or tensors changed."""
    keys = [name for name in model.keys if not name.startswith(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))]
    for _ in range(rng.randint(1, 3)):
        (_lie_in_a_key if rng.random() < 0.6 else _lie_in_a_tensor)(model, rng, rng.choice(keys), rng.choice(list(model.tensors)))
    return model.bytes()


def _lie_in_a_key(model: Model, rng: random.Random, name: str, _) -> None:
    if name not in model.keys:
        return
    kind, value = model.keys[name]
    if rng.random() < 0.1:
        del model.keys[name]
    elif kind == ARR and rng.random() < 0.8:
        item, values = value
        values = list(values)
        if values and rng.random() < 0.6:
            values[rng.randrange(len(values))] = rng.choice(values)
        else:
            values = values[: rng.randrange(len(values) + 1)] * rng.randint(0, 3)
        model.keys[name] = (kind, (item, values))
    else:
        form = rng.choice("IIif")
        model.keys[name] = (KINDS[form], rng.choice(NUMBERS[form]))


def _lie_in_a_tensor(model: Model, rng: random.Random, _, name: str) -> None:
    if name not in model.tensors:
        return
    shape, kind, data = model.tensors[name]
    match rng.randrange(5):
        case 0:
            del model.tensors[name]
        case 1:
            model.tensors[name] = [tuple(reversed(shape)), kind, data]
        case 2:
            model.tensors[name] = [(*shape, 1) if rng.random() < 0.5 else (1, *shape), kind, data]
        case 3:  # NaN, Inf and huge values among the weights
            out = bytearray(data)
            for _ in range(rng.randint(1, 8)):
                at = rng.randrange(max(1, len(out) // 4)) * 4
                out[at : at + 4] = struct.pack("<f", rng.choice(NUMBERS["f"]))[: len(out) - at]
            model.tensors[name] = [shape, kind, bytes(out)]
        case 4:
            other = rng.choice(list(model.tensors))
            model.tensors[name], model.tensors[other] = model.tensors[other], model.tensors[name]
