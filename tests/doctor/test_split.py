"""The doctor with layers on several devices: here the CPU twice."""

import json

import pytest
from click.testing import CliRunner
from pairs import write_pair

import pyggml_spec as ps
from pyggml_spec.cli.main import cli
from pyggml_spec.doctor import split
from pyggml_spec.doctor.examine import Effort, Subject, examine_drafter
from pyggml_spec.doctor.report import NOT_APPLICABLE, OK, WARN
from pyggml_spec.doctor.split import Layers, Move, faster_step, level_chunks
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.split_steps import CopySpeed, DeviceShare, SplitStep, split_chunk

pytestmark = pytest.mark.slow
GLANCE = Effort(prompts=1, prompt_tokens=48, tokens=48, blocks=4, running=False)
CHECKS = ["cut cost", "waiting devices", "prompts on devices", "device copies"]


def examined(device: str, **more):
    subject = Subject(DEMO_TARGET, device=device, threads=1, effort=GLANCE, **more)
    try:
        return examine_drafter(subject, DEMO_DRAFTER)
    finally:
        subject.close()


def test_drafts_and_remedies():
    """It was refused. Texts, captured rows, noise and readings have the same bits, so every figure is the same."""
    one, two = examined("CPU"), examined("CPU,CPU", tensor_split=[3, 1])
    assert [c.as_dict() for c in two.checks] == [c.as_dict() for c in one.checks]
    assert two.conditions["device"] == f"{one.conditions['device']} and {one.conditions['device']}"
    ways = {"directly": "", "without peer access: PYSPEC_PEER_COPIES=0 is set": "start without PYSPEC_PEER_COPIES=0",
            "without peer access: the driver offers none": "nvidia-smi topo -m"}  # fmt: skip
    for way, words in ways.items():
        check = split.device_copies([CopySpeed("CUDA0", "CUDA1", 50.0, 1e9, way)])
        assert (check.verdict == WARN) == bool(words) == bool(check.remedy) and words in check.remedy and way in check.found
    assert level_chunks(layers(3.0, 1.0), 15) == Move((4, 12), 12.0) and level_chunks(layers(1.0, 1.0), 15) is None
    assert level_chunks(layers(3.0, 1.0, room=3), 15) is None and level_chunks(layers(3.0, 0.0), 15) is None


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    files = write_pair(tmp_path_factory.mktemp("pair"), "qwen35")
    with ps.load(*files, device="CPU,CPU", threads=1, n_ctx=256, draft_width=8, tensor_split=[3, 1], prefix_memory=0) as made:
        yield made


def test_splits_are_taken_apart(session, tmp_path):
    for _ in range(3):  # a copy within one process can take less than the clock's microsecond
        checks = {check.name: check for check in split.examine(session.runner)}
        assert list(checks) == CHECKS and all(check.verdict in (OK, WARN) for check in checks.values())
        if checks["cut cost"].data["cut_share"]:
            break
    assert checks["cut cost"].data["width"] == 8 and 0 < checks["cut cost"].data["cut_share"] < 1
    assert checks["cut cost"].found.startswith("1 cut: ") and "of a block of 8 rows" in checks["cut cost"].found
    waits = checks["waiting devices"]
    assert sum(waits.data["waits"]) == pytest.approx(1) and "CPU (layers 0 to 2) computes" in waits.found
    assert all(ms > 0 for ms in waits.data["layer_ms"])
    assert checks["prompts on devices"].data["rows"] == 128 and len(checks["device copies"].data["copies"]) == 2
    assert session.runner.io.lane is None
    chunk = split_chunk(session.runner)
    assert chunk.width == 128 and all(d.compute_ms > 0 for d in chunk.devices) and chunk.devices[0].copies >= 1
    assert session.runner.cursor.committed == 0
    target, drafter = write_pair(tmp_path, "qwen3")
    with ps.load(target, drafter, device="CPU", threads=1, n_ctx=256, draft_width=4) as alone:
        assert list(split.examine(alone.runner)) == []


def layers(*each, room=100, count=8):
    return [Layers(f"D{i}", count, ms, room) for i, ms in enumerate(each)]


def test_layers_and_devices_that_could_be_moved():
    assert faster_step(layers(3.0, 1.0), 15) == Move((1, 15), 14.0, "D0")
    assert faster_step(layers(3.0, 1.0, room=5), 15) == Move((3, 13), 10.0)
    assert faster_step(layers(1.0, 3.0), 15) == Move((15, 1), 14.0)
    assert faster_step(layers(1.0, 3.0), 10) == Move((10, 6), 4.0)  # gemma4: later layers read rows of earlier ones
    assert faster_step(layers(3.0, 1.0, room=0), 15) is None
    assert faster_step(layers(2.0, 1.0, 4.0), 23).counts == (8, 15, 1)  # of two cuts the one that saves most

    # The last device has the head and the drafter: their bytes were not counted. The first has the embedding, and of the others only a neighbour was asked.
    def spare(*rooms, slow, next_layers=0):
        devices = [Layers(f"D{i}", 8, 3.0 if i == slow else 1.0, room, next_layers if i == 0 else 0) for i, room in enumerate(rooms)]
        return faster_step(devices, 8 * len(rooms) - 1).spare

    assert spare(100, 100, slow=1) == "" and spare(100, 8, slow=0) == "D0" and spare(100, 7, slow=0) == ""
    assert spare(0, 10, slow=0, next_layers=2) == "D0" and spare(0, 9, slow=0, next_layers=2) == ""
    assert spare(0, 1, 100, slow=0, next_layers=2) == ""  # what this device holds goes to the next device, whole
    assert spare(4, 0, 4, slow=1) == "D1" and spare(4, 0, 3, slow=1) == "" and spare(9, 9, 0, slow=2) == ""
    twice = [Layers("D0", 8, 3.0, 100), Layers("D0", 8, 1.0, 100)]
    assert faster_step(twice, 15) == Move((1, 15), 14.0)  # a device that has others of the layers too is not left out


def test_rooms_and_slow_devices(session, monkeypatch):
    engine, parts = session.runner, session.runner.resources
    tensors = engine.target.file.tensors.items()
    sizes = [sum(t.nbytes for name, t in tensors if name.startswith(f"blk.{i}.")) for i in range(engine.target.n_layer)]
    each = max(sizes) + (parts.kv.nbytes + parts.recurrent.nbytes) // len(sizes)
    monkeypatch.setattr(split, "free_bytes", lambda device: 10 * each)
    shares = tuple(DeviceShare(f"D{i}", "layers", 1.0, 1, 4096, 0.1, 0.5) for i in range(2))
    first, last = split.layers_of(engine, SplitStep(1, 2.0, shares))
    assert (first.room, last.room) == (9, 9)
    assert first.next_layers == -(-engine.target.file.tensors["token_embd.weight"].nbytes // each) and last.next_layers == 0
    monkeypatch.setattr(split, "layers_of", lambda *_, **more: [Layers("A", 3, 2.0, 0), Layers("B", 1, 1.0, 9)])
    check = split.waiting(session.runner, step(0.1, 6.0, 1.0))
    assert check.verdict == WARN and check.data["better_split"] == [1, 3]
    assert check.remedy == (
        "1,3 layers (`tensor_split` 1,3) would take that step from 7.20 to about 5.20 ms; A could be left out, the others have room for what it holds"
    )
    levelled = split.prompts(session.runner, step(0.1, 6.0, 1.0))
    assert levelled.verdict == WARN and levelled.data["level_split"] == [1, 3]
    assert split.prompts(session.runner, None).verdict == NOT_APPLICABLE


def step(copy_ms: float, *computes: float) -> SplitStep:
    shares = [DeviceShare(f"D{i}", "layers", ms, 1, 4096, copy_ms, 0.5) for i, ms in enumerate(computes)]
    return SplitStep(1, sum(computes), tuple(shares))


@pytest.mark.parametrize(
    "way, words", [("over the network, through this machine", "waits for the network"), ("PYSPEC_PEER_COPIES=0 is set", "start without PYSPEC_PEER_COPIES=0"),
                   ("through the host", "fewer devices")]
)  # fmt: skip
def test_a_dear_cut_is_a_warning_with_its_remedy(way, words):
    copies = [CopySpeed("D0", "D1", 50.0, 1e9, way)]
    dear, cheap = split.cut_cost(step(1.0, 4.0, 4.0), copies), split.cut_cost(step(0.1, 4.0, 4.0), copies)
    assert dear.verdict == WARN and words in dear.remedy and "2 copies of 2.000 ms in 10.00 ms of a plain step (20.0 %)" in dear.found
    assert cheap.verdict == OK and not cheap.remedy


def test_the_command_takes_several_devices(monkeypatch):
    seen = {}

    def examine(target, draft, **more):
        seen.update(more)
        raise ps.PyspecError("enough")

    monkeypatch.setattr("pyggml_spec.cli.doctor.examine", examine)
    result = CliRunner().invoke(cli, ["doctor", "--device", "CPU,CPU", "-ts", "3,1", "--json"])
    assert result.exit_code == 1 and seen["device"] == "CPU,CPU" and seen["tensor_split"] == (3.0, 1.0), json.dumps(str(result.output))
