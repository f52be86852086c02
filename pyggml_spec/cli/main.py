"""The command group and what every command shares: errors as one sentence, exit codes, interrupts.

Exit codes: 0 done; 1 an error, one sentence on stderr; 2 usage; 3 a check that failed; 130 interrupted; 141 the reader of stdout went away.
"""

import errno
import os
import sys
from typing import ClassVar

import click

from ..errors import PyspecError
from ..suggest import meant

_OUTPUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}  # what a write that nobody caught ends with
EXIT_ERROR, EXIT_CHECK, EXIT_INTERRUPT, EXIT_PIPE = 1, 3, 130, 141


TALKS = {"-cnv", "--conversation", "-sys", "--system-prompt", "-sysf", "--system-prompt-file", "-st", "--single-turn"}  # of llama-cli
LLAMA_CPP = {  # its tools, and words that other programs have for the same
    "llama-cli": "run", "llama-completion": "run", "cli": "run", "complete": "run", "generate": "run", "main": "run", "llama-server": "serve",
    "server": "serve", "start": "serve", "llama-bench": "bench", "llama-batched-bench": "bench --slots", "perplexity": "compare",
    "llama-perplexity": "compare", "show": "inspect", "info": "inspect", "gguf-dump": "inspect", "list": "devices", "fit-params": "plan",
    "rpc-server": "worker", "convert_hf_to_gguf.py": "convert", "pull": "run -hf USER/MODEL", "download": "run -hf USER/MODEL",
}  # fmt: skip


class Commands(click.Group):
    """Imports a command's module only when it is used: `pyspec --help` needs no ggml."""

    names: ClassVar = {  # and what `pyspec --help` says about them
        "run": "Generates text.",
        "chat": "Talks with a model: a line is a turn.",
        "serve": "Serves a model over HTTP, as OpenAI, Anthropic and llama.cpp do.",
        "bench": "Measures speed, or acceptance on real prompts.",
        "doctor": "Says why acceptance is low or speed is missing.",
        "plan": "Says how many bytes a pair will take, before it is loaded.",
        "inspect": "Shows what a GGUF holds and what pyspec would do with it.",
        "compare": "Compares logits with llama.cpp's, or the weights of two files.",
        "convert": "Converts a published drafter in safetensors to GGUF.",
        "experts": "Counts which routed experts a text needs.",
        "devices": "Lists the devices that this build of llama-cpp-python offers.",
        "worker": "Serves this machine's devices to other machines.",
        "build": "Builds llama-cpp-python again, for this processor or for NVIDIA GPUs.",
        "patches": "The patch set for those who build llama.cpp themselves.",
    }

    def list_commands(self, ctx):
        return list(self.names)

    def format_commands(self, ctx, formatter):
        with formatter.section("Commands"):
            formatter.write_dl(list(self.names.items()))

    def get_command(self, ctx, name):
        if name not in self.names:
            return None
        module = __import__(f"pyggml_spec.cli.{name}", fromlist=["command"])
        return module.command

    def resolve_command(self, ctx, args):
        name = args[0]
        if name == "run" and TALKS.intersection(args):
            from .terminal import say

            say("note: a conversation is what `pyspec chat` runs, with the same options")
            args = ["chat", *(arg for arg in args[1:] if arg not in ("-cnv", "--conversation"))]
        elif name.lower().endswith(".gguf"):
            raise click.UsageError(f"{name} is a file and no command; give it with -m: pyspec run -m {name}, or pyspec inspect {name}", ctx)
        elif name not in self.names:
            hint = (
                f"; `pyspec {LLAMA_CPP[name]}` does that here"
                if name in LLAMA_CPP
                else meant(name, self.names) or "; `pyspec --help` lists them"
            )
            raise click.UsageError(f"there is no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would make it 1, which is an error
            _drop_stdout()
            raise click.exceptions.Exit(EXIT_PIPE) from None
        except PyspecError as error:
            from .names import in_options

            error.args = (in_options(str(error), self.get_command(ctx, ctx.invoked_subcommand)),)
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="pyggml_spec", prog_name="pyspec")
def cli():
    """Runs GGUF models with speculative decoding, proves that the tokens are the same, and says why when it is not faster."""


def _drop_stdout() -> None:
    """What is still buffered has nowhere to go; the interpreter must not try again when it ends."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(args: list[str] | None = None) -> None:
    """Entry point of `pyspec`."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names in files can be what the locale cannot write
    try:
        code = cli.main(args, prog_name="pyspec", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPT
    except BrokenPipeError:
        _drop_stdout()
        code = EXIT_PIPE
    except PyspecError as error:
        click.echo(f"pyspec: {error}", err=True)
        code = EXIT_ERROR
    except MemoryError:
        click.echo("pyspec: there is not enough memory; use a smaller -c or a smaller model", err=True)
        code = EXIT_ERROR
    except OSError as error:
        _drop_stdout()
        what = error.filename or ("the output cannot be written" if error.errno in _OUTPUT else "the system refused what was asked of it")
        click.echo(f"pyspec: {what}: {error.strerror or error}", err=True)
        code = EXIT_ERROR
    sys.exit(code or 0)
