"""Kernels compiled for GPUs that need not be here: resources and assembly, for the tests and the node kit."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = {"gfx950": ("hip", "gfx950", 64), "gfx942": ("hip", "gfx942", 64), "sm_90": ("cuda", 90, 32)}
SHARED_BYTES = {"gfx950": 160 * 1024, "gfx942": 64 * 1024, "sm_90": 227 * 1024}  # a workgroup may use (vendors' manuals)


@dataclass(frozen=True)
class Build:
    """What a compiler made of one kernel and launch setting: registers a thread, spills, shared bytes, text.

    `spills` go to memory: vector registers and private bytes on AMD, local bytes on NVIDIA. AMD's scalar registers
    spill into lanes of vector registers instead, without memory traffic: `scalar_spills`.
    """

    target: str
    registers: int
    spills: int
    shared_bytes: int
    assembly: str
    scalar_spills: int = 0
    ir: str = ""  # Triton's own, with layouts


def build(kernel, pointers: dict[str, str], constants: dict[str, Any], target: str, **options: Any) -> Build:
    """Compile a jitted kernel.

    Args:
        kernel: a `triton.jit` function (not under the interpreter).
        pointers: element type of each pointer argument, such as {"cache_ptr": "bf16"}; every other argument that is
            not in `constants` is an int32.
        constants: values of the constexpr arguments.
        target: "gfx950", "gfx942" or "sm_90".
        options: launch settings: num_warps, num_stages.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise ValueError(f"target={target!r}: must be one of {', '.join(TARGETS)}")
    signature = {
        name: "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else "i32" for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()})
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    if target == "sm_90":
        registers, spills = _cubin_resources(made.asm["cubin"])
        return Build(target, registers, spills, made.metadata.shared, made.asm["ptx"], ir=made.asm["ttgir"])
    text = made.asm["amdgcn"]
    registers, vector, private, scalar = (
        int(re.search(rf"\.{name}:\s*(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size", "sgpr_spill_count")
    )
    return Build(target, registers, vector + private, made.metadata.shared, text, scalar, made.asm["ttgir"])


def resident_programs(kernel, num_warps: int, device) -> int:
    """Programs of a compiled kernel that a compute unit of `device` holds at once, by registers, shared memory, threads.

    Args:
        kernel: what launching or warming a jitted kernel returns.

    Register files and allocation units are the vendors': CUDA's occupancy rules for compute capability 9.0 (registers
    a warp in units of 256, 1 KB of shared memory a block reserved), CDNA's 512 VGPRs a lane and SIMD in units of 8.
    """
    import torch

    kernel._init_handles()
    properties = torch.cuda.get_device_properties(device)
    registers = max(1, kernel.n_regs)
    if torch.version.hip:
        waves = min(8, 512 // (-(-registers // 8) * 8)) * 4
        shared = SHARED_BYTES.get(properties.gcnArchName.split(":")[0], 64 * 1024)
        return min(waves // num_warps, shared // max(1, kernel.metadata.shared))
    a_warp = -(-registers * 32 // 256) * 256
    warps = min(properties.regs_per_multiprocessor // a_warp, properties.max_threads_per_multi_processor // 32)
    return min(warps // num_warps, properties.shared_memory_per_multiprocessor // (kernel.metadata.shared + 1024))


def _cubin_resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of local memory) from the binary that will run."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    stack, local = int(re.search(r"STACK:(\d+)", text)[1]), int(re.search(r"LOCAL:(\d+)", text)[1])
    return int(re.search(r"REG:(\d+)", text)[1]), stack + local
