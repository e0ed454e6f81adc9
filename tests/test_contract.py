"""Pure arithmetic: shapes, Points and shards; and that explaining needs neither torch nor triton."""

import subprocess
import sys

import pytest

from m3cp.shapes import IndexerShape, Point
from m3cp.shard import Shard


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
def test_heads_are_owned_in_runs_and_replicas_share(heads, world):
    shards = [Shard(rank, world, heads) for rank in range(world)]
    owners = {h: [s.rank for s in shards if h in s.owned_heads] for h in range(heads)}
    assert all(len(s.owned_heads) == s.local_heads for s in shards)
    assert all(len(ranks) == shards[0].replicas for ranks in owners.values())
    assert sorted(h for s in shards for h in s.owned_heads) == sorted(list(range(heads)) * shards[0].replicas)
    for rank in range(world):
        assert list(shards[rank].owned_heads) == (
            [rank // (world // heads)]
            if world >= heads
            else list(range(heads))[rank * heads // world :][: heads // world]
        )


def test_heads_of_the_model():
    assert [tuple(Shard(r, 2, 4).owned_heads) for r in range(2)] == [(0, 1), (2, 3)]
    assert [tuple(Shard(r, 8, 4).owned_heads) for r in range(8)] == [(r // 2,) for r in range(8)]
    assert [tuple(Shard(r, 16, 4).owned_heads) for r in range(16)] == [(r // 4,) for r in range(16)]


@pytest.mark.parametrize("heads, world", [(4, 3), (4, 6), (4, 5), (8, 12), (1, 0), (2, 3)])
def test_worlds_that_do_not_divide_are_refused(heads, world):
    with pytest.raises(ValueError, match=f"world={world}"):
        Shard(0, world, heads)


@pytest.mark.parametrize("rank", [-1, 4, 1.5])
def test_ranks_outside_the_world_are_refused(rank):
    with pytest.raises(ValueError, match="rank="):
        Shard(rank, 4, 4)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 16])
def test_blocks_are_dealt_round_robin(world):
    heads = world
    for n in [0, 1, 2, world - 1, world, world + 1, 5 * world + 3]:
        dealt = [[b for b in range(n) if Shard(r, world, heads).owns(b)] for r in range(world)]
        assert sorted(sum(dealt, [])) == list(range(n))
        for rank, blocks in enumerate(dealt):
            shard = Shard(rank, world, heads)
            assert shard.local_blocks(n) == len(blocks)
            assert [shard.to_global(i) for i in range(len(blocks))] == blocks
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@pytest.mark.parametrize(
    "change, named",
    [
        ({"heads": 0}, "heads=0"),
        ({"heads": True}, "heads=True"),
        ({"head_dim": 96}, "head_dim=96: must be 64 or 128"),
        ({"block_size": 256}, "block_size=256: must be 64 or 128"),
        ({"block_size": 1}, "block_size=1"),
        ({"topk": 0}, "topk=0: must be an integer from 1 to 64"),
        ({"topk": -1}, "topk=-1"),
        ({"topk": 65}, "topk=65"),
        ({"topk": 16.0}, "topk=16.0"),
        ({"init_blocks": -1}, "init_blocks=-1"),
        ({"local_blocks": 2**24}, "local_blocks=16777216"),
    ],
)
def test_shapes_name_what_is_wrong(change, named):
    with pytest.raises(ValueError, match=named.replace("*", r"\*")):
        IndexerShape(**change)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"context_tokens": 0}, "context_tokens=0"),
        ({"context_tokens": 300_000}, "max_context=262144"),
        ({"batch": 0}, "batch=0"),
        ({"query_len": 9}, "query_len=9"),
        ({"dtype": "fp8"}, "dtype='fp8'"),
        ({"arm": "cp"}, "exchange=None: must be one of collective, symmetric"),
        ({"arm": "tp", "form": "staged", "queries": "gathered"}, "queries='gathered'"),
        ({"arm": "cp", "form": "one_launch", "exchange": "collective", "queries": "gathered"}, "exchange='collective'"),
        ({"arm": "tp", "form": "staged", "threshold_blocks": 3}, "threshold_blocks=3"),
        ({"max_context": 2**31}, "max_context=2147483648"),
    ],
)
def test_points_name_what_is_wrong(change, named):
    with pytest.raises(ValueError, match=named):
        Point(**({"context_tokens": 1024, "batch": 1, "form": "staged"} | change))


def test_a_point_survives_the_round_trip():
    point = Point(
        8192,
        4,
        arm="cp",
        form="staged",
        exchange="collective",
        queries="replicated",
        shape=IndexerShape(topk=8),
        world=4,
    )
    assert Point.from_dict(point.to_dict()) == point
    assert len({point, point.replace(seed=1), Point.from_dict(point.to_dict())}) == 2


def test_explaining_needs_neither_torch_nor_triton():
    code = "import sys; sys.modules['torch'] = sys.modules['triton'] = None\nimport m3cp, m3cp.shapes, m3cp.shard, m3cp.traffic, m3cp.records"
    subprocess.run([sys.executable, "-c", code], check=True)
