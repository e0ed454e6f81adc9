"""Every kernel compiles for GPUs that are not here, with its launch settings: no spills, fits, uses the matrix unit."""

import re

import pytest
import torch
import triton
import triton.language as tl

from m3cp import compiled
from m3cp.kernels import candidates as candidates_op
from m3cp.kernels import merge as merge_op
from m3cp.kernels import score as score_op
from m3cp.kernels import tile
from m3cp.shapes import IndexerShape


@triton.jit
def _greedy_kernel(x_ptr, out_ptr, N: tl.constexpr):
    o = tl.arange(0, N)
    a = tl.load(x_ptr + o)
    b = tl.load(x_ptr + N + o * 2)
    c = tl.load(x_ptr + 3 * N + o * 3)
    total = tl.sum(a * b + c, 0)
    tl.store(out_ptr + o, a * total + b * tl.sum(c, 0) + c)


pytestmark = pytest.mark.skipif(tile.INTERPRETED, reason="compiles kernels: run without TRITON_INTERPRET")
TARGETS = sorted(compiled.TARGETS)
MATRIX = {
    "sm_90": r"wgmma|mma\.sync",
    "gfx942": r"v_mfma_f32_\d+x\d+x\d+_b?f16",
    "gfx950": r"v_mfma_f32_\d+x\d+x\d+_b?f16",
}
POINTERS = {
    "q_ptr": "bf16",
    "cache_ptr": "bf16",
    "table_ptr": "i32",
    "lens_ptr": "i32",
    "scores_ptr": "fp32",
    "state_ptr": "i64",
}


CASTS = {"sm_90": torch.float8_e4m3fn, "gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}  # by an instruction


def launched(target, dtype, groups=1, adaptive=False, staged=False):
    """(constants, setting) of a scoring kernel over such a cache on a target."""
    form = tile.cache_format(dtype, CASTS[target] == dtype)
    setting = tile.setting(form, groups, adaptive, target != "sm_90", staged)
    return dict(FORMAT=form, STAGES=setting.stages, UPCAST=False), setting


def score(target, *, heads=4, query_len=1, requests=16, dim=128, block=128, page_bytes=0, dtype=torch.bfloat16):
    shape = IndexerShape(heads=heads, head_dim=dim, block_size=block)
    cache = torch.empty(2, block, dim, dtype=dtype)
    if page_bytes:
        cache = cache.as_strided((1, block, dim), (page_bytes // 2, dim, 1))
    constants = score_op.constants(shape, heads, heads, 1, query_len, requests, cache, tile.columns(target != "sm_90"))
    options, setting = launched(target, dtype, constants["GROUPS"], staged=True)
    return compiled.build(
        score_op.score_kernel,
        POINTERS
        | {
            "cache_ptr": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "u8"),
            "q_ptr": "fp16" if dtype == torch.float16 else "bf16",
        },
        constants | options,
        target,
        **setting.options,
    )


PAGES = {"pages_ptr": "i32", "attended_ptr": "i32", "table_ptr": "i32"}


def candidates(target, topk, choose, per_block=0):
    constants = dict(
        HEADS=4,
        BLOCK=128,
        TOPK=topk,
        KEEP=candidates_op.kept(topk),
        CHUNK=candidates_op.CHUNK,
        CHOOSE=choose,
        PER_BLOCK=per_block,
    )
    pointers = {"scores_ptr": "fp32", "lens_ptr": "i32", "out_ptr": "i32" if choose else "i64"} | PAGES
    return compiled.build(candidates_op.candidates_kernel, pointers, constants, target, num_warps=candidates_op.WARPS)


def merge(target, topk, world, per_block=0):
    constants = dict(WORLD=world, RANKS=world, TOPK=topk, KEEP=candidates_op.kept(topk), BLOCK=128, PER_BLOCK=per_block)
    pointers = {"keys_ptr": "i64", "out_ptr": "i32", "state_ptr": "i64", "lens_ptr": "i32"} | PAGES
    return compiled.build(merge_op.merge_kernel, pointers, constants, target, num_warps=merge_op.WARPS)


def assert_sound(build):
    assert build.spills == 0, f"{build.target}: {build.spills} spilled registers (of {build.registers})"
    assert build.shared_bytes <= compiled.SHARED_BYTES[build.target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        dict(heads=1, requests=1),
        dict(heads=8, query_len=4),
        dict(heads=4, query_len=8, requests=256),
        dict(dim=64, block=64),
        dict(dtype=torch.float8_e4m3fn),
        dict(dtype=torch.float8_e4m3fnuz),
        pytest.param(dict(dtype=torch.float8_e4m3fnuz, query_len=3), marks=pytest.mark.slow),
        dict(dtype=torch.float8_e4m3fnuz, query_len=8),
        dict(dtype=torch.float16),
    ],
    ids=str,
)
def test_score(target, change):
    build = score(target, **change)
    assert_sound(build)
    assert re.search(MATRIX[target], build.assembly), "no matrix instruction"
    if target == "sm_90":
        # What the setting promises must fit a unit together.
        groups = -(-change.get("heads", 4) * change.get("query_len", 1) // tile.columns(False))
        setting = launched(target, change.get("dtype", torch.bfloat16), groups, staged=True)[1]
        resident = min(compiled.SHARED_BYTES[target] // build.shared_bytes, 65_536 // (32 * setting.options["num_warps"] * build.registers))
        assert resident >= setting.programs_per_unit


@pytest.mark.parametrize("target", TARGETS)
def test_keys_are_loaded_sixteen_bytes_at_a_time(target):
    pattern = {
        "sm_90": r"cp\.async\.cg\.shared\.global.*0x10|ld\.global[.\w]*v4|cp\.async\.cg",
        "gfx942": "(global|buffer)_load_dwordx4",
        "gfx950": "(global|buffer)_load_dwordx4",
    }
    assert re.search(pattern[target], score(target).assembly)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "topk, choose, per_block",
    [(16, True, 0), (16, False, 0), (1, True, 0), (64, False, 0), (64, True, 8), (16, True, 1)],
)
def test_candidates(target, topk, choose, per_block):
    assert_sound(candidates(target, topk, choose, per_block))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("topk, world, per_block", [(16, 2, 0), (16, 8, 0), (1, 1, 0), (64, 16, 8)])
def test_merge(target, topk, world, per_block):
    assert_sound(merge(target, topk, world, per_block))


def test_targets_are_checked():
    with pytest.raises(ValueError, match="target='gfx90a': must be one of gfx950, gfx942, sm_90"):
        compiled.build(merge_op.merge_kernel, {}, {}, "gfx90a")


def test_spills_are_seen():
    """A kernel with too few registers is reported as spilling."""
    constants, pointers = dict(N=4096), {"x_ptr": "fp32", "out_ptr": "fp32"}
    assert compiled.build(_greedy_kernel, pointers, constants, "sm_90", num_warps=1).spills > 0
    assert compiled.build(_greedy_kernel, pointers, constants, "gfx942", num_warps=1, waves_per_eu=8).spills > 0
