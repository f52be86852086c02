"""The table of registers and shared memory: ranges per compute capability, without kernels that are empty there and what the system reserves."""

from kernel_resources import kernels, table

USAGE = """
arch = sm_120a
Resource usage:
 Function void mmsb::mul_mat_sb<(ggml_type)12, 1, mmsb::shape<8, 1, 1, false, false, false>, true>(mmsb::tensor_maps, mmsb::arguments):
  REG:100 STACK:0 SHARED:1152 LOCAL:0 CONSTANT[0]:1832 TEXTURE:0 SURFACE:0 SAMPLER:0
arch = sm_80
Resource usage:
 Common:
  GLOBAL:26792 CONSTANT[4]:88
 Function void mmsb::mul_mat_sb<(ggml_type)12, 1, mmsb::shape<4, 2, 2, true, false, false>, false>(mmsb::tensor_maps, mmsb::arguments):
  REG:24 STACK:40 SHARED:0 LOCAL:0 CONSTANT[0]:1640 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function void mmsb::mul_mat_sb<(ggml_type)12, 1, mmsb::shape<8, 1, 1, false, false, false>, false>(mmsb::tensor_maps, mmsb::arguments):
  REG:87 STACK:0 SHARED:96 LOCAL:0 CONSTANT[0]:1640 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function void mmsb::mul_mat_sb<(ggml_type)8, 2, mmsb::shape<8, 1, 1, false, false, false>, true>(mmsb::tensor_maps, mmsb::arguments):
  REG:138 STACK:1200 SHARED:96 LOCAL:8 CONSTANT[0]:1640 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function moe_step_down(moe_step_arguments, bool):
  REG:56 STACK:0 SHARED:640 LOCAL:0 CONSTANT[0]:689 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function moe_step_down_other(int):
  REG:255 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:689 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_ranges_of_families_without_empty_kernels():
    assert table(kernels(USAGE)).splitlines()[:4] == [
        "| | 8.0 | 12.0 |",
        "|---|---|---|",
        "| `mul_mat_sb` by cp.async | 87-138 / 96 / 0-1,208 | 100 / 128 / 0 |",
        "| `moe_step_down` | 56 / 640 / 0 | - |",
    ]
