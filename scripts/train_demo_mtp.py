#!/usr/bin/env python3
"""Train the MTP layer of the embedded target, with the target frozen: minutes on one large GPU.

Stages (each one's output is a file in --workdir; a stage whose output exists is skipped):

  import    target.pt and tokenizer.json from the files in --dest
  corpus    train.npy, heldout.npy, heldout.jsonl, packages.json: Python source as train_demo_pair.py finds it
  generate  generated.pt    the target's own continuations, greedy and sampled, with its hidden states
  mtp       mtp.pt          the layer, in half precision: to be carried elsewhere
  eval      mtp_metrics.json  tokens per step on continuations of held-out prompts
  export    mtp.gguf in --dest

Example: train_demo_mtp.py --workdir build/mtp; --preset tiny is a smoke test for a CPU.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from train_demo_pair import MIX, Run, fit

ROUNDS = {"demo": 8, "tiny": 1}
SETTINGS = {
    # rows generated at once, tokens of a row, prompts' lengths by round, rows of a training step, tokens of one, drafts of a chain
    "demo": {"rows": 3072, "total": 512, "prompts": (48, 96, 160, 256), "batch": 32, "max_mb": 36, "eval_rows": 256, "eval_total": 512},
    "tiny": {"rows": 8, "total": 96, "prompts": (32,), "batch": 4, "max_mb": 1.5, "eval_rows": 8, "eval_total": 192},
}
PEAK, WARM, EVAL_PROMPT = 2e-3, 60, 128


def settings(run):
    return SETTINGS[run.args.preset]


def stage_import(run):
    torch = run.setup()
    from demo_pair import export

    path = pathlib.Path(run.args.dest) / "target.gguf"
    torch.save({k: torch.from_numpy(v) for k, v in export.read_weights(path).items()}, run.work / "target.pt")
    export.read_tokenizer(path).save(str(run.work / "tokenizer.json"))


def stage_corpus(run):
    from demo_pair import corpus

    began = time.time()
    counts = corpus.build(run.work, run.tc.vocab, settings(run)["max_mb"], 0, run.args.seed)
    run.log("corpus", json.dumps(counts), f"{time.time() - began:.0f} s")


def stage_generate(run):
    torch = run.setup()
    model, data, s = run.target(compiled=False).eval(), run.tokens("train"), settings(run)
    gen, rng = torch.Generator(run.dev).manual_seed(run.args.seed), np.random.default_rng(run.args.seed + 1)
    share = torch.tensor([t for t, p in MIX for _ in range(round(p * s["rows"]))], device=run.dev)
    tokens, began = [], time.time()
    with run.autocast():
        for i in range(ROUNDS[run.args.preset]):
            length = s["prompts"][i % len(s["prompts"])]
            at = torch.from_numpy(rng.integers(0, data.numel() - s["total"], len(share))).to(run.dev)
            prompts = data[at[:, None] + torch.arange(length, device=run.dev)].long()
            tokens.append(model.generate(prompts, s["total"], share[torch.randperm(len(share), device=run.dev)], gen).to(torch.int16))
            run.log("generate round", i, f"{time.time() - began:.1f} s")
            if time.time() - began > 60 * run.args.generate_minutes:
                break
    torch.save(torch.cat(tokens).cpu(), run.work / "generated.pt")


def layer_of(run):
    from demo_pair.mtp import MTPConfig, MTPLayer

    model = MTPLayer(MTPConfig(n_ff=run.args.ffn)).to(run.dev)
    path = run.work / "mtp.pt"
    if path.exists():
        import torch

        model.load_state_dict({k: v.float() for k, v in torch.load(path, map_location=run.dev).items()})
    return model


def stage_mtp(run):
    torch = run.setup()
    from demo_pair.mtp import loss_of

    target, layer = run.target(compiled=False).eval().requires_grad_(False), layer_of(run)
    own, s = torch.load(run.work / "generated.pt").to(run.dev), settings(run)
    run.log("MTP parameters", sum(p.numel() for p in layer.parameters()), "rows", len(own))
    gen = torch.Generator(run.dev).manual_seed(run.args.seed + 3)
    step_loss = torch.compile(loss_of, dynamic=False) if run.args.compile else loss_of

    def step():
        batch = own[torch.randint(len(own), (s["batch"],), generator=gen, device=run.dev)].long()
        with run.autocast():
            with torch.no_grad():
                hidden, _ = target(batch)
            return step_loss(layer, target.token_embd, batch, hidden, layer.c.drafts)

    fit(run, layer, "mtp", step, run.args.mtp_minutes, run.args.mtp_steps, PEAK, WARM)
    torch.save({k: v.half().cpu() if v.dim() == 2 else v.cpu() for k, v in layer.state_dict().items()}, run.work / "mtp.pt")


def stage_eval(run):
    torch = run.setup()
    from demo_pair.drafter import simulate
    from demo_pair.mtp import matched_lengths

    target, layer, s = run.target(compiled=False).eval(), layer_of(run).eval(), settings(run)
    data, metrics = run.tokens("heldout"), {"parameters": sum(p.numel() for p in layer.parameters())}
    gen, rng = torch.Generator(run.dev).manual_seed(run.args.seed), np.random.default_rng(run.args.seed)
    at = torch.from_numpy(rng.integers(0, data.numel() - s["eval_total"], s["eval_rows"])).to(run.dev)
    prompts = data[at[:, None] + torch.arange(min(EVAL_PROMPT, s["eval_total"] // 2), device=run.dev)].long()
    for label, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7)):
        with run.autocast(), torch.no_grad():
            rows = target.generate(prompts, s["eval_total"], torch.full((len(at),), temperature, device=run.dev), gen)
            for drafts in (layer.c.drafts, 3, 1):
                parts = []
                for part in rows.split(32):
                    hidden, _ = target(part)
                    parts.append(matched_lengths(layer, target.token_embd, part, hidden, prompts.shape[1], drafts))
                result = simulate(np.concatenate(parts), drafts + 1)
                per_row = [simulate(row[None], drafts + 1)["tokens_per_step"] for row in np.concatenate(parts)]
                result["median_over_prompts"] = round(float(np.median(per_row)), 3)
                metrics[f"{label}, width {drafts + 1}"] = result
                run.log("eval", label, json.dumps(result))
    if (run.work / "mtp.json").exists():
        metrics["training"] = json.loads((run.work / "mtp.json").read_text())
    metrics["counts"], metrics["seed"] = json.loads((run.work / "packages.json").read_text())["counts"], run.args.seed
    (run.work / "mtp_metrics.json").write_text(json.dumps(metrics, indent=1))


def stage_export(run):
    torch = run.setup()
    from demo_pair import card, export
    from demo_pair.mtp import MTPConfig

    dest = pathlib.Path(run.args.dest)
    weights = {k: v.float().numpy() for k, v in torch.load(run.work / "mtp.pt", map_location="cpu").items()}
    config = MTPConfig(n_ff=len(weights["ffn_gate.weight"]))
    out = pathlib.Path(run.args.out or dest) / "mtp.gguf"
    export.write_mtp(out, config, weights, dest / "target.gguf", run.tc.context, card.LICENCE)
    run.log("exported", out.name, out.stat().st_size)


OUTPUTS = {"import": "tokenizer.json", "corpus": "packages.json", "generate": "generated.pt", "mtp": "mtp.pt", "eval": "mtp_metrics.json"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default="all", help="all (import to eval), or a comma-separated list of stages")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--dest", default="pyggml_spec/demo", help="folder of the embedded pair")
    parser.add_argument("--out", help="folder of the exported file (default DEST)")
    parser.add_argument("--preset", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--ffn", type=int, default=512, help="width of the layer's feed-forward part")
    parser.add_argument("--generate-minutes", type=float, default=0.5)
    parser.add_argument("--mtp-minutes", type=float, default=1.25)
    parser.add_argument("--mtp-steps", type=int)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--compile", action="store_true", help="compile the layer: half a minute more, faster steps")
    args = parser.parse_args()
    run = Run(argparse.Namespace(**(vars(args) | {"preset": "demo"})))  # the target is always the embedded one
    run.args = args
    for stage in list(OUTPUTS) if args.stage == "all" else args.stage.split(","):
        if stage in OUTPUTS and (run.work / OUTPUTS[stage]).exists():
            run.log(stage, "is done")
            continue
        globals()["stage_" + stage](run)


if __name__ == "__main__":
    main()
