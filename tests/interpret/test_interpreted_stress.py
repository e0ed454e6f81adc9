"""Legs of the stress run between processes, the kernels interpreted over host memory, some rank late before half of the calls.

What a leg counts is what it must: nothing where nothing is wrong, and each of the faults that are planted here.
"""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import quick_interpreter
import torch
import torch.distributed as dist
from ranks import Ranks

from m3cp import inputs, reference, stress
from m3cp.worker import make_decode

SEED = 3


@pytest.fixture(scope="module")
def ranks_of():
    """Ranks of a world, started at the first use."""
    made = {}
    yield lambda world: made.get(world) or made.setdefault(world, Ranks(world))
    for ranks in made.values():
        ranks.close()


def no_fault(ready: stress.Rotation, pool: torch.Tensor) -> None: ...


def stale_page(ready: stress.Rotation, pool: torch.Tensor) -> None:
    """The page of a block that the first row's first head chose holds other keys, on every rank: the block loses its place."""
    point = ready.leg.point
    problem = inputs.build(point.replace(seed=SEED), "cpu", pool=pool)
    given = (problem.q, pool, problem.block_table, problem.seq_lens)
    first = reference.select_blocks(*given, shape=point.shape, query_len=point.query_len)[0, 0, 0]
    pool[problem.block_table[0, first]] = (-2 * problem.q[0, 0].sign()).to(pool.dtype)


def another_threshold(ready: stress.Rotation, pool: torch.Tensor) -> None:
    """Calls at the threshold take CP's path: every id is right, only the paths are not."""
    ready.decode._fused.threshold -= 1


def run(rank: int, leg: stress.Leg, fault) -> tuple[bool, dict]:
    """A leg on one of the ranks: whether something was wrong, and what it found."""
    quick_interpreter.sort_in_numpy(pytest.MonkeyPatch())
    stress.DELAYED, stress.MOST_DELAY_US, stress.LAYERS = 1.0, 20_000.0, 2  # in this process, which only this test uses

    def exchange(value):
        answers = [None] * leg.point.world
        dist.all_gather_object(answers, value)
        return answers

    peers = SimpleNamespace(rank=rank, world=leg.point.world, exchange=exchange, beat=lambda: None)
    place = SimpleNamespace(peers=peers, device=torch.device("cpu"), on_gpu=False, llc_bytes=1 << 20)
    pool = inputs.make_pool(leg.point.shape, inputs.TORCH_DTYPES[leg.point.dtype], "cpu", pages=200, seed=1)
    decode = make_decode(stress.bounds([leg])[leg.shared], rank, place.device)
    ready = stress.Rotation(place, leg, decode, pool, SEED)
    fault(ready, pool)
    found = stress.Found(leg.name, stress.kind_of(leg))
    wrong = stress.run_leg(place, ready, found, stress.Thrash(place, True), until=0.0, tell=lambda: None)
    return wrong, asdict(found)


def leg_of(world: int, *words: str) -> stress.Leg:
    return next(leg for leg in stress.legs(world, "cpu", interpreted=True) if all(word in leg.name for word in words))


ADAPTIVE, FP8 = ("one_launch", "x2 P=2 adaptive"), ("one_launch", "P=2 fp8")


@pytest.mark.parametrize(
    "world, words",
    [
        (2, ADAPTIVE),
        pytest.param(2, ("q3 adaptive", "+1 padded"), marks=pytest.mark.slow),
        (4, ("one_launch", "P=4 fp8")),
        (4, ("one_launch", "x2 P=4 adaptive")),
        pytest.param(4, ("q3 adaptive", "+1 padded"), marks=pytest.mark.slow),
        (4, ("two_launch", "q2 fp8", "adaptive")),
    ],
)
def test_every_launch_is_right_on_both_paths_whoever_is_late(ranks_of, world, words):
    leg = leg_of(world, *words)
    for wrong, found in ranks_of(world).run(run, leg, no_fault):
        assert not wrong and (found["launches"], found["mismatches"], found["expiries"], found["error"]) == (6, 0, 0, ""), found
        assert found["delays"] > 0
        assert leg.point.threshold_blocks is None or 0 < found["exchanging"] < 6


@pytest.mark.parametrize("words", [ADAPTIVE, FP8])
def test_a_block_lost_is_counted(ranks_of, words):
    for wrong, found in ranks_of(2).run(run, leg_of(2, *words), stale_page):
        assert wrong and 1 <= found["mismatches"] <= 2, "the one call over that cache, on one rank or both"
        assert not found["error"]


def test_calls_on_the_wrong_path_are_an_error_though_every_id_is_right(ranks_of):
    for wrong, found in ranks_of(2).run(run, leg_of(2, *ADAPTIVE), another_threshold):
        assert wrong and found["mismatches"] == 0 and "beyond those above the threshold, by rank: {0: " in found["error"]
