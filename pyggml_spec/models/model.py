"""What every architecture inherits: the list of tensors that it reads, and the rule that no tensor of a file goes unread without a reason."""

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
STATIC = "a scale for kernels that quantise activations by a fixed one, which neither llama.cpp's nor ours do"


class Model:
    """An architecture. Subclasses say what they read (``tensors``) and what they leave aside and why (``unused``); ``specs`` is not theirs.

    Attributes:
        scaled: matrices that may have a `.scale` beside them (one number, or one for each expert), as files with NVFP4 weights do; llama.cpp
            reads these of every architecture.
        unscaled: those of them whose scale llama.cpp reads and then does not apply.
        biased: matrices that may have a `.bias`.
        ggml_attention: why ggml attends where native kernels run; empty where they do.
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
            raise TypeError(f"{cls.__name__} replaces Model.specs, which refuses unknown tensors; name what it reads in tensors() instead")

    def tensors(self) -> list[Spec]:
        """The tensors that the graph uses."""
        raise NotImplementedError

    def unused(self) -> dict[str, str]:
        """Tensors of the file that no graph uses, by name, with the reason."""
        return {}

    def specs(self) -> list[Spec]:
        """``tensors()`` and the scales and biases beside them, if they and the unused ones are all that the file has.

        A bias or a scale that nobody reads would give wrong text without a word; llama.cpp too refuses a file with tensors left over.

        Raises:
            ModelError: another tensor, by name, or a scale whose meaning is not certain.
        """
        return self._read_and_idle()[0]

    def unused_in_file(self) -> dict[str, str]:
        """The tensors of the file that are left aside, by name, with the reason. Raises what ``specs`` raises."""
        return {name: why for name, why in self._read_and_idle()[1].items() if name in self.file.tensors}

    def _read_and_idle(self) -> tuple[list[Spec], dict[str, str]]:
        specs, unused = self.tensors(), self.unused()
        for spec in [spec for spec in specs if spec.use in (MATMUL, EXPERTS) and spec.source is None]:
            found, more = self._beside(spec)
            specs += found
            unused |= more
        known = {spec.source or spec.name for spec in specs} | unused.keys()
        for name in self.file.tensors:
            if name not in known:
                raise ModelError(
                    f"{self.file.path} has the tensor {name!r}, which {self.arch} models here do not use; the result would be wrong"
                )
        return specs, unused

    def _beside(self, spec: Spec) -> tuple[list[Spec], dict[str, str]]:
        """The scale and bias of a matrix that the file has, and what of it is unused."""
        base, found, unused, tensors = spec.name.removesuffix(".weight"), [], {}, self.file.tensors
        short, scale, bias = base.split(".")[-1], f"{base}.scale", f"{base}.bias"
        quantised = spec.name in tensors and tensors[spec.name].type_name == NVFP4
        if short in self.scaled or (short == "output" and quantised):  # llama.cpp reads the head's for this type only
            if short != "fc":  # which llama.cpp knows a scale of only
                unused[f"{base}.input_scale"] = STATIC
            if scale in tensors and short in self.unscaled:
                self._check_one(scale)
                unused[scale] = "a scale of 1"
            elif scale in tensors:
                found.append(Spec(scale, (spec.shape[2] if spec.use == EXPERTS else 1,), VECTOR, of=spec.name))
        if short in self.biased and bias in tensors:
            if found and quantised and short in FFN:
                raise ModelError(f"{self.file.path} has {bias!r} beside NVFP4 weights with a scale; llama.cpp does not compute that either")
            found.append(Spec(bias, (spec.shape[1],), VECTOR, of=spec.name))
        return found, unused

    def _check_one(self, name: str) -> None:
        with self.file.read(name) as data:
            if self.file.tensors[name].type_name != "f32" or (np.frombuffer(data, np.float32) != 1).any():
                raise ModelError(
                    f"{self.file.path} has the scale {name!r}, which llama.cpp reads and does not apply to {self.arch} models, so what the "
                    "weights are meant to be is not certain; convert the model to a type without scales"
                )
