"""`pyspec`, and `python -m pyggml_spec`."""

import sys


def main() -> None:
    """Entry point: the command line's own, and Ctrl-C before that is there to take it (its imports take 0.1 s)."""
    try:
        from .cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
