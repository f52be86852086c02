"""Files of the further architectures whose keys or tensors lie: each is refused with one line or runs, none ends the process."""

from functools import partial

import pytest
from architectures import TARGETS, params, write_tiny
from gguf_io.batch import load_all
from gguf_io.build import ARR, BOOL, F32, I32, U32, Model
from models.dress import dressed

DRESSED = ("llama", "qwen35moe", "qwen3next", "muse-glimmer")


def write_valid(arch, path):
    path = write_tiny(arch, path)
    return dressed(path)[0] if arch in DRESSED else path


WRITERS = {name: partial(write_valid, name) for name in TARGETS if name != "qwen35"}
NUMBERS = [(U32, n) for n in (0, 1, 3, (1 << 32) - 1)] + [(I32, -1), (F32, -1.0), (F32, 1e30), (ARR, (U32, [1])), (ARR, (U32, [3] * 8))]
LISTS = [(U32, 3), (ARR, (U32, [])), (ARR, (U32, [3] * 8)), (ARR, (U32, [0] * 8)), (ARR, (I32, [-1] * 8)), (ARR, (BOOL, [True] * 8))]
GUARDED = {  # keys that can only be refused, whatever number of NUMBERS they hold: the tensors have other shapes
    "block_count", "embedding_length", "attention.head_count", "expert_count", "expert_used_count", "expert_feed_forward_length",
}  # fmt: skip


def lies(valid, arch):
    """(what was changed, model) for every numeric key of the architecture and every tensor of its second layer."""
    whole = Model(valid)
    for name, (kind, _) in whole.keys.items():
        for change in (LISTS if kind == ARR else NUMBERS) if name.startswith(f"{arch}.") and kind != 8 else ():
            model = whole.copy()
            model.keys[name] = change
            yield (name.removeprefix(f"{arch}."), change), model
    for name, (shape, _, data) in whole.tensors.items():
        if name.startswith("blk.1.") or not name.startswith("blk."):
            for other in (None, shape[::-1], (shape[0], len(data) // 4 // shape[0]), (1, *shape)):
                model = whole.copy()
                if other is None:
                    del model.tensors[name]
                else:
                    model.tensors[name][0] = other
                yield (name, other), model


@pytest.mark.parametrize("arch", params(WRITERS, ("qwen35moe",)))
def test_every_number_and_every_tensor(tmp_path, arch):
    valid = WRITERS[arch](tmp_path / "valid.gguf")
    cases, pairs = [], [(valid, None)]
    for i, (case, model) in enumerate(lies(valid, arch)):
        cases.append(case)
        pairs.append((model.write(tmp_path / f"{i}.gguf"), None))
    first, *found = load_all(pairs, tokens=2)
    assert first is None, first
    for case, result in zip(cases, found, strict=True):
        assert result is None or (result[0] == "PyspecError" and "\n" not in result[1] and len(result[1]) < 700), (case, result)
    accepted = [case for case, result in zip(cases, found, strict=True) if result is None]
    # 1 is the true value of some; a number that says what the list said is no lie either
    assert not [case for case in accepted if case[0] in GUARDED and case[1][1] not in (1, 3, (U32, [3] * 8))], accepted
    assert len(accepted) < len(cases) / 2
