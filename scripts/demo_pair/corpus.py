"""Corpus and tokenizer of the demo pair.

Text is the Python source of the running interpreter's standard library and of installed packages whose
metadata names a permissive licence. Files are held out by a hash of their name, so the split does not depend on
the order in which files are found.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import re
import sys
import sysconfig

import numpy as np

END, MASK = "<|endoftext|>", "<|mask|>"
# The pre-tokeniser that GGUF files name "qwen2".
PRE_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PERMISSIVE = re.compile(
    r"^(mit(-0|-cmu)?|mit license|the mit license|bsd|bsd license|(modified|new|simplified|3-clause|2-clause) bsd"
    r"( license)?|bsd[- ][23]-clause( license)?|0bsd|apache(-| license,? ?(version )?|[- ]software license)?[- ]?2\.0"
    r"|apache( software)? license( 2\.0)?|apache 2|isc( license.*)?|psf(-2\.0)?|python-2\.0(\.1)?"
    r"|python software foundation license|cnri-python|zlib(/libpng license)?|cc0-1\.0|unlicense|the unlicense.*|hpnd"
    r"|historical permission notice and disclaimer.*|ncsa|bsl-1\.0|blueoak-1\.0\.0|unicode-3\.0|llvm-exception)$",
    re.IGNORECASE,
)
SKIP_PARTS = {
    "_vendor",
    "vendored",
    "_vendored",
    "vendor",
    "extern",
    "externals",
    "third_party",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


def is_permissive(dist):
    """Return the licence text of an importlib.metadata distribution if every licence it names is permissive, else None."""
    meta = dist.metadata
    expression = meta.get("License-Expression")
    if expression:
        names = [n for n in re.split(r"\s+(?:AND|OR|WITH)\s+|[()]", expression) if n and n.strip()]
    else:
        classifiers = [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
        names = [c for c in classifiers if c != "OSI Approved"]
        field = (meta.get("License") or "").strip()
        if not names and field and "\n" not in field:
            names = [n for n in re.split(r"\s+(?:and|or|AND|OR)\s+|,(?! ?version)|;", field) if n.strip()]
    if not names or not all(PERMISSIVE.match(n.strip()) for n in names):
        return None
    return expression or " AND ".join(dict.fromkeys(n.strip() for n in names))


def _clean(raw):
    """Return the text of a source file, or None where it is no ordinary source (undecodable, tables, huge)."""
    if not 200 <= len(raw) <= 400_000:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n").replace("\t", "    ").lstrip("\ufeff")
    except UnicodeDecodeError:
        return None
    lines = text.count("\n") + 1
    # Generated tables teach digits and nothing else: keep them out.
    if len(text) / lines > 120 or sum(map(str.isdigit, text)) > 0.12 * len(text) or "\0" in text:
        return None
    if sum(ord(c) > 127 for c in text) > 0.02 * len(text):
        return None
    return text.rstrip() + "\n"


def collect(max_mb):
    """Return (documents, packages): [(name, text)] and [{name, version, licence, files, bytes}]; at most max_mb MB of text."""
    sources = []
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in stdlib.rglob("*.py") if not SKIP_PARTS & set(p.relative_to(stdlib).parts))
    sources.append(("python", sys.version.split()[0], "PSF-2.0", [("python/" + str(p.relative_to(stdlib)), p) for p in files]))
    dists = {}
    for dist in importlib.metadata.distributions():
        dists.setdefault((dist.metadata["Name"] or "").lower(), dist)
    for name, dist in sorted(dists.items()):
        licence = is_permissive(dist) if name else None
        if licence is None:
            continue
        found = [
            (f"{name}/{f}", pathlib.Path(dist.locate_file(f)))
            for f in dist.files or []
            if str(f).endswith(".py") and not SKIP_PARTS & set(f.parts) and ".." not in f.parts
        ]
        sources.append((name, dist.version, licence, sorted(found)))
    seen, documents, packages, total = set(), [], [], 0
    for name, version, licence, found in sources:
        files = size = 0
        for label, path in found:
            try:
                text = _clean(path.read_bytes())
            except OSError:
                continue
            if text is None or total + len(text) > max_mb * 1e6:
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            documents.append((label, text))
            files, size, total = files + 1, size + len(text), total + len(text)
        if files:
            packages.append({"name": name, "version": version, "licence": licence, "files": files, "bytes": size})
    return documents, packages


def held_out(label):
    """Whether the file of this label belongs to the evaluation set (about 2 % of files)."""
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:4], "big") % 50 == 0


def split_bytes(tok):
    """tok, splitting text as GGUF files say by "qwen2", over bytes."""
    from tokenizers import Regex, decoders, pre_tokenizers

    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PRE_REGEX), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    return tok


def train_tokenizer(texts, vocab):
    """Train a byte-level BPE of `vocab` tokens; the last two ids are the end and the mask token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tok = split_bytes(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 2, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False, max_token_length=24
    )
    tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens([END, MASK])
    assert tok.get_vocab_size() == vocab, tok.get_vocab_size()
    return tok


def build(workdir, vocab, max_mb, tokenizer_mb, seed):
    """Write tokenizer.json (an existing one is kept), train.npy, heldout.npy (uint16 token streams), heldout.jsonl and packages.json to workdir."""
    documents, packages = collect(max_mb)
    rng = np.random.default_rng(seed)
    documents = [documents[i] for i in rng.permutation(len(documents))]
    train = [d for d in documents if not held_out(d[0])]
    test = [d for d in documents if held_out(d[0])]
    sample, size = [], 0
    for _, text in train:
        if size > tokenizer_mb * 1e6:
            break
        sample.append(text)
        size += len(text)
    path = workdir / "tokenizer.json"
    if path.exists():
        from tokenizers import Tokenizer

        tok = Tokenizer.from_file(str(path))
    else:
        tok = train_tokenizer(sample, vocab)
        tok.save(str(path))
    end = tok.token_to_id(END)
    counts = {}
    for split, docs in (("train", train), ("heldout", test)):
        parts = []
        for i in range(0, len(docs), 512):
            for enc in tok.encode_batch([t for _, t in docs[i : i + 512]]):
                parts.append(np.array([end, *enc.ids], dtype=np.uint16))
        stream = np.concatenate(parts)
        np.save(workdir / f"{split}.npy", stream)
        counts[split] = {"files": len(docs), "bytes": sum(len(t) for _, t in docs), "tokens": int(stream.size)}
    with open(workdir / "heldout.jsonl", "w") as f:
        for name, text in test:
            f.write(json.dumps({"name": name, "text": text[:6000]}) + "\n")
    (workdir / "packages.json").write_text(json.dumps({"counts": counts, "packages": packages}, indent=1))
    return counts
