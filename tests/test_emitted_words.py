"""How polls and pushes are emitted: each by itself, found by the source line that it came from, and the faults planted.

A word is stored and polled in `m3cp/kernels/words.py` alone. So every load that comes from there must be coherent,
eight bytes wide and of a tensor with an element a thread, and every store must write through.
"""

import re

import pytest
import triton
import triton.language as tl
from test_compiled import TARGETS
from test_compiled_fused import fused

from m3cp import compiled
from m3cp.kernels import fused as fused_op
from m3cp.kernels import gather as gather_op
from m3cp.kernels import tile

pytestmark = pytest.mark.skipif(tile.INTERPRETED, reason="compiles kernels: run without TRITON_INTERPRET")
WORD_POINTERS = {"words_ptr": "i64", "peers_ptr": "i64", "counters_ptr": "i64", "state_ptr": "i64", "payload_ptr": "i32", "out_ptr": "i32"}  # fmt: skip
COHERENT = {
    "sm_90": (r"ld\.volatile\.global(\.v2)?\.b64", r"st\.global\.wt(\.v2)?\.b64"),
    "gfx942": (r"(global|flat|buffer)_load_dwordx[24] .*sc0 sc1", r"(global|flat|buffer)_store_dwordx[24] .*sc0 sc1"),
    "gfx950": (r"(global|flat|buffer)_load_dwordx[24] .*sc0 sc1", r"(global|flat|buffer)_store_dwordx[24] .*sc0 sc1"),
}


def memory_operations(build: compiled.Build, source: str) -> tuple[list[str], list[str]]:
    """(loads, stores) of device memory that come from a line of `source`, also where it was inlined."""
    loads, stores, here = [], [], ""
    for line in build.assembly.splitlines():
        if found := re.match(r"\s*\.loc\s.*?(?:;|//)\s*(\S+?):\d+", line):
            here = found[1]
        elif here == source and re.search(r"(global|buffer|flat)_load_|\bld\.(volatile\.)?global", line):
            loads.append(line.strip())
        elif here == source and re.search(r"(global|buffer|flat)_store_|\bst\.global", line):
            stores.append(line.strip())
    return loads, stores


def faults(build: compiled.Build, source: str = "words.py", warps: int = 4) -> list[str]:
    """What is wrong with how words travel, in words; at least one load and one store must be there."""
    loads, stores = memory_operations(build, source)
    load, store = COHERENT[build.target]
    found = [f"a plain load: {x}" for x in loads if not re.search(load, x)]
    found += [f"a plain store: {x}" for x in stores if not re.search(store, x)]
    found += [] if loads else ["no load"]
    found += [] if stores else ["no store"]
    threads = warps * compiled.TARGETS[build.target][2]
    for line in build.ir.splitlines():
        if re.search(r"(tt|buffer)[._]load .*(isVolatile = true|cacheModifier = cv)", line):
            tensor = re.search(r"tensor<((?:\d+x)+)", line)
            elements = 1
            for size in re.findall(r"\d+", tensor[1]) if tensor else ():
                elements *= int(size)
            if elements < threads:
                found.append(f"{elements} polled elements for {threads} threads")
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_gather(target):
    build = compiled.build(gather_op.gather_kernel, WORD_POINTERS, dict(CHUNK=gather_op.CHUNK), target, num_warps=gather_op.WARPS)  # fmt: skip
    assert faults(build) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("adaptive, phase, presence", [(False, fused_op.ONE_LAUNCH, False), (True, fused_op.ONE_LAUNCH, True), (False, fused_op.PUSH, True)])
def test_fused(target, adaptive, phase, presence):
    """The default kernel, and those with more words in them; test_compiled_fused compiles the same ones, so none is compiled twice."""
    assert faults(fused(target, gather=True, adaptive=adaptive, phase=phase, presence=presence)) == []


@pytest.mark.parametrize("target", TARGETS)
def test_fused_choosing_only_polls(target):
    assert faults(fused(target, gather=True, phase=fused_op.CHOOSE, presence=True)) == ["no store"]


@triton.jit
def _words_kernel(words_ptr, out_ptr, N: tl.constexpr, VOLATILE: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(words_ptr + N + o, o.to(tl.int64), cache_modifier=STORE)
    word = tl.load(words_ptr + o, volatile=VOLATILE, cache_modifier=LOAD)
    while tl.sum((word == 0).to(tl.int32)) > 0:
        word = tl.load(words_ptr + o, volatile=VOLATILE, cache_modifier=LOAD)
    tl.store(words_ptr + 2 * N + o, word, cache_modifier=STORE)


@triton.jit
def _one_word_kernel(words_ptr, out_ptr):
    word = tl.load(words_ptr, volatile=True, cache_modifier=".cv")
    while word == 0:
        word = tl.load(words_ptr, volatile=True, cache_modifier=".cv")
    tl.store(words_ptr + 1, word, cache_modifier=".wt")


def planted(target, n=256, volatile=True, load=".cv", store=".wt"):
    constants = dict(N=n, VOLATILE=volatile, LOAD=load, STORE=store)
    build = compiled.build(_words_kernel, WORD_POINTERS, constants, target, num_warps=4)
    return faults(build, "test_emitted_words.py")


@pytest.mark.parametrize("target", TARGETS)
def test_polls_that_are_right_pass(target):
    assert planted(target) == []


# Pitfalls 1 and 2, each planted where it bites: (target, change, what must be said)
@pytest.mark.parametrize(
    "target, change, expect",
    [
        ("gfx942", dict(n=128), "128 polled elements for 256 threads"),
        ("gfx950", dict(n=64), "64 polled elements for 256 threads"),
        ("sm_90", dict(n=64), "64 polled elements for 128 threads"),
        ("gfx942", dict(load=""), "a plain load"),
        ("gfx950", dict(load=""), "a plain load"),
        ("sm_90", dict(volatile=False), "a plain load"),
        ("gfx942", dict(store=""), "a plain store"),
        ("gfx950", dict(store=""), "a plain store"),
        ("sm_90", dict(store=""), "a plain store"),
    ],
    ids=str,
)
def test_a_planted_fault_is_seen(target, change, expect):
    found = planted(target, **change)
    assert found and all(text.startswith(expect) for text in found), found


@pytest.mark.parametrize("target", TARGETS)
def test_a_scalar_poll_is_seen(target):
    build = compiled.build(_one_word_kernel, WORD_POINTERS, {}, target, num_warps=4)
    assert any(text.startswith("1 polled elements") for text in faults(build, "test_emitted_words.py"))
