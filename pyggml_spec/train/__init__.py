"""`pyspec train`: trains a drafter for a GGUF on that file's own answers. Needs torch (the extra `pyggml-spec[train]`), which nothing else imports.

Importing it refuses an order that crashes: torch with CUDA behind a ggml with CUDA.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from ..errors import TrainingError

_found = find_spec("torch")
_behind = "torch" not in sys.modules and "pyggml_spec.ggml.library" in sys.modules
if _behind and _found is not None and [*Path(str(_found.origin)).parent.glob("lib/*torch_cuda*")]:
    raise TrainingError("import torch before anything that loads ggml: with CUDA builds of both, the other order crashes the process")
