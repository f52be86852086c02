"""`python -m pyggml_spec` is `pyspec`."""

from .cli import main

if __name__ == "__main__":
    main()
