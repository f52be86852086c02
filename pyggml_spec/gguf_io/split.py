"""Models in several files, as ``llama-gguf-split`` writes them: NAME-00001-of-00005.gguf and so on.

Every part is a GGUF with split.no (from 0), split.count and split.tensors.count (total); the first one has the model's keys.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import GGUFError

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MOST_PARTS = 512  # open files; 671B in BF16 has 30 parts
_OWN = {NUMBER, COUNT, TENSORS, "general.alignment"}  # keys of a part, not of the model
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_paths(path: Path, metadata: dict) -> list[Path]:
    """Paths of all parts of the model that ``path`` belongs to. Raises GGUFError: its name and keys do not agree, or parts are missing."""
    number, count = metadata.get(NUMBER), metadata[COUNT]
    if type(number) is not int or not 0 <= number < count:
        raise GGUFError(f"{path} is one of {count} parts of a model, but its key {NUMBER!r} is {number!r}; split the model again")
    if count > MOST_PARTS:
        most = f"{MOST_PARTS} are the most that can be read; split it into larger ones"
        raise GGUFError(f"{path} is one of {count} parts of a model, and {most}")
    name, part = _NAME.fullmatch(path.name), f"{path} is part {number + 1} of {count} of a model"
    if name is None or (int(name[2]), int(name[3])) != (number + 1, count):
        raise GGUFError(f"{part}, and the others are found by its name; rename it to end in -{number + 1:05}-of-{count:05}.gguf")
    paths = [path.with_name(f"{name[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [other.name for other in paths if not other.exists()]
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        verb = "is" if len(missing) == 1 else "are"
        raise GGUFError(f"{part}, and {shown} {verb} not in its folder; put all parts into one folder")
    return paths


def check_part(path: Path, metadata: dict, number: int, first: dict) -> None:
    """Raises GGUFError unless this is part ``number`` (from 0) of the model whose first part has the metadata ``first``."""
    other = f"{path} is of another model than the other parts"
    for key, wanted in ((NUMBER, number), (COUNT, first[COUNT]), (TENSORS, first.get(TENSORS))):
        if metadata.get(key) != wanted:
            raise GGUFError(f"{other}: its key {key!r} is {metadata.get(key)!r} instead of {wanted!r}")
    for key in metadata.keys() - _OWN:
        if key not in first or not _same(metadata[key], first[key]):
            raise GGUFError(f"{other}: its key {key!r} differs from the first part's")


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    return a.same(b) if hasattr(a, "same") else bool(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)
