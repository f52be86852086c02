"""What stands behind the commands: library functions that return values and print nothing."""

# ggml is mapped before numpy is: a CUDA build that carries a C++ runtime of its own otherwise takes over symbols of the system's, and
# llama.cpp dies while it prints a number (seen with pyspec compare on a GPU)
from ..ggml import library as _library  # noqa: F401
