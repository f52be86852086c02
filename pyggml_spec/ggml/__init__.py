"""Binding to the ggml that llama-cpp-python ships: library, devices, graphs, step inputs. Nothing above this folder sees cffi handles
other than opaque tensors."""
