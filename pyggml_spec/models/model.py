"""Base of all architectures: the list of tensors, and the rule that every tensor of a file is used or listed as unused."""

from typing import Any

import numpy as np

from ..errors import ModelError
from ..gguf_io import GGUFFile
from .weights import EXPERTS, MATMUL, VECTOR, Spec

ATTENTION = ("attn_q", "attn_k", "attn_v")
FFN = ("ffn_gate", "ffn_up", "ffn_down")
SHARED, EXPERT = tuple(f"{name}_shexp" for name in FFN), tuple(f"{name}_exps" for name in FFN)
SCALED = (*ATTENTION, "attn_output", "attn_qkv", "attn_gate", *FFN, *SHARED, *EXPERT, "ssm_out", "ssm_alpha", "ssm_beta")
NVFP4 = "nvfp4"
STATIC = "a scale for kernels with static activation quantisation, which neither llama.cpp nor pyggml_spec has"


class Model:
    """An architecture. Subclasses implement ``tensors`` and ``unused``, not ``specs``.

    Attributes:
        scaled: matrices that may have a `.scale` (one number, or one per expert), as NVFP4 files do.
        unscaled: those whose scale llama.cpp reads but does not apply.
        biased: matrices that may have a `.bias`.
        ggml_attention: reason for ggml's attention where native kernels run; empty without one.
    """

    arch: str
    file: GGUFFile
    scaled: tuple[str, ...] = SCALED
    unscaled: frozenset[str] = frozenset()
    biased: tuple[str, ...] = ()
    ggml_attention = ""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "specs" in cls.__dict__:
            raise TypeError(f"{cls.__name__} overrides Model.specs, which refuses unknown tensors; list its tensors in tensors() instead")

    def tensors(self) -> list[Spec]:
        """The tensors that the graph uses."""
        raise NotImplementedError

    def unused(self) -> dict[str, str]:
        """Tensors of the file that no graph uses, by name, with the reason."""
        return {}

    def specs(self) -> list[Spec]:
        """``tensors()`` with their scales and biases. As in llama.cpp, any other tensor of the file is an error unless listed as unused.

        Raises:
            ModelError: an unknown tensor, or an ambiguous scale.
        """
        return self._specs_and_unused()[0]

    def unused_in_file(self) -> dict[str, str]:
        """The unused tensors that the file has, with the reason. Raises as ``specs``."""
        return {name: why for name, why in self._specs_and_unused()[1].items() if name in self.file.tensors}

    def _specs_and_unused(self) -> tuple[list[Spec], dict[str, str]]:
        specs, unused = self.tensors(), self.unused()
        for spec in [spec for spec in specs if spec.use in (MATMUL, EXPERTS) and spec.source is None]:
            found, more = self._scale_and_bias(spec)
            specs += found
            unused |= more
        known = {spec.source or spec.name for spec in specs} | unused.keys()
        for name in self.file.tensors:
            if name not in known:
                raise ModelError(
                    f"{self.file.path} has the tensor {name!r}, which {self.arch} models here do not use; the result would be wrong"
                )
        return specs, unused

    def _scale_and_bias(self, spec: Spec) -> tuple[list[Spec], dict[str, str]]:
        """Specs of the matrix's scale and bias, and those of them that are unused."""
        base, found, unused, tensors = spec.name.removesuffix(".weight"), [], {}, self.file.tensors
        short, scale, bias = base.split(".")[-1], f"{base}.scale", f"{base}.bias"
        quantised = spec.name in tensors and tensors[spec.name].type_name == NVFP4
        if short in self.scaled or (short == "output" and quantised):  # as llama.cpp does
            if short != "fc":
                unused[f"{base}.input_scale"] = STATIC
            if scale in tensors and short in self.unscaled:
                with self.file.read(scale) as data:
                    if tensors[scale].type_name != "f32" or (np.frombuffer(data, np.float32) != 1).any():
                        raise ModelError(
                            f"{self.file.path} has the scale {scale!r}, which llama.cpp reads and does not apply to {self.arch} models, so what "
                            "the weights are meant to be is not certain; convert the model to a type without scales"
                        )
                unused[scale] = "a scale of 1"
            elif scale in tensors:
                found.append(Spec(scale, (spec.shape[2] if spec.use == EXPERTS else 1,), VECTOR, of=spec.name))
        if short in self.biased and bias in tensors:
            if found and quantised and short in FFN:
                raise ModelError(f"{self.file.path} has {bias!r} and NVFP4 weights with a scale, which llama.cpp does not support either")
            found.append(Spec(bias, (spec.shape[1],), VECTOR, of=spec.name))
        return found, unused
