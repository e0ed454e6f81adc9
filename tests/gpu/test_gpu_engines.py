"""The engines' own kernels on GPUs: ids against the reference, captured and replayed; skipped in words where not importable."""

import pytest
import torch
from problems import build

from m3cp import engine_kernels, reference
from m3cp.shapes import IndexerShape, Point
from m3cp.shard import Shard

CONTEXTS = [32_768, 81_920, 2_000, 0, 50_001]
MAX_CONTEXT = 131_072


def needs(arm):
    why = engine_kernels.missing(arm)
    if why:
        pytest.skip(f"arm {arm!r}: its kernels are not importable here: {why}")


def problem_of(query_len=1, seed=3):
    return build(IndexerShape(), CONTEXTS, query_len, max_context=MAX_CONTEXT, page_slots=1, seed=seed).to("cuda")


def made(arm, problem, shard, exchange=None):
    ways = {} if arm == "vllm_tp" else {"exchange": exchange.name if exchange else "collective", "queries": "gathered"}
    point = Point(
        max(CONTEXTS), len(CONTEXTS), arm=arm, world=shard.world, query_len=problem.query_len, max_context=MAX_CONTEXT, **ways
    )  # fmt: skip
    device = torch.device("cuda", torch.cuda.current_device())
    return engine_kernels.make(point, shard, device=device, cache_dtype=problem.cache.dtype, exchange=exchange)


def assert_right(got, problem, owned, what):
    """Every row right up to ties, and few tied: the rest equal the reference's ids."""
    expect = reference.select_blocks(*problem.tensors, shape=problem.shape, query_len=problem.query_len)
    right, tied = engine_kernels.same_up_to_ties(
        got, expect[owned.start : owned.stop], *problem.tensors, shape=problem.shape, query_len=problem.query_len, heads=owned
    )  # fmt: skip
    assert bool(right.all()), f"{what}: {int((~right).sum())} of {right.numel()} rows are wrong"
    assert int(tied.sum()) < right.numel() / 2, f"{what}: {int(tied.sum())} of {right.numel()} rows are ties"


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("query_len", [1, 4])
def test_vllm_tp_chooses_the_references_blocks_at_every_setting(world, query_len):
    needs("vllm_tp")
    problem, shard = problem_of(query_len), Shard(world - 1, world, 4)
    q = problem.heads(shard.owned_heads)
    x = made("vllm_tp", problem, shard)
    x.warmup()
    out = torch.full((shard.local_heads, problem.tokens, 16), -7, dtype=torch.int32, device="cuda")
    for setting in x.settings if query_len == 1 else x.settings[:1]:
        x.compile(setting)
        x(q, *problem.tensors[1:], query_len=query_len, out=out, setting=setting)  # vLLM compiles anew for a table's stride
        assert_right(out, problem, shard.owned_heads, setting.name)
        out.fill_(-7)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x(q, *problem.tensors[1:], query_len=query_len, out=out, setting=setting)
        for _ in range(3):
            graph.replay()
        assert_right(out, problem, shard.owned_heads, setting.name)
    x.check()


@pytest.mark.gpu
@pytest.mark.parametrize("arm, world", [("vllm_cp", 2), ("vllm_cp", 4), ("vllm_cp", 8), ("sglang_cp", 4)])
def test_engines_cp_with_the_ranks_run_in_turn(arm, world):
    """Every rank's kernels in one process; the gathers are stacks."""
    needs(arm)
    problem = problem_of()
    ranks = [made(arm, problem, Shard(r, world, 4)) for r in range(world)]
    everyone = torch.stack([problem.heads(x.shard.owned_heads) for x in ranks])
    _, cache, table, lens = problem.tensors
    for setting in ranks[0].settings:
        with engine_kernels.using(ranks[0].modules, setting):
            found = torch.stack([x.local_keys(x.ordered(everyone), cache, table, lens, 1).clone() for x in ranks])
            for x in ranks:
                out = torch.full((x.shard.local_heads, problem.tokens, 16), -7, dtype=torch.int32, device="cuda")
                x.merge(found, lens, 1, out)
                assert_right(out, problem, x.shard.owned_heads, f"rank {x.shard.rank}, {setting.name}")


@pytest.mark.gpu
def test_a_choice_that_is_wrong_by_one_block_is_seen():
    """The comparison up to ties itself, on this device."""
    problem = problem_of()
    expect = reference.select_blocks(*problem.tensors, shape=problem.shape)
    wrong = expect.clone()
    free = next(b for b in range(200) if b not in wrong[1, 1].tolist() and b + 1 not in wrong[1, 1].tolist())
    wrong[1, 1, 0] = free
    given = dict(shape=problem.shape, query_len=1, heads=range(4))
    right, tied = engine_kernels.same_up_to_ties(wrong, expect, *problem.tensors, **given)
    assert not bool(right[1, 1]) and int((~right).sum()) == 1 and not bool(tied.any())
