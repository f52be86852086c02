"""One exception base class; every message is a sentence that names the value and the remedy."""


class PyspecError(Exception):
    """Base of every error that pyggml_spec raises on purpose."""


class LibraryError(PyspecError):
    """The llama-cpp-python beside this package is missing, of another version, or mapped twice."""


class DeviceError(PyspecError):
    """A device does not exist, or has no memory for what was asked."""


class GGUFError(PyspecError):
    """A file is not a GGUF, or its contents contradict each other."""


class ModelError(PyspecError):
    """A well-formed GGUF that this package cannot run, or whose tensors do not fit its metadata."""


class PairError(PyspecError):
    """A drafter that was not made for the target it is paired with."""


class ContextError(PyspecError):
    """A prompt or a request that does not fit the context."""


class SamplingError(PyspecError):
    """A sampling parameter out of range, or a grammar that is none."""


class EngineError(PyspecError):
    """A step failed, or the engine was used in a way that its state does not allow."""


class ConstraintError(SamplingError, EngineError):
    """A constraint (schema, grammar, ...) that a generation cannot follow any further: it takes too long, or leaves nothing that may come."""


class HubError(PyspecError):
    """A file of the Hugging Face hub that does not exist, or cannot be had now."""


class ConvertError(PyspecError):
    """A checkpoint that cannot be converted: unreadable, of an unsupported layout, or made for another target."""


class TemplateError(PyspecError):
    """A chat template that is wrong, refuses the conversation, or does what a template must not do."""


class PatchError(PyspecError):
    """A patch of the llama.cpp set that does not fit the tree, or a tree that cannot be had."""


class BuildError(PyspecError):
    """llama-cpp-python could not be built or put into place. ``log``: the last lines of what the build said, if it began."""

    def __init__(self, message: str, log: list[str] | None = None):
        super().__init__(message)
        self.log = log or []
