"""The installed build of ggml: does it run what this device offers?"""

from ..ggml.device import Device, build_notes
from ..ggml.library import FITNESS, GGML_VERSION
from ..pin import LLAMA_CPP_PYTHON, pip_command
from .report import OK, WARN, Check


def build(device: Device) -> Check:
    """Buffer types that crash, and kernels that could be faster."""
    data = {"features": list(FITNESS.features), "refused": dict(FITNESS.refused)}
    if FITNESS.refused and device.kind == "cpu":
        died = "; ".join(f"products in the buffer type {name} {how}, so it is not used" for name, how in FITNESS.refused.items())
        return Check("build", WARN, died, f"build llama-cpp-python again, without what pip may have kept: {pip_command()}", data=data)
    notes = build_notes(device)
    if any("ggml's own" in note for note in notes):
        return Check(
            "build",
            WARN,
            "blocks go through ggml's own kernels on this GPU",
            "run `pyspec build --cuda`, which builds it with faster ones",
            data=data,
        )
    uses = f", with {' '.join(FITNESS.features)}" if FITNESS.features else ""
    return Check(
        "build", OK, f"llama-cpp-python {LLAMA_CPP_PYTHON}, ggml {GGML_VERSION}{uses}{''.join(f', {note}' for note in notes)}", data=data
    )
