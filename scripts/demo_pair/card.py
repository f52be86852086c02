"""Model card and held-out prompts of the demo pair."""

import json
import pathlib
import re

LICENCE = "see README.md: trained on PSF-2.0 and permissively licensed Python source"


def write_prompts(work, dest, count=20):
    """Write `count` held-out prompts to dest/prompts.jsonl: starts of functions and classes, and of files, in turn."""
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(work / "tokenizer.json"))
    docs = [json.loads(line) for line in (work / "heldout.jsonl").read_text("utf-8").splitlines()]
    # The standard library first: its licence is the same on every machine. At most two prompts per package after it.
    docs.sort(key=lambda d: (not d["name"].startswith("python/"), d["name"]))
    prompts, used = [], {}
    for doc in docs:
        package = doc["name"].split("/")[0]
        if len(prompts) == count:
            break
        if used.get(package, 0) >= (12 if package == "python" else 1):
            continue
        text = doc["text"]
        if len(prompts) % 3 == 0:
            begin, limit = 0, 160
        else:
            starts = [m.start() for m in re.finditer(r"^(?:def|class) \w+.*:$", text, re.MULTILINE) if 300 < m.start() < len(text) - 900]
            if not starts:
                continue
            begin, limit = starts[len(starts) // 2], 110
        ids = tok.encode(text[begin : begin + 1200]).ids[:limit]
        piece = tok.decode(ids)
        # End on a whole line, so that the continuation starts where a writer would.
        piece = piece[: piece.rfind("\n") + 1]
        # no credits or links: a prompt is a task, not a name
        if len(tok.encode(piece).ids) < 50 or re.search(
            r"\ufffd|copyright|author|licen[sc]e|https?:|\(c\)|@\w+\.\w+\.", piece, re.IGNORECASE
        ):
            continue
        name = doc["name"] + (" (start)" if begin == 0 else f" (from character {begin})")
        prompts.append({"name": name, "prompt": piece})
        used[package] = used.get(package, 0) + 1
    (dest / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))


def _fence(text):
    return "````python\n" + text.rstrip().replace("````", "'''") + "\n````\n"


def write_card(work, dest):
    """Write dest/README.md from metrics.json, packages.json and samples.json in work."""
    m = json.loads((work / "metrics.json").read_text())
    data = json.loads((work / "packages.json").read_text())
    samples = json.loads((work / "samples.json").read_text())
    t, d, counts = m["target_config"], m["drafter_config"], data["counts"]
    size = {p.name: p.stat().st_size for p in pathlib.Path(dest).glob("*.gguf")}
    python = data["packages"][0]
    lines = [
        "# Demo pair",
        "",
        (
            "A small language model of Python source and its block drafter, made for trying speculative decoding without a "
            "download. It completes Python-looking text; it knows nothing else, and its code is not to be relied on."
        ),
        "",
        "| | target | drafter |",
        "| --- | --- | --- |",
        f"| file | `target.gguf` ({size['target.gguf'] / 1e6:.1f} MB) | `drafter.gguf` ({size['drafter.gguf'] / 1e6:.1f} MB) |",
        "| architecture | `qwen35` | `dflash` |",
        f"| layers | {t['n_layer']} (every {t['interval']}th full attention, the others gated delta net) | {d['n_layer']} |",
        f"| embedding, feed-forward | {t['n_embd']}, {t['n_ff']} | {d['n_embd']}, {d['n_ff']} |",
        f"| attention heads (key heads) x size | {t['n_head']} ({t['n_kv']}) x {t['head_dim']} | {d['n_head']} ({d['n_kv']}) x {d['head_dim']} |",
        f"| delta-net heads, value (key) x size | {t['v_heads']} ({t['k_heads']}) x {t['state']} | |",
        f"| parameters | {m.get('target_parameters', 0) / 1e6:.1f} M (embedding and head tied) | {m.get('drafter_parameters', 0) / 1e6:.1f} M (embedding and head borrowed) |",
        f"| vocabulary | {t['vocab']} tokens, byte-level BPE, pre-tokeniser `qwen2` | the same |",
        f"| context | {t['context']} (trained on windows of 1,024) | block of {d['block']}, target layers {list(d['target_layers'])} (inputs of these layers) |",
        "| quantisation | Q8_0; norms, convolutions and decay parameters F32 | Q8_0; norms F32 |",
        "",
        "## Figures",
        "",
        (
            f"Held-out files: {counts['heldout']['files']} ({counts['heldout']['tokens']:,} tokens), chosen by a hash of the file's "
            f"name; training files: {counts['train']['files']} ({counts['train']['tokens']:,} tokens). Near-copies between packages "
            "are not removed, so the figures flatter the model a little. All figures are of the unquantised weights."
        ),
        "",
        (
            f"* Perplexity on held-out files: {m['heldout']['perplexity']} (loss {m['heldout']['loss']} per token, windows of "
            f"{m['heldout']['window']}); on positions 1,024 to 2,047 of longer windows "
            f"{m['heldout_second_half_of_double_window']['perplexity']}."
        ),
        (
            f"* Training loss, last: target {m['target_training']['history'][-1][1]} after {m['target_training']['steps']:,} steps of "
            f"65,536 tokens; drafter {m['drafter_training']['history'][-1][1]} (mixed objective) after {m['drafter_training']['steps']:,} steps."
        ),
        (
            "* Tokens per speculative step on the target's own continuations of 256 held-out prompts (128 tokens of prompt, 384 "
            "of text), the pending token included:"
        ),
        "",
        "| | mean | median over prompts | share of steps whose first 1, 2, 3, ... drafts are all accepted |",
        "| --- | --- | --- | --- |",
    ]
    for key, r in m.items():
        if isinstance(r, dict) and "tokens_per_step" in r:
            lines.append(
                f"| {key} | {r['tokens_per_step']} | {r['median_over_prompts']} | {' '.join(f'{x:.2f}' for x in r['acceptance'])} |"
            )
    lines += [
        "",
        (
            f"A model this small repeats itself: {m['greedy, repeated 16-grams']:.0%} of the 16-token pieces of its greedy text "
            f"occurred before in the same text ({m['temperature 0.7, repeated 16-grams']:.0%} at temperature 0.7), which helps any drafter."
        ),
    ]
    lines += [f"* {check}" for check in m.get("checks", [])]
    lines += [
        "",
        "## Training",
        "",
        f"Seed {m['seed']}; one GPU; target {m['target_training']['seconds'] // 60} minutes, drafter {m['drafter_training']['seconds'] // 60} minutes:",
        "",
        (
            "    python scripts/train_demo_pair.py --stage corpus,target,generate,drafter,eval --workdir WORK "
            f"--target-steps {m['target_training']['steps']} --drafter-steps {m['drafter_training']['steps']} --seed {m['seed']}"
        ),
        "    python scripts/train_demo_pair.py --stage export --workdir WORK --dest pyggml_spec/demo",
        "",
        (
            "The target learned the source text by AdamW with warm-up and cosine decay. It then continued 16,384 prompts from the "
            "corpus (45 % greedy, 45 % at temperature 0.7, 10 % at 1.0), and the drafter learned those continuations (seven parts in eight) "
            "and corpus text from the frozen target's hidden states, at random anchors, with embedding and head shared. "
            "The mask token is row 4095 of the embedding as the target's training left it."
        ),
        "",
        "## Data and licences",
        "",
        (
            f"Python source of the standard library of Python {python['version']} (PSF licence, version 2) and of the installed packages "
            "below, taken where the package's own metadata names only permissive licences; vendored copies, generated tables and "
            "duplicate files were left out. The weights hold no files, but a language model can repeat short passages of what it "
            "was trained on; such passages stay under their authors' licences."
        ),
        "",
        "| package | version | licence as the package states it | files | bytes |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {p['name']} | {p['version']} | {p['licence']} | {p['files']} | {p['bytes']:,} |" for p in data["packages"]]
    lines += [
        "",
        "`prompts.jsonl` holds 20 prompts from held-out files, named after their files.",
        "",
        "## Samples",
        "",
        "Prompts from held-out files (end of the prompt shown), then `# --- continued ---` and the model's text, cut.",
        "",
    ]
    chosen = [s for s in samples if s["kind"] == "greedy"][:1] + [s for s in samples if s["kind"] != "greedy"][:2]
    for s in chosen:
        lines += [s["kind"].capitalize() + ":", "", _fence(s["prompt"][-220:] + "\n# --- continued ---\n" + s["text"][:500])]
    (dest / "README.md").write_text("\n".join(lines))
