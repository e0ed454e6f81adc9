"""Faults that the fast path must not have, each planted once and seen. By number, as in the study that found them:

1, 2  polled tensors smaller than a program, loads and stores that are not coherent: here in our own words and gather,
      and in `test_emitted_words.py` one by one
3     what compiles to nothing useful or not at all: here
4     slots and tags: `test_protocol.py` by search, `test_interpreted_ranks.py` in the kernel
5     a bounded wait that gives up: `test_interpreted_ranks.py`, "an expired wait is told"
6     programs that wait for programs which don't run: here, `test_protocol.py` by search, `test_interpreted_pitfalls.py` in the kernel
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from test_compiled import TARGETS
from test_emitted_words import WORD_POINTERS, faults
from triton.errors import TritonError

from m3cp import compiled, decode
from m3cp.kernels import fused as fused_op
from m3cp.kernels import tile

KERNELS = Path(fused_op.__file__).parent
compiles = pytest.mark.skipif(tile.INTERPRETED, reason="compiles kernels: run without TRITON_INTERPRET")


# --- 1 and 2, in our own files ---


def gather_of(folder: Path, *changes: tuple[str, str, str]):
    """The gather kernel of copies of words.py and gather.py with (file, text, new text) changed."""
    made = {}
    for name in ("words", "gather"):
        text = (KERNELS / f"{name}.py").read_text()
        for file, old, new in changes:
            if file == name:
                assert old in text, f"{name}.py does not hold {old!r}"
                text = text.replace(old, new)
        (folder / f"{name}.py").write_text(text)  # `faults` goes by the file's name
        spec = importlib.util.spec_from_file_location(f"planted_{name}", folder / f"{name}.py")
        made[name] = sys.modules[f"planted_{name}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made[name])
    for name in ("await_words", "put", "tagged"):
        setattr(made["gather"], name, getattr(made["words"], name))
    return made["gather"]


CV, VOLATILE, WT = ("words", ', cache_modifier=".cv"', ""), ("words", ", volatile=True", ""), ("words", ', cache_modifier=".wt"', "")
SMALL = ("gather", "CHUNK, WARPS, PROGRAMS = 512", "CHUNK, WARPS, PROGRAMS = 64")


@compiles
@pytest.mark.parametrize(
    "target, change, expect",
    [(t, None, []) for t in TARGETS]
    + [("sm_90", VOLATILE, ["a plain load"]), ("gfx942", CV, ["a plain load"]), ("gfx950", CV, ["a plain load"])]
    + [(t, WT, ["a plain store"]) for t in TARGETS]
    + [("sm_90", SMALL, ["64 polled elements for 128 threads"]), ("gfx942", SMALL, ["64 polled elements for 256 threads"])]
    + [("gfx950", SMALL, ["64 polled elements for 256 threads"])],
    ids=lambda value: value if isinstance(value, str) else value[1][:24] if isinstance(value, tuple) else "",
)
def test_incoherent_words_and_small_polls_are_seen_in_our_own_kernel(target, change, expect, tmp_path):
    gather = gather_of(tmp_path, *([change] if change else []))
    build = compiled.build(gather.gather_kernel, WORD_POINTERS, dict(CHUNK=gather.CHUNK), target, num_warps=gather.WARPS)
    found = faults(build)
    assert sorted({text.split(":")[0] for text in found}) == expect, found


# --- 3 ---


def rising(step: ast.expr, function: ast.FunctionDef) -> bool:
    """Whether a loop's step is certain to be positive: a literal, a constant in capitals, a grid's size, or their product."""
    if isinstance(step, ast.BinOp):
        return isinstance(step.op, ast.Mult) and rising(step.left, function) and rising(step.right, function)
    if isinstance(step, ast.Constant):
        return step.value > 0
    if not isinstance(step, ast.Name):
        return ast.unparse(step).startswith("tl.num_programs(")
    given = [a.value for a in ast.walk(function) if isinstance(a, ast.Assign) and step.id in map(ast.unparse, a.targets)]
    if given:
        return all(rising(value, function) for value in given)
    return step.id.lstrip("_").isupper() or step.id == "programs"  # passed on under its name


def does_not_compile_well(source: str) -> list[str]:
    """Loops whose step a program could make negative at run time, and uses of `tl.cat`, in jitted functions."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not any("triton.jit" in ast.unparse(d) for d in function.decorator_list):
            continue
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            steps = call.args[2:3] + [k.value for k in call.keywords if k.arg == "step"]
            if name in ("range", "tl.range") and steps and not rising(steps[0], function):
                found.append(f"{function.name}: step {ast.unparse(steps[0])}")
            if name == "tl.cat":
                found.append(f"{function.name}: tl.cat")
    return found


@pytest.mark.parametrize("file", sorted(p.name for p in KERNELS.glob("*.py")))
def test_loops_rise_and_nothing_is_concatenated(file):
    assert does_not_compile_well((KERNELS / file).read_text()) == []


@pytest.mark.parametrize(
    "old, new, expect",
    [
        ("range(i_program, rows, programs)", "range(i_program, rows, -programs)", "fused_kernel: step -programs"),
        ("range(i_program, rows, programs)", "range(i_program, rows, world - rank)", "fused_kernel: step world - rank"),
        ("programs = tl.num_programs(0)", "programs = tl.program_id(0) - 1", "fused_kernel: step programs"),
        ("tl.join(low, high)", "tl.cat(low, high)", "await_columns: tl.cat"),
    ],
)
def test_a_falling_loop_and_a_concatenation_are_seen(old, new, expect):
    source = (KERNELS / "fused.py").read_text()
    assert old in source
    assert expect in does_not_compile_well(source.replace(old, new))


@triton.jit
def _falling_kernel(out_ptr, n, step):
    for i in range(n, 0, step):
        tl.store(out_ptr + i, i)


@triton.jit
def _two_shapes_kernel(out_ptr, n):
    if n > 0:
        o = tl.arange(0, 64)
    else:
        o = tl.arange(0, 128)
    tl.store(out_ptr + o, o)


@triton.jit
def _cat_kernel(out_ptr):
    o = tl.arange(0, 16)
    tile_of = tl.load(out_ptr + o[:, None] * 16 + o[None, :])
    tl.store(out_ptr + tl.arange(0, 32)[:, None] * 16 + o[None, :], tl.cat(tile_of, tile_of, can_reorder=True))


@compiles
def test_why_loops_must_rise_names_keep_one_shape_and_cat_is_out():
    """The compiler takes a run-time step for a rising one, so that the loop runs never; the others don't compile at all.

    That every kernel of ours does compile, for every target, is `test_compiled.py`'s and `test_compiled_fused.py`'s.
    """
    build = compiled.build(_falling_kernel, {"out_ptr": "i32"}, {}, "sm_90", num_warps=4)
    (loop,) = [line for line in build.ir.splitlines() if "scf.for" in line]
    assert re.search(r"= %n to %c0_i32 step %step", loop), f"from n up to 0: {loop}"
    with pytest.raises(TritonError, match="Mismatched type for o between then block"):
        compiled.build(_two_shapes_kernel, {"out_ptr": "i32"}, {}, "sm_90", num_warps=4)
    with pytest.raises(TritonError, match="tl.cat"):
        compiled.build(_cat_kernel, {"out_ptr": "i32"}, {}, "sm_90", num_warps=4)


# --- 6 ---


def launch_on(monkeypatch, *, grid: int, fit: int, warm: bool = False, phase: int = fused_op.ONE_LAUNCH):
    """One launch of a fused object on a GPU of 132 units that isn't there: `fit` programs of what was compiled stay in a unit."""
    launched = []
    monkeypatch.setattr(decode.fused_op, "fused", lambda *tensors, **named: launched.append(named["phase"]) or "built")
    monkeypatch.setattr(decode, "_compute_units", lambda device: 132)
    monkeypatch.setattr(decode.compiled, "resident_programs", lambda built, device: fit)
    made = object.__new__(decode._Fused)
    made.owner = SimpleNamespace(device=torch.device("cuda", 0), _warm=warm, shape=None, max_context=1, form="one_launch")
    made.shard, made.spin_limit, made.exchange, made.gather, made.threshold = None, 1, True, False, None
    made.memory = SimpleNamespace(counters=SimpleNamespace(shape=(2, grid)))
    made.launch(phase, None, None, None, None, 1, None)
    return launched


def test_a_grid_larger_than_what_is_resident_is_refused_at_warm_up(monkeypatch):
    """The occupancy that sized the grid was wrong: the kernel that warm-up launches says so before anything is captured."""
    for fits in (dict(grid=396, fit=3), dict(grid=264, fit=2), dict(grid=264, fit=3)):
        assert launch_on(monkeypatch, **fits) == [fused_op.ONE_LAUNCH]
    with pytest.raises(RuntimeError, match="264 programs of this kernel are resident at once, the grid has 396: they could wait for ever"):
        launch_on(monkeypatch, grid=396, fit=2)


@pytest.mark.parametrize("phase", [fused_op.PUSH, fused_op.CHOOSE])
def test_two_launches_need_no_grid_that_is_resident(monkeypatch, phase):
    """Their programs await those of launches that were issued before; the kernel of either has registers of its own."""
    assert launch_on(monkeypatch, grid=396, fit=2, phase=phase) == [phase]


def test_a_kernel_that_does_not_fit_a_unit_is_refused_at_construction(monkeypatch):
    made = object.__new__(decode._Fused)
    made.owner = SimpleNamespace(device=torch.device("cuda", 0), form="one_launch", shape=None, max_requests=1, max_query_len=1, cache_dtype=torch.bfloat16)
    made.shard, made.exchange, made.gather, made.threshold = None, True, False, None
    made.phases = (fused_op.ONE_LAUNCH,)
    monkeypatch.setattr(decode, "_compute_units", lambda device: 132)
    monkeypatch.setattr(decode.fused_op, "heaviest", lambda *given: "built")
    for fit, grid in ((0, None), (1, 132), (2, 264), (9, 132 * 4)):
        monkeypatch.setattr(decode.compiled, "resident_programs", lambda built, device, fit=fit: fit)
        if grid is None:
            with pytest.raises(RuntimeError, match="form='one_launch': no program of this kernel fits a compute unit of cuda:0"):
                made._resident()
        else:
            assert made._resident() == grid


@pytest.mark.parametrize(
    "hip, registers, warps, shared, expect",
    [
        (None, 168, 4, 66_000, 3), (None, 168, 4, 80_000, 2), (None, 255, 4, 66_000, 2), (None, 128, 4, 1_000, 4), (None, 255, 8, 40_000, 1), (None, 128, 8, 40_000, 2),
        ("6.4", 184, 4, 32_768, 2), ("6.4", 128, 4, 32_768, 4), ("6.4", 168, 4, 32_768, 3), ("6.4", 128, 4, 65_536, 2), ("6.4", 512, 4, 1_000, 1),
    ],
)  # fmt: skip
def test_programs_a_unit_holds(monkeypatch, hip, registers, warps, shared, expect):
    """By the vendors' rules; at 184 VGPRs an MI355X compute unit holds two programs of four waves, not three."""
    properties = SimpleNamespace(
        regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, shared_memory_per_multiprocessor=228 * 1024, gcnArchName="gfx950:sramecc+:xnack-"
    )
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kernel = SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(shared=shared, num_warps=warps), _init_handles=lambda: None)
    assert compiled.resident_programs(kernel, "cuda") == expect
