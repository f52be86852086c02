#!/usr/bin/env python3
"""Train the embedded demo pair: a small qwen35 target and its DFlash drafter, on Python source.

Stages (each one's output is a file in --workdir; a stage whose output exists is skipped, an interrupted training
stage continues from its last checkpoint):

  corpus    tokenizer.json, train.npy, heldout.npy, heldout.jsonl, packages.json
  target    target.pt
  generate  generated.npy   the target's own continuations, greedy and sampled
  drafter   drafter.pt
  eval      metrics.json, samples.json
  pack      out/            weights as half precision in shards and one bundle, to be carried elsewhere
  unpack    the reverse of pack, reading --out
  import    the reverse of export: target.pt and drafter_base.pt from the files in --dest
  export    target.gguf, drafter.gguf, prompts.jsonl and README.md in --dest

Example: train_demo_pair.py --stage all --workdir build/demo (one large GPU, about 20 minutes);
--preset tiny is a smoke test for a CPU. --preset refine puts one more layer on a trained drafter (drafter_base.pt)
and trains on, on fresh continuations: --stage import,corpus,generate,drafter,eval.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import tarfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

SHARD = 15 << 20
BUNDLE = ("tokenizer.json", "packages.json", "heldout.jsonl", "heldout.npy", "metrics.json", "samples.json", "log.txt")
MIX = ((0.0, 0.45), (0.7, 0.45), (1.0, 0.10))  # temperature, share of the generated text
ADDED = 1  # layers that the presets "refine" put on top of a trained drafter


def configs(preset):
    """Return (TargetConfig, DrafterConfig, settings) of a preset."""
    from demo_pair.drafter import DrafterConfig
    from demo_pair.target import TargetConfig

    if preset in ("demo", "refine"):
        t, d = TargetConfig(), DrafterConfig()
        s = {
            "max_mb": 320,
            "tok_mb": 50,
            "window": 1024,
            "seq": 1024,
            "batch": 64,
            "lr": 2e-3,
            "dbatch": 32,
            "dlr": 2e-3,
            "anchors": 64,
            "gen_rows": 2048,
            "gen_rounds": 8,
            "prompts": (64, 128, 256, 512),
            "eval_rows": 256,
            "eval_prompt": 128,
            "eval_total": 512,
        }
        if preset == "refine":
            # Shorter texts: more of them, and less of each is a loop.
            s.update(seq=640, dbatch=48, dlr=1.5e-3, anchors=56, gen_rows=3072, gen_rounds=9, prompts=(64, 128, 192, 320))
    else:
        t = TargetConfig(vocab=512, n_embd=256, n_layer=4, n_ff=256, n_head=2, n_kv=1, k_heads=1, v_heads=2)
        d = DrafterConfig(n_embd=256, n_layer=1, n_ff=256, n_head=2, n_kv=1, target_layers=(1, 3))
        s = {
            "max_mb": 2,
            "tok_mb": 2,
            "window": 128,
            "seq": 128,
            "batch": 4,
            "lr": 2e-3,
            "dbatch": 4,
            "dlr": 2e-3,
            "anchors": 4,
            "gen_rows": 16,
            "gen_rounds": 1,
            "prompts": (64,),
            "eval_rows": 4,
            "eval_prompt": 64,
            "eval_total": 96,
        }
    if preset.endswith("refine"):
        d.n_layer += ADDED
    return t, d, s


class Run:
    """What every stage needs: arguments, configurations, paths, device, log."""

    def __init__(self, args):
        self.args, self.work = args, pathlib.Path(args.workdir)
        self.work.mkdir(parents=True, exist_ok=True)
        self.tc, self.dc, self.s = configs(args.preset)
        self.mask_id = self.tc.vocab - 1

    def setup(self):
        import torch
        import torch._dynamo

        self.dev = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(self.args.seed)
        torch.set_float32_matmul_precision("high")
        # A compiler that fails on some version must not cost the run: it then goes on uncompiled.
        torch._dynamo.config.suppress_errors = True
        # It plans anew for every length, 40 ms each, and decoding meets every length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return torch

    def log(self, *words):
        line = time.strftime("%H:%M:%S ") + " ".join(map(str, words))
        print(line, flush=True)
        with open(self.work / "log.txt", "a") as f:
            f.write(line + "\n")

    def autocast(self):
        import torch

        return torch.autocast(self.dev, dtype=torch.bfloat16, enabled=self.dev == "cuda")

    def target(self, compiled):
        import torch
        from demo_pair.target import Target

        model = Target(self.tc).to(self.dev)
        path = self.work / "target.pt"
        if path.exists():
            model.load_state_dict(torch.load(path, map_location=self.dev))
        if compiled and self.args.compile:
            for block in model.blk:
                block.compile(dynamic=False)
        return model

    def drafter(self):
        import torch
        from demo_pair.drafter import Drafter

        model = Drafter(self.dc).to(self.dev)
        path, base = self.work / "drafter.pt", self.work / "drafter_base.pt"
        if path.exists():
            model.load_state_dict(torch.load(path, map_location=self.dev))
        elif base.exists():
            missing, unexpected = model.load_state_dict(torch.load(base, map_location=self.dev), strict=False)
            assert not unexpected, unexpected
            for name, p in model.named_parameters():
                # A layer that the base lacks starts as the identity.
                if name in missing and name.endswith(("attn_output.weight", "ffn_down.weight")):
                    torch.nn.init.zeros_(p)
        return model

    def tokens(self, split):
        import torch

        return torch.from_numpy(np.load(self.work / f"{split}.npy").astype(np.int32)).to(self.dev)


def fit(run, model, name, step_fn, minutes, steps, peak, warm):
    """AdamW with warm-up and cosine; step_fn() returns the loss. Without `steps`, the count is fixed after timing 50."""
    import torch

    decay = [p for n, p in model.named_parameters() if p.dim() == 2 and "token_embd" not in n and "conv1d" not in n]
    ids = set(map(id, decay))
    rest = [p for p in model.parameters() if id(p) not in ids]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=peak,
        betas=(0.9, 0.95),
        eps=1e-9,
        fused=run.dev == "cuda",
    )
    ckpt, step = run.work / f"{name}.ckpt", 0
    if ckpt.exists():
        saved = torch.load(ckpt, map_location=run.dev)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        step, steps = saved["step"], saved["steps"]
        run.log(name, "continues at step", step, "of", steps)
    began = saved_at = time.time()
    history, recent = [], []
    timed = None
    while steps is None or step < steps:
        share = 0.0 if steps is None else step / steps
        lr = peak * min(1.0, (step + 1) / warm) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in opt.param_groups:
            group["lr"] = lr
        loss = step_fn()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        step += 1
        if steps is None and step in (10, 50):
            recent[-1].item()
            if step == 10:
                timed = time.time()
                run.log(name, f"first 10 steps {timed - began:.1f} s")
            else:
                each = (time.time() - timed) / 40
                steps = max(60, step + int((minutes * 60 - (time.time() - began)) / each))
                run.log(name, f"{each * 1e3:.1f} ms a step, {steps} steps")
        if step % 100 == 0 or step == steps:
            mean = torch.stack(recent).mean().item()
            if not math.isfinite(mean):
                raise SystemExit(f"{name}: loss is not finite at step {step}")
            recent = []
            history.append((step, round(mean, 4)))
            if step % 500 == 0 or step in (steps, 100):
                run.log(name, "step", step, "loss", round(mean, 4), f"{time.time() - began:.0f} s")
            if time.time() - saved_at > 150:
                torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step, "steps": steps}, ckpt)
                saved_at = time.time()
    torch.save(model.state_dict(), run.work / f"{name}.pt")
    record = {"steps": steps, "seconds": round(time.time() - began), "history": history[:: max(1, len(history) // 20)] + history[-1:]}
    (run.work / f"{name}.json").write_text(json.dumps(record))
    ckpt.unlink(missing_ok=True)


def stage_corpus(run):
    from demo_pair import corpus

    began = time.time()
    counts = corpus.build(run.work, run.tc.vocab, run.s["max_mb"], run.s["tok_mb"], run.args.seed)
    run.log("corpus", json.dumps(counts), f"{time.time() - began:.0f} s")


def windows(torch, data, seq, batch, seed):
    """Endless batches [batch, seq + 1] of data [N]; every epoch cuts at another offset, in another order."""
    rng = np.random.default_rng(seed)
    while True:
        starts = np.arange(int(rng.integers(seq)), data.numel() - seq - 1, seq)
        rng.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            at = torch.from_numpy(starts[i : i + batch]).to(data.device)
            yield data[at[:, None] + torch.arange(seq + 1, device=data.device)].long()


def stage_target(run):
    torch = run.setup()
    import torch.nn.functional as F

    model = run.target(compiled=True)
    run.log("target parameters", sum(p.numel() for p in model.parameters()))
    batches = windows(torch, run.tokens("train"), run.s["seq"], run.s["batch"], run.args.seed)

    def loss_of(hidden, table, labels):
        return F.cross_entropy(F.linear(hidden, table).float().flatten(0, 1), labels.flatten())

    if run.args.compile:
        loss_of = torch.compile(loss_of, dynamic=False)

    def step():
        batch = next(batches)
        with run.autocast():
            hidden, _ = model(batch[:, :-1])
            return loss_of(hidden, model.token_embd, batch[:, 1:])

    fit(run, model, "target", step, run.args.target_minutes, run.args.target_steps, run.s["lr"], 200)


def stage_generate(run):
    torch = run.setup()
    model, data, s = run.target(compiled=False).eval(), run.tokens("train"), run.s
    gen = torch.Generator(run.dev).manual_seed(run.args.seed)
    rng = np.random.default_rng(run.args.seed + 1)
    out, began = [], time.time()
    share = torch.tensor([t for t, p in MIX for _ in range(round(p * s["gen_rows"]))], device=run.dev)
    with run.autocast():
        for i in range(s["gen_rounds"]):
            length = s["prompts"][i % len(s["prompts"])]
            at = torch.from_numpy(rng.integers(0, data.numel() - s["seq"], len(share))).to(run.dev)
            prompts = data[at[:, None] + torch.arange(length, device=run.dev)].long()
            rows = model.generate(prompts, s["seq"], share[torch.randperm(len(share), device=run.dev)], gen)
            out.append(rows.cpu().numpy().astype(np.uint16))
            run.log("generate round", i, f"{time.time() - began:.0f} s")
    np.save(run.work / "generated.npy", np.concatenate(out))


def stage_drafter(run):
    torch = run.setup()
    import torch.nn.functional as F
    from demo_pair.drafter import block_tokens

    model, target, s, c = run.drafter(), run.target(compiled=True).eval().requires_grad_(False), run.s, run.dc
    run.log("drafter parameters", sum(p.numel() for p in model.parameters()))
    own = torch.from_numpy(np.load(run.work / "generated.npy").astype(np.int32)).to(run.dev)
    corpus = windows(torch, run.tokens("train"), s["seq"], max(1, s["dbatch"] // 8), run.args.seed + 2)
    gen = torch.Generator(run.dev).manual_seed(run.args.seed + 3)
    weight = torch.exp(-torch.arange(c.block - 1, device=run.dev) / 7.0)
    kinds = torch.tensor([c.block, c.block // 2, c.block // 4], device=run.dev)
    odds = torch.tensor([0.7, 0.2, 0.1], device=run.dev)

    def loss_of(features, hidden, batch, anchors, widths):
        blocks = block_tokens(batch, anchors, c.block, run.mask_id)
        rows = model(model.context(features), F.embedding(blocks, target.token_embd), anchors, widths)
        at = anchors[:, None] + torch.arange(1, c.block, device=anchors.device)
        logq = target.logits(rows[:, :, 1:]).float().log_softmax(-1)
        with torch.no_grad():
            # the target's sharpened distribution has more information than its chosen token
            soft = (target.logits(hidden[:, at - 1]).float() / 0.7).softmax(-1)
        hard = -logq.gather(-1, batch[:, at][..., None])[..., 0]
        loss = 0.5 * hard - 0.5 * (soft * logq).sum(-1)
        live = weight * (torch.arange(1, c.block, device=anchors.device)[None] < widths[:, None])
        return (loss * live).sum() / (live.sum() * batch.shape[0])

    if run.args.compile:
        loss_of = torch.compile(loss_of, dynamic=False)

    def step():
        other = next(corpus)[:, :-1]
        pick = torch.randint(own.shape[0], (s["dbatch"] - other.shape[0],), generator=gen, device=run.dev)
        batch = torch.cat([own[pick].long(), other])
        anchors = torch.randperm(batch.shape[1] - c.block - 8, generator=gen, device=run.dev)[: s["anchors"]] + 8
        # Narrower blocks are drafted too: a caller that wants few drafts must not pay for a full block.
        widths = kinds[torch.multinomial(odds, s["anchors"], True, generator=gen)]
        with run.autocast():
            with torch.no_grad():
                hidden, features = target(batch, features=c.target_layers)
            return loss_of(features, hidden, batch, anchors.sort().values, widths)

    fit(run, model, "drafter", step, run.args.drafter_minutes, run.args.drafter_steps, s["dlr"], 150)


def stage_eval(run):
    torch = run.setup()
    import torch.nn.functional as F
    from demo_pair.drafter import matched_lengths, simulate
    from tokenizers import Tokenizer

    target, drafter, s = run.target(compiled=False).eval(), run.drafter().eval(), run.s
    data, metrics = run.tokens("heldout"), {}

    def text_loss(length, first, rows):
        n = min(rows, (data.numel() - 1) // length)
        total = count = 0
        for at in torch.arange(n, device=run.dev).mul(length).split(16):
            batch = data[at[:, None] + torch.arange(length + 1, device=run.dev)].long()
            with torch.no_grad(), run.autocast():
                hidden, _ = target(batch[:, :-1])
                loss = F.cross_entropy(target.logits(hidden).float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
            loss = loss.reshape(batch.shape[0], length)[:, first:]
            total, count = total + loss.sum().item(), count + loss.numel()
        return round(total / max(count, 1), 4), count

    loss, count = text_loss(s["window"], 0, 4096)
    metrics["heldout"] = {"loss": loss, "perplexity": round(math.exp(loss), 3), "tokens": count, "window": s["window"]}
    loss, count = text_loss(2 * s["window"], s["window"], 1024)
    metrics["heldout_second_half_of_double_window"] = {"loss": loss, "perplexity": round(math.exp(loss), 3), "tokens": count}
    run.log("eval", json.dumps(metrics))

    tok = Tokenizer.from_file(str(run.work / "tokenizer.json"))
    gen, rng = torch.Generator(run.dev).manual_seed(run.args.seed), np.random.default_rng(run.args.seed)
    at = torch.from_numpy(rng.integers(0, data.numel() - s["eval_total"], s["eval_rows"])).to(run.dev)
    prompts = data[at[:, None] + torch.arange(s["eval_prompt"], device=run.dev)].long()
    samples = []
    for label, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7)):
        with run.autocast():
            rows = target.generate(prompts, s["eval_total"], torch.full((len(at),), temperature, device=run.dev), gen)
            for width in (run.dc.block, run.dc.block // 2, run.dc.block // 4):
                parts = [matched_lengths(target, drafter, part, s["eval_prompt"], width, run.mask_id) for part in rows.split(32)]
                result = simulate(np.concatenate(parts), width)
                per_row = [simulate(row[None], width)["tokens_per_step"] for row in np.concatenate(parts)]
                result["median_over_prompts"] = round(float(np.median(per_row)), 3)
                metrics[f"{label}, width {width}"] = result
                run.log("eval", label, json.dumps(result))
        # Share of repeated 16-grams: how much of the figure above is owed to text that loops.
        loops = [1 - len({tuple(r[i : i + 16]) for i in range(len(r) - 16)}) / (len(r) - 16) for r in rows[:, s["eval_prompt"] :].tolist()]
        metrics[f"{label}, repeated 16-grams"] = round(float(np.mean(loops)), 3)
        for r in rows[:8].tolist():
            samples.append({"kind": label, "prompt": tok.decode(r[: s["eval_prompt"]]), "text": tok.decode(r[s["eval_prompt"] :])})
    for name in ("target", "drafter"):
        if (run.work / f"{name}.json").exists():
            metrics[name + "_training"] = json.loads((run.work / f"{name}.json").read_text())
        metrics[name + "_parameters"] = sum(p.numel() for p in (target if name == "target" else drafter).parameters())
    metrics["seed"], metrics["target_config"] = run.args.seed, dataclasses.asdict(run.tc)
    metrics["drafter_config"] = dataclasses.asdict(run.dc)
    (run.work / "metrics.json").write_text(json.dumps(metrics, indent=1))
    (run.work / "samples.json").write_text(json.dumps(samples, indent=1))


def stage_pack(run):
    torch = run.setup()
    out = pathlib.Path(run.args.out or run.work / "out")
    out.mkdir(parents=True, exist_ok=True)
    for name in ("target", "drafter"):
        if not (run.work / f"{name}.pt").exists():
            continue
        shard, size, index = {}, 0, 0
        items = list(torch.load(run.work / f"{name}.pt", map_location="cpu").items())
        for i, (key, value) in enumerate(items):
            # Half precision rounds less than Q8_0 does; vectors and conv kernels stay exact.
            value = value.half() if value.dim() == 2 and value.shape[1] > 64 else value
            shard[key], size = value.clone(), size + value.numel() * value.element_size()
            following = items[i + 1][1].numel() * 2 if i + 1 < len(items) else SHARD
            if size + following > SHARD or i + 1 == len(items):
                torch.save(shard, out / f"{name}-{index}.pt")
                shard, size, index = {}, 0, index + 1
    with tarfile.open(out / "bundle.tgz", "w:gz") as tar:
        for name in BUNDLE:
            if (run.work / name).exists():
                tar.add(run.work / name, name)
    run.log("packed", sorted((p.name, p.stat().st_size) for p in out.iterdir()))


def stage_unpack(run):
    torch = run.setup()
    out = pathlib.Path(run.args.out or run.work / "out")
    with tarfile.open(out / "bundle.tgz") as tar:
        tar.extractall(run.work, filter="data")
    for name in ("target", "drafter"):
        merged = {}
        for path in sorted(out.glob(f"{name}-*.pt")):
            merged.update({k: v.float() for k, v in torch.load(path).items()})
        if merged:
            torch.save(merged, run.work / f"{name}.pt")


def stage_import(run):
    torch = run.setup()
    from demo_pair import export

    for file, name in (("target.gguf", "target"), ("drafter.gguf", "drafter_base")):
        weights = export.read_weights(pathlib.Path(run.args.dest) / file)
        torch.save({k: torch.from_numpy(v) for k, v in weights.items()}, run.work / f"{name}.pt")


def stage_export(run):
    torch = run.setup()
    from demo_pair import card, export

    dest = pathlib.Path(run.args.dest)
    dest.mkdir(parents=True, exist_ok=True)
    weights = {
        n: {k: v.float().numpy() for k, v in torch.load(run.work / f"{n}.pt", map_location="cpu").items()} for n in ("target", "drafter")
    }
    tokenizer = run.work / "tokenizer.json"
    export.write_target(dest / "target.gguf", run.tc, weights["target"], tokenizer, card.LICENCE)
    export.write_drafter(dest / "drafter.gguf", run.dc, weights["drafter"], tokenizer, run.tc.context, card.LICENCE)
    card.write_prompts(run.work, dest)
    card.write_card(run.work, dest)
    run.log("exported", sorted((p.name, p.stat().st_size) for p in dest.iterdir()))


OUTPUTS = {"corpus": "packages.json", "target": "target.pt", "generate": "generated.npy", "drafter": "drafter.pt", "eval": "metrics.json"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default="all", help="all (corpus to eval), or a comma-separated list of stages")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--out", help="folder of pack and unpack (default WORKDIR/out)")
    parser.add_argument("--dest", default="pyggml_spec/demo", help="folder of the exported pair")
    parser.add_argument("--preset", choices=("demo", "tiny", "refine", "tiny-refine"), default="demo")
    parser.add_argument("--target-minutes", type=float, default=9.0)
    parser.add_argument("--drafter-minutes", type=float, default=6.0)
    parser.add_argument("--target-steps", type=int)
    parser.add_argument("--drafter-steps", type=int)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    run = Run(args)
    for stage in list(OUTPUTS) if args.stage == "all" else args.stage.split(","):
        if stage in OUTPUTS and (run.work / OUTPUTS[stage]).exists():
            run.log(stage, "is done")
            continue
        globals()["stage_" + stage](run)


if __name__ == "__main__":
    main()
