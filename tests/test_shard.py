"""Shard arithmetic: every block and every head has exactly its owners, for every world that is allowed."""

import pytest

from m3cp.shard import Shard

WORLDS = (1, 2, 4, 8, 16)


def shards(world, heads=4):
    return [Shard(rank, world, heads) for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
def test_blocks_are_dealt_to_exactly_one_rank(world):
    for n in (0, 1, 2, world - 1, world, world + 1, 17, 1023, 1024):
        owned = [[s.to_global(i) for i in range(s.local_blocks(n))] for s in shards(world)]
        assert sorted(b for ids in owned for b in ids) == list(range(n))
        for shard, ids in zip(shards(world), owned, strict=True):
            assert ids == [b for b in range(n) if shard.owns(b)]
        assert max(map(len, owned)) - min(map(len, owned)) <= 1


@pytest.mark.parametrize(
    ("world", "owned"),
    [
        (1, [(0, 1, 2, 3)]),
        (2, [(0, 1), (2, 3)]),
        (4, [(0,), (1,), (2,), (3,)]),
        (8, [(r // 2,) for r in range(8)]),
        (16, [(r // 4,) for r in range(16)]),
    ],
)
def test_heads_of_m3(world, owned):
    assert [tuple(s.owned_heads) for s in shards(world)] == owned
    assert {s.replicas for s in shards(world)} == {max(1, world // 4)}


def test_more_ranks_than_heads_still_shard_all_blocks():
    assert [s.local_blocks(16) for s in shards(8)] == [2] * 8


@pytest.mark.parametrize("world", [3, 6, 0, -1])
def test_worlds_that_do_not_fit_are_refused_by_name(world):
    with pytest.raises(ValueError, match=f"world={world}"):
        Shard(0, world, 4)


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_world_are_refused(rank):
    with pytest.raises(ValueError, match=f"rank={rank}"):
        Shard(rank, 4, 4)


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
