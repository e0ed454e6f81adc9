"""Sparse attention's kernels compile for GPUs that are not here: no spills, fit, use the matrix unit."""

import re

import pytest
import torch
from test_compiled import CASTS, MATRIX, TARGETS, assert_sound

from m3cp import compiled
from m3cp.kernels import attention as attention_op
from m3cp.kernels import tile

pytestmark = pytest.mark.skipif(tile.INTERPRETED, reason="compiles kernels: run without TRITON_INTERPRET")
POINTERS = {"q_ptr": "bf16", "k_ptr": "bf16", "v_ptr": "bf16", "table_ptr": "i32", "lens_ptr": "i32", "ids_ptr": "i32", "parts_ptr": "fp32", "lse_ptr": "fp32"}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_heads, dtype", [(4, torch.bfloat16), (1, torch.float8_e4m3fn), pytest.param(1, torch.float8_e4m3fnuz, marks=pytest.mark.slow)])
def test_attention(target, kv_heads, dtype):
    constants = attention_op.constants(kv_heads, 16, 128, 128, 16, 4)
    form = attention_op.cache_format(dtype, target != "sm_90", CASTS[target] == dtype)
    constants |= dict(UNIT=16 // dtype.itemsize, FORMAT=form, STAGES=attention_op.STAGES, UPCAST=False, scale=0.088)
    pointers = POINTERS | ({"k_ptr": "u8", "v_ptr": "u8"} if dtype.itemsize == 1 else {})
    options = attention_op.options(form, target != "sm_90")
    build = compiled.build(attention_op.attention_kernel, pointers, constants, target, **options)
    assert_sound(build)
    if target == "sm_90" and CASTS[target] == dtype:
        assert compiled.nvidia_programs(build.registers, options["num_warps"], build.shared_bytes, 233_472, 65_536, 2048) >= 2, "two programs a unit"
    assert len(re.findall(MATRIX[target], build.assembly)) >= 2, "two products on the matrix unit"


@pytest.mark.parametrize("target", TARGETS)
def test_merging_parts(target):
    pointers = {"parts_ptr": "fp32", "lse_ptr": "fp32", "out_ptr": "bf16"}
    constants = dict(GROUP=16, DIM=128, SPLITS=16, LANES=16, v_scale=1.0)
    assert_sound(compiled.build(attention_op.merge_parts_kernel, pointers, constants, target, num_warps=1))
