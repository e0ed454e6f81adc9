"""Prefill's scoring kernel compiles for GPUs that are not here: no spills, fits, uses the matrix unit."""

import re

import pytest
import torch
from test_compiled import MATRIX, TARGETS, assert_sound, launched

from m3cp import compiled
from m3cp.kernels import prefill as prefill_op
from m3cp.kernels import tile
from m3cp.shapes import IndexerShape

pytestmark = pytest.mark.skipif(tile.INTERPRETED, reason="compiles kernels: run without TRITON_INTERPRET")
POINTERS = {"cache_ptr": "bf16", "q_ptr": "bf16", "table_ptr": "i32", "lens_ptr": "i32", "starts_ptr": "i32", "scores_ptr": "fp32", "rows_ptr": "i32", "state_ptr": "i64"}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("heads, requests, dtype", [(4, 16, torch.bfloat16), (2, 256, torch.float8_e4m3fn)])
def test_prefill(target, heads, requests, dtype):
    cache = torch.empty(2, 128, 128, dtype=dtype)
    constants = prefill_op.constants(IndexerShape(), heads, requests, cache, tile.columns(target != "sm_90"))
    options = launched(target, dtype)[0] | dict(STAGES=prefill_op.STAGES)
    pointers = POINTERS | ({"cache_ptr": "u8"} if dtype.itemsize == 1 else {})
    build = compiled.build(prefill_op.prefill_kernel, pointers, constants | options, target, num_warps=prefill_op.WARPS)
    assert_sound(build)
    assert re.search(MATRIX[target], build.assembly), "no matrix instruction"
