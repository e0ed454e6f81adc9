"""Kernels compiled ahead of a sweep: the very ones that it launches, and what fails in words."""

import os

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from m3cp import compiled
from m3cp.kernels import fused, tile
from m3cp.shapes import Point
from m3cp.shard import Shard

pytestmark = pytest.mark.skipif(tile.INTERPRETED, reason="what Triton compiles: run without TRITON_INTERPRET")
CP = Point(8192, 8, arm="cp", form="one_launch", exchange="symmetric", queries="gathered", world=2)
TP = Point(8192, 1, arm="tp", form="one_launch", world=2)


class Driver:
    """A GPU that is not here, as far as Triton asks before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def asked(monkeypatch):
    """Keys of the kernels that Triton was about to compile."""
    from triton.runtime import driver

    keys = []
    monkeypatch.setattr(driver, "_active", Driver(), raising=False)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **given: keys.append(given["key"]) or True)
    return keys


def launched(point, requests, query_len, phase):
    """Launch as a decode object does; Triton's hook stops it before it compiles."""
    exchange = point.arm == "cp"
    owned = Shard(0, point.world, 4).local_heads
    shard = Shard(0, point.world, 4) if exchange else Shard(0, 1, owned)
    heads = owned if not exchange or point.queries == "gathered" else 4
    cache = torch.zeros(1, 128, 128, dtype=torch.float8_e4m3fn if point.dtype.startswith("fp8") else torch.bfloat16)

    def words(*size):
        return torch.zeros(size, dtype=torch.int64)

    memory = fused.Memory(words(8), words(2), words(8), words(2, 8), words(4), 1024, 5000, 8)
    fused.fused(
        torch.zeros(requests * query_len, heads, 128, dtype=torch.bfloat16), cache, torch.zeros(requests, 1024, dtype=torch.int32),
        torch.zeros(requests, dtype=torch.int32), shape=point.shape, shard=shard, query_len=query_len, max_context=131_072, memory=memory,
        out=torch.zeros(owned, requests * query_len, 16, dtype=torch.int32), phase=phase, spin_limit=20_000_000, exchange=exchange,
        gather=exchange and point.queries == "gathered",
    )  # fmt: skip


@pytest.mark.parametrize(
    "point",
    [CP, CP.replace(queries="replicated"), CP.replace(form="two_launch"), CP.replace(dtype="fp8_e4m3fn"), TP, TP.replace(batch=40), TP.replace(batch=3, query_len=5)],
    ids=lambda p: p.label,
)
def test_what_is_compiled_ahead_is_what_is_launched(asked, point):
    """By Triton's own keys: the launches of a warm-up are the kernels compiled ahead, no more and no fewer."""
    for what in compiled.launches([point]):
        compiled._compile(what)
    ahead, once = set(asked), len(asked)
    asked.clear()
    phases = (fused.ONE_LAUNCH,) if point.form == "one_launch" else (fused.PUSH, fused.CHOOSE)
    for requests in {1, min(32, point.batch), point.batch}:
        for query_len in range(1, point.query_len + 1):
            for phase in phases:
                launched(point, requests, query_len, phase)
    assert set(asked) == ahead and once == len(ahead)


def test_each_kernel_once_and_none_of_forms_that_compile_fast():
    staged = TP.replace(form="staged")
    assert compiled.launches([staged, TP.replace(arm="page_read", form=None)]) == []
    assert len(compiled.launches([TP, TP.replace(context_tokens=32_768), staged])) == 1
    assert len(compiled.launches([CP, TP])) == 3  # CP of 8 requests is warmed with one request too
    around = [CP.replace(arm="toy_cp"), CP.replace(arm="mixed_cp", launch="eager"), TP.replace(arm="toy_tp")]
    assert [len(compiled.launches(points)) for points in (around, [CP, TP, *around])] == [3, 3], "a toy and a mixed step launch TP's and CP's"
    assert compiled.ahead([staged]) == (0, [])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compile for")
def test_a_machine_without_a_gpu_says_so():
    count, problems = compiled.ahead([TP], limit_s=60)
    assert count == 1 and len(problems) == 1 and problems[0].startswith("exit status 1: ") and "driver" in problems[0]


def test_a_compiler_that_hangs_is_ended_and_one_that_fails_is_said(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILE", ["sh", "-c", "echo no ptxas; exit 3"])
    assert compiled.ahead([TP]) == (1, ["exit status 3: no ptxas"])
    monkeypatch.setattr(compiled, "COMPILE", ["sh", "-c", "echo ptxas; sleep 60"])
    assert compiled.ahead([TP, CP], limit_s=0.3)[1] == ["not done within 0 s: ptxas"] * min(3, len(os.sched_getaffinity(0)))


@pytest.mark.gpu
def test_ahead_on_a_gpu():
    assert compiled.ahead([TP]) == (1, [])
