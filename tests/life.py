"""Failures that people hit in systems like this one, as inputs and right results; run by the eager backend and on GPUs.

Each function is a whole kind of fault. Names are the cases' own.
"""

from __future__ import annotations

import numpy as np
import torch
from problems import Problem, assert_ids, build, oracle

from m3cp import keys, reference
from m3cp.decode import CPLocal, TPDecode
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard
from m3cp.testing import select_virtual

WORLDS = (1, 2, 4, 8)


def pages_of(values: torch.Tensor, block: int = 128, dim: int = 128) -> torch.Tensor:
    """A cache with one page a value: its key's first lane at every position, bf16."""
    cache = torch.zeros(len(values), block, dim)
    cache[:, :, 0] = values[:, None]
    return cache.bfloat16()


def select(problem: Problem, world: int, path: str = "cp", device="cpu", **changes) -> torch.Tensor:
    there = problem.to(device)
    given = (
        dict(shape=there.shape, world=world, query_len=there.query_len, path=path, max_context=there.max_context)
        | changes
    )
    return select_virtual(*there.tensors, **given).cpu()


def one_row(shape: IndexerShape, cache: torch.Tensor, table: torch.Tensor, tokens: int) -> Problem:
    """One request whose query is the first unit vector, for every head."""
    q = torch.zeros(1, shape.heads, shape.head_dim)
    q[:, :, 0] = 1
    return Problem(shape, 1, tokens, q.bfloat16(), cache, table.int()[None], torch.tensor([tokens], dtype=torch.int32))


def by_scores(scores: torch.Tensor, topk: int, world: int, device="cpu", **forced) -> list[int]:
    """The choice from given block scores `[blocks]`, by every rank's candidates and the merge, without any key."""
    shape = IndexerShape(heads=1, topk=topk, **({"local_blocks": 0} | forced))
    lens = torch.tensor([scores.numel() * 128], dtype=torch.int32, device=device)
    found = []
    for rank in range(world):
        bounds = dict(shape=shape, shard=Shard(rank, world, world), query_len=1, max_context=int(lens[0]))
        mine = scores[rank::world].contiguous()[None, None].to(device)
        if str(device) == "cpu":
            found.append(reference.candidates(mine, lens, **bounds))
        else:
            from m3cp.kernels import candidates as op

            found.append(
                op.candidates(
                    mine, lens, tokens=1, out=torch.empty(1, 1, topk, dtype=torch.int64, device=device), **bounds
                )
            )
    gathered = torch.stack(found)
    if str(device) == "cpu":
        return reference.merge(gathered, shape=shape, owned=range(1))[0, 0].tolist()
    from m3cp.kernels import merge as op

    return op.merge(
        gathered, shape=shape, owned=range(1), out=torch.empty(1, 1, topk, dtype=torch.int32, device=device)
    )[0, 0].tolist()


def best_of(scores: torch.Tensor, topk: int) -> list[int]:
    order = sorted(range(scores.numel()), key=lambda b: (-float(scores[b]), b))
    return sorted(order[:topk])


def k01_padding_rows_of_draft_tokens(device="cpu"):
    """A negative row length read as unsigned; a scheduler that reads past lengths that are all zero."""
    shape = IndexerShape()
    problem = build(shape, [0, 1, 2, 3, 4, 130], 4)
    only = [0] + [-1] * 15
    for path, world in (("tp", 1), ("cp", 1), ("cp", 4), ("cp", 8)):
        ids = select(problem, world, path, device)
        assert ids.shape == (4, 24, 16)
        for head in ids.tolist():
            assert head[0:4] == [[-1] * 16] * 4
            assert head[4:8] == [[-1] * 16] * 3 + [only]
            assert head[8:12] == [[-1] * 16] * 2 + [only] * 2
            assert head[16:20] == [only] * 4
            assert head[20:24] == [only] * 2 + [[0, 1] + [-1] * 14] * 2
        zeros = build(shape, [0] * 8, 4, max_context=256)
        assert bool((select(zeros, world, path, device) == -1).all())
        nothing = build(shape, [], 4, max_context=256)
        assert select(nothing, world, path, device).shape == (4, 0, 16)


def k02_lengths_include_the_draft_tokens(device="cpu"):
    """A verification step that passes the committed prefix hides its own draft tokens."""
    shape = IndexerShape(local_blocks=0)
    right = build(shape, [130], 4)
    wrong = Problem(shape, 4, 130, *right.tensors[:3], torch.tensor([126], dtype=torch.int32))
    first, both = [0] + [-1] * 15, [0, 1] + [-1] * 14
    for world in WORLDS:
        assert select(right, world, device=device)[0].tolist() == [first, first, both, both]
        assert select(wrong, world, device=device)[0].tolist() == [first] * 4


def k05_ties_overflow_no_buffer(device="cpu"):
    """Selectors that keep a fixed number of candidates from the threshold's bucket lose some, or return -1."""
    shape = IndexerShape(local_blocks=0)
    for blocks, worlds in ((100, WORLDS), (8192, (2,))):
        zeros = one_row(shape, pages_of(torch.zeros(1)), torch.zeros(blocks), blocks * 128)
        for world in worlds:
            assert select(zeros, world, device=device)[0, 0].tolist() == list(range(16))
    table = torch.zeros(100)
    table[[7, 40, 99]] = torch.tensor([1.0, 2.0, 3.0])
    winners = one_row(shape, pages_of(torch.tensor([0.0, 3.0, 1.0, 2.0])), table, 100 * 128)
    band = 1 + torch.randperm(8192, generator=torch.Generator().manual_seed(5)) * 2.0**-23
    assert len(band.unique()) == 8192
    coarse = torch.where(torch.arange(8192) % 3 == 0, float("inf"), band)
    for world in WORLDS:
        assert select(winners, world, device=device)[0, 0].tolist() == [*range(14), 40, 99]
        assert by_scores(band, 16, world, device) == best_of(band, 16)
        assert by_scores(-band, 64, world, device) == best_of(-band, 64)
        assert by_scores(coarse, 16, world, device) == list(range(0, 48, 3))


def k08_a_needle_anywhere_is_found(device="cpu"):
    """A reduction over something large that returned zeros, so that only the last positions were chosen."""
    shape = IndexerShape()
    cache = pages_of(torch.zeros(1))
    cache = torch.cat([cache, cache.clone()])
    for blocks in (1023, 1024, 1025, 8192):
        for position in (0, 65_535, 131_071, 131_072, 1_048_575):
            if position >= blocks * 128:
                continue
            cache[1] = 0
            cache[1, position % 128, 0] = 1
            table = torch.zeros(blocks)
            table[position // 128] = 1
            problem = one_row(shape, cache, table, blocks * 128)
            expect = sorted({position // 128, blocks - 1})
            fill = [b for b in range(18) if b not in expect][: 16 - len(expect)]
            ids = select(problem, 4, device=device)
            assert ids.tolist() == [[sorted(expect + fill)]] * 4, (blocks, position)


def k10_any_token_of_a_block_may_hold_its_maximum(device="cpu"):
    """Kernels written for one-token pages: a table read per token, or only each block's first token scored."""
    shape = IndexerShape(topk=3, local_blocks=0)
    seen = []
    for token in (0, 1, 63, 64, 126, 127):
        problem = build(shape, [128 * 9, 128 * 12], seed=3)
        problem.cache.zero_()
        for request, winners in enumerate(([1, 4, 6], [0, 5, 11])):
            for value, block in enumerate(winners):
                problem.cache[problem.block_table[request, block].item(), token] = 0.25 * (value + 1)
        problem.q.fill_(1)
        for path, world in (("tp", 1), ("cp", 2), ("cp", 8)):
            seen.append(select(problem, world, path, device).tolist())
            assert seen[-1] == [[[1, 4, 6], [0, 5, 11]]] * 4, (token, path, world)
    renamed = build(shape, [128 * 9, 128 * 12], seed=3)
    order = torch.randperm(renamed.cache.shape[0], generator=torch.Generator().manual_seed(1))
    moved = torch.empty_like(renamed.cache)
    moved[order] = renamed.cache
    inside = (renamed.block_table >= 0) & (renamed.block_table < renamed.cache.shape[0])
    table = torch.where(
        inside, order[renamed.block_table.clamp(0, renamed.cache.shape[0] - 1).long()].int(), renamed.block_table
    )
    other = Problem(shape, 1, renamed.max_context, renamed.q, moved, table, renamed.seq_lens)
    assert torch.equal(select(renamed, 4, device=device), select(other, 4, device=device))


def k13_problem(init: int, local: int) -> Problem:
    """Rows of one request that see 4991 to 4994 tokens (39 or 40 blocks), and a huge key that only the last ones see."""
    shape = IndexerShape(init_blocks=init, local_blocks=local)
    cache = pages_of(torch.cat([torch.arange(38) % 19 * 0.125 + 1, torch.tensor([0.125, 0.125])]))
    cache[38, 4991 - 38 * 128, 0] = 64  # token 4991 of block 38
    q = torch.zeros(4, 4, 128)
    q[:, :, 0] = 1
    return Problem(
        shape,
        4,
        5120,
        q.bfloat16(),
        cache,
        torch.arange(40, dtype=torch.int32)[None],
        torch.tensor([4994], dtype=torch.int32),
    )


def k13_a_draft_token_is_seen_from_its_own_row_on(device="cpu"):
    """A mask by the group's longest row; hidden wherever the block is forced anyway."""
    problem = k13_problem(0, 0)
    for path, world in [("tp", 1)] * (1 in WORLDS) + [("cp", world) for world in WORLDS]:
        ids = select(problem, world, path, device)
        for head in ids.tolist():
            assert 38 not in head[0] and all(38 in row for row in head[1:]), (path, world)
        forced = select(k13_problem(1, 2), world, path, device)
        assert all(38 in row for head in forced.tolist() for row in head)


def x07_fewer_candidates_than_topk(device="cpu"):
    """Short sequences on many ranks; and winners that all live on one rank's shard."""
    shape = IndexerShape()
    assert select(build(shape, [128 * 3]), 4, device=device).tolist() == [[[0, 1, 2] + [-1] * 13]] * 4
    assert select(build(shape, [128]), 8, device=device).tolist() == [[[0] + [-1] * 15]] * 4
    table = torch.zeros(64)
    table[1::4] = torch.arange(1, 17)
    cache = pages_of(torch.arange(17) * 0.125)
    problem = one_row(IndexerShape(local_blocks=0), cache, table, 64 * 128)
    for world in WORLDS:
        assert select(problem, world, device=device).tolist() == [[list(range(1, 64, 4))]] * 4


def n02_zeros_of_both_signs_are_one_score(device="cpu"):
    """Order-preserving bits give -0.0 and +0.0 different keys."""
    shape = IndexerShape(topk=1, local_blocks=0)
    for first, second in ((-0.0, 0.0), (0.0, -0.0)):
        values = torch.full((8,), -1.0)
        values[3], values[5] = first, second
        q = torch.zeros(1, 4, 128)
        q[:, :, 0] = 1
        cache = pages_of(values)
        problem = one_row(shape, cache, torch.arange(8), 8 * 128)
        for world in WORLDS:
            assert select(problem, world, device=device).tolist() == [[[3]]] * 4
            assert by_scores(values, 1, world, device) == [3]


def n06_infinities_are_chosen_once(device="cpu"):
    """Loops of argmax and mask drop values where +inf stands; topk that is no power of two goes wrong silently."""
    scores = torch.arange(32) * 0.5 - 8
    scores[[2, 9, 17, 30]] = float("inf")
    scores[[4, 5]] = float("-inf")
    for topk in (1, 3, 8, 12, 16, 31, 32):
        for world in WORLDS:
            assert by_scores(scores, topk, world, device) == best_of(scores, topk), (topk, world)
    assert by_scores(scores, 4, 4, device) == [2, 9, 17, 30]
    assert by_scores(scores[:12], 16, 4, device)[:12] == list(range(12))


def g08_padding_of_a_bucket_changes_nothing(device="cpu"):
    """Metadata sized for the requests there are, a graph for its bucket's rows, and rubbish in the rows between."""
    shape = IndexerShape(topk=4)
    bound = 128 * 9
    for query_len in (1, 4):
        real = build(shape, [(37 * i) % (bound - 3) + 4 for i in range(100)], query_len, max_context=bound, seed=query_len).to(device)
        table = torch.full((112, bound // 128), 1 << 20, dtype=torch.int32, device=device)
        table[::2, 3:] = -7
        table[:100] = real.block_table
        lens = torch.zeros(112, dtype=torch.int32, device=device)
        lens[:100] = real.seq_lens
        q = torch.full((112 * query_len, 4, 128), float("nan"), dtype=torch.bfloat16, device=device)
        q[: 100 * query_len] = real.q
        for world in (1, 2):
            shard = Shard(0, world, 4)
            made = [TPDecode(shape, shard, **real.bounds(max_requests=112))] + [CPLocal(shape, shard, **real.bounds(max_requests=112))] * (world == 1)
            for decode in made:
                mine = slice(0, shard.local_heads) if isinstance(decode, TPDecode) else slice(0, 4)
                given = q[:, mine].contiguous()
                alone = decode(given[: 100 * query_len], *real.tensors[1:], query_len=query_len).clone()
                assert_ids(alone, oracle(real.to("cpu"))[mine])
                padded = decode(given, real.cache, table, lens, query_len=query_len)
                assert torch.equal(padded[:, : 100 * query_len], alone) and bool((padded[:, 100 * query_len :] == -1).all())
                unwritten = decode(given, real.cache, torch.full_like(table, 1 << 20), torch.full_like(lens, bound), query_len=query_len)
                assert bool((unwritten[:, query_len - 1 :: query_len] == torch.tensor([0, 1, 2, 8], device=device)).all())
                decode.check()
                more = torch.zeros(113, dtype=torch.int32, device=device)
                try:
                    decode(given, real.cache, table, more, query_len=query_len)
                except ValueError as error:
                    assert "seq_lens of 113 requests: the buffers hold max_requests=112" in str(error)
                else:
                    raise AssertionError("more requests than the buffers hold were accepted")


def m01_pages_beyond_two_to_the_31_elements(device="cpu"):
    """A page id times a stride in 32 bits; fp8's bytes reach it at half the size. Memory that nobody writes costs nothing."""
    shape = IndexerShape(topk=1, local_blocks=0)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        small = build(shape, [128 * 3], page_slots=1, dtype=dtype)
        size = 131_074 * 128 * 128 * dtype.itemsize
        raw = torch.from_numpy(np.zeros(size, np.uint8)) if str(device) == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)
        cache = raw.view(dtype).view(131_074, 128, 128)
        cache[131_071:] = small.cache[small.block_table[0].long()].to(device)
        table = torch.arange(131_071, 131_074, dtype=torch.int32, device=device)[None]
        q, lens = small.q.to(device), small.seq_lens.to(device)
        for path, world in (("tp", 1), ("cp", 4)):
            given = dict(shape=shape, world=world, path=path, max_context=small.max_context)
            assert_ids(select_virtual(q, cache, table, lens, **given).cpu(), oracle(small), f"{dtype}, {path} of {world}")
        del raw, cache


def m02_caches_may_be_slices(device="cpu"):
    """A page stride rebuilt from the block size instead of taken from the tensor."""
    shape = IndexerShape(topk=4)
    for slots in (1, 2, 3, 8):
        problem = build(shape, [128 * 9, 128 * 6], page_slots=slots, seed=1)
        assert problem.cache.stride(0) == slots * 128 * 128
        dense = Problem(
            shape,
            1,
            problem.max_context,
            problem.q,
            problem.cache.contiguous(),
            problem.block_table.contiguous(),
            problem.seq_lens,
        )
        for path, world in (("tp", 1), ("cp", 4)):
            assert_ids(select(problem, world, path, device), oracle(problem))
            assert torch.equal(select(problem, world, path, device), select(dense, world, path, device))
    layers = torch.full((4, 20, 128, 128), float("nan")).bfloat16()
    layers[2, : problem.cache.shape[0]] = problem.cache
    sliced = Problem(shape, 1, problem.max_context, problem.q, layers[2], problem.block_table, problem.seq_lens)
    assert_ids(select(sliced, 2, device=device), oracle(problem))


def m07_the_highest_block_is_returned_as_itself(device="cpu"):
    """Id fields of 14 or 16 bits, and bounds that disagree."""
    shape = IndexerShape(heads=1, topk=4, local_blocks=0)
    cache = pages_of(torch.tensor([0.0, 1.0]))
    table = torch.zeros(65_537)
    table[-1] = 1
    assert select(one_row(shape, cache, table, 65_537 * 128), 4, device=device)[0, 0].tolist() == [0, 1, 2, 65_536]
    for blocks in (16_384, 65_534, 65_535, 65_536, 2**20):
        scores = torch.zeros(blocks)
        scores[-1] = 1
        for world in (1, 4):
            assert by_scores(scores, 4, world, device) == [0, 1, 2, blocks - 1]
    top = torch.tensor([[[2**24 - 1, 65_536, 7]]])
    made = keys.encode(torch.tensor([[[9, 5, 5]]]), top, torch.tensor(2**24), 0, 0)
    assert reference.merge(made[None], shape=IndexerShape(heads=1, topk=3), owned=range(1)).tolist() == [
        [[7, 65_536, 2**24 - 1]]
    ]
    tp = TPDecode(shape, Shard(0, 1, 1), max_requests=1, max_query_len=1, max_context=65_537, device=device)
    narrow = one_row(shape, cache, torch.zeros(512), 65_536).to(device)
    try:
        tp(*narrow.tensors)
    except ValueError as error:
        assert "block_table of width 512" in str(error) and "max_context=65537" in str(error)
    else:
        raise AssertionError("a table narrower than the bound was accepted")


CASES_FROM_LIFE = [
    k01_padding_rows_of_draft_tokens,
    k02_lengths_include_the_draft_tokens,
    k05_ties_overflow_no_buffer,
    k08_a_needle_anywhere_is_found,
    k10_any_token_of_a_block_may_hold_its_maximum,
    k13_a_draft_token_is_seen_from_its_own_row_on,
    x07_fewer_candidates_than_topk,
    n02_zeros_of_both_signs_are_one_score,
    n06_infinities_are_chosen_once,
    g08_padding_of_a_bucket_changes_nothing,
    m01_pages_beyond_two_to_the_31_elements,
    m02_caches_may_be_slices,
    m07_the_highest_block_is_returned_as_itself,
]
