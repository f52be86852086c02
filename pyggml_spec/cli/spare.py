"""A process for the next model of a router: it has imported what serving needs before it is known which one that is.

Its first line of stdin is a list of JSON, the arguments of `pyspec serve`; a router that ends closes stdin instead.
"""

import json
import sys

from .. import api  # noqa: F401
from ..server import start  # noqa: F401
from ..tools import plan  # noqa: F401
from . import serve  # noqa: F401
from .main import main

if __name__ == "__main__":
    if line := sys.stdin.readline():
        main(["serve", *json.loads(line), "--of-router"])
