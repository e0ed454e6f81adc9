"""The stress run's own logic on a CPU: what it counts, what it draws, what it says; faults planted and seen."""

import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from m3cp import inputs, stress
from m3cp.shapes import IndexerShape, Point
from m3cp.worker import make_decode

POINT = Point(
    64 * 9,
    2,
    shape=IndexerShape(head_dim=64, block_size=64, topk=4),
    max_context=64 * 16,
    arm="tp",
    form="staged",
    launch="eager",
)


def place(world=1, rank=0):
    peers = SimpleNamespace(rank=rank, world=world, exchange=lambda value: [value], beat=lambda: None)
    return SimpleNamespace(peers=peers, device=torch.device("cpu"), on_gpu=False, llc_bytes=1 << 20)


@pytest.fixture
def ready():
    pool = inputs.make_pool(POINT.shape, torch.bfloat16, "cpu", pages=200, seed=1)
    decode = make_decode(POINT, 0, torch.device("cpu"))
    decode.warmup()
    made = stress.Rotation(place(), stress.Leg(POINT, 1, 1.0), decode, pool, seed=3)
    made.start()
    return made


def run(ready):
    found = stress.Found("a leg", "eager")
    wrong = stress.run_leg(place(), ready, found, stress.Thrash(place(), True), until=0.0, tell=lambda: None)
    return wrong, found


def test_right_launches_give_a_bound(ready):
    wrong, found = run(ready)
    assert not wrong and (found.launches, found.mismatches, found.expiries) == (12, 0, 0)
    assert found.bound == 3 / 12


def test_one_wrong_id_in_one_launch_is_counted_and_ends_the_leg(ready):
    ready.expect[2, 1, 0, 3] += 1
    wrong, found = run(ready)
    assert wrong and found.mismatches == 1 and found.bound is None


def test_a_launch_that_writes_nothing_is_counted(ready):
    decode, calls = ready.decode, []

    def lazy(*args, out, **named):
        calls.append(1)
        return out if len(calls) == 4 else type(decode).__call__(decode, *args, out=out, **named)

    ready.run.__closure__[[c for c in ready.run.__code__.co_freevars].index("decode")].cell_contents = lazy
    wrong, found = run(ready)
    assert wrong and found.mismatches == 1


def test_an_expired_wait_is_counted_and_named(ready):
    ready.decode._state[1:] = torch.tensor([2, 1, 7])
    wrong, found = run(ready)
    assert (
        wrong
        and found.expiries == 1
        and "rank 0 found error 2 (rank 1) at launch 7" in found.error
        and found.bound is None
    )


def test_delays_are_drawn_alike_and_hit_one_rank_in_one_launch_of_a_thousand():
    ranks = [stress.Delay(place(2, rank), 228, random.Random(5)) for rank in range(2)]
    assert ranks[0].positions == ranks[1].positions
    drawn = [[us for row in d.drawn_us for us in row] for d in ranks]
    assert not any(a and b for a, b in zip(*drawn, strict=True)), "two ranks late at once"
    late = [us for one in drawn for us in one if us]
    assert 0.7 < len(late) / (228 * stress.DELAY_ROWS) * 1000 < 1.3
    assert max(late) <= 500 and min(late) > 0 and sum(late) / len(late) == pytest.approx(250, rel=0.1)
    assert ranks[0].count(stress.DELAY_ROWS * 2 + 3) == 2 * sum(us > 0 for us in drawn[0]) + sum(
        us > 0 for row in ranks[0].drawn_us[:3] for us in row
    )


def test_legs_cover_what_they_should():
    found = stress.legs(2, "cuda")
    kinds = {stress.kind_of(leg) for leg in found}
    assert kinds == {"small", "large", "eager"}
    assert {leg.point.queries for leg in found if leg.point.arm == "cp"} == {"replicated", "gathered"}
    assert {leg.point.form for leg in found} == {"one_launch", "two_launch"}
    assert {leg.point.query_len for leg in found} >= {1, 2, 3, 4, 5, 8}
    assert {leg.point.mix for leg in found} == {"uniform", "one_long_rest_4k", "log_uniform"}
    small = [leg for leg in found if stress.kind_of(leg) == "small"]
    assert all(leg.point.context_tokens <= 8192 and leg.steps * stress.LAYERS >= 200 for leg in small)
    assert len({leg.name + str(leg.point) for leg in found}) == len(found)


def test_the_table_sums_and_bounds():
    found = [
        stress.Found("a", "small", launches=1000),
        stress.Found("b", "small", launches=2000, delays=3),
        stress.Found("c", "eager", launches=10, mismatches=1),
    ]
    lines = stress.table(found)
    assert "all small" in lines[4] and "3,000" in lines[4] and "1.0e-03" in lines[4]
    assert lines[-1].split()[-1] == "-"


def test_one_pass_a_path(capsys):
    assert stress.main("cpu") == 0
    said = capsys.readouterr().out
    assert said.count(": ok") == len(stress.paths("cpu")) and "cp  staged     8 ranks: ok" in said


def test_two_ranks_end_with_a_table_and_a_file(tmp_path):
    command = [
        sys.executable,
        "-m",
        "m3cp.stress",
        "--stress",
        "--minutes",
        "0.05",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "stress.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "stress.json").read_text())
    assert (
        summary["ranks"] == 2
        and summary["kinds"]["eager"]["mismatches"] == 0
        and summary["kinds"]["eager"]["launches"] > 0
    )
    assert "95% bound" in done.stdout and "all eager" in done.stdout


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match=r"ranks=3: must be 1, 2, 4 or 8"):
        stress.main("cpu", stressed=True, ranks=3)
    with pytest.raises(ValueError, match=r"minutes=0: must be a positive number"):
        stress.main("cpu", stressed=True, minutes=0)
