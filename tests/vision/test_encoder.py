"""Pictures through libmtmd: logits and greedy text against llama.cpp's own path over the same random target and encoder."""

import numpy as np
import pytest
from random_gguf.archs import WRITERS
from random_gguf.mmproj import CONTROL, write_mmproj
from random_gguf.model import Shape
from sessions import fails_with
from vision.families import FAMILIES, SEEING, file_of, write_family

import pyggml_spec as ps
from pyggml_spec.errors import ModelError, PictureError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.tools.compare import nmse
from pyggml_spec.vision.encoder import BREAK, companion, repair_breaks
from pyggml_spec.vision.pictures import PictureLimits

pytest.importorskip("pyggml_spec._mtmd")
from vision.mtmd_oracle import MARKER, after_pictures


@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", SEEING)
def test_text_after_pictures_equals_llama_cpp(tmp_path, family, quant):
    """Two pictures of different sizes, one of them cut into parts where the encoder does that."""
    target, mmproj = write_family(tmp_path, family, quant)
    files = [file_of(size, seed) for seed, size in enumerate(FAMILIES[family].sizes)]
    # behind "? Say it." muse-glimmer has two tokens within 1e-3, and processors differ
    texts = "What is in ", " and in ", "? Describe both."
    logits, ids, rows = after_pictures(target, mmproj, MARKER.join(texts), files)
    with ps.load(target, mmproj=mmproj, device="CPU", threads=1, kernels="ggml", n_ctx=2048, spec=["none"]) as session:
        prompt = session.picture_prompt(texts[0], files[0], texts[1], files[1], texts[2], special=True)
        assert all(np.array_equal(p.embeddings, theirs) for (_, p), theirs in zip(prompt.pictures, rows, strict=True))
        assert nmse(session.runner.logits(prompt)[-1], logits) < 1e-10  # theirs has one row of the last layer, and rounds by that
        assert [t for event in session.steps(prompt, 9, ignore_end=True) for t in event.tokens][:8] == ids
        encoded = session.encoder.encoded
        session.picture_prompt("Again: ", files[0])
        assert session.encoder.encoded == encoded  # kept


def test_what_is_refused(tmp_path):
    target, mmproj = write_family(tmp_path, "gemma3")
    other = write_mmproj(tmp_path / "wide.gguf", "gemma3", 320)
    for file, words in ((other, "mismatch between text model"), (target, "no encoder of pictures")):
        fails_with(ModelError, words, ps.load, target, mmproj=file, device="CPU")
    assert companion(target) == mmproj
    with ps.load(target, mmproj="auto", device="CPU", threads=1, n_ctx=512) as session:
        assert session.configuration().encoder == mmproj.name and any("encodes pictures" in note for note in session.notes)
        fails_with(PictureError, "cannot be read", session.picture_prompt, "x", b"no picture")
        fails_with(PictureError, "takes 18 rows .* there are 10", session.encoder.encode, file_of((8, 8)), PictureLimits(rows=10))
    with ps.load(target, device="CPU", threads=1, n_ctx=512) as session:
        fails_with(PictureError, "name its file with `mmproj`", session.picture_prompt, "x", file_of((8, 8)))
    data = bytearray(mmproj.read_bytes())
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    fails_with(ps.PyspecError, "cut.gguf", ps.load, target, mmproj=tmp_path / "cut.gguf", device="CPU")


def test_prefix_files_and_a_drafter_of_text(tmp_path):
    """A prompt with a picture outlives the process; after pictures a small model does not draft, and a note says so."""
    target, mmproj = write_family(tmp_path, "llama")
    small = WRITERS["llama"](tmp_path / "small.gguf", Shape(n_layer=1, n_ff=64, control=CONTROL["idefics3"]))
    seen = []
    for draft in (None, None, small):
        with ps.load(
            target,
            draft,
            mmproj=mmproj,
            device="CPU",
            threads=1,
            n_ctx=1024,
            spec=None if draft else ["none"],
            draft_width=4 if draft else None,
        ) as session:
            prompt = session.picture_prompt("See ", file_of((90, 60)), " and say. " * 20)
            with session.concurrent(2, prefix_cache=tmp_path / "kept") as server:
                handle = server.submit(prompt, 12, ignore_end=True)
                handle.result()
                seen.append((handle.sequence.tokens, handle.stats.reused_tokens))
            if draft is not None:
                _, stats = session.generate(prompt, 12, ignore_end=True)
                assert not stats.drafted and any("does not draft after pictures" in note for note in stats.notes)
                assert session.generate("See and say.", 12, mode="speculative", ignore_end=True)[1].drafted
    assert seen[0][0] == seen[1][0] == seen[2][0] and seen[0][1] == 0 and seen[1][1] > 100


def test_rows_between_lines_of_pixtral(tmp_path):
    """Of a picture of 3 lines of 4: what NaN in memory made of them is repaired, and nothing else."""
    with GGUFFile(write_mmproj(tmp_path / "m.gguf", "pixtral", 64)) as file:
        rows = np.random.default_rng(0).standard_normal((14, 64), np.float32)
        with file.read(BREAK) as data:
            rows[[4, 9]] = np.frombuffer(data, np.float32)
        for bad, right in (([4, 9], True), ([9], True), ([5, 9], False), (slice(None), False)):
            damaged = rows.copy()
            damaged[bad, 3:50] = np.nan
            repair_breaks(damaged, file)
            assert np.array_equal(damaged, rows) == right


@pytest.mark.slow
def test_with_a_worker(tmp_path):
    """The target is computed there, the encoder here."""
    from workers import Worker, need_library

    need_library()
    target, mmproj = write_family(tmp_path, "qwen3vl")
    texts = []
    with Worker() as worker:
        for device in ("CPU", worker.device):
            with ps.load(
                target, mmproj=mmproj, device=device, kernels="ggml" if device == "CPU" else None, n_ctx=512, spec=["none"]
            ) as session:
                texts.append(session.generate(session.picture_prompt("What is in ", file_of((96, 64)), "?"), 16, ignore_end=True)[0])
    assert texts[0] == texts[1]
