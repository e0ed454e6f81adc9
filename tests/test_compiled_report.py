"""The resource report of the node kit: every kernel of the decode path for gfx950, printed as a table."""

import pytest

from m3cp import compiled
from m3cp.kernels import tile

pytestmark = pytest.mark.skipif(tile.INTERPRETED, reason="compiles kernels: run without TRITON_INTERPRET")
HEAVY = ("one launch: TP", "one launch: CP, replicated", "one launch: CP, gathered, fp8")  # the gathered one in bf16, which other tests compile too, stands for them
LDS_BYTES = 160 * 1024


def sound(found, capsys):
    with capsys.disabled():
        print("\n" + "\n".join(compiled.table("gfx950", found)))
    for line in found:
        assert line.spills == 0 and 0 < line.registers <= 512 and line.shared_bytes <= LDS_BYTES, line
        assert line.programs >= 1 and line.waves <= 32 and line.programs * line.shared_bytes <= LDS_BYTES


@pytest.mark.slow
def test_every_kernel_for_gfx950_fits_and_spills_nothing(capsys):
    found = compiled.resources("gfx950", without=HEAVY)
    sound(found, capsys)
    assert {r.kernel for r in found} == set(compiled.kernels("gfx950")) - set(HEAVY)
    text = compiled.table("gfx950", found)
    assert all(word in text[0] for word in ("VGPRs", "LDS bytes", "programs/CU", "waves/CU", "spills"))
    assert len(text) == len(found) + 1 and all(line.startswith(r.kernel) for line, r in zip(text[1:], found, strict=True))


@pytest.mark.slow
def test_the_heavy_ones_too(capsys):
    found = compiled.resources("gfx950", without=tuple(name for name in compiled.kernels("gfx950") if name not in HEAVY))
    sound(found, capsys)
    assert {r.kernel for r in found} == set(HEAVY)


@pytest.mark.parametrize(
    "registers, warps, shared, programs",
    [(128, 4, 0, 4), (129, 4, 0, 3), (184, 4, 0, 2), (512, 4, 0, 1), (8, 4, 0, 8), (64, 4, 65_536, 2), (64, 1, 8, 32)],
)
def test_occupancy_of_a_compute_unit(registers, warps, shared, programs):
    """512 VGPRs a lane and SIMD in units of 8, at most eight waves a SIMD; 184 VGPRs leave room for two programs."""
    assert compiled.amd_programs(registers, warps, shared, LDS_BYTES) == programs


def test_occupancy_of_a_multiprocessor():
    assert compiled.nvidia_programs(128, 4, 0, 233_472, 65_536, 2048) == 4
    assert compiled.nvidia_programs(64, 4, 69_888, 233_472, 65_536, 2048) == 3
    assert compiled.nvidia_programs(16, 4, 0, 233_472, 65_536, 2048) == 16
    assert compiled.nvidia_programs(16, 1, 0, 233_472, 65_536, 2048) == 32  # programs, whatever their size


def test_a_constant_without_a_value_is_refused():
    """It would be compiled as a run-time value, and the report would be about another kernel: seen, 416 bytes of spills that no launch has."""
    kernel, pointers, constants, options = compiled.kernels("sm_90")["one launch: TP"]
    lacking = {k: v for k, v in constants.items() if k not in ("ADAPTIVE", "GATHER")}
    with pytest.raises(ValueError, match="fused_kernel: must hold GATHER, ADAPTIVE too"):
        compiled.build(kernel, pointers, lacking, "sm_90", **options)
    for target in compiled.TARGETS:
        for name, (kernel, _, given, _) in compiled.kernels(target).items():
            assert {p.name for p in kernel.params if p.is_constexpr} <= set(given), (target, name)
