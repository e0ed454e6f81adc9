"""Several GPUs: TP and CP over NCCL and over peers' memory, eager and captured.

pytest starts torchrun on this very file, once per number of ranks; the ranks run everything and report by name.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_S = 300
CONTEXTS = [32_768, 81_920, 50_001, 65_537]
# (form, exchange, queries, heads, query_len)
RUNS = [
    ("staged", "collective", queries, heads, query_len)
    for queries in ("gathered", "replicated")
    for heads in (1, 4)
    for query_len in (1, 4)
]
RUNS += [
    ("staged", "symmetric", "gathered", 4, 1),
    ("two_launch", "symmetric", "gathered", 4, 1),
    ("one_launch", "symmetric", "replicated", 4, 1),
]
RUNS += [("one_launch", "symmetric", "gathered", 4, 4)]
NAMES = ["/".join(map(str, run)) for run in RUNS]
EXTRA = ["bits", "heads differ", "capture after collectives", "no warm-up", "group size", "vllm cp over nccl", "vllm cp over symmetric memory"]


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, marks=pytest.mark.multigpu(gpus=2)), pytest.param(4, marks=pytest.mark.multigpu(gpus=4))],
)
def report(request):
    """{name: "ok" or what went wrong}, of as many ranks as `params` says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        done = torchrun(request.param, path)
        if not path.exists():
            pytest.fail(f"torchrun ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        return json.loads(path.read_text())


def torchrun(ranks: int, *given) -> subprocess.CompletedProcess:
    """This file as `ranks` fresh processes, with `given` on their command line."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__, *map(str, given)]
    return subprocess.run(command, env=env, timeout=LIMIT_S, capture_output=True, text=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES + EXTRA)
def test_ranks(report, name):
    found = report.get(name, "not reached")
    if found.startswith("rank 0: skipped: "):
        pytest.skip(found.splitlines()[0].removeprefix("rank 0: skipped: "))
    assert found == "ok", found


@pytest.mark.multigpu(gpus=2)
@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 512])
@pytest.mark.parametrize("form, exchange", [("staged", "collective"), ("staged", "symmetric"), ("two_launch", "symmetric"), ("one_launch", "symmetric")])
def test_the_first_call_of_fresh_processes_is_inside_a_capture(form, exchange, batch):
    """G06: refused in words without warm-up, right after it; the group's first collective is warm-up's own."""
    done = torchrun(2, "fresh", form, exchange, batch)
    assert done.returncode == 0 and done.stdout.count("right") == 2, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def fresh(form: str, exchange: str, batch: str) -> None:
    """One rank of that test. No device is given to the group: NCCL would connect at the first collective."""
    import torch
    import torch.distributed as dist
    from graphs import capture
    from problems import assert_ids

    from m3cp import reference

    rank, requests = int(os.environ["LOCAL_RANK"]), int(batch)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    problem = problem_of(4, 1)
    expect = reference.select_blocks(*problem.tensors, shape=problem.shape).cpu()
    several = [torch.arange(requests, device="cuda") % len(CONTEXTS)]
    q, table, lens = problem.q[several], problem.block_table[several], problem.seq_lens[several]
    decode, shard = object_of(problem, rank, dist.get_world_size(), form, exchange, "gathered", max_requests=512)
    q = q[:, shard.owned_heads.start : shard.owned_heads.stop].contiguous()
    out = torch.full((shard.local_heads, requests, problem.shape.topk), -7, dtype=torch.int32, device="cuda")
    try:
        capture(decode, q, problem.cache, table, lens, out=out)
    except RuntimeError as error:
        assert "call warmup" in str(error), error
    else:
        raise AssertionError("captured without warm-up")
    torch.cuda.synchronize()
    decode.warmup()
    capture(decode, q, problem.cache, table, lens, out=out).replay()
    decode.check()
    assert_ids(out, expect[shard.owned_heads.start : shard.owned_heads.stop, several[0].cpu()], f"{form}, {exchange}, batch {batch}")
    print("right", flush=True)
    dist.barrier()
    os._exit(0)  # a group with captured collectives does not go away


def main(path: str) -> None:
    import torch
    import torch.distributed as dist
    from problems import poison_fresh_memory

    poison_fresh_memory()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    world = dist.get_world_size()
    found = {}
    for name, function, args in [
        *((n, run_decode, r) for n, r in zip(NAMES, RUNS, strict=True)),
        *((n, globals()["run_" + n.replace(" ", "_").replace("-", "_")], ()) for n in EXTRA),
    ]:
        try:
            function(rank, world, *args)
            said = "ok"
        except pytest.skip.Exception as reason:
            said = f"skipped: {reason}"
        except Exception:
            said = traceback.format_exc()
        everyone = [None] * world
        dist.all_gather_object(everyone, said)
        bad = [f"rank {r}: {text}" for r, text in enumerate(everyone) if text != "ok"]
        found[name] = "\n".join(bad) or "ok"
        if rank == 0:
            Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@functools.cache
def problem_of(heads: int, query_len: int):
    from problems import build

    from m3cp.shapes import IndexerShape

    return build(IndexerShape(heads=heads), CONTEXTS, query_len, max_context=131_072, seed=heads * 10 + query_len).to(
        "cuda"
    )


def object_of(problem, rank, world, form, exchange, queries, **changes):
    from m3cp.decode import CPDecode
    from m3cp.exchange import CollectiveExchange, SymmetricExchange
    from m3cp.shard import Shard

    shard = Shard(rank, world, problem.shape.heads)
    kind = {"collective": CollectiveExchange, "symmetric": SymmetricExchange}[exchange]()
    return CPDecode(problem.shape, shard, exchange=kind, queries=queries, form=form, **problem.bounds(**changes)), shard


def run_decode(rank, world, form, exchange, queries, heads, query_len):
    """Eager, then captured on one-block requests and replayed at full length and at none, many times back to back."""
    import torch
    from graphs import capture, no_compile, nodes
    from problems import assert_ids

    from m3cp import reference
    from m3cp.decode import TPDecode

    problem = problem_of(heads, query_len)
    expect = reference.select_blocks(*problem.tensors, shape=problem.shape, query_len=query_len).cpu()
    decode, shard = object_of(problem, rank, world, form, exchange, queries)
    mine = expect[shard.owned_heads.start : shard.owned_heads.stop]
    q = problem.q if queries == "replicated" else problem.heads(shard.owned_heads)
    decode.warmup()
    assert_ids(decode(q, *problem.tensors[1:], query_len=query_len), mine, "eager")
    if exchange == "collective" and queries == "gathered":
        tp = TPDecode(problem.shape, shard, **problem.bounds())
        assert_ids(tp(problem.heads(shard.owned_heads), *problem.tensors[1:], query_len=query_len), mine, "tp")
    full = problem.seq_lens.clone()
    lens = torch.ones_like(full)
    out = torch.full(mine.shape, -7, dtype=torch.int32, device="cuda")
    before = decode.exchange.calls
    with no_compile():
        graph = capture(decode, q, problem.cache, problem.block_table, lens, query_len=query_len, out=out)
    found = nodes(graph)
    assert sum(n.endswith("_kernel") and "nccl" not in n.lower() for n in found) == decode.launches, found
    if exchange == "collective":
        assert decode.exchange.calls - before == decode.collectives
        assert sum("nccl" in n.lower() for n in found) == decode.collectives, found
    for lengths in (full, torch.zeros_like(full), full, full.clamp(max=129), full):
        lens.copy_(lengths)
        out.fill_(-7)
        for _ in range(5):
            graph.replay()
        now = reference.select_blocks(
            problem.q, problem.cache, problem.block_table, lens, shape=problem.shape, query_len=query_len
        ).cpu()
        assert_ids(out, now[shard.owned_heads.start : shard.owned_heads.stop], f"replayed at {lengths.tolist()}")
    assert_ids(decode(q, *problem.tensors[1:], query_len=query_len), mine, "eager again")
    decode.check()


def run_bits(rank, world):
    """Score buffers of the ranks' own CP and TP runs, bit for bit, on data where another order of summation shows."""
    import torch
    from cases import kernel_scores
    from problems import build

    from m3cp.decode import TPDecode
    from m3cp.shapes import IndexerShape
    from m3cp.shard import Shard

    for kind in ("free", "ulp"):
        problem = build(IndexerShape(local_blocks=0), [128 * 90, 128 * 41 + 9], 4, kind=kind, seed=5).to("cuda")
        whole = kernel_scores(problem, Shard(0, 1, 4))
        decode, shard = object_of(problem, rank, world, "staged", "collective", "gathered")
        ids = decode(problem.heads(shard.owned_heads), *problem.tensors[1:], query_len=4)
        width = shard.local_blocks(problem.block_table.shape[1])
        # Blocks behind a request's last are never scored: what stands there is whatever the memory held.
        last = (problem.seq_lens + 127).div(128, rounding_mode="floor").repeat_interleave(4)[:, None, None]
        scored = torch.arange(whole.shape[2], device="cuda") < last
        local = scored[:, :, rank::world].expand(-1, 4, -1)
        assert torch.equal(decode._scores[: problem.tokens, :, :width][local], whole[:, :, rank::world][local]), kind
        tp = TPDecode(problem.shape, shard, **problem.bounds())
        tp_ids = tp(problem.heads(shard.owned_heads), *problem.tensors[1:], query_len=4)
        mine = scored.expand(-1, shard.local_heads, -1)
        own = whole[:, shard.owned_heads.start : shard.owned_heads.stop]
        assert torch.equal(tp._scores[: problem.tokens, :, : whole.shape[2]][mine], own[mine]), kind
        assert torch.equal(ids, tp_ids), kind


def run_heads_differ(rank, world):
    """The inputs themselves: heads choose different blocks on at least 90% of the rows, or merging heads would pass."""
    from m3cp import reference

    for query_len in (1, 4):
        problem = problem_of(4, query_len)
        ids = (
            reference.select_blocks(*problem.tensors, shape=problem.shape, query_len=query_len)
            .permute(1, 0, 2)
            .tolist()
        )
        assert sum(len({tuple(head) for head in row}) == 4 for row in ids) >= 0.9 * len(ids)


def run_capture_after_collectives(rank, world):
    """G04: thirty eager collectives right before a capture, a hundred times."""
    import torch
    import torch.distributed as dist
    from graphs import capture

    problem = problem_of(4, 1)
    decode, shard = object_of(problem, rank, world, "staged", "collective", "gathered")
    decode.warmup()
    q = problem.heads(shard.owned_heads)
    noise = torch.ones(1024, device="cuda")
    out = torch.empty(shard.local_heads, problem.tokens, problem.shape.topk, dtype=torch.int32, device="cuda")
    for _ in range(100):
        for _ in range(30):
            dist.all_reduce(noise)
        capture(decode, q, *problem.tensors[1:], out=out).replay()
    torch.cuda.synchronize()
    decode.check()


def run_no_warm_up(rank, world):
    """G06: the first call inside a capture is refused in words, on every rank, and the object works afterwards."""
    import torch
    from graphs import capture

    problem = problem_of(4, 1)
    for form, exchange in (("staged", "collective"), ("one_launch", "symmetric")):
        decode, shard = object_of(problem, rank, world, form, exchange, "gathered")
        q = problem.heads(shard.owned_heads)
        try:
            capture(decode, q, *problem.tensors[1:])
        except RuntimeError as error:
            assert "call warmup" in str(error), error
        else:
            raise AssertionError("captured without warm-up")
        torch.cuda.synchronize()
        decode.warmup()
        decode(q, *problem.tensors[1:])
        decode.check()


def run_vllm_cp_over_nccl(rank, world):
    from m3cp.exchange import CollectiveExchange

    run_vllm_cp(rank, world, CollectiveExchange())


def run_vllm_cp_over_symmetric_memory(rank, world):
    from m3cp.exchange import SymmetricExchange

    run_vllm_cp(rank, world, SymmetricExchange())


def run_vllm_cp(rank, world, exchange):
    """vLLM's kernels around our transports: captured at its own and at every other launch setting, replayed back to back."""
    import torch
    import torch.distributed as dist
    from graphs import capture, nodes
    from test_gpu_engines import assert_right, made, needs, problem_of

    from m3cp.shard import Shard

    needs("vllm_cp")
    problem, shard = problem_of(), Shard(rank, world, 4)
    x = made("vllm_cp", problem, shard, exchange)
    dist.barrier()  # nobody waits inside an exchange for a rank that still compiles
    x.warmup()
    q = problem.heads(shard.owned_heads)
    out = torch.full((shard.local_heads, problem.tokens, 16), -7, dtype=torch.int32, device="cuda")
    for setting in x.settings:
        x.compile(setting)
        dist.barrier()
        x(q, *problem.tensors[1:], out=out, setting=setting)
        assert_right(out, problem, shard.owned_heads, setting.name)
        out.fill_(-7)
        graph = capture(x, q, *problem.tensors[1:], out=out, setting=setting)
        found = [name for name in nodes(graph) if name not in ("wait", "record")]  # NCCL's stream joins by events
        over_nccl = sum("nccl" in name.lower() for name in found)
        assert (len(found) - over_nccl, over_nccl) == (x.launches, x.collectives), found
        for _ in range(5):
            graph.replay()
        assert_right(out, problem, shard.owned_heads, setting.name)
        out.fill_(-7)
    x.check()


def run_group_size(rank, world):
    """X02: a shard of another world than the group's."""
    from m3cp.decode import CPDecode
    from m3cp.exchange import CollectiveExchange, SymmetricExchange
    from m3cp.shard import Shard

    problem = problem_of(4, 1)
    for kind in (CollectiveExchange, SymmetricExchange):
        try:
            CPDecode(problem.shape, Shard(rank, 2 * world, 4), exchange=kind(), **problem.bounds())
        except ValueError as error:
            assert f"shard.world={2 * world}: the process group has {world} ranks" in str(error)
        else:
            raise AssertionError("accepted a shard of another world")


if __name__ == "__main__":
    fresh(*sys.argv[2:]) if sys.argv[1] == "fresh" else main(sys.argv[1])
