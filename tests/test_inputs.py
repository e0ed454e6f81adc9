"""Inputs: exactly summable, the same for every world and rank, permuted pages, garbage that decides nothing."""

import pytest
import torch

from m3cp import compiled, inputs, traffic
from m3cp.kernels import page_read
from m3cp.reference import select_blocks
from m3cp.shapes import IndexerShape, Point

SHAPE = IndexerShape()
POINT = Point(5000, 3, rows_padded=2, query_len=2, max_context=8192, form="staged")


def test_values_are_multiples_of_an_eighth_and_exact_in_every_dtype():
    problem = inputs.build(POINT, "cpu")
    for values in (problem.q, problem.cache):
        eighths = values.to(torch.float32) * 8
        assert bool((eighths == eighths.round()).all()) and float(eighths.abs().max()) == 16
    for name, dtype in inputs.TORCH_DTYPES.items():
        cache = inputs.build(POINT.replace(dtype=name), "cpu").cache
        assert cache.dtype == dtype and torch.equal(cache.to(torch.float32), problem.cache.to(torch.float32))
    assert inputs.build(POINT.replace(dtype="fp16"), "cpu").q.dtype == torch.float16


def test_arm_world_and_transport_do_not_change_the_tensors():
    a = inputs.build(POINT, "cpu", caches=2)
    b = inputs.build(POINT.replace(arm="cp", world=4, exchange="collective", queries="gathered"), "cpu", caches=2)
    assert torch.equal(a.q, b.q) and torch.equal(a.cache, b.cache) and torch.equal(a.seq_lens, b.seq_lens)
    assert all(torch.equal(x, y) for x, y in zip(a.block_tables, b.block_tables, strict=True))
    other = inputs.build(POINT.replace(seed=1), "cpu", caches=2)
    assert not torch.equal(a.q, other.q) and not torch.equal(a.cache, other.cache)


def test_pages_of_all_caches_are_disjoint_and_permuted():
    problem = inputs.build(POINT, "cpu", caches=3)
    blocks = [SHAPE.blocks(n) for n in problem.seq_lens.tolist()]
    used = torch.cat([t[r, :n] for t in problem.block_tables for r, n in enumerate(blocks)])
    assert used.unique().numel() == used.numel() == 3 * inputs.pages_of_a_cache(POINT)
    assert not bool((used[1:] == used[:-1] + 1).float().mean() > 0.1), "pages lie in the order of blocks"
    assert problem.seq_lens.tolist() == [5000, 5000, 5000, 0, 0]


def test_entries_that_no_row_sees_are_garbage_and_decide_nothing():
    problem = inputs.build(POINT, "cpu", poison=True)
    table = problem.block_table
    beyond = torch.cat([table[0, 40:], table[3]])
    assert bool(((beyond < 0) | (beyond >= problem.cache.shape[0])).all()) and beyond.unique().numel() >= 4
    poisoned = select_blocks(problem.q, problem.cache, table, problem.seq_lens, shape=SHAPE, query_len=2)
    clean = inputs.build(POINT, "cpu")
    assert bool(problem.cache.isnan().any()) and not bool(clean.cache.isnan().any())
    ids = select_blocks(clean.q, clean.cache, clean.block_table, clean.seq_lens, shape=SHAPE, query_len=2)
    assert torch.equal(ids, poisoned)
    assert bool((ids[:, 6:] == -1).all()) and bool((ids[:, :6] >= 0).all())


def test_poison_reaches_the_tail_of_the_last_visible_block():
    problem = inputs.build(POINT, "cpu", poison=True)
    tail = problem.cache[int(problem.block_table[1, 39])]
    assert not bool(tail[: 5000 % 128].isnan().any()) and bool(tail[5000 % 128 :].isnan().all())


def test_heads_choose_different_blocks_on_nearly_every_row():
    point = Point(32_768, 4, query_len=4, max_context=32_768, form="staged")
    problem = inputs.build(point, "cpu")
    ids = select_blocks(problem.q, problem.cache, problem.block_table, problem.seq_lens, shape=SHAPE, query_len=4)
    differ = torch.stack([(ids[a] != ids[b]).any(1) for a in range(4) for b in range(a)]).all(0)
    assert float(differ.float().mean()) >= 0.9


def test_a_shared_prefix_shares_pages():
    point = Point(4096, 4, shared_prefix_tokens=2048, max_context=4096, form="staged")
    problem = inputs.build(point, "cpu")
    table = problem.block_table
    assert bool((table[:, :16] == table[:1, :16]).all())
    assert table.unique().numel() == 16 + 4 * 16 == inputs.pages_of_a_cache(point)


def test_pages_read_are_the_bytes_that_traffic_counts():
    for arm, world in (("tp", 2), ("cp_local", 4), ("page_read", 4)):
        shape = IndexerShape(init_blocks=3, local_blocks=2)
        form = None if arm == "page_read" else "staged"
        point = Point(
            9000, 5, mix="log_uniform", rows_padded=1, world=world, shape=shape, max_context=16_384, arm=arm, form=form
        )
        problem = inputs.build(point, "cpu")
        for rank in range(world):
            assert problem.pages_read(point, rank).numel() == traffic.blocks_read(point, rank)
        if arm != "tp":
            everyone = torch.cat([problem.pages_read(point, r) for r in range(world)])
            assert everyone.unique().numel() == everyone.numel()


def test_a_pool_that_does_not_fit_is_refused():
    pool = inputs.make_pool(SHAPE, torch.bfloat16, "cpu", pages=50, seed=0)
    with pytest.raises(ValueError, match="pool of 50 pages: 1 caches of 120 pages need 120"):
        inputs.build(POINT, "cpu", pool=pool)
    with pytest.raises(ValueError, match="poison"):
        inputs.build(POINT.replace(batch=1), "cpu", pool=pool, poison=True)
    with pytest.raises(ValueError, match="must be"):
        inputs.build(POINT.replace(batch=1, dtype="fp16"), "cpu", pool=pool)
    with pytest.raises(ValueError, match="pool_bytes"):
        inputs.build(POINT, "cpu", pool_bytes=1 << 20)


def test_constant_inputs_are_refused_for_timing():
    for values in (torch.zeros(8, 4), torch.full((3, 3), 1.5), torch.ones(1)):
        with pytest.raises(ValueError, match="cache is constant"):
            inputs.refuse_constant("cache", values)
    inputs.refuse_constant("cache", torch.tensor([0.0, 1.0]))


def chosen(problem):
    return select_blocks(problem.q, problem.cache, problem.block_table, problem.seq_lens, shape=problem.shape)[
        :, 0
    ].tolist()


def test_adversarial_problems_are_what_they_say():
    free = IndexerShape(local_blocks=0)
    assert chosen(inputs.all_zero(free, 100)) == [list(range(16))] * 4
    expected = sorted([7, 40, 99, *range(7), *range(8, 14)])
    assert chosen(inputs.few_winners(free, 100, (7, 40, 99))) == [expected] * 4
    for position in (0, 127, 128, 2000, 12_799):
        assert position // 128 in chosen(inputs.needle(SHAPE, 100, position))[2]
    one = IndexerShape(topk=1, local_blocks=0)
    assert chosen(inputs.negative_zero(one, 20, minus=3, plus=5)) == [[3]] * 4
    assert chosen(inputs.negative_zero(one, 20, minus=5, plus=3)) == [[3]] * 4
    ids = chosen(inputs.one_ulp_apart(free, 300))
    assert ids == chosen(inputs.one_ulp_apart(free, 300)) and len({tuple(row) for row in ids}) == 4
    assert chosen(inputs.recycled_nan(SHAPE, 40, 17))[0][-1] == 39


def test_one_ulp_apart_is_ranked_by_the_last_bit():
    problem = inputs.one_ulp_apart(IndexerShape(local_blocks=0), 64)
    keys = problem.cache[problem.block_table[0].to(torch.int64)].to(torch.float64)
    score = torch.einsum("hd,btd->hbt", problem.q[0].to(torch.float64), keys).amax(2)
    gaps = score.sort(1).values.diff()
    assert bool((gaps == 2.0**-23).all())
    best = score.topk(16).indices.sort(1).values
    assert chosen(problem) == best.tolist()


def test_infinities_win_and_nan_and_minus_infinity_still_rank_above_nothing():
    problem = inputs.not_finite(IndexerShape(local_blocks=0), 40)
    ids = chosen(problem)
    for head in range(4):
        infinite = set(range(1 + head, 40, 11))
        assert infinite <= set(ids[head]) and not set(range(7 + head, 40, 11)) & set(ids[head])
    few = inputs.not_finite(IndexerShape(topk=32, local_blocks=0), 33)
    assert all(-1 not in row for row in chosen(few))


@pytest.mark.parametrize("reader", page_read.HOST_READERS)
def test_page_read_reads_every_word(reader):
    problem = inputs.build(POINT, "cpu")
    pages = problem.pages_read(POINT, 0)
    out = torch.empty(page_read.partials(torch.device("cpu"), reader), dtype=torch.int32)

    def total():
        return int(page_read.page_read(problem.cache, pages, out, reader=reader).sum(dtype=torch.int64)) % 2**32

    before = total()
    assert before == page_read.checksum(problem.cache, pages)
    problem.cache[int(pages[-1]), 127, 127] += 1
    assert total() != before
    with pytest.raises(ValueError, match="contiguous"):
        page_read.page_read(problem.cache[:, :, :64], pages, out, reader=reader)


@pytest.mark.parametrize("target", compiled.TARGETS)
def test_page_read_compiles_wide_without_spills(target):
    for words in (8192, 4096, 1024):
        for reader in page_read.READERS:
            made = compiled.build(
                page_read.page_read_kernel,
                {"words_ptr": "i32", "pages_ptr": "i32", "out_ptr": "i32"},
                {"PAGE_WORDS": words, "TILE": min(words, reader.tile_words)},
                target,
                num_warps=reader.warps,
            )
            wide = ("ld.global.v4",) if target == "sm_90" else ("load_dwordx4", "load_b128")
            assert made.spills == 0, (target, words, reader)
            threads = reader.warps * compiled.TARGETS[target][2]
            if min(words, reader.tile_words) >= 4 * threads:  # 16 bytes a thread
                assert any(w in made.assembly for w in wide), (target, words, reader)
