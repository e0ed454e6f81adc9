"""The compiled kernels on one GPU: the same cases as the interpreter's, and what only a device can show."""

import os
import subprocess
import sys
from pathlib import Path

import cells
import pytest
import torch
from cases import (
    CASES,
    SPREAD,
    check,
    check_grid_bound,
    check_length_error,
    check_nothing_kept,
    check_same_bits,
    check_written,
    kernel_scores,
)
from problems import assert_ids, build, oracle

from m3cp import decode, reference
from m3cp.decode import CPLocal, TPDecode
from m3cp.kernels import tile
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard
from m3cp.testing import select_virtual

pytestmark = pytest.mark.gpu
FORMS = ("staged", "one_launch", "two_launch")
HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Kernels of all cases, compiled side by side into Triton's cache: tests then load them. Side by side already under xdist."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    parts = max(1, min(12, (os.cpu_count() or 2) - 2))
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)]),
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen([sys.executable, HERE / "prepare.py", str(i), str(parts)], env=env) for i in range(parts)
    ]
    for process in running:
        process.wait()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case):
    check(case, path="cp", world=SPREAD[case.name], device="cuda")
    check(case, path="tp", world=1, device="cuda")


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in ("m3", "bad pages", "short lengths of draft tokens", "longer than the bound", "e4m3fn", "every e4m3fnuz code")],
    ids=str,
)
def test_two_launches(case):
    check(case, path="cp", world=4, device="cuda", form="two_launch")


@pytest.mark.parametrize("form", cells.FORMS)
@pytest.mark.parametrize("name", ["padding rows of a bucket", "a context of 1M tokens", "a batch of 256", "topk 64"])
def test_the_fused_forms_do_what_the_staged_one_does(name, form):
    """TP, and adaptive CP on its own path; ranks of two launches take turns, those of one launch await themselves."""
    threshold = cells.threshold_of(cells.problem_of(name), True)
    cells.check(name, form, world=1 if form == "one_launch" else 8, queries="gathered", threshold_blocks=threshold, device="cuda")


@pytest.mark.parametrize("kind", ["free", "ulp"])
@pytest.mark.parametrize("heads, query_len", [(4, 1), (4, 4), (8, 3)])
def test_scores_have_the_same_bits_whatever_ranks_and_grid(kind, heads, query_len):
    """The canary: block scores a few units in the last place apart, compared bit by bit."""
    shape = IndexerShape(heads=heads, topk=3, local_blocks=0)
    check_same_bits(
        build(shape, [128 * 67, 128 * 30 + 77], query_len, kind=kind, seed=7).to("cuda"),
        worlds=(2, 8),
        grids=(1, 7, 396),
    )


def test_dots_on_free_data_are_near_fp64():
    shape = IndexerShape(topk=3, local_blocks=0)
    problem = build(shape, [128 * 200, 128 * 31 + 5], 2, kind="free", seed=3)
    on_gpu = problem.to("cuda")
    got = kernel_scores(on_gpu, Shard(0, 1, 4), programs=264)
    for request, n in enumerate(problem.seq_lens.tolist()):
        k = on_gpu.cache[on_gpu.block_table[request, : shape.blocks(n)].long()].double().flatten(0, 1)[:n]
        for row in range(2):
            q = on_gpu.q[request * 2 + row].double()
            seen = n - 1 + row
            blocks = seen // 128  # whole ones
            dots, size = (k[:seen] @ q.T)[: blocks * 128], (k.abs()[:seen] @ q.abs().T)[: blocks * 128]
            exact, margin = (x.view(blocks, 128, 4).amax(1).T for x in (dots, size))
            assert bool(((got[request * 2 + row, :, :blocks] - exact).abs() <= margin * 2**-16).all())


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in CASES
        if c.name in ("m3", "ties", "bad pages", "only the last draft rows are too long", "padding only")
    ],
    ids=str,
)
def test_scores_are_written_where_they_decide_and_nowhere_else(case):
    check_written(case.problem.to("cuda"), SPREAD[case.name])


def test_a_bound_eight_times_larger_changes_no_score():
    check_grid_bound(
        build(IndexerShape(topk=2), [128 * 7 - 3, 128 * 4, 0], kind="free", max_context=128 * 64).to("cuda")
    )


@pytest.mark.parametrize("form", FORMS)
def test_lengths_beyond_the_bound_reach_the_error_word(form):
    check_length_error("cuda", form)


@pytest.mark.parametrize("form", FORMS)
def test_an_object_keeps_nothing_of_its_last_call(form):
    check_nothing_kept("cuda", form)


def test_long_contexts_choose_as_the_reference():
    """Heads differ on nearly every row, and every chunk of the choice is full."""
    shape = IndexerShape()
    problem = build(shape, [131_072, 70_001, 3_000], 4, max_context=1 << 20).to("cuda")
    expect = reference.select_blocks(*problem.tensors, shape=shape, query_len=4)
    heads = expect.permute(1, 0, 2)
    assert sum(len({tuple(h) for h in row.tolist()}) == 4 for row in heads) >= 0.6 * len(heads)
    for path, world in (("tp", 2), ("cp", 4), ("cp", 8)):
        assert_ids(
            select_virtual(*problem.tensors, shape=shape, world=world, query_len=4, path=path),
            expect.cpu(),
            f"{path} of {world}",
        )
    for form in FORMS[1:]:
        tp = TPDecode(shape, Shard(0, 1, 4), form=form, **problem.bounds())
        assert_ids(tp(*problem.tensors, query_len=4), expect.cpu(), form)


def test_pages_beyond_two_to_the_31_elements():
    """M01: the same data on pages 0, 1, 2 and on pages whose element offset needs 64 bits."""
    shape = IndexerShape(topk=1, local_blocks=0)
    problem = build(shape, [128 * 3], page_slots=1).to("cuda")
    used = problem.cache[problem.block_table[0].long()]
    cache = torch.empty(131_074, 128, 128, dtype=torch.bfloat16, device="cuda")
    ids = []
    for first in (0, 131_071):
        cache[first : first + 3] = used
        table = torch.arange(first, first + 3, dtype=torch.int32, device="cuda")[None]
        scores = kernel_scores(type(problem)(shape, 1, 384, problem.q, cache, table, problem.seq_lens), Shard(0, 1, 4))
        ids.append(
            (
                scores,
                TPDecode(shape, Shard(0, 1, 4), **problem.bounds())(problem.q, cache, table, problem.seq_lens).clone(),
            )
        )
        assert_ids(ids[-1][1], oracle(problem.to("cpu")))
    assert torch.equal(ids[0][0], ids[1][0])
    slots = cache[: 65_537 * 2].view(65_537, 2, 128, 128)[:, 0]  # a page stride of 32,768: the threshold is page 65,536
    slots[65_534:] = used
    table = torch.arange(65_534, 65_537, dtype=torch.int32, device="cuda")[None]
    assert_ids(
        TPDecode(shape, Shard(0, 1, 4), **problem.bounds())(problem.q, slots, table, problem.seq_lens),
        oracle(problem.to("cpu")),
    )


def test_score_rows_beyond_two_to_the_31_elements():
    """The same fault in the score buffer: the last rows of a full batch lie beyond 2**31 scores, the first ones before."""
    shape = IndexerShape(heads=8, topk=2)
    requests, query_len, width = 4096, 8, 8448
    assert (requests - 1) * query_len * 8 * width > 2**31
    small = build(shape, [128 * 6], query_len).to("cuda")
    table = torch.zeros(requests, width, dtype=torch.int32, device="cuda")
    lens = torch.zeros(requests, dtype=torch.int32, device="cuda")
    q = torch.zeros(requests * query_len, 8, 128, dtype=torch.bfloat16, device="cuda")
    for at in (0, requests - 1):
        table[at, :6], lens[at], q[at * query_len : (at + 1) * query_len] = small.block_table[0], 128 * 6, small.q
    bounds = small.bounds(max_requests=requests, max_context=width * 128)
    ids = TPDecode(shape, Shard(0, 1, 8), **bounds)(q, small.cache, table, lens, query_len=query_len)
    expect = oracle(small.to("cpu"))
    assert_ids(ids[:, :query_len], expect)
    assert_ids(ids[:, -query_len:], expect)
    assert bool((ids[:, query_len:-query_len] == -1).all())


def test_short_and_padding_rows_with_huge_lengths_next_to_them():
    """K01: `seq_lens` stands between lengths beyond any bound; reading one of them would be an error or a hang."""
    shape = IndexerShape(topk=2)
    problem = build(shape, [0, 1, 2, 3, 4, 130], 4).to("cuda")
    for form in FORMS:
        tp = TPDecode(shape, Shard(0, 1, 4), form=form, **problem.bounds())
        assert_ids(tp(*problem.tensors, query_len=4), oracle(problem.to("cpu")), form)
        tp.check()


def test_the_resources_of_the_compiled_kernels_are_those_promised():
    """The grid of the staged score kernel is what the device holds, on the device itself."""
    tp = TPDecode(IndexerShape(), Shard(0, 1, 4), max_requests=1, max_query_len=1, max_context=4096, device="cuda")
    assert tp._programs == tile.setting(tile.NATIVE.value).programs_per_unit * torch.cuda.get_device_properties(0).multi_processor_count
    assert (
        CPLocal(IndexerShape(), Shard(1, 4, 4), max_requests=1, max_query_len=1, max_context=4096, device="cuda").nbytes
        > 0
    )


def test_a_grid_larger_than_what_is_resident_is_refused_at_warm_up(monkeypatch):
    """A wrong occupancy, planted: the first kernel that warm-up launches waits for nothing and tells how many fit."""
    units = torch.cuda.get_device_properties(0).multi_processor_count
    monkeypatch.setattr(decode._Fused, "_resident", lambda self: 16 * units)
    tp = TPDecode(IndexerShape(), Shard(0, 1, 4), max_requests=2, max_query_len=1, max_context=8192, device="cuda", form="one_launch")
    with pytest.raises(RuntimeError, match=f"programs of this kernel are resident at once, the grid has {16 * units}: they could wait for ever"):
        tp.warmup()
