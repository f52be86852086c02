"""Random LoRA adapters of a target, for tests."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.registry import open_target

ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")  # which adapters leave as they are


def write_adapter(
    path: str | Path,
    target: str | Path,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.1,
    only: Callable[[str], bool] = lambda name: True,
) -> Path:
    """A and B of every matrix of ``target`` for which ``only`` is true, normal numbers of ``size``; F32, every second one F16."""
    rng, count = np.random.default_rng(seed), 0
    with GGUFFile(target) as file:
        writer = gguf.GGUFWriter(path, file.metadata["general.architecture"])
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        for spec in open_target(file).specs():
            name = spec.name.split(".")[-2]
            if spec.use != "matmul" or spec.source is not None or name in ROUTERS or not only(spec.name):
                continue
            n_in, n_out = spec.shape[:2]
            kind, count = (np.float16 if count % 2 else np.float32), count + 1
            for part, shape in (("a", (rank, n_in)), ("b", (n_out, rank))):
                writer.add_tensor(f"{spec.name}.lora_{part}", rng.normal(0, size, shape).astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
