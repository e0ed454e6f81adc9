"""Kernels compiled for GPUs that need not be here, with resources and assembly; and those of a sweep ahead of it, side by side."""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3cp import ranks

if TYPE_CHECKING:
    from m3cp.shapes import Point

ROOT = Path(__file__).resolve().parents[1]
COMPILE = [sys.executable, "-m", "m3cp.compiled", "--ahead"]
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

    Raises:
        ValueError: another target, or a constexpr argument without a value.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise ValueError(f"target={target!r}: must be one of {', '.join(TARGETS)}")
    lacking = [p.name for p in kernel.params if p.is_constexpr and p.name not in constants]
    if lacking:  # they would be compiled as run-time values: another kernel
        raise ValueError(f"constants of {kernel.__name__}: must hold {', '.join(lacking)} too")
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


def resident_programs(kernel, device) -> int:
    """Programs of a compiled kernel that a compute unit of `device` holds at once, by registers, shared memory, threads.

    Args:
        kernel: what launching or warming a jitted kernel returns.

    Register files and allocation units are the vendors': CUDA's occupancy rules for compute capability 9.0 (registers
    a warp in units of 256, 1 KB of shared memory a block reserved), CDNA's 512 VGPRs a lane and SIMD in units of 8.
    """
    import torch

    kernel._init_handles()
    num_warps = kernel.metadata.num_warps
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        limit = SHARED_BYTES.get(properties.gcnArchName.split(":")[0], 64 * 1024)
        return amd_programs(kernel.n_regs, num_warps, kernel.metadata.shared, limit)
    return nvidia_programs(
        kernel.n_regs, num_warps, kernel.metadata.shared, properties.shared_memory_per_multiprocessor,
        properties.regs_per_multiprocessor, properties.max_threads_per_multi_processor,
    )  # fmt: skip


def amd_programs(registers: int, num_warps: int, shared: int, shared_limit: int) -> int:
    """Programs a compute unit holds at once: four SIMDs of 512 VGPRs a lane, eight waves each at most."""
    waves = min(8, 512 // (-(-max(1, registers) // 8) * 8)) * 4
    return min(waves // num_warps, shared_limit // max(1, shared))


def nvidia_programs(registers: int, num_warps: int, shared: int, shared_limit: int, file: int, threads: int) -> int:
    """Programs a multiprocessor holds at once, 32 at most, with `file` registers and at most `threads` threads."""
    a_warp = -(-max(1, registers) * 32 // 256) * 256
    warps = min(file // a_warp, threads // 32)
    return min(warps // num_warps, shared_limit // (shared + 1024), 32)


@dataclass(frozen=True)
class Resources:
    """A line of the resource report: `programs` is how many a compute unit (multiprocessor) holds, `waves` of `warps` each."""

    kernel: str
    warps: int
    registers: int
    spills: int
    scalar_spills: int
    shared_bytes: int
    programs: int

    @property
    def waves(self) -> int:
        """Waves (warps) that are resident a unit."""
        return self.programs * self.warps


def kernels(target: str) -> dict[str, tuple]:
    """Every kernel of a step as it is launched on `target` for M3's shape, bf16 and 16 requests.

    Returns:
        {name: (kernel, element types of its pointers, constants, the compiler's options)}.
    """
    import torch

    from m3cp.kernels import attention, candidates, fused, gather, merge, prefill, score, tile
    from m3cp.shapes import IndexerShape
    from m3cp.turns import turns_kernel

    shape, keep = IndexerShape(), candidates.kept(16)
    cache = torch.empty(2, shape.block_size, shape.head_dim, dtype=torch.bfloat16)
    words = dict.fromkeys(("words_ptr", "peers_ptr", "parts_ptr", "counters_ptr", "state_ptr"), "i64")
    step = {"q_ptr": "bf16", "cache_ptr": "bf16", "table_ptr": "i32", "lens_ptr": "i32"}
    pages = {"pages_ptr": "i32", "attended_ptr": "i32", "table_ptr": "i32"}
    columns = tile.columns(hip := target != "sm_90")
    alone = score.constants(shape, shape.heads, shape.heads, 1, 1, 16, cache, columns)
    of_two = score.constants(shape, shape.heads, 2, 2, 1, 16, cache, columns)

    def form(dtype: str) -> int:
        """How elements are read: fp8 comes as bytes, and which format they are in is a constant."""
        return tile.NATIVE.value if dtype != "u8" else tile.E4M3FNUZ_CAST.value if target == "gfx942" else tile.E4M3FN_CAST.value

    def launched(dtype: str) -> tuple[dict, dict]:
        """(constants, options) of a scoring kernel's launch."""
        setting = tile.setting(form(dtype), hip=hip)
        return dict(FORMAT=form(dtype), STAGES=setting.stages, UPCAST=False), setting.options

    def scoring(dtype: str) -> tuple:
        return (score.score_kernel, step | {"cache_ptr": dtype, "scores_ptr": "fp32", "state_ptr": "i64"},
                alone | launched(dtype)[0], launched(dtype)[1])  # fmt: skip

    def fusing(fixed: dict, phase: int, exchange: bool, gathered: bool, presence: bool = False, dtype: str = "bf16", paged: bool = False) -> tuple:
        options = dict(KEEP=keep, PHASE=phase, EXCHANGE=exchange, GATHER=gathered, PRESENCE=presence, ADAPTIVE=False) | launched(dtype)[0]
        options |= {"PER_BLOCK": 8} if paged else fused.NO_PAGES
        pointers = step | {"cache_ptr": dtype, "out_ptr": "i32"} | words | (pages if paged else {})
        return fused.fused_kernel, pointers, fixed | options, launched(dtype)[1]

    def attending(dtype: str) -> tuple:
        fixed = attention.constants(shape.heads, 16, shape.head_dim, shape.block_size, shape.topk, 4) | {"scale": shape.head_dim**-0.5}
        stored = torch.float8_e4m3fn if dtype == "u8" else torch.bfloat16
        kind = attention.cache_format(stored, hip, cast=True)
        options = dict(UNIT=16 if dtype == "u8" else 8, FORMAT=kind, STAGES=attention.STAGES, UPCAST=False)
        pointers = step | dict(k_ptr=dtype, v_ptr=dtype, ids_ptr="i32", parts_ptr="fp32", lse_ptr="fp32")
        return attention.attention_kernel, pointers, fixed | options, attention.options(kind, hip)

    filling = dict(FORMAT=form("bf16"), STAGES=prefill.STAGES, UPCAST=False)
    parts = dict(GROUP=16, DIM=shape.head_dim, SPLITS=4, LANES=4, v_scale=1.0)
    chosen = dict(HEADS=shape.heads, BLOCK=shape.block_size, TOPK=shape.topk, KEEP=keep, CHUNK=candidates.CHUNK, PER_BLOCK=0)
    merging = dict(WORLD=4, RANKS=4, TOPK=shape.topk, KEEP=keep, BLOCK=shape.block_size, PER_BLOCK=0)
    listing = {"scores_ptr": "fp32", "lens_ptr": "i32"} | pages
    return {
        "score, bf16": scoring("bf16"),
        "score, fp8": scoring("u8"),
        "candidates": (candidates.candidates_kernel, listing | {"out_ptr": "i64"}, chosen | dict(CHOOSE=False), dict(num_warps=candidates.WARPS)),
        "choice (TP)": (candidates.candidates_kernel, listing | {"out_ptr": "i32"}, chosen | dict(CHOOSE=True), dict(num_warps=candidates.WARPS)),
        "merge, P=4": (
            merge.merge_kernel, {"keys_ptr": "i64", "out_ptr": "i32", "state_ptr": "i64", "lens_ptr": "i32"} | pages, merging, dict(num_warps=merge.WARPS),
        ),
        "prefill scores": (
            prefill.prefill_kernel, step | {"starts_ptr": "i32", "scores_ptr": "fp32", "rows_ptr": "i32", "state_ptr": "i64"},
            prefill.constants(shape, shape.heads, 16, cache, columns) | filling, dict(num_warps=prefill.WARPS),
        ),
        "attention, bf16": attending("bf16"),
        "attention, fp8": attending("u8"),
        "attention, merge of parts": (attention.merge_parts_kernel, {"parts_ptr": "fp32", "lse_ptr": "fp32", "out_ptr": "bf16"}, parts, dict(num_warps=1)),
        "symmetric gather": (gather.gather_kernel, {"payload_ptr": "i32", "out_ptr": "i32"} | words, dict(CHUNK=gather.CHUNK), dict(num_warps=gather.WARPS)),
        "ping-pong": (turns_kernel, {"words_ptr": "i64", "peers_ptr": "i64", "state_ptr": "i32"}, {}, dict(num_warps=4)),
        "two launches: push": fusing(of_two, fused.PUSH, True, True, True),
        "two launches: choose": fusing(of_two, fused.CHOOSE, True, True, True),
        "one launch: TP": fusing(alone, fused.ONE_LAUNCH, False, False),
        "one launch: CP, replicated": fusing(of_two, fused.ONE_LAUNCH, True, False),
        "one launch: CP, gathered": fusing(of_two, fused.ONE_LAUNCH, True, True),
        "one launch: CP, gathered, fp8": fusing(of_two, fused.ONE_LAUNCH, True, True, dtype="u8"),
        "one launch: CP, page tables": fusing(of_two, fused.ONE_LAUNCH, True, True, paged=True),
    }  # fmt: skip


def resources(target: str, without: tuple[str, ...] = (), processes: int = 1) -> list[Resources]:
    """Compile the kernels of `kernels`, but for those named, and say what each takes; seconds a kernel, no GPU needed.

    Args:
        processes: that compile beside each other; 1 compiles in this one.
    """
    from tqdm import tqdm

    todo = [name for name in kernels(target) if name not in without]
    one = functools.partial(_resources_of, target)
    if processes == 1:
        return [one(name) for name in tqdm(todo, desc=target, unit="kernel", mininterval=0.5)]
    with ProcessPoolExecutor(min(processes, len(todo)), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(tqdm(pool.map(one, todo), total=len(todo), desc=target, unit="kernel", mininterval=0.5))


def _resources_of(target: str, name: str) -> Resources:
    kernel, pointers, constants, options = kernels(target)[name]
    made = build(kernel, {k: v for k, v in pointers.items() if k in kernel.arg_names}, constants, target, **options)
    limit, warps = SHARED_BYTES[target], options["num_warps"]
    if target == "sm_90":  # the vendor's table for compute capability 9.0: 65,536 registers, 2,048 threads, 228 KB
        programs = nvidia_programs(made.registers, warps, made.shared_bytes, limit + 1024, 65_536, 2048)
    else:
        programs = amd_programs(made.registers, warps, made.shared_bytes, limit)
    return Resources(name, warps, made.registers, made.spills, made.scalar_spills, made.shared_bytes, programs)


def table(target: str, found: list[Resources]) -> list[str]:
    """The report as lines of text."""
    amd = target.startswith("gfx")
    registers, shared, waves, unit = ("VGPRs", "LDS bytes", "waves", "CU") if amd else ("registers", "shared bytes", "warps", "SM")
    head = (f"{target}: kernel", registers, shared, f"programs/{unit}", f"{waves}/{unit}", "spills", "SGPRs to lanes" if amd else "")
    rows = [(r.kernel, r.registers, r.shared_bytes, r.programs, r.waves, r.spills, r.scalar_spills if amd else "") for r in found]
    return [f"{name:30}" + "".join(f"{value!s:>16}" for value in rest).rstrip() for name, *rest in (head, *rows)]


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


def launches(points: Iterable[Point]) -> list[dict[str, Any]]:
    """The one- and two-launch kernels of TP and CP that these Points launch, warm-up included, each once: what `_compile` takes."""
    from m3cp.kernels import fused, score, tile
    from m3cp.shard import Shard

    found: dict[tuple, dict[str, Any]] = {}
    for p in points:
        arm = p.arm.removeprefix("mixed_").removeprefix("toy_")
        if arm not in ("tp", "cp") or p.form not in ("one_launch", "two_launch"):
            continue
        exchange, most = arm == "cp", p.batch + p.rows_padded
        heads = p.shape.heads if exchange else Shard(0, p.world, p.shape.heads).local_heads
        buckets = sorted({score.request_bucket(min(n, most)) for n in (1, 32, 256, 2048, 16_384, most)})
        phases = (fused.ONE_LAUNCH,) if p.form == "one_launch" else (fused.PUSH, fused.CHOOSE)
        for phase, requests, query_len in itertools.product(phases, buckets, range(1, p.query_len + 1)):
            groups = -(-query_len * heads // tile.COLUMNS)
            what = dict(world=p.world if exchange else 1, dtype=p.dtype, exchange=exchange, gather=exchange and p.queries == "gathered",
                        adaptive=p.threshold_blocks is not None, phase=phase, requests=requests)  # fmt: skip
            found.setdefault((p.shape, heads, groups, *what.values()), what | {"point": p.to_dict(), "query_len": query_len})
    return list(found.values())


def _compile(what: dict[str, Any]) -> None:
    """Compile one of `launches` for this process's GPU, into Triton's cache."""
    from m3cp import inputs
    from m3cp.kernels import fused
    from m3cp.shapes import Point
    from m3cp.shard import Shard

    p = Point.from_dict(what["point"])
    owned = Shard(0, p.world, p.shape.heads).local_heads
    shard = Shard(0, p.world, p.shape.heads) if what["exchange"] else Shard(0, 1, owned)
    fused.heaviest(
        p.shape, shard, what["requests"], what["query_len"], inputs.TORCH_DTYPES[p.dtype], what["exchange"], what["gather"], what["adaptive"], what["phase"],
    )  # fmt: skip


def ahead(points: Iterable[Point], limit_s: float = 150.0, processes: int | None = None) -> tuple[int, list[str]]:
    """Compile `launches(points)` for the GPU that is here by processes side by side, into Triton's cache.

    A cold compile of such a kernel takes 5 to 20 s, and ranks compile one after another: with a core a kernel it is the slowest that counts.

    Args:
        limit_s: seconds after which processes that still compile are ended.
        processes: None is a core each.

    Returns:
        How many kernels, and what did not compile, in words: whoever launches it then compiles it, and finds out why.
    """
    from tqdm import tqdm

    todo = launches(points)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = min(len(todo), processes or cores)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="m3cp-") as folder:
        job = Path(folder) / "kernels.json"
        job.write_text(json.dumps(todo))
        began, running = time.monotonic(), []
        try:
            for part in range(parts):
                with open(Path(folder) / f"log.{part}", "wb") as log:
                    command = [*COMPILE, str(job), str(part), str(parts)]
                    running.append(subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                        env=_environment(), preexec_fn=functools.partial(ranks.die_with_parent, os.getpid()),
                    ))  # fmt: skip
            for part, process in enumerate(tqdm(running, desc=f"{len(todo)} kernels compiled ahead", unit="process", mininterval=0.5, disable=not running)):
                try:
                    code = process.wait(max(0.1, limit_s - (time.monotonic() - began)))
                    ended = f"exit status {code}" if code else ""
                except subprocess.TimeoutExpired:
                    ended = f"not done within {limit_s:.0f} s"
                said = (Path(folder) / f"log.{part}").read_text(errors="replace").strip().splitlines()
                problems += [f"{ended}: {said[-1][:300] if said else 'no word'}"] if ended else []
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
    return len(todo), problems


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ahead"]:
        for kernel_launch in json.loads(Path(sys.argv[2]).read_text())[int(sys.argv[3]) :: int(sys.argv[4])]:
            _compile(kernel_launch)
        sys.exit()
    for arch in sys.argv[1:] or TARGETS:
        print("\n".join(table(arch, resources(arch))), flush=True)
