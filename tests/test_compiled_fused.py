"""The one-launch form and the symmetric gather, compiled for three GPUs: resources, and the spelling of their polls."""

import re

import pytest
import torch
from test_compiled import MATRIX, TARGETS, assert_sound, launched

from m3cp import compiled
from m3cp.kernels import fused as fused_op
from m3cp.kernels import gather as gather_op
from m3cp.kernels import tile
from m3cp.kernels.candidates import kept
from m3cp.kernels.score import constants
from m3cp.shapes import IndexerShape

pytestmark = pytest.mark.skipif(tile.INTERPRETED, reason="compiles kernels: run without TRITON_INTERPRET")
WORDS = {name: "i64" for name in ("words_ptr", "peers_ptr", "parts_ptr", "counters_ptr", "state_ptr")}
POINTERS = {"q_ptr": "bf16", "cache_ptr": "bf16", "table_ptr": "i32", "lens_ptr": "i32", "out_ptr": "i32"} | WORDS
PAGES = {"pages_ptr": "i32", "attended_ptr": "i32"}
REGISTERS = {
    "sm_90": 65_536 // 128,
    "gfx942": 512,
    "gfx950": 512,
}  # of a unit, a thread of four warps (a lane of a SIMD)


def fused(target, *, exchange=True, gather=False, phase=fused_op.ONE_LAUNCH, presence=False, dtype=torch.bfloat16, adaptive=False, per_block=0, query_len=1):
    """The kernel of TP (no exchange) or of one rank of two, for M3's shape and 16 requests."""
    shape = IndexerShape()
    cache = torch.empty(2, 128, 128, dtype=dtype)
    fixed = constants(shape, 4, 2 if exchange else 4, 2 if exchange else 1, query_len, 16, cache, tile.columns(target != "sm_90"))
    given, setting = launched(target, dtype, fixed["GROUPS"], adaptive)
    options = dict(
        KEEP=kept(16),
        PHASE=phase,
        EXCHANGE=exchange,
        GATHER=gather,
        PRESENCE=presence,
        ADAPTIVE=adaptive,
    )
    options |= given
    options |= {"PER_BLOCK": per_block} if per_block else fused_op.NO_PAGES
    pointers = POINTERS | ({"cache_ptr": "u8"} if dtype.itemsize == 1 else {}) | (PAGES if per_block else {})
    return compiled.build(fused_op.fused_kernel, pointers, fixed | options, target, **setting.options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_one_launch(target, adaptive):
    build = fused(target, gather=True, adaptive=adaptive, presence=adaptive)
    assert_sound(build)
    assert re.search(MATRIX[target], build.assembly), "no matrix instruction"
    # Programs that wait need those they wait for: a unit must hold one at least, and three where they are promised.
    resident = min(compiled.SHARED_BYTES[target] // build.shared_bytes, REGISTERS[target] // build.registers)
    assert resident >= (launched(target, torch.bfloat16)[1].programs_per_unit if target == "sm_90" else 2 if target == "gfx950" else 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, pytest.param(torch.float8_e4m3fnuz, marks=pytest.mark.slow)], ids=str)
def test_one_launch_over_fp8(target, dtype):
    build = fused(target, gather=True, dtype=dtype)
    assert_sound(build)
    assert compiled.SHARED_BYTES[target] >= build.shared_bytes and REGISTERS[target] >= build.registers


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "dtype, query_len, adaptive",
    [
        (torch.bfloat16, 4, False), (torch.bfloat16, 4, True), (torch.bfloat16, 8, False),
        (torch.float8_e4m3fn, 4, False), (torch.float8_e4m3fn, 1, True),
    ],
)  # fmt: skip
def test_more_columns_and_adaptive(target, dtype, query_len, adaptive):
    build = fused(target, gather=True, dtype=dtype, query_len=query_len, adaptive=adaptive)
    assert_sound(build)


@pytest.mark.parametrize(
    "query_len, adaptive",
    [pytest.param(5, False, marks=pytest.mark.slow), (8, False), pytest.param(3, True, marks=pytest.mark.slow), pytest.param(8, True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("way", [dict(gather=True), pytest.param(dict(exchange=False), marks=pytest.mark.slow)], ids=["gathered", "TP"])
def test_fp8_columns_that_four_warps_spill(query_len, adaptive, way):
    """At 255 registers of four warps these spilled up to 104 bytes on sm_90."""
    assert launched("sm_90", torch.float8_e4m3fn, -(-4 * query_len // 8), adaptive)[1].options["num_warps"] == 8
    assert_sound(fused("sm_90", dtype=torch.float8_e4m3fn, query_len=query_len, adaptive=adaptive and way.get("gather", False), **way))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("phase", [fused_op.PUSH, fused_op.CHOOSE])
def test_two_launches(target, phase):
    assert_sound(fused(target, phase=phase, gather=True, presence=True))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(dict(gather=True), id="gathered"),
        pytest.param(dict(phase=fused_op.CHOOSE, gather=True, presence=True), id="two launches"),
        pytest.param(dict(exchange=False), id="TP", marks=pytest.mark.slow),
        pytest.param(dict(gather=True, adaptive=True), id="adaptive", marks=pytest.mark.slow),
        pytest.param(dict(gather=True, per_block=1), id="whole blocks", marks=pytest.mark.slow),
        pytest.param(dict(gather=True, dtype=torch.float8_e4m3fn), id="fp8", marks=pytest.mark.slow),
    ],
)
def test_page_tables_take_no_program_from_a_unit(target, setting):
    """Grids are made for the kernel without page tables: with them as many programs must be resident."""
    paged, plain = fused(target, **({"per_block": 8} | setting)), fused(target, **{k: v for k, v in setting.items() if k != "per_block"})
    assert_sound(paged)
    resident = [
        min(4, compiled.SHARED_BYTES[target] // b.shared_bytes, REGISTERS[target] // b.registers) for b in (paged, plain)
    ]
    assert resident[0] >= resident[1]


@pytest.mark.parametrize("target", TARGETS)
def test_polls_and_pushes_are_coherent(target):
    """Polls must not stop at a stale line, nor pushes in a die's L2: both vendors' spellings are in the code."""
    pointers = {
        "payload_ptr": "i32",
        "out_ptr": "i32",
        "words_ptr": "i64",
        "peers_ptr": "i64",
        "counters_ptr": "i64",
        "state_ptr": "i64",
    }
    gather = compiled.build(
        gather_op.gather_kernel, pointers, dict(CHUNK=gather_op.CHUNK), target, num_warps=gather_op.WARPS
    )
    assert_sound(gather)
    for build in (gather, fused(target, phase=fused_op.PUSH, gather=True, presence=True)):
        if target == "sm_90":
            assert re.search(r"ld\.volatile\.global\S*64", build.assembly) and re.search(
                r"st\.global\.wt\S*64", build.assembly
            )
        else:
            assert re.search(r"_load_dwordx[24]\b.* sc0 sc1", build.assembly) and re.search(
                r"_store_dwordx[24]\b.* sc0 sc1", build.assembly
            )
