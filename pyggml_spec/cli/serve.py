"""pyspec serve"""

import json
import os
import ssl
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from ..errors import PyspecError
from .bench import Rates
from .help import GroupedCommand
from .names import in_options
from .options import Finite, TokenLimit, check_prefix, loading, text_of
from .report import configuration_line
from .sampling import sampler_options, take_sampling
from .terminal import progress_line, say

_KEY = "Key that requests have to bring; several with commas between them."


@click.command("serve", cls=GroupedCommand, words="prompts come over HTTP")
@loading
@click.option(
    "-np", "--parallel", "--slots", "slots", type=click.IntRange(1, 64), default=8, show_default=True, help="Requests that run at once."
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at, or the path of a unix socket that ends with .sock; several with commas between them.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--api-key", multiple=True, help=_KEY)
@click.option("--api-key-file", type=click.Path(), help="File with keys, one per line; SIGHUP reads it anew.")
@click.option(
    "--queue",
    "queue_requests",
    type=click.IntRange(0),
    help="Requests that may wait; further ones get 429. 0: none waits for a slot. Default: 4 per slot.",
)
@click.option("--queue-tokens", type=click.IntRange(1), help="Tokens of prompts that may wait. Default: no limit.")
@click.option("--queue-timeout", "queue_seconds", type=Finite(0.01), help="Seconds that a request may wait. Default: no limit.")
@click.option("--drain", type=Finite(0), default=30.0, show_default=True, help="Seconds for running requests when the server is ended.")
@click.option("--max-body", type=click.IntRange(1), default=8, show_default=True, metavar="MIB", help="Largest request body.")
@click.option("-a", "--alias", help="Name of the model; several with commas between them. Default: the file's.")
@click.option("--tags", help="Tags of the model in the list of models, with commas between them.")
@click.option(
    "-n",
    "--predict",
    "--n-predict",
    "max_tokens",
    type=TokenLimit(0),
    help="Tokens per answer if a request sets no limit. Default: no limit but the context.",
)
@click.option("--chat-template", "template", help="Chat template instead of the model file's: Jinja text, or chatml, command-r or llama3.")
@click.option("--chat-template-file", "template_file", type=click.Path(), help="File with the template.")
@click.option("--chat-template-kwargs", "variables", metavar="JSON", help="Further names that the template knows, as a JSON object.")
@click.option(
    "--reasoning", "-rea", type=click.Choice(["on", "off", "auto"]), default="auto", help="Thinking mode, where the template has one."
)
@click.option(
    "--reasoning-format", type=click.Choice(["auto", "deepseek", "none"]), default="auto", help="none leaves reasoning in the content."
)
@click.option(
    "--cors-origins", default="localhost", show_default=True, help="Pages whose scripts may ask: *, localhost, or a list of origins."
)
@click.option(
    "--allowed-hosts",
    default="",
    help="Further host names that requests may use, besides localhost and the addresses it listens at: a list, *.name for all below a name, or *.",
)
@click.option("--ssl-cert-file", "certificate", type=click.Path(), help="Certificate for HTTPS.")
@click.option("--ssl-key-file", "certificate_key", type=click.Path(), help="Its key.")
@click.option("--no-slots", "show_slots", is_flag=True, flag_value=False, default=True, help="No /slots.")
@click.option("--metrics/--no-metrics", default=True, show_default=True, help="Whether there is /metrics.")
@click.option("--ui/--no-ui", "--webui/--no-webui", "page", default=True, help="Whether there is a page at /.")
@click.option("--spm-infill", "suffix_first", is_flag=True, help="/infill puts the suffix in front of the prefix, as some models want it.")
@click.option("--prefill-assistant/--no-prefill-assistant", default=True, help="Whether an assistant's message at the end is gone on with.")
@sampler_options
@click.option(
    "--share-prefixes", is_flag=True, help="API keys share prompt prefixes, so that one key can find out by timing what another one sent."
)
@click.option("-v", "--verbose", is_flag=True, help="A line per error on stderr, and __verbose in responses.")
@click.option(
    "--synthetic-acceptance",
    "--spec-synth-len",
    "synthetic",
    type=float,
    hidden=True,
    help="Tokens per step: benchmarks only, texts are not the target's.",
)
@click.option(
    "--spec-synth-rates",
    "rates",
    type=Rates(),
    default=(),
    hidden=True,
    help="The share in which the draft of each position is accepted, instead.",
)
@click.option("--jinja/--no-jinja", hidden=True, default=True)
def command(target, draft, options, slots, host, port, api_key, api_key_file, queue_requests, queue_tokens, queue_seconds, drain,
            max_body, alias, tags, max_tokens, template, template_file, variables, reasoning, reasoning_format, cors_origins, allowed_hosts, certificate,
            certificate_key, show_slots, metrics, page, prefill_assistant, suffix_first, share_prefixes, verbose, synthetic, rates, jinja, **more):  # fmt: skip
    """Serves a model over HTTP, as OpenAI, Anthropic and llama.cpp do. `docs/server.md` lists the endpoints.

    -c is the context of each slot. Sampling options are the defaults of requests.
    """
    from ..server import start

    if (why := start.missing()) is not None:
        raise PyspecError(why)
    from ..api import load
    from ..sampling.recommended import recommended
    from ..sampling.sampler import Sampling
    from ..server.access import Hosts, Keys
    from ..server.sampling import Limits
    from ..server.served import NAMED, ServeOptions

    if rates and synthetic is not None:
        raise click.UsageError("--synthetic-acceptance and --spec-synth-rates both say how many drafts are accepted; give one of them")
    wanted = take_sampling(more)
    check_prefix(options)
    source = text_of("chat_template", template, template_file)
    named = _variables(variables)
    hosts = tuple(part.strip() for part in host.split(",") if part.strip()) or ("127.0.0.1",)
    keys = Keys(api_key, api_key_file)  # once: a pipe has its lines once
    Hosts(allowed_hosts)  # before a model is loaded
    _check(hosts, port, certificate, certificate_key)
    start.log_to_stderr(verbose)
    with progress_line() as progress:
        session = load(target, draft, options, progress, prefix_cache=None, prefix_memory=0)
    with session:
        values, refused = recommended(session.target.file.metadata)
        sampling = Sampling(**{**values, **wanted.values})
        notes = [f"{session.target.file.path.name} recommends {what}, which is not supported here" for what in refused]
        context = session.slots_context(slots, only=True)
        if context < session.engine.options.n_ctx:
            notes.append(
                f"each of the {slots} slots has {context} tokens of context, as many as memory has room for: use fewer `slots` for more"
            )
        say(configuration_line(session.configuration(), None, sampling.describe(), notes))
        served = ServeOptions(
            _names(alias), _names(tags), slots, {"on": True, "off": False}.get(reasoning), reasoning_format, named, verbose,
            metrics, show_slots, page, prefill_assistant, suffix_first,
        )  # fmt: skip
        settings = start.Settings(
            keys, hosts, port, slots, replace(options, n_ctx=context), share_prefixes,
            4 * slots if queue_requests is None else queue_requests, queue_tokens, queue_seconds, drain, cors_origins, allowed_hosts, max_body << 20,
            certificate, certificate_key, synthetic, rates, lambda line: say(in_options(line)),
        )  # fmt: skip
        limits = Limits(sampling, max_tokens, context)
        sys.exit(start.serve(session, settings, limits, served, NAMED.get(source or "", source)))


class _Encrypted(Exception):
    """A key that needs a pass phrase."""


def _check(hosts: Sequence[str], port: int, certificate: str | None, key: str | None) -> None:
    """Refuses, before a model is loaded, what the start would refuse later: addresses, a certificate. What is no file, as a pipe, is
    left for the start, which could not read it again."""
    from ..server.sockets import listen

    if key is not None and certificate is None:
        raise click.UsageError("--ssl-key-file is the key of a certificate; name that with --ssl-cert-file")

    def encrypted() -> str:
        raise _Encrypted

    if certificate is not None and not any(map(_is_pipe, (certificate, key or certificate))):
        try:
            for path in (certificate, key or certificate):
                Path(path).open("rb").close()
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, encrypted)
        except _Encrypted:
            if sys.stdin is None or not sys.stdin.isatty():
                raise PyspecError(
                    f"the key {key or certificate} is encrypted, and there is no terminal to ask for its pass phrase; give one without"
                ) from None
        except ssl.SSLError as error:
            pair = certificate if key is None else f"{certificate} with the key {key}"
            raise PyspecError(
                f"HTTPS cannot be served by {pair} ({error.reason or error}); give a certificate and its key as PEM"
            ) from None
        except OSError as error:
            raise PyspecError(f"{error.filename} cannot be read: {error.strerror}; give a certificate and its key as PEM") from None
    for sock in listen(hosts, port):
        sock.close()


def _is_pipe(path: str) -> bool:
    """`<(...)` of a shell, or a device."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(sorted({part.strip() for part in (text or "").split(",") if part.strip()}))


def _variables(text: str | None) -> dict:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise click.UsageError(f"--chat-template-kwargs {text!r} is no JSON object")
    return value
