"""On the path of every process of `run_sanitized_tests.py`: loads the extension from SANITIZED_NATIVE."""

import importlib.util
import os
import sys


class Sanitized:
    """Before the finders of installed packages."""

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, os.environ["SANITIZED_NATIVE"]) if name == "pyggml_spec._native" else None


if "SANITIZED_NATIVE" in os.environ:
    sys.meta_path.insert(0, Sanitized())
