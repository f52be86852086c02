"""Model files with more tensors than their writer gave them: unknown ones, and scales and biases alongside matrices."""

import numpy as np
from gguf_io.build import Model as Parts

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.registry import DRAFTERS, open_drafter, open_target
from pyggml_spec.models.weights import EXPERTS, MATMUL


def with_tensor(model: Parts, name: str, values: np.ndarray) -> Parts:
    model.tensors[name] = [values.shape[::-1], 0, values.astype(np.float32).tobytes()]
    return model


def opened(file):
    return (open_drafter if file.get("general.architecture", str) in DRAFTERS else open_target)(file)


def dressed(path, scales=True, biases=True):
    """The file with a scale, an input scale and a bias alongside every matrix that may have one, and how many of each."""
    parts, rng, counts = Parts(path), np.random.default_rng(11), {"scale": 0, "bias": 0}
    with GGUFFile(path) as file:
        model = opened(file)
        for spec in model.tensors():
            base, short = spec.name.removesuffix(".weight"), spec.name.split(".")[-2]
            if spec.use not in (MATMUL, EXPERTS) or spec.source is not None:
                continue
            quantised = file.tensors[spec.name].type_name == "nvfp4"
            may = (short in model.scaled or (short == "output" and quantised)) and short not in model.unscaled
            if scales and may:
                values = rng.uniform(0.5, 1.5, spec.shape[2] if spec.use == EXPERTS else 1)
                with_tensor(parts, f"{base}.scale", values)
                if short != "fc":
                    with_tensor(parts, f"{base}.input_scale", 2 * values)
                counts["scale"] += 1
            if biases and short in model.biased and not (quantised and scales and short.startswith("ffn_")):
                with_tensor(parts, f"{base}.bias", rng.normal(0, 0.3, spec.shape[1]))
                counts["bias"] += 1
    return parts.write(path), counts
