"""A model with the same weights in F32: the reference of its quantised products, up to the rounding of activations."""

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize


def write_twin(model: str | Path, path: str | Path) -> Path:
    """Writes every tensor of ``model`` as F32 (whole numbers as they are), with its metadata. Returns ``path``."""
    reader, path = gguf.GGUFReader(model), Path(path)
    arch = reader.fields["general.architecture"].contents()
    out = gguf.GGUFWriter(path, arch, use_temp_file=False)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        out.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    whole = {gguf.GGMLQuantizationType.I32, gguf.GGMLQuantizationType.I64, gguf.GGMLQuantizationType.F32}
    for tensor in reader.tensors:
        shape, keep = tuple(int(n) for n in reversed(tensor.shape)), tensor.tensor_type in whole
        out.add_tensor_info(
            tensor.name,
            shape,
            tensor.data.dtype if keep else np.dtype(np.float32),
            int(np.prod(shape)) * (tensor.data.itemsize if keep else 4),
        )
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for tensor in reader.tensors:  # one at a time: the twin of a large model is larger than memory
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = tensor.data if tensor.tensor_type in whole else dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        out.write_tensor_data(np.ascontiguousarray(values.reshape(shape)))
    out.close()
    return path
