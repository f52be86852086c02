"""llama.cpp options without an effect of their own here: accepted where they request the default behaviour, otherwise refused with the
alternative.

A line of the tables: names and number of values; a sentence applies to all lines above it. Options of `llama_cpp.py` have an effect.
"""

from collections.abc import Iterator
from typing import NamedTuple

import click

from .terminal import say

SAME = """
--perf --no-perf --show-timings --no-show-timings -kvo --kv-offload --repack --op-offload --mmap --no-warmup --warmup --jinja 0
-cb --cont-batching --simple-io --log-disable --no-log-prefix --no-log-timestamps --no-log-jsonl --no-context-shift --no-mmproj --no-mmproj-auto 0
--cache-prompt --no-escape --no-embedding --ui --webui --props --no-agent -no-ag --models-autoload --cache-idle-slots -kvu --kv-unified 0
--no-ui-mcp-proxy --no-webui-mcp-proxy --no-spec-draft-backend-sampling --display-prompt -no-cnv --no-conversation --no-skip-chat-parsing 0
-co --color -fit --fit --log-colors 1
"""

NOTED = """
-b --batch-size 1
 prompts are processed in batches of -ub tokens
--mlock 0
 memory is not locked; weights are memory-mapped
--no-mmap -nkvo --no-kv-offload -nr --no-repack --no-host --no-op-offload --check-tensors --swa-full 0
-lm --load-mode -lzm --lazy-mode 1
 placement is decided at load: `pyspec plan` shows it; --device, --kernels ggml and --n-cpu-moe change it
-tb --threads-batch -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft --spec-draft-threads-batch 1
 prompts, drafts and steps share the threads of -t
-C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --numa 1
-Cd --cpu-mask-draft --spec-draft-cpu-mask -Crd --cpu-range-draft --spec-draft-cpu-range --cpu-strict-draft --spec-draft-cpu-strict 1
-Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch --cpu-strict-batch-draft --spec-draft-cpu-strict-batch 1
 threads run on the processors of the process: start it with taskset or numactl
--prio --poll --prio-batch --poll-batch --prio-draft --spec-draft-prio --poll-draft --spec-draft-poll 1
--prio-batch-draft --spec-draft-prio-batch --poll-batch-draft --spec-draft-poll-batch 1
 there is no such setting; use nice for the priority
-dt --defrag-thold -fitt --fit-target -fitc --fit-ctx -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step --cache-reuse 1
-sps --slot-prompt-similarity --kv-unified-per-slot 1
 there is no such setting; --prefix-memory limits the prefix cache
-bs --backend-sampling --spec-draft-backend-sampling 0
 candidates are always chosen on the device
--draft-p-min --spec-draft-p-min 1
 all drafts of a step and their verification are one graph, which does not stop at an unsure one: their number follows from measured costs and acceptance; --spec-draft-n-max limits it
--draft-p-split --spec-draft-p-split --draft-min --draft-n-min --spec-draft-n-min 1
--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m 1
--spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n 1
--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits 1
 the number of draft tokens follows from measured costs and acceptance; --spec-draft-n-max limits it
--log-file -lv --verbosity --log-verbosity --log-prompts-dir 1
-v --verbose --log-verbose --log-prefix --log-timestamps --log-jsonl --verbose-prompt 0
 logs go to stderr; --stats writes statistics
--no-display-prompt 0
 the prompt is never printed
--reuse-port -nocb --no-cont-batching --no-cache-prompt --no-cache-idle-slots -no-kvu --no-kv-unified 0
--threads-http --sse-ping-interval -to --timeout 1
 the server has no such setting: batching and prefix reuse are always on; -np, --queue-timeout and --prefix-memory limit them
-np --parallel 1
 this command generates one sequence; `pyspec serve -np N` serves several, `pyspec bench --slots` measures them
-mg --main-gpu 1
 use --device with a name from `pyspec devices`
-otd --override-tensor-draft --spec-draft-override-tensor -ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe 1
-devd --device-draft --spec-draft-device 1
-cmoed --cpu-moe-draft --spec-draft-cpu-moe 0
 the drafter is on the target's device, the last one of --device
"""

REFUSED = """
-mu --model-url -dr --docker-repo 1
 use a file (-m) or the Hugging Face hub (-hf USER/MODEL:QUANT)
-hft --hf-token 1
 set the variable HF_TOKEN instead, which is not visible in process lists
-cl --cache-list 0
 `pyspec list` lists the models of the caches
--completion-bash 0
 `_PYSPEC_COMPLETE=bash_source pyspec` prints the completion script
--offline 0
 set HF_HUB_OFFLINE=1, or name the file with -m
--version 0
 `pyspec --version` prints it
--usage 0
 `--help` shows how a command is used
-cnv --conversation 0
 use `pyspec chat`, or `pyspec serve` for HTTP
--list-devices 0
 `pyspec devices` lists the devices
--keep 1
--context-shift 0
 a full context ends the text, nothing is shifted out: use a larger -c
-bf --binary-file 1
 use -f FILE, which keeps all bytes
--rpc 1
 name workers with --device host:port; `pyspec worker` starts one (docs/workers.md)
-ncffn --n-cpu-ffn 1
 whole layers go to the CPU: --device CPU,GPU --tensor-split, or -ngl
--override-kv 1
 metadata cannot be overridden: change a copy of the file with gguf-set-metadata of the gguf package; --rope-scaling has options
--control-vector --control-vector-scaled 1
--control-vector-layer-range 2
 control vectors are not supported; LoRA adapters are (--lora)
--sampler-seq --sampling-seq 1
 name the samplers: --samplers 'top_k;top_p;min_p;temperature'
--server-base 1
 `pyspec chat` runs the model itself; for a server use its web page or an OpenAI client
-r --reverse-prompt 1
 use --stop of `pyspec run`, or "stop" in a request
-mli --multiline-input -i --interactive --interactive-first 0
 `pyspec chat` reads lines; one that ends with \\ continues in the next
-mm --mmproj -mmu --mmproj-url -mmdev --mmproj-device --image --audio --video --image-min-tokens --image-max-tokens --video-fps 1
--video-timestamp-interval --video-ffmpeg-dir --mtmd-batch-max-tokens --media-path 1
--mmproj-auto --mmproj-offload --no-mmproj-offload 0
 pictures and sounds are read by `pyspec run --image FILE --audio FILE`, `pyspec chat` and `pyspec serve`, with the encoder of --mmproj; video is not supported
-o --output --output-file 1
 the text goes to stdout: `pyspec run ... > FILE`; --stats and --logprobs write files
--reasoning-effort 1
 set it as a template variable: --chat-template-kwargs '{"reasoning_effort": "low"}' for `pyspec chat` and `pyspec serve`
--reasoning-budget --reasoning-budget-message 1
 `pyspec serve` limits thinking; in `pyspec chat` it is on or off (--think/--no-think), and -n limits answer and thinking together
--reasoning-preserve --no-reasoning-preserve --skip-chat-parsing 0
 the template decides: --chat-template-kwargs sets its variables, --reasoning-format none leaves reasoning in the content
--no-jinja 0
 templates are always rendered as Jinja
--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default --spec-default --embd-gemma-default 0
--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default 0
 name the model with -hf USER/MODEL:QUANT, and its drafter with -hfd (docs/pairs.md)
-lcs --lookup-cache-static -lcd --lookup-cache-dynamic 1
 n-gram drafting reads the text itself (--spec-type suffix) and keeps no file
--embd-normalize 1
 requests say it: "embd_normalize"
--path --api-prefix --ui-config --webui-config --ui-config-file --webui-config-file 1
 the web page is part of the package (--no-ui disables it); use a proxy for other files and prefixes
--cors-methods --cors-headers 1
--cors-credentials --no-cors-credentials 0
 use --cors-origins; the rest follows from it
--tools --tools-runtime --mcp-servers-config --mcp-servers-json 1
-ag --agent --ui-mcp-proxy --webui-mcp-proxy 0
 no tools are run here: calls go to the client, which runs them
--no-models-autoload 0
 models are loaded by the first request that names them; those with pinned = true in --models-preset at the start
--slot-save-path 1
 prompts are kept on disk with --prefix-cache FOLDER
"""


class Foreign(NamedTuple):
    """An option of llama.cpp: its number of ``values``, and the text: none, a note, or an error."""

    values: int
    text: str
    refused: bool


def _read(table: str, refused: bool) -> Iterator[tuple[str, Foreign]]:
    found: list[tuple[str, int]] = []
    for line in [*table.strip("\n").split("\n"), " "]:
        if line.startswith(" "):
            yield from ((name, Foreign(values, line.strip(), refused)) for name, values in found)
            found = []
        else:
            *names, values = line.split()
            found += [(name, int(values)) for name in names]


KNOWN = {**dict(_read(SAME, False)), **dict(_read(NOTED, False)), **dict(_read(REFUSED, True))}
OPTIONAL = {  # options with an optional value: the default; "" drops the option, which may be a flag here
    "-fa": "on", "--flash-attn": "on", "-co": "auto", "--color": "auto", "-fit": "on", "--fit": "on", "--log-colors": "auto",
}  # fmt: skip
_WORDS = {"on", "off", "auto", "true", "false", "enabled", "disabled", "0", "1"}


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Options of a command by all their names."""
    return {name: p for p in command.params if isinstance(p, click.Option) for name in (*p.opts, *p.secondary_opts)}


def resolve(ctx: click.Context, args: list[str]) -> list[str]:
    """``args`` without foreign options, with a note for each without effect. Raises click.UsageError: an unsupported or unknown option."""
    own, rest = options_of(ctx.command), list(args)
    out: list[str] = []
    while rest:
        word = rest.pop(0)
        name, given = (word.split("=", 1)[0], True) if word.startswith("--") and "=" in word else (word, False)
        if word == "--":
            return [*out, word, *rest]
        if word[:1] != "-" or word[1:2].isdecimal() or word[1:2] in ("", "."):  # a number, or no option
            out.append(word)
        elif name in OPTIONAL and not given and not (rest and rest[0] in _WORDS):
            if name in own:
                out += [name, OPTIONAL[name]]
        elif name == "--slots" and name in own and not given and not (rest and rest[0][:1].isdecimal()):
            continue  # llama-server's flag; /slots exists unless --no-slots
        elif name in own:
            count = 0 if given or own[name].is_flag or own[name].count else own[name].nargs
            out += [word, *rest[:count]]
            del rest[:count]
        elif name in ctx.help_option_names or (word[:2] in own and not own[word[:2]].is_flag and word[2:3].isdecimal()):
            out.append(word)
        elif name in KNOWN:
            del rest[: 0 if given else KNOWN[name].values]
            if KNOWN[name].refused:
                raise click.UsageError(f"{name} is a llama.cpp option: {KNOWN[name].text}", ctx)
            if KNOWN[name].text:
                say(f"note: {name} has no effect here: {KNOWN[name].text}")
        else:
            raise unknown(ctx, name)
    return out


def unknown(ctx: click.Context, name: str) -> click.UsageError:
    """Suggests similar options, or commands that have the option."""
    from difflib import get_close_matches

    own, group = options_of(ctx.command), ctx.find_root().command
    commands = {other: group.get_command(ctx, other) for other in group.list_commands(ctx)} if isinstance(group, click.Group) else {}
    others = [other for other, command in commands.items() if command is not None and name in options_of(command)]
    told = [known for known in sorted(own, key=lambda o: o.startswith("--")) if not own[known].hidden or len(known) > 4]
    bare = {known.lstrip("-").lower(): known for known in told}
    near = [bare[word] for word in get_close_matches(name.lstrip("-").lower(), bare, 3, 0.6)]
    if others:
        hint = f"`pyspec {others[0]}` has it"
    elif near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"`{ctx.command_path} --help` lists the options"
    return click.UsageError(f"no such option: {name}; {hint}", ctx)
