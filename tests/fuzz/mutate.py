"""Changes to bytes that parsers get wrong: flipped bits, extreme numbers, parts removed, repeated, cut off, or taken from another file."""

import random
import struct
from collections.abc import Sequence

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
    return [range(0, 400), range(400, first), range(last, last + 60), range(data.index(b"tokenizer.ggml.merges"), end)]


def spliced(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """``data`` with a part of ``other`` put in, over its own bytes or between them."""
    first = rng.randrange(len(other) + 1)
    part = other[first : first + rng.choice((4, 8, 16, 64, 256))]
    at = rng.randrange(len(data) + 1)
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
