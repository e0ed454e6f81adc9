"""What a captured graph consists of, asked of the driver; and whether anything compiled meanwhile."""

from __future__ import annotations

import contextlib
import ctypes

import torch
import triton

_KINDS = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty", 6: "wait", 7: "record"}


def capture(call, *args, **named) -> torch.cuda.CUDAGraph:
    """A graph of `call(*args, **named)`, kept so that `nodes` can look at it."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call(*args, **named)
    graph.instantiate()
    return graph


def nodes(graph: torch.cuda.CUDAGraph) -> list[str]:
    """Kinds of a graph's nodes; a kernel is given by its name. CUDA only."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _done(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)))
    found = (ctypes.c_void_p * count.value)()
    _done(driver.cuGraphGetNodes(handle, found, ctypes.byref(count)))
    named = []
    for node in found:
        kind = ctypes.c_int()
        _done(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        name = _KINDS.get(kind.value, str(kind.value))
        named.append(_kernel_name(driver, node) if name == "kernel" else name)
    return named


def _kernel_name(driver, node) -> str:
    # CUDA_KERNEL_NODE_PARAMS_v2: the function first; a context-free kernel stands at byte 56 instead.
    params = (ctypes.c_uint64 * 16)()
    _done(driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), params))
    name = ctypes.c_char_p()
    if params[0]:
        _done(driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(params[0])))
    else:
        _done(driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(params[7])))
    return name.value.decode()


def _done(status: int) -> None:
    assert status == 0, f"CUDA driver error {status}"


@contextlib.contextmanager
def no_compile():
    """Fails when Triton compiles or loads a kernel inside the block."""
    compiled = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(str(given.get("repr"))) and None
    try:
        yield
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled, f"compiled during capture: {compiled}"
