"""Bytes and lengths of a Point, against counting block by block."""

import dataclasses
import statistics

import pytest

from m3cp import traffic
from m3cp.shapes import IndexerShape, Point

SHAPES = (
    IndexerShape(),
    IndexerShape(init_blocks=1, local_blocks=2),
    IndexerShape(init_blocks=40),
    IndexerShape(block_size=64, topk=8),
)


def cp(context, batch, world=4, **changes):
    return Point(
        context, batch, world=world, arm="cp", form="staged", exchange="collective", queries="gathered", **changes
    )


def counted(point, rank):
    """Distinct (request, block) pairs a rank reads, shared prefix pages once, by enumeration."""
    pages, shape = set(), point.shape
    for request, tokens in enumerate(traffic.context_lengths(point)):
        visible = shape.blocks(tokens)
        if visible <= shape.topk:
            continue
        for block in range(visible):
            forced = block < shape.init_blocks or block >= visible - shape.local_blocks
            mine = point.arm.endswith("tp") or block % point.world == rank
            if mine and not forced:
                shared = (block + 1) * shape.block_size <= point.shared_prefix_tokens
                pages.add((0 if shared else request + 1, block))
    return len(pages)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mix", ["uniform", "one_long_rest_1k", "one_long_rest_4k", "log_uniform", "agentic"])
@pytest.mark.parametrize("arm", ["tp", "cp"])
def test_distinct_blocks_by_counting(shape, mix, arm):
    for tokens, batch, prefix in (
        (9_000, 5, 0),
        (2048, 3, 0),
        (2049, 3, 0),
        (40_000, 6, 20_000),
        (130, 1, 0),
        (12_345, 4, 12_345),
    ):
        point = cp(tokens, batch, mix=mix, shape=shape, shared_prefix_tokens=prefix)
        if arm == "tp":
            point = dataclasses.replace(point, arm="tp", exchange=None, queries=None)
        ranks = range(traffic.shards(point))
        counts = [counted(point, rank) for rank in ranks]
        assert [traffic.distinct_blocks_read(point, rank) for rank in ranks] == counts
        assert traffic.distinct_bytes_read(point) == max(counts) * shape.block_size * shape.head_dim * 2


def test_rows_of_at_most_topk_blocks_read_nothing():
    assert traffic.bytes_read(Point(16 * 128, 8, form="staged")) == 0
    assert traffic.bytes_read(Point(16 * 128 + 1, 8, form="staged")) == 8 * 16 * 32_768


def test_fp8_halves_and_the_world_divides():
    tp = Point(131_072, 8, world=4, form="staged")
    assert traffic.bytes_read(tp) == 2 * traffic.bytes_read(dataclasses.replace(tp, dtype="fp8_e4m3fn"))
    assert traffic.bytes_read(tp) / traffic.bytes_read(cp(131_072, 8)) == pytest.approx(4, rel=0.002)


def test_what_is_exchanged():
    assert traffic.bytes_exchanged(cp(32_768, 8, rows_padded=8, query_len=2)) == {
        "queries": 32 * 128 * 2,
        "candidates": 32 * 4 * 16 * 8,
    }
    replicated = dataclasses.replace(cp(32_768, 8), queries="replicated")
    assert traffic.bytes_exchanged(replicated)["queries"] == 0
    assert sum(traffic.bytes_exchanged(cp(32_768, 8, world=1)).values()) == 0
    assert sum(traffic.bytes_exchanged(Point(32_768, 8, world=4, form="staged")).values()) == 0


def test_the_limit_is_bytes_over_bandwidth():
    node = traffic.Node("a node", page_bandwidth_gbs=4000.0, llc_bytes=50 << 20)
    point = Point(131_072, 32, form="staged")
    assert traffic.limit_us(point, node) == pytest.approx(32 * 1023 * 32_768 / 4e6)


@pytest.mark.parametrize("mix", ["uniform", "one_long_rest_1k", "one_long_rest_4k", "log_uniform", "agentic"])
def test_lengths_are_reproducible_and_in_range(mix):
    point = Point(100_000, 16, mix=mix, form="staged")
    lengths = traffic.context_lengths(point)
    assert lengths == traffic.context_lengths(dataclasses.replace(point))
    assert len(lengths) == 16 and max(lengths) == 100_000 and min(lengths) >= 1024
    if mix in ("log_uniform", "agentic"):
        assert lengths != traffic.context_lengths(dataclasses.replace(point, seed=1))


def test_skewed_batches_hold_one_long_request():
    assert sorted(traffic.context_lengths(Point(131_072, 4, mix="one_long_rest_1k", form="staged"))) == [
        1024,
        1024,
        1024,
        131_072,
    ]
    assert sorted(traffic.context_lengths(Point(2000, 3, mix="one_long_rest_4k", form="staged"))) == [2000, 2000, 2000]


def test_log_uniform_spreads_evenly_in_the_logarithm():
    lengths = sorted(traffic.context_lengths(Point(65_536, 7, mix="log_uniform", form="staged")))
    assert lengths == [1024 * 2**i for i in range(7)]
    assert statistics.median(lengths) == 8192


def test_agentic_batches_spread_as_reported():
    """ATOM's authors report a max/min ratio in a batch of 2.5 at the median and 22 at p90 of their steps."""
    for batch in (2, 8, 32):
        ratios = []
        for seed in range(2000):
            lengths = traffic.context_lengths(Point(262_144, batch, mix="agentic", form="staged", seed=seed))
            ratios.append(max(lengths) / min(lengths))
        quantiles = statistics.quantiles(ratios, n=10)
        assert 2.3 < quantiles[4] < 2.7 and 18 < quantiles[8] < 26
    assert traffic.context_lengths(Point(262_144, 1, mix="agentic", form="staged")) == [262_144]
