"""Whole steps: decode rows by TP or CP and prefill rows unsharded, each exactly once, on the eager backend."""

import pytest
import torch
import torch.distributed as dist
from mixed import BATCHES, M3, check_mixed, mixed, step_of
from problems import assert_ids
from ranks import Ranks

from m3cp.decode import CPDecode, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.indexer import WholeStep
from m3cp.prefill import Prefill
from m3cp.shard import Shard


@pytest.mark.parametrize("name", BATCHES)
def test_every_row_is_chosen_as_the_oracle_chooses(name):
    check_mixed(BATCHES[name], 1)
    check_mixed(BATCHES[name], BATCHES[name].problem.shape.heads, scores_bytes=1 << 14)  # many windows


def step_on_a_rank(rank, name, queries, exchange):
    batch = BATCHES[name]
    problem, shape = batch.problem, batch.problem.shape
    shard = Shard(rank, dist.get_world_size(), shape.heads)
    transport = CollectiveExchange() if exchange == "collective" else SymmetricExchange()
    cp = CPDecode(shape, shard, exchange=transport, queries=queries, **problem.bounds())
    step = step_of(batch, shard, cp)
    q = problem.q if queries == "replicated" else problem.heads(shard.owned_heads)
    ids = step(q, *batch.tensors[1:], decode_requests=batch.decode_requests, query_len=problem.query_len).clone()
    return ids, step.path, transport.calls


@pytest.mark.parametrize("queries, exchange", [("gathered", "collective"), ("replicated", "symmetric")])
def test_cp_over_the_decode_rows_and_prefill_on_ranks(queries, exchange):
    ranks = Ranks(2)
    for name, batch in BATCHES.items():
        if batch.problem.shape.heads % 2:
            continue
        for rank, (ids, path, calls) in enumerate(ranks.run(step_on_a_rank, name, queries, exchange)):
            owned = Shard(rank, 2, batch.problem.shape.heads).owned_heads
            assert_ids(ids, batch.expect[owned.start : owned.stop], f"{name}, rank {rank}")
            assert path == "cp" and calls == ((1 + (queries == "gathered")) if batch.decode_requests else 0), name
    ranks.close()


def decode_rows_differ(rank):
    """X05: rank 0 has decode rows, rank 1 nothing but prefill."""
    from m3cp import exchange as exchange_module

    exchange_module.AGREE_S = 20.0
    batch = (BATCHES["mixed"], BATCHES["prefill alone"])[rank]
    shard = Shard(rank, 2, 4)
    bounds = dict(max_context=128 * 7, cache_dtype=torch.bfloat16, device="cpu")
    cp = CPDecode(M3, shard, exchange=CollectiveExchange(), max_requests=8, max_query_len=2, **bounds)
    step = WholeStep(cp, Prefill(M3, shard, max_tokens=256, **bounds))
    table = torch.nn.functional.pad(batch.problem.block_table, (0, 2))
    cp._warm = True
    try:
        step(batch.problem.heads(shard.owned_heads), batch.problem.cache, table, batch.problem.seq_lens, batch.starts,
             decode_requests=batch.decode_requests, query_len=batch.problem.query_len)  # fmt: skip
    except ValueError as error:
        return str(error)


def test_ranks_whose_decode_rows_differ_all_raise():
    ranks = Ranks(2)
    said = ranks.run(decode_rows_differ)
    ranks.close()
    assert all("rows of the ranks [8, 0]" in text for text in said), said


def test_decode_padding_never_reaches_prefill_rows():
    """All decode rows are padding, with rubbish in their tables: -1 in their slice, and prefill rows as without them."""
    chunks = [(37, 128 * 5 + 20), (9, 128 * 6)]
    batch, alone = mixed(M3, [0] * 7, chunks, query_len=2), mixed(M3, [], chunks)
    step = step_of(batch, Shard(0, 1, 4))
    ids = step(*batch.tensors, decode_requests=7, query_len=2)
    assert bool((ids[:, :14] == -1).all())
    assert_ids(ids, batch.expect)
    assert bool((alone.expect != -1).any()) and bool((ids[:, 14:] >= 0).any())


def test_a_chunk_chooses_as_the_same_tokens_decoded_and_as_one_chunk():
    """On data where another order of summation shows: a token's choice does not depend on how it came."""
    batch = mixed(M3, [], [(24, 128 * 8 + 3)], kind="ulp", seed=3)
    p = batch.problem
    whole = step_of(batch, Shard(0, 1, 4))(*batch.tensors, decode_requests=0).clone()
    tp = TPDecode(M3, Shard(0, 1, 4), **p.bounds(max_query_len=8))
    for first in range(0, 24, 8):
        lens = p.seq_lens - (24 - first - 8)
        assert_ids(tp(p.q[first : first + 8], p.cache, p.block_table, lens, query_len=8), whole[:, first : first + 8], "decoded")
        starts = torch.tensor([0, 8], dtype=torch.int32)
        step = step_of(batch, Shard(0, 1, 4))
        part = step(p.q[first : first + 8], p.cache, p.block_table, lens, starts, decode_requests=0)
        assert_ids(part, whole[:, first : first + 8], "chunked")


def test_lengths_beyond_the_bound_are_found():
    batch = BATCHES["chunks longer than the bound"]
    step = step_of(batch, Shard(0, 1, 4))
    step(*batch.tensors, decode_requests=1)
    with pytest.raises(RuntimeError, match="a prefill's sequence length exceeds max_context=768, found by rank 0"):
        step.check()


def test_a_profiling_run_chooses_nothing():
    batch = BATCHES["mixed"]
    step = step_of(batch, Shard(0, 1, 4))
    q, _, *rest = batch.tensors
    ids = step(q, None, *rest, decode_requests=4, query_len=2)
    assert step.path == "profiling" and bool((ids == -1).all()) and step.nbytes > step.decode.nbytes


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(decode_requests=8), r"decode_requests=8: must be 0 to 7"),
        (dict(query_len=3), r"query_len=3: must be 1 to 2"),
        (dict(out=torch.empty(4, 76, 3, dtype=torch.int32)), r"out of shape \(4, 76, 3\).*must be contiguous \(4, 77, 3\)"),
        (dict(starts=torch.zeros(3, dtype=torch.int32)), r"starts of shape \(3,\).*must be \(4,\) int32"),
        (dict(starts=torch.zeros(4, dtype=torch.int64)), "starts of shape .*torch.int64"),
        (dict(q=BATCHES["mixed"].problem.q[:5]), "q.shape.0.=5: must be at least the 8 rows of 4 decode requests"),
    ],
)
def test_what_does_not_fit_is_refused(change, named):
    batch = BATCHES["mixed"]
    names = ("q", "cache", "block_table", "seq_lens", "starts")
    given = dict(zip(names, batch.tensors, strict=True)) | dict(decode_requests=4, query_len=2) | change
    step = step_of(batch, Shard(0, 1, 4))
    with pytest.raises(ValueError, match=named):
        step(*[given.pop(n) for n in names], **given)


def test_parts_that_do_not_belong_together_are_refused():
    batch = BATCHES["mixed"]
    tp = TPDecode(M3, Shard(0, 1, 4), **batch.problem.bounds())
    other = Prefill(M3, Shard(1, 2, 4), max_tokens=4, max_context=tp.max_context, device="cpu")
    with pytest.raises(ValueError, match="prefill.shard=.*must be the decode object's shard="):
        WholeStep(tp, other)
