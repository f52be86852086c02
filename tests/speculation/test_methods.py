"""What may draft: the names of llama.cpp's `--spec-type`, and what becomes of a pair with each of them."""

import pytest
from random_gguf.model import Shape, write_dflash, write_qwen35
from random_gguf.mtp import write_mtp, write_mtp_target
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.errors import PyspecError
from pyggml_spec.speculation.methods import methods
from pyggml_spec.speculation.synthetic import SyntheticAcceptance


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, shape = tmp_path_factory.mktemp("files"), Shape()
    targets, drafters = {"plain": write_qwen35, "own": write_mtp_target}, {"dflash": write_dflash, "layer": write_mtp}
    (folder / "drafters").mkdir()  # where no target finds them by itself
    files = {name: write(folder / f"{name}.gguf", shape) for name, write in targets.items()}
    return files | {name: write(folder / "drafters" / f"{name}.gguf", shape) for name, write in drafters.items()}


def method_of(files, target, draft=None, **options):
    with ps.load(files[target], files.get(draft), device="CPU", threads=1, n_ctx=256, draft_width=4, **options) as session:
        assert (session.generate([1, 2, 3], 6)[1].drafted > 0) == (session.drafter is not None)
        return session.drafter and session.drafter.method


@pytest.mark.parametrize("target, draft, options, method", [
    ("own", None, {}, "draft-mtp"), ("own", None, {"spec": ["draft-mtp"]}, "draft-mtp"), ("own", "dflash", {}, "draft-dflash"),
    ("own", "dflash", {"spec": ["draft-dflash"]}, "draft-dflash"), ("plain", "layer", {}, "draft-mtp"),
    ("own", "layer", {}, "draft-mtp"),
])  # fmt: skip
def test_who_drafts(files, target, draft, options, method):
    assert method_of(files, target, draft, **options) == method


@pytest.mark.parametrize("options", [{"spec": []}, {"spec": ["none"]}, {"no_spec": ["draft-mtp"]}])
def test_a_layer_that_may_not_draft_is_left_aside(files, options):
    with ps.load(files["own"], device="CPU", threads=1, n_ctx=256, **options) as session:
        assert session.drafter is None and "draft_weights" not in session.runner.memory()


@pytest.mark.parametrize("target, draft, options, words", [
    ("plain", None, {"spec": ["draft-mtp"]}, "nothing that drafts as draft-mtp"),
    ("own", "dflash", {"spec": ["draft-mtp"]}, "dflash.gguf drafts as draft-dflash"),
    ("own", "layer", {"no_spec": ["draft-mtp"]}, "not among what may draft"),
    ("own", None, {"spec": ["draft-mtp"], "no_spec": ["draft-mtp"]}, "both requested and excluded"),
    ("layer", None, {}, "is the MTP layer of a qwen35 model"),
])  # fmt: skip
def test_what_is_not_there_is_said(files, target, draft, options, words):
    fails_with(PyspecError, words, lambda: ps.load(files[target], files.get(draft), device="CPU", threads=1, n_ctx=256, **options))


@pytest.mark.parametrize("names, words", [
    (["ngram-cache"], "no lookup files"), (["draft-mtpp"], "unknown drafting method"), (["none", "draft-mtp"], "no drafts at all"),
])  # fmt: skip
def test_names_that_are_refused(names, words):
    fails_with(PyspecError, words, methods, names)


@pytest.mark.parametrize("options, found", [
    ({"spec": "none"}, ()), ({"spec": " draft-mtp,suffix "}, ("draft-mtp", "suffix")), ({"no_spec": "draft-mtp"}, ("suffix",)),
])  # fmt: skip
def test_a_text_names_methods_as_a_list_does(files, options, found):
    with ps.load(files["own"], device="CPU", threads=1, n_ctx=256, **options) as session:
        assert session.methods == found


@pytest.mark.parametrize("options", [{"spec": 5}, {"spec": ""}, {"no_spec": " , "}])
def test_what_names_no_method(options):
    with pytest.raises(PyspecError, match=r"are a name or a list of names, like 'suffix', and not (5|''|' , ')"):
        ps.load(device="CPU", threads=1, n_ctx=256, **options)


def test_plans_and_ends_of_files(files, tmp_path):
    """Its embedding, norm and head are compared with the target's byte by byte."""
    same = write_mtp(tmp_path / "same.gguf", Shape(), seed=1)  # the seed of the target: the first numbers drawn are those of the ends
    sizes = []
    for layer in (same, files["layer"]):
        with ps.load(files["plain"], layer, device="CPU", threads=1, n_ctx=256) as session:
            sizes.append(session.runner.memory()["draft_weights"])
    assert sizes[1] - sizes[0] >= 2 * 256 * 320 * 4
    from pyggml_spec.tools.plan import check

    done = check(files["own"], device="CPU", threads=1, n_ctx=256, draft_width=4)
    assert done.memory["draft_weights"] == done.plan.memory["draft_weights"] > 0 and done.error < 0.03


BLOCKS = 20000


def test_shares_and_lengths():
    """5 standard deviations of 20,000 draws are 0.018: one seed in a million fails."""
    rates = (0.85, 0.7, 0.55, 0.45)
    synthetic = SyntheticAcceptance.of_rates(rates, seed=3)
    drawn = [synthetic.draw(7) for _ in range(BLOCKS)]
    for i, rate in enumerate(rates):
        assert abs(sum(n > i for n in drawn) / BLOCKS - rate) < 0.018
    assert max(drawn) == len(rates)  # nothing is said of later ones
    assert max(synthetic.draw(2) for _ in range(100)) == 2
    synthetic = SyntheticAcceptance(6.0, 15, seed=1)
    assert abs((sum(1 + synthetic.draw(15) for _ in range(BLOCKS)) / BLOCKS) - 6.0) < 0.2


@pytest.mark.parametrize("rates", [(), (1.2,), (0.5, 0.6), (0.5, -0.1)])
def test_impossible_rates_are_refused(rates):
    fails_with(PyspecError, "acceptance rates", SyntheticAcceptance.of_rates, rates)
