"""The command group, and what all commands share: one-sentence errors, exit codes, interrupts.

Exit codes: 0 done; 1 error, one sentence on stderr; 2 usage; 3 a check failed; 130 interrupted; 141 stdout was closed.
"""

import errno
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import ClassVar

import click

from ..errors import PyspecError
from ..suggest import meant
from .terminal import say

_OUTPUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}  # raised by an uncaught write error
EXIT_ERROR, EXIT_CHECK, EXIT_INTERRUPT, EXIT_PIPE = 1, 3, 130, 141


TALKS = {"-cnv", "--conversation", "-sys", "--system-prompt", "-sysf", "--system-prompt-file", "-st", "--single-turn"}  # of llama-cli
LLAMA_CPP = {  # llama.cpp's tools, and names used by other programs
    "llama-cli": "run", "llama-completion": "run", "cli": "run", "complete": "run", "generate": "run", "main": "run", "llama-server": "serve",
    "server": "serve", "start": "serve", "llama-bench": "bench", "llama-batched-bench": "bench --slots", "perplexity": "compare",
    "llama-perplexity": "compare", "show": "inspect", "info": "inspect", "gguf-dump": "inspect", "ls": "list", "stop": "ps", "fit-params": "plan",
    "rpc-server": "worker", "convert_hf_to_gguf.py": "convert", "download": "pull",
}  # fmt: skip


# what commands that load models import while a GPU starts, and on the first start with llama.cpp's libraries a child process tries those
MEANWHILE = {
    "run": ("numpy",),
    "chat": ("numpy",),
    "serve": ("numpy", "uvicorn", "starlette.applications", "msgspec", "prometheus_client", "httptools"),
}


def _begin(args: list[str]) -> None:
    from ..ggml import gpu_start, probe

    gpu_start.begin(args[1:], probe.libraries())
    probe.begin()
    for name in MEANWHILE[args[0]]:
        with suppress(ImportError):  # a package for `serve` that is not installed: the command says so
            import_module(name)


class Commands(click.Group):
    """Imports a command's module on use: `pyspec --help` needs no ggml."""

    names: ClassVar = {  # and its line in `pyspec --help`
        "run": "Generates text.",
        "chat": "Chats with a model.",
        "serve": "Serves models over HTTP with the APIs of OpenAI, Anthropic, Ollama and llama.cpp.",
        "pull": "Downloads a model from the Hugging Face hub.",
        "list": "Lists downloaded models.",
        "rm": "Deletes downloaded models.",
        "ps": "Lists the models of a running server.",
        "bench": "Measures speed, or acceptance on real prompts.",
        "doctor": "Finds causes of low acceptance and missing speed.",
        "plan": "Predicts the memory of a pair without loading it.",
        "drafters": "Lists drafters for a target: what is there, what is published, and what fits.",
        "inspect": "Shows the contents of a GGUF and how pyspec uses it.",
        "compare": "Compares logits with llama.cpp's, or the weights of two files.",
        "convert": "Converts a published drafter in safetensors to GGUF.",
        "train": "Trains a drafter for a GGUF on the file's own answers.",
        "experts": "Profiles which routed experts a text uses.",
        "devices": "Lists the devices of this build of llama-cpp-python.",
        "worker": "Serves this machine's devices to other machines.",
        "build": "Builds llama-cpp-python for this processor or for NVIDIA GPUs.",
        "patches": "The patch set for builds of llama.cpp.",
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
            say("note: `pyspec chat` runs conversations, with the same options")
            args = ["chat", *(arg for arg in args[1:] if arg not in ("-cnv", "--conversation"))]
        elif name.lower().endswith(".gguf"):
            raise click.UsageError(f"{name} is a file, not a command; give it with -m: pyspec run -m {name}, or pyspec inspect {name}", ctx)
        elif name not in self.names:
            hint = f"; use `pyspec {LLAMA_CPP[name]}`" if name in LLAMA_CPP else meant(name, self.names) or "; `pyspec --help` lists them"
            raise click.UsageError(f"there is no command {name!r}{hint}", ctx)
        if args[0] in MEANWHILE:
            _begin(args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would exit with 1, which is an error
            _drop_stdout()
            raise click.exceptions.Exit(EXIT_PIPE) from None
        except PyspecError as error:
            from .options import in_options

            error.args = (in_options(str(error), self.get_command(ctx, ctx.invoked_subcommand)),)
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="pyggml_spec", prog_name="pyspec")
def cli():
    """Runs GGUF models with speculative decoding, bit-equal to llama.cpp."""


def _drop_stdout() -> None:
    """Drops buffered output, so that the interpreter does not write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fill_streams() -> None:
    """/dev/null in place of streams that a daemon starts without: files and connections would get their numbers, and what libraries print there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout, sys.stderr = (file or open(os.devnull, "w") for file in (sys.stdout, sys.stderr))  # noqa: SIM115


def main(args: list[str] | None = None) -> None:
    """Entry point of `pyspec`."""
    _fill_streams()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names in files may not fit the locale
    try:
        code = cli.main(args, prog_name="pyspec", standalone_mode=False)
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
    except (PyspecError, MemoryError, OSError) as error:
        code, said = EXIT_ERROR, str(error)
        if isinstance(error, MemoryError):
            said = "there is not enough memory; use a smaller -c or a smaller model"
        elif isinstance(error, OSError):
            _drop_stdout()
            what = error.filename or ("the output cannot be written" if error.errno in _OUTPUT else "the system refused the operation")
            said = f"{what}: {error.strerror or error}"
        say(f"pyspec: {said}")
    sys.exit(code or 0)
