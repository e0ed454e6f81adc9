"""The engines' own kernels, interpreted; skipped in words where they are not importable. fp16: the interpreter multiplies no bf16."""

import importlib

import pytest
import torch
from problems import build

from m3cp import engine_kernels, reference
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard


def needs(arm):
    why = engine_kernels.missing(arm)
    if why:
        pytest.skip(f"arm {arm!r}: its kernels are not importable here: {why}")


def problem_of(heads):
    return build(IndexerShape(heads=heads), [128 * 18 - 7, 0], dtype=torch.float16, page_slots=1, seed=4)


def assert_right(got, problem, owned):
    expect = reference.select_blocks(*problem.tensors, shape=problem.shape)[owned.start : owned.stop]
    right, _ = engine_kernels.same_up_to_ties(got, expect, *problem.tensors, shape=problem.shape, query_len=1, heads=owned)
    assert bool(right.all()), (got, expect)


def test_vllm_cp_chooses_as_the_reference():
    needs("vllm_cp")
    problem, shards = problem_of(4), [Shard(r, 2, 4) for r in range(2)]
    ranks = [engine_kernels.VllmCP(problem.shape, s, **problem.bounds()) for s in shards]
    everyone = torch.stack([problem.heads(s.owned_heads) for s in shards])
    found = torch.stack([x.local_keys(x.ordered(everyone), *problem.tensors[1:], 1).clone() for x in ranks])
    for x in ranks:
        out = torch.full((2, problem.tokens, 16), -7, dtype=torch.int32)
        x.merge(found, problem.seq_lens, 1, out)
        assert_right(out, problem, x.shard.owned_heads)


@pytest.mark.slow
def test_vllm_tp_chooses_as_the_reference(monkeypatch):
    needs("vllm_tp")
    problem, shard = problem_of(2), Shard(1, 2, 2)
    (engine,) = [importlib.import_module(n) for n in engine_kernels.MODULES["vllm_tp"]]
    tuner = engine._topk_index_partial_kernel.fn
    monkeypatch.setattr(tuner, "configs", tuner.configs[-1:])  # there is no device to tune on
    x = engine_kernels.VllmTP(problem.shape, shard, **problem.bounds())
    assert_right(x(problem.heads(shard.owned_heads), *problem.tensors[1:]), problem, shard.owned_heads)


def test_sglang_scores_its_shard_as_the_reference():
    """Its top-k kernels complement unsigned integers, which the interpreter can't: those run on GPUs alone."""
    needs("sglang_cp")
    problem = problem_of(4)
    (engine,) = [importlib.import_module(n) for n in engine_kernels.MODULES["sglang_cp"]]
    x = engine_kernels.SglangCP.__new__(engine_kernels.SglangCP)
    x.shape, x.device, x._slots = problem.shape, torch.device("cpu"), {}
    tokens, requests = x._token_slots(problem.block_table), torch.arange(2, dtype=torch.int32)
    q, cache = problem.q.transpose(0, 1).contiguous(), problem.cache.reshape(-1, 1, 128)
    got = engine.score_local_blocks(q, cache, tokens, requests, problem.seq_lens, problem.max_context, 1, 0, 1, 1 / 1.4426950409, 1.0)
    expect = reference.score(
        *problem.tensors, shape=problem.shape, shard=Shard(1, 4, 4), query_len=1, max_context=problem.max_context
    ).transpose(0, 1)  # [heads, tokens, local blocks]
    read = expect[:, :1] > -1e9  # not the forced block, not what lies behind the end
    assert int(read.sum()) == 4 * 4
    torch.testing.assert_close(got[:, :1][read], expect[:, :1][read], rtol=1e-6, atol=0)
