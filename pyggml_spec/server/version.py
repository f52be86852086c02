"""The version in responses."""

from importlib.metadata import version

VERSION = version("pyggml_spec")
FINGERPRINT = f"b0-pyspec-{VERSION}"
