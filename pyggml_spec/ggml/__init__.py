"""Binding to the ggml of llama-cpp-python: library, devices, graphs, step inputs. Higher layers see only opaque tensors."""
