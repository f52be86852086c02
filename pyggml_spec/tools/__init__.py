"""Library functions of the commands: they return values and print nothing."""

# ggml is loaded before numpy: a CUDA build with its own C++ runtime otherwise breaks symbols of the system's and crashes llama.cpp
from ..ggml import library as _library  # noqa: F401
