"""The stress run's own logic on a CPU: what it counts, what it draws, what it says; faults planted and seen."""

import json
import random
import runpy
import sys
import warnings
from types import SimpleNamespace

import drivers
import pytest
import torch

from m3cp import inputs, stress, traffic
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
def ready(request):
    point = POINT.replace(**getattr(request, "param", {}))
    pool = inputs.make_pool(point.shape, inputs.TORCH_DTYPES[point.dtype], "cpu", pages=200, seed=1)
    decode = make_decode(point.replace(batch=point.batch + point.rows_padded, rows_padded=0), 0, torch.device("cpu"))
    decode.warmup()
    made = stress.Rotation(place(), stress.Leg(point, 1, 1.0), decode, pool, seed=3)
    made.start()
    return made


def run(ready):
    found = stress.Found("a leg", "eager")
    wrong = stress.run_leg(place(), ready, found, stress.Thrash(place(), True), until=0.0, tell=lambda: None)
    return wrong, found


@pytest.mark.parametrize("ready", [{}, {"dtype": "fp8_e4m3fn"}, {"rows_padded": 2, "query_len": 8, "mix": "log_uniform"}], indirect=True)
def test_right_launches_give_a_bound(ready):
    wrong, found = run(ready)
    assert not wrong and (found.launches, found.mismatches, found.expiries) == (12, 0, 0)
    assert found.bound == 3 / 12


@pytest.mark.parametrize("ready", [{}, {"dtype": "fp8_e4m3fn"}, {"rows_padded": 2}], indirect=True)
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


def ways(found):
    return {(p.arm, p.form, p.queries, p.dtype, p.threshold_blocks is not None) for p in (leg.point for leg in found)}


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_legs_cover_every_cell_captured_and_eager(world):
    found = stress.legs(world, "cuda")
    wanted = {("tp", "one_launch", None, dtype, False) for dtype in ("bf16", "fp8_e4m3fn")}
    if world > 1:
        both = "replicated", "gathered"
        wanted |= {("cp", "one_launch", q, dtype, adaptive) for q in both for dtype in ("bf16", "fp8_e4m3fn") for adaptive in (False, True)}
        wanted |= {("cp", "two_launch", q, "bf16", False) for q in both} | {("cp", "two_launch", "gathered", "fp8_e4m3fn", True)}
    for kind in ("small", "eager"):
        assert ways(leg for leg in found if stress.kind_of(leg) == kind) == wanted, kind
    large = [leg for leg in found if stress.kind_of(leg) == "large"]
    assert ways(large) == {way for way in wanted if way[3:] != ("fp8_e4m3fn", True)}
    for way in ways(large):
        mine = [leg.point for leg in large if ways([leg]) == {way}]
        assert way[0] == "tp" or way[1] == "two_launch" or {p.query_len for p in mine} >= {1, 8} and any(p.rows_padded for p in mine)


@pytest.mark.parametrize("world, device, interpreted", [(2, "cuda", False), (4, "cuda", False), (2, "cpu", True)])
def test_adaptive_legs_have_both_paths_and_tps_reads_keys(world, device, interpreted):
    adaptive = [leg.point for leg in stress.legs(world, device, interpreted) if leg.point.threshold_blocks is not None]
    above = []
    for p in adaptive:
        lengths = traffic.context_lengths(p) + [0] * p.rows_padded
        few = stress.at_threshold(lengths, p.threshold_blocks, p.shape.block_size)
        blocks, fewer = ([p.shape.blocks(n) for n in some] for some in (lengths, few))
        above.append(sum(blocks) - p.threshold_blocks)
        assert sum(blocks) > p.threshold_blocks == sum(fewer) and max(fewer) > p.shape.topk, p.label
        assert all((a == 0) == (b == 0) and b <= a for a, b in zip(lengths, few, strict=True))
    assert device == "cpu" or above.count(1) >= 4, "one block above, as close as it gets"


def test_shortened_requests_keep_their_last_blocks_raggedness():
    assert stress.at_threshold([300, 130, 0, 128], 4, 128) == [172, 2, 0, 128]
    assert stress.at_threshold([300, 130], 5, 128) == [300, 130]


def test_every_leg_fits_the_object_that_it_shares():
    found = stress.legs(2, "cuda")
    bounds = stress.bounds(found)
    for leg in found:
        point, bound = leg.point, bounds[leg.shared]
        assert point.batch + point.rows_padded <= bound.batch <= 32 and point.query_len <= bound.query_len
        alike = ("arm", "form", "queries", "exchange", "dtype", "threshold_blocks", "max_context", "world")
        assert all(getattr(point, name) == getattr(bound, name) for name in alike)


@pytest.mark.parametrize("word", stress.CELLS)
def test_a_cell_can_be_chosen_by_its_word(word):
    job = {"device": "cuda", "only": [word]}
    mine = stress.chosen(job, 2)
    held = {"fp8": lambda p: p.dtype == "fp8_e4m3fn", "adaptive": lambda p: p.threshold_blocks is not None, "padded": lambda p: p.rows_padded > 0}[word]
    assert mine == [leg for leg in stress.legs(2, "cuda") if held(leg.point)] and {stress.kind_of(leg) for leg in mine} == {"small", "large", "eager"}
    with pytest.raises(ValueError, match=r"only=\['fp9'\]: must be words"):
        stress.chosen(job | {"only": ["fp9"]}, 2)


def test_the_table_sums_each_cell_over_all_kinds():
    found = [
        stress.Found("cp 8k fp8_e4m3fn graph", "small", launches=2000),
        stress.Found("cp 8k adaptive above 40 graph", "small", launches=1000),
        stress.Found("cp 8k fp8_e4m3fn adaptive above 40 eager", "eager", launches=500, error="rank 0 found"),
    ]
    sums = {name: stress.total(some, name) for name, some in stress.groups(found).items()}
    assert {name: s.launches for name, s in sums.items()} == {"small": 3000, "eager": 500, "fp8": 2500, "adaptive": 1500}
    assert sums["small"].bound == 1e-3 and sums["fp8"].bound is None and sums["adaptive"].kind == "small/eager"
    assert [line[:12].strip() for line in stress.table(found)[4:]] == ["all small", "all eager", "all fp8", "all adaptive"]


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


def test_two_ranks_end_with_a_table_and_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["m3cp.stress", "--stress", "--minutes", "0.05", "--device", "cpu", "--out", str(tmp_path / "stress.json")])
    with drivers.forked(), pytest.raises(SystemExit, match="^0$"), warnings.catch_warnings(action="ignore"):  # runpy's: it is imported already
        runpy.run_module("m3cp.stress", run_name="__main__")
    summary, said = json.loads((tmp_path / "stress.json").read_text()), capsys.readouterr().out
    assert summary["ranks"] == 2 and summary["kinds"]["eager"]["mismatches"] == 0 < summary["kinds"]["eager"]["launches"]
    assert "95% bound" in said and "all eager" in said
    assert summary["kinds"]["fp8"]["launches"] == sum(leg["launches"] for leg in summary["legs"] if "fp8" in leg["leg"]) > 0


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match=r"ranks=3: must be 1, 2, 4 or 8"):
        stress.main("cpu", stressed=True, ranks=3)
    with pytest.raises(ValueError, match=r"minutes=0: must be a positive number"):
        stress.main("cpu", stressed=True, minutes=0)
