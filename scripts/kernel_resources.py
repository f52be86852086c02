#!/usr/bin/env python3
"""Registers, shared memory and stack of the kernels of patches/ for each compute capability in a CUDA library or in objects: a Markdown table.

    kernel_resources.py LIBRARY_OR_OBJECT...      cuobjdump (CUDA toolkit, or pip install nvidia-cuda-cuobjdump) and c++filt are on PATH

A row is a family of kernels, a cell the range over its instances. A kernel that is nothing but NO_DEVICE_CODE for a compute capability is not counted there.
"""

import re
import subprocess
import sys
from collections import defaultdict
from typing import NamedTuple

FAMILIES = {  # and how the names of their kernels begin
    "`mul_mat_sb` by TMA": r"mmsb::mul_mat_sb<.*shape<\d, \d, \d, true, false",
    "`mul_mat_sb` by TMA and wgmma": r"mmsb::mul_mat_sb<.*shape<\d, \d, \d, true, true",
    "`mul_mat_sb` by cp.async": r"mmsb::mul_mat_sb<.*shape<\d, \d, \d, false",
    "`mul_mat_lb`": "mmlb::mul_mat_lb<",
    "`products` of MXFP4 and Q8_0 by rows": "mmrow::products<",
    "`flash_attn_ext_quantized`, heads of 128": r"fattn_quantized::flash_attn_ext_quantized<\(ggml_type\)\d+, 128",
    "the same, heads of 256, 8 warps": r"fattn_quantized::flash_attn_ext_quantized<\(ggml_type\)\d+, 256, \d+, \d+, 8>",
    "the same, 4 warps": r"fattn_quantized::flash_attn_ext_quantized<\(ggml_type\)\d+, 256, \d+, \d+, 4>",
    **{f"`{name}`": rf"(\w+::)?{name}[<(]" for name in (
        "flash_attn_ext_quantized_90", "flash_attn_ext_quantized_row", "flash_attn_quantized_row_sum", "flash_attn_ext_f16", "flash_attn_ext_vec", "delta_front",
        "delta_step", "gated_delta_net_pieces", "delta_chunks::prepare", "delta_chunks::scan", "moe_step_router", "moe_step_gate_up", "moe_step_down", "moe_route",
        "shared_expert", "shared_expert_norm_convert", "rms_norm_mul_convert", "gated_norm_convert", "gate_convert", "convert_activations", "convert_tokens",
        "group_pairs", "sort_pairs", "rms_norm_mul_in_registers", "rope_rows", "qkv_rows", "kv_mask", "draw_of_pieces", "draw_of_found", "argmax_of_pieces",
        "k_set_rows", "k_set_rows_quant", "mul_mat_vec_q", "mul_mat_q",
    )},
}  # fmt: skip
EMPTY_REGISTERS, EMPTY_STACK = 32, 40  # what the message of NO_DEVICE_CODE takes: at most, exactly
RESERVED = 1024  # bytes of shared memory that cuobjdump counts from 9.0 on, which no kernel can use
CAPTION = """Registers / static shared memory / stack, of which spills are a part, in bytes. Dynamic shared memory is not in an object and not in this table.
-: no code, or not among the files."""
PARTS = re.compile(r"^arch = sm_(\d+)|^ Function (.*):\n  REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.MULTILINE)


class Kernel(NamedTuple):
    capability: int
    name: str
    registers: int
    shared: int
    stack: int


def kernels(usage: str) -> list[Kernel]:
    """Those in the demangled output of `cuobjdump --dump-resource-usage`, without empty ones."""
    found, capability = [], 0
    for part in PARTS.finditer(usage):
        if part[1]:
            capability = int(part[1])
            continue
        registers, stack, shared, local = map(int, part.groups()[2:])
        if registers > EMPTY_REGISTERS or stack != EMPTY_STACK:
            own = max(shared - RESERVED, 0) if capability >= 90 else shared
            found.append(Kernel(capability, part[2].removeprefix("void "), registers, own, stack + local))
    return found


def table(found: list[Kernel]) -> str:
    cells = defaultdict(list)
    for kernel in found:
        for family, name in FAMILIES.items():
            if re.match(name, kernel.name):
                cells[family, kernel.capability].append(kernel)

    def cell(of: list[Kernel]) -> str:
        spans = [(min(values), max(values)) for values in zip(*(kernel[2:] for kernel in of), strict=True)]
        return " / ".join(f"{low:,}" if low == high else f"{low:,}-{high:,}" for low, high in spans) or "-"

    capabilities = sorted({kernel.capability for kernel in found})
    lines = ["| | " + " | ".join(f"{one // 10}.{one % 10}" for one in capabilities) + " |", "|---" * (len(capabilities) + 1) + "|"]
    for family in FAMILIES:
        row = [cell(cells[family, one]) for one in capabilities]
        if any(text != "-" for text in row):
            lines.append(f"| {family} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", CAPTION])


def main() -> None:
    found: list[Kernel] = []
    for path in sys.argv[1:] or sys.exit(__doc__):
        usage = subprocess.run(["cuobjdump", "--dump-resource-usage", path], check=True, capture_output=True).stdout
        found += kernels(subprocess.run(["c++filt"], check=True, input=usage, capture_output=True).stdout.decode())
    print(table(found) if found else sys.exit("No kernels are in these files."))


if __name__ == "__main__":
    main()
