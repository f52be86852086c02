"""One exception base class; every message is a sentence that names the value and the remedy."""


class PyspecError(Exception):
    """Base of every error that pyggml_spec raises on purpose."""


class LibraryError(PyspecError):
    """The installed llama-cpp-python is missing, of another version, or mapped twice."""


class DeviceError(PyspecError):
    """A device does not exist, or lacks memory."""


class GGUFError(PyspecError):
    """A file is no GGUF, or is inconsistent."""


class ModelError(PyspecError):
    """A well-formed GGUF that is not supported, or whose tensors do not fit its metadata."""


class PairError(PyspecError):
    """A drafter that does not fit the target."""


class ContextError(PyspecError):
    """A prompt or a request that does not fit the context."""


class PictureError(ContextError):
    """A picture that is damaged, too large, or that this model does not take."""


class SamplingError(PyspecError):
    """A sampling parameter out of range, or an invalid grammar."""


class EngineError(PyspecError):
    """A step failed, or the engine was used in an invalid state."""


class ConstraintError(SamplingError, EngineError):
    """A constraint (schema, grammar, ...) that a generation can no longer follow: too slow, or no token is allowed."""


class HubError(PyspecError):
    """A file of the Hugging Face hub that does not exist, or cannot be fetched."""


class ConvertError(PyspecError):
    """A checkpoint that cannot be converted: unreadable, of an unsupported layout, or for another target."""


class TrainingError(PyspecError):
    """A drafter that cannot be trained: no torch, no texts, or a state of another training."""


class TemplateError(PyspecError):
    """A chat template that is invalid, rejects the conversation, or does something forbidden."""


class PatchError(PyspecError):
    """A llama.cpp patch that does not fit the tree, or a tree that is unavailable."""


class BuildError(PyspecError):
    """llama-cpp-python could not be built or installed. ``log``: the last lines of output."""

    def __init__(self, message: str, log: list[str] | None = None):
        super().__init__(message)
        self.log = log or []
