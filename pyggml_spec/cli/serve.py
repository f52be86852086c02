"""pyspec serve"""

import os
import ssl
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from ..errors import PyspecError
from .clients import CONFIGS, config
from .help import PATH, GroupedCommand, flag, option
from .options import (
    LIMIT,
    TEMPLATE,
    Finite,
    TokenLimit,
    check_prefix,
    check_synthetic,
    in_options,
    loading,
    synthetic_options,
    template_variables,
    text_of,
    with_options,
)  # fmt: skip
from .report import configuration_line
from .sampling import sampler_options, take_sampling
from .terminal import progress_line, say


def _printing(command):
    """Prints a client's configuration instead, where that is asked for: nothing is fetched or loaded."""

    @wraps(command)
    def wrapped(print_config, **values):
        if print_config is None:
            return command(**values)
        return click.echo(config(print_config, values), nl=False)

    return wrapped


@click.command("serve", cls=GroupedCommand, words="prompts come over HTTP")
@_printing
@loading
@option("-np --parallel --slots slots", "Requests that run at once.", type=click.IntRange(1, 64), shown=8)
@option(
    "--host",
    "Address to listen at, or the path of a unix socket that ends with .sock; several with commas between them.",
    shown="127.0.0.1",
)
@option("--port", "0 takes a free one.", type=click.IntRange(0, 65535), shown=8080)
@option("--api-key", "Key that requests have to bring; several with commas between them.", multiple=True)
@option("--api-key-file", "File with keys, one per line; SIGHUP reads it anew.", type=PATH)
@option(
    "--queue queue_requests",
    "Requests that may wait; further ones get 429. 0: none waits for a slot. Default: 4 per slot.",
    type=click.IntRange(0),
)
@option("--queue-tokens", "Tokens of prompts that may wait. Default: no limit.", type=click.IntRange(1))
@option("--queue-timeout queue_seconds", "Seconds that a request may wait. Default: no limit.", type=Finite(0.01))
@option("--drain", "Seconds for running requests when the server is ended.", type=Finite(0), shown=30.0)
@option("--max-body", "Largest request body.", type=click.IntRange(1), shown=8, metavar="MIB")
@option("--models-dir", "Folder with GGUF files, each of which is a model; several times for several.", type=PATH, multiple=True)
@option("--models-preset", "TOML or JSON file with models, their names and options.", type=PATH)
@flag("--models-cached", "The models of `pyspec list`, too.")
@option("--models-max", "Models that are loaded at once. Default: as many as memory has room for.", type=click.IntRange(1))
@option(
    "--models-memory",
    "What they may take together, as planned. Default: what their devices have free.",
    type=click.IntRange(1),
    metavar="MIB",
)
@option(
    "--sleep-idle-seconds sleep_idle",
    "Seconds without a request after which a model is unloaded; the next request loads it. -1, the default: only when memory is needed.",
    type=Finite(-1),
)
@option("-a --alias", "Name of the model; several with commas between them. Default: the file's.")
@option("--tags", "Tags of the model in the list of models, with commas between them.")
@option(LIMIT, "Tokens per answer if a request sets no limit. Default: no limit but the context.", type=TokenLimit(0))
@option("--chat-template template", "Chat template instead of the model file's: Jinja text, or chatml, command-r or llama3.")
@with_options(TEMPLATE)
@option("--reasoning -rea", "Thinking mode, where the template has one.", type=click.Choice(["on", "off", "auto"]), default="auto")
@option(
    "--reasoning-budget thinking_budget",
    "Tokens of thinking in requests that do not say; -1 for no limit.",
    type=click.IntRange(-1, 1 << 31),
    default=-1,
)
@option("--reasoning-budget-message thinking_message", "Text that is put before the end of thinking at that limit.", default="")
@flag("--embedding --embeddings embeds", "Serves embeddings of texts (/v1/embeddings) and nothing else.")
@flag("--rerank --reranking ranks", "Serves rankings of texts (/v1/rerank), and nothing else.")
@option(
    "--pooling",
    "How an embedding comes of a text's tokens. Default: the file's.",
    type=click.Choice(["none", "mean", "cls", "last", "rank"]),
)
@option("--reasoning-format", "none leaves reasoning in the content.", type=click.Choice(["auto", "deepseek", "none"]), default="auto")
@option("--cors-origins origins", "Pages whose scripts may ask: *, localhost, or a list of origins.", shown="localhost")
@option(
    "--allowed-hosts",
    "Further host names that requests may use, besides localhost and the addresses it listens at: a list, *.name for all below a name, or *.",
    default="",
)
@option("--ssl-cert-file certificate", "Certificate for HTTPS.", type=PATH)
@option("--ssl-key-file certificate_key", "Its key.", type=PATH)
@option(
    "--record",
    "Folder that keeps the tokens of answers, for `pyspec train`; requests with record false are left out. Default: nothing is kept.",
    type=PATH,
)
@option("--record-limit", "What the folder may take.", type=click.IntRange(1), shown=1024, metavar="MIB")
@flag("--no-slots show_slots", "No /slots.", flag_value=False, default=True)
@option("--metrics/--no-metrics", "Whether there is /metrics.", shown=True)
@option("--ui/--no-ui --webui/--no-webui page", "Whether there are pages: a chat at /, speculation at /speculation.", default=True)
@flag("--spm-infill suffix_first", "/infill puts the suffix in front of the prefix, as some models want it.")
@option("--prefill-assistant/--no-prefill-assistant", "Whether an assistant's message at the end is gone on with.", default=True)
@sampler_options
@flag("--allow-image-urls", "Fetch pictures from the public addresses that requests name; data URLs are always taken.")
@flag("--share-prefixes", "API keys share prompt prefixes, so that one key can find out by timing what another one sent.")
@flag("-v --verbose", "A line per error on stderr, and __verbose in responses.")
@with_options(synthetic_options(shown=False))
@option("--jinja/--no-jinja", default=True)
@flag("--of-router")
@option("--print-config", "Print what to paste into this client, for the other options, and end.", type=click.Choice([*CONFIGS]))
def command(target, draft, options, host, api_key, api_key_file, **more):
    """Serves models over HTTP, as OpenAI, Anthropic, Ollama and llama.cpp do. `docs/server.md` lists the endpoints.

    -c is the context of each slot. Sampling options are the defaults of requests. With --models-dir, --models-preset or --sleep-idle-seconds there is a
    process for each model, which is loaded by the first request that names it.
    """
    from ..server import missing

    several = bool(more["models_dir"] or more["models_preset"] or more["models_cached"])
    sleep_idle = more["sleep_idle"] = None if more["sleep_idle"] in (None, -1) else more["sleep_idle"]
    if (why := missing(("httpx",) if several or sleep_idle is not None else ())) is not None:
        raise PyspecError(why)
    from ..server import start
    from ..server.access import Admitted, Hosts, Keys

    if more["record"] is not None and (more["synthetic"] is not None or more["rates"]):
        raise click.UsageError("--record keeps the target's answers, and those of synthetic acceptance are not; leave one of them out")
    hosts = tuple(part.strip() for part in host.split(",") if part.strip()) or ("127.0.0.1",)
    keys = Admitted() if more["of_router"] else Keys(api_key, api_key_file)  # once: a pipe has its lines once
    Hosts(more["allowed_hosts"])  # before a model is loaded
    _check(hosts, more["port"], more["certificate"], more["certificate_key"])
    start.log_to_stderr(more["verbose"])
    settings = start.Settings(
        keys, hosts, load=options, report=lambda line: say(in_options(line)),
        **_of(start.Settings, more) | {"max_body": more["max_body"] << 20, "record_limit": more["record_limit"] << 20},
    )  # fmt: skip
    if not several and sleep_idle is None:
        sys.exit(_serve_one(target, draft, options, settings, **more))
    from ..server import router
    from .presets import model_specs

    context = click.get_current_context()
    models = model_specs(context.command, {**context.params, "sleep_idle": sleep_idle}, context.meta["arguments"])
    memory = more["models_memory"] << 20 if more["models_memory"] is not None else None
    sys.exit(router.serve(settings, router.RouterOptions(models, memory, more["models_max"], more["page"])))


def _serve_one(target, draft, options, settings, slots, alias, tags, max_tokens, template, template_file, variables, reasoning, reasoning_format,
               of_router, queue_requests, embeds, ranks, pooling, allow_image_urls, **more) -> int:  # fmt: skip
    from ..api import load_to_serve, slots_note
    from ..sampling.recommended import recommended
    from ..sampling.sampler import Sampling
    from ..server import start
    from ..server.link import Link
    from ..server.pictures import PictureOptions
    from ..server.sampling import Limits
    from ..server.served import NAMED, ServeOptions
    from ..text.renderer import RENDERER

    check_synthetic(more["synthetic"], more["rates"])
    wanted = take_sampling(more)
    check_prefix(options)
    source = text_of("chat_template", template, template_file)
    named = template_variables(variables)
    link = Link() if of_router else None
    if link is not None:
        settings = replace(settings, started=lambda served: link.ready(**served.model_entry()))
    try:
        if embeds or ranks or pooling:
            return _serve_embeddings(
                target, options, "rank" if ranks else pooling, ServeOptions(_names(alias), _names(tags), page=False), settings, link
            )
        RENDERER.start()  # it is ready by the time the model is
        if link is not None:
            options = _planned(link, target, draft, options, slots)
        with progress_line() as progress:
            alone = replace(options, prefix_cache=None, prefix_memory=0)
            session = load_to_serve(target, draft, alone, link.progress if link is not None else progress, slots)
    except (PyspecError, MemoryError) as error:
        if link is not None:
            link.send(error=in_options(str(error) or "there is not enough memory"))
        raise
    with session:
        values, refused = recommended(session.target.file.metadata)
        sampling = Sampling(**{**values, **wanted.values})
        notes = [f"{session.target.file.path.name} recommends {what}, which is not supported here" for what in refused]
        context = session.slots_context(slots, only=True)
        if context < session.runner.options.n_ctx:
            notes.append(slots_note(slots, context))
        used = session.configuration()
        share, held = context / used.n_ctx, session.runner.options.slots
        used = replace(used, n_ctx=context, memory={name: _of_slot(name, n, share, held) for name, n in used.memory.items()})
        say(configuration_line(used, None, sampling.describe(), notes, slots))
        thinking = {"on": True, "off": False}.get(reasoning)
        served = ServeOptions(
            _names(alias),
            _names(tags),
            slots=slots,
            thinking=thinking,
            reasoning=reasoning_format,
            template_arguments=named,
            pictures=PictureOptions(urls=allow_image_urls),
            **_of(ServeOptions, more),
        )
        settings = replace(
            settings, load=replace(options, n_ctx=context), queue_requests=4 * slots if queue_requests is None else queue_requests,
        )  # fmt: skip
        limits = Limits(sampling, max_tokens, context)
        return start.serve(session, settings, limits, served, NAMED.get(source or "", source))


def _of_slot(name: str, nbytes: int, share: float, slots: int) -> int:
    """Of memory of an engine of so many slots, what one of them takes with that ``share`` of the context; other bytes as they are."""
    return int(nbytes * share) // slots if "kv" in name else nbytes // slots if name == "recurrent" else nbytes


def _planned(link, target, draft, options, slots):
    """The options with the context and the prefix cache of a plan that fits what the router leaves free."""
    from ..ggml.device import free_bytes, pick_device
    from ..tools.plan import plan

    made = None

    def planned(free: int | None) -> dict[str, Any]:
        nonlocal made
        if made is None or options.n_ctx is None or made.split or made.copied:
            made = plan(target, draft, options, slots=slots, free=free, largest=False)
        else:  # nothing of it depends on what is free
            made = replace(made, free=free_bytes(pick_device(made.device)) if free is None else free)
        prefixes = options.prefix_memory
        if prefixes is None:  # as without a plan, of what remains
            prefixes = min(1 << 30, max(0, made.free - made.total) // 8)
        total = made.total - made.prefix_memory + prefixes
        return {"total": total, "free": made.free, "fits": made.fits, "n_ctx": made.n_ctx, "prefix_memory": prefixes}

    chosen = link.agree(planned)
    return replace(options, n_ctx=chosen["n_ctx"], prefix_memory=chosen["prefix_memory"])


def _serve_embeddings(target, options, pooling, named, settings, link) -> int:
    from ..embedding import Embedder
    from ..ggml.device import free_bytes, pick_devices, present
    from ..server import start

    if target is None:
        raise click.UsageError("the embedded pair embeds nothing; name a model with -m")
    made = partial(Embedder, target, options.device, options.n_ctx, options.threads, pooling)
    if link is not None:
        with closing(made(counted=True)) as counted:
            device, total, n_ctx = pick_devices(options.device)[0], counted.nbytes, counted.n_ctx

        def planned(free: int | None) -> dict[str, Any]:
            free = free_bytes(present(device)) if free is None else free
            return {"total": total, "free": free, "fits": total <= free, "n_ctx": n_ctx}

        link.agree(planned)
    return start.serve_embeddings(made(), settings, named)


def _of(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The options that a dataclass has as fields."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


class _Encrypted(Exception):
    """A key that needs a pass phrase."""


def _check(hosts: Sequence[str], port: int, certificate: str | None, key: str | None) -> None:
    """Refuses, before a model is loaded, addresses and certificates that the start would refuse. Pipes are left for the start, which could not
    read them again."""
    from ..server.start import listen

    if key is not None and certificate is None:
        raise click.UsageError("--ssl-key-file is the key of a certificate; name that with --ssl-cert-file")

    def encrypted() -> str:
        raise _Encrypted

    as_pem = "give a certificate and its key as PEM"
    files = [path for path in (certificate, key) if path is not None]
    pipes = any(os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)) for path in files)  # `<(...)` of a shell
    if certificate is not None and not pipes:
        try:
            for path in files:
                Path(path).open("rb").close()
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, encrypted)
        except _Encrypted:
            if sys.stdin is None or not sys.stdin.isatty():
                why = "is encrypted, and there is no terminal to ask for its pass phrase; give one without"
                raise PyspecError(f"the key {key or certificate} {why}") from None
        except ssl.SSLError as error:
            pair = certificate if key is None else f"{certificate} with the key {key}"
            raise PyspecError(f"HTTPS cannot be served by {pair} ({error.reason or error}); {as_pem}") from None
        except OSError as error:
            raise PyspecError(f"{error.filename} cannot be read: {error.strerror}; {as_pem}") from None
    for sock in listen(hosts, port):
        sock.close()


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(sorted({part.strip() for part in (text or "").split(",") if part.strip()}))
