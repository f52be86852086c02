"""What a cut costs: each device's part of a step, copies between them, and the tables of `pyspec bench`."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from pairs import write_pair

import pyggml_spec as ps
from pyggml_spec.cli.main import cli
from pyggml_spec.engine.batch import Draft
from pyggml_spec.errors import EngineError
from pyggml_spec.ggml import peer
from pyggml_spec.tools import split_steps as split_steps_module
from pyggml_spec.tools.split_steps import CopySpeed, DeviceShare, SplitStep, copy_speeds, split_steps, way_of_copies, without_waiting

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), "qwen35")


@pytest.fixture(scope="module")
def session(files):
    with ps.load(*files, device="CPU,CPU", threads=1, n_ctx=256, draft_width=8, tensor_split=[3, 1], prefix_memory=0) as made:
        yield made


def test_each_devices_part_of_a_step_is_measured(session):
    engine = session.engine
    plain, block = split_steps(session.engine, (1, 8))
    for step, width in ((plain, 1), (block, 8)):
        engine.reset(drafting=width > 1)
        engine.prefill([1, 2, 3])
        chain = engine.step_graph("fused" if width > 1 else "plain", width)
        sent = [sum(nbytes for after, _, nbytes in chain.hops if chain.segments[after] == index) for index in range(2)]
        assert step.width == width and [d.copied_bytes for d in step.devices] == sent
        assert [d.layers for d in step.devices] == ["layers 0 to 2", "layer 3"]
        assert all(d.compute_ms > 0 for d in step.devices) and sum(d.waits for d in step.devices) == pytest.approx(1)
        assert 0 <= step.cut_share < 1 and step.step_ms > 0
    assert plain.devices[1].copies == 0 and block.devices[1].copies == 1  # drafts go from the last device to the first
    assert engine.io.lane is None


def test_steps_part_by_part_give_the_same_bits(session):
    def trace():
        engine, out = session.engine, []
        engine.reset()
        engine.prefill(list(range(20)))
        for item in (Draft(8), Draft(4), Draft(8)):
            result = engine.step({0: item})[0]
            out += [result.tokens, result.ids, engine.candidates(2)[1].copy()]
            engine.accept(2, int(result.ids[1]))
        return out

    want = trace()
    with session.engine.devices.apart():
        assert all(np.array_equal(a, b) for a, b in zip(want, trace(), strict=True))


def test_copies_between_neighbours_and_back(session, files, monkeypatch):
    there, back = copy_speeds(session.engine)
    assert there.small_us > 0 and there.bandwidth > 1e7 and (back.source, back.target) == ("CPU", "CPU")
    monkeypatch.delenv("GGML_CUDA_P2P", raising=False)
    monkeypatch.setattr(peer, "_results", {frozenset(("CUDA0", "CUDA1")): "", frozenset(("CUDA0", "CUDA2")): "the driver offers none"})
    assert (
        way_of_copies("CUDA1", "CUDA0") == "directly" and way_of_copies("CUDA0", "CUDA2") == "without peer access: the driver offers none"
    )
    monkeypatch.setenv("GGML_CUDA_P2P", "1")
    assert "GGML_CUDA_P2P is set" in way_of_copies("CUDA0", "CUDA1")
    assert way_of_copies("RPC:a:1", "CPU") == "over the network, through this machine"
    with ps.load(files[0], device="CPU", threads=1, n_ctx=256) as alone, pytest.raises(EngineError, match="no cut to measure"):
        split_steps(alone.engine, (1,))


def test_what_a_workers_copies_wait_for_is_its_computing(session, monkeypatch):
    """Otherwise a cut between two workers seemed to take 70 % of a step, and a layer there nothing. `pyspec bench` still said so."""
    shares = tuple(DeviceShare(f"D{i}", "layers", ms, 1, 4096, 3.0, 0.5) for i, ms in enumerate((0.1, 4.0)))
    far = [CopySpeed("D0", "D1", 100.0, 1e9, "over the network, through this machine")]
    first, last = without_waiting(SplitStep(1, 4.1, shares), far).devices
    assert first.copy_ms == pytest.approx(0.1 + 0.004096) and first.compute_ms == pytest.approx(3.1 - first.copy_ms)
    assert (last.copy_ms, last.compute_ms) == (3.0, 4.0) and first.waits + last.waits == pytest.approx(1)
    near = [CopySpeed("D0", "D1", 100.0, 1e9, "through the host")]
    assert [d.copy_ms for d in without_waiting(SplitStep(1, 4.1, shares), near).devices] == [3.0, 3.0]
    instant = [CopySpeed("CPU", "CPU", 0.0, 0.0, "over the network, through this machine")]  # then all of it is computing
    monkeypatch.setattr(split_steps_module, "copy_speeds", lambda engine: instant)
    for step in (*split_steps(session.engine, (1, 8)), split_steps_module.split_chunk(session.engine)):
        assert all(share.copies and share.copy_ms == 0 < share.compute_ms for share in step.devices[:1])
        assert sum(share.waits for share in step.devices) == pytest.approx(1)


def test_bench_prints_them(files):
    command = ["bench", "-m", str(files[0]), "--device", "CPU,CPU", "-t", "1", "-p", "0", "-n", "4", "-r", "1", "--json"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout.splitlines()[-1])  # a busy machine is warned of on the other stream
    assert [step["width"] for step in about["split"]] == [1] and len(about["split"][0]["devices"]) == 2 == len(about["copies"])
    assert "| step | ms | device | layers | computes | copies | moved | copying | waits |" in result.stdout
    assert "| CPU to CPU |" in result.stdout
