"""What every architecture inherits: the list of tensors that it reads, and the rule that no tensor of a file goes unread without a reason."""

from ..errors import ModelError
from ..gguf_io import GGUFFile
from .weights import Spec


class Model:
    """An architecture. Subclasses say what they read (``tensors``) and what they leave aside and why (``idle``); ``specs`` is not theirs."""

    arch: str
    file: GGUFFile

    def __init_subclass__(cls, **more):
        super().__init_subclass__(**more)
        if "specs" in cls.__dict__:
            raise TypeError(f"{cls.__name__} replaces Model.specs, which refuses unknown tensors; name what it reads in tensors() instead")

    def tensors(self) -> list[Spec]:
        """The tensors that the graph uses."""
        raise NotImplementedError

    def idle(self) -> dict[str, str]:
        """Tensors of the file that no graph uses, by name, with the reason."""
        return {}

    def specs(self) -> list[Spec]:
        """``tensors()``, if they and the idle ones are all that the file has.

        A bias or a scale that nobody reads would give wrong text without a word; llama.cpp too refuses a file with tensors left over.

        Raises:
            ModelError: another tensor, by name.
        """
        specs = self.tensors()
        known = {spec.source or spec.name for spec in specs} | self.idle().keys()
        for name in self.file.tensors:
            if name not in known:
                raise ModelError(
                    f"{self.file.path} has the tensor {name!r}, which {self.arch} models here do not use; the result would be wrong"
                )
        return specs
