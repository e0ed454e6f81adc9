"""What stands around the indexer: rows from a real sweep on a CPU, checks that can fail, the tables of planted rows."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import drivers
import numpy as np
import pytest
import synthetic
import torch
from matplotlib.colors import to_hex
from typer.testing import CliRunner

from m3cp import (
    cli,
    crossover,
    frames,
    inputs,
    layer_arms,
    layer_shares,
    plots,
    records,
    sweep,
    timing,
    toy,
    traffic,
    worker,
)
from m3cp import grid as planning
from m3cp.shapes import LAYER_ARMS, IndexerShape, Point

SMALL = IndexerShape(heads=2, head_dim=64, block_size=64, topk=4)
CPU = torch.device("cpu")


def point(arm, world=1, dtype="bf16", context_tokens=700, **fields):
    ways = {"form": "staged", "exchange": "collective", "queries": "gathered"}
    ways = {name: ways[name] for name in planning.ARM_FIELDS[arm]}
    return Point(context_tokens, 2, world=world, arm=arm, dtype=dtype, shape=SMALL, max_context=1024, **({"cache": "warm", "launch": "eager"} | ways | fields))


POINTS = [point(arm, 2) for arm in ("tp", "cp", *LAYER_ARMS)] + [
    point("mixed_cp", 2, queries="replicated"), point("attention", 2, "fp8_e4m3fn"), point("projections", 2, queries="replicated"),
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers") / "run"
    with drivers.forked():
        assert sweep.main(grid=POINTS, device="cpu", out=folder) == 0
    return folder


def test_every_arm_has_a_checked_row(run):
    rows = {r.point: r for r in records.load(run)}
    assert set(rows) == set(POINTS)
    for p, row in rows.items():
        assert row.status == "ok" and row.check["mismatches"] == 0 < row.check["rows"] and row.median_us > 0, row
        assert row.bytes_read == row.distinct_bytes_read == traffic.bytes_read(p)
        assert row.limit_us == pytest.approx(row.bytes_read / (row.extra["page_gbs"] * 1e3))
        assert (row.page_read_us is None) == (p.arm in LAYER_ARMS)
        assert row.path == {"mixed": p.arm[6:], "toy": p.arm[4:]}.get(p.arm.split("_")[0], p.arm) and row.ranks == 2
    assert rows[point("mixed_cp", 2)].timed_region[-1] == "prefill" and rows[point("mixed_cp", 2)].extra["chunk_tokens"] == 64
    assert rows[point("toy_cp", 2)].extra == rows[point("toy_tp", 2)].extra
    assert rows[point("projections", 2, queries="replicated")].timed_region == ["projections", "extra_projection"]


def test_the_command_prints_shares_mixed_steps_and_the_toy(run, tmp_path):
    said = CliRunner().invoke(cli.app, ["fit", str(run), "--layers", "--figures", str(tmp_path)])
    assert said.exit_code == 0, said.output
    assert sorted(f.name for f in tmp_path.iterdir()) == ["layer_shares.png", "layer_shares.svg"]
    lines = said.output.splitlines()
    assert sum(line.startswith("| 700, 2 | 2 | TP staged |") for line in lines) == 1
    assert sum(line.startswith("| 700, 2 | 2 | CP staged, collective, gathered |") for line in lines) == 3
    assert lines[lines.index("| batch | P | projections µs | with the other ranks' index heads | extra | its bytes alone |") + 2].startswith("| 2 | 2 | ")
    assert "a prefill chunk of 64 tokens" in said.output and "serving.Setting(layers=3)" in said.output


def test_no_fit_and_no_figure_of_paths_meets_these_rows(run):
    found = frames.load_run(str(run))
    assert sorted(found.frame["arm"]) == ["cp", "tp"]
    rows = records.load(run)
    assert sorted(frames.table(rows)["arm"]) == ["cp", "tp"]
    assert [len(c.pairs) for c in crossover.comparisons(frames.table(rows), draws=2)] == [1]


def test_a_run_of_these_rows_alone_says_so(run, tmp_path):
    records.append(tmp_path, *(r for r in records.load(run) if r.point.arm in LAYER_ARMS and r.point.queries is None))  # projections of one kind
    with pytest.raises(ValueError, match="has no timed row of the indexer$"):
        frames.load_run(str(tmp_path))
    assert layer_shares.main(str(tmp_path))[1:] == ["Nothing to compare: no TP or CP row stands at the shape of an attention, mixed or toy row."]


def made(arm, world=1, dtype="bf16", llc_bytes=1 << 20, **fields):
    p = point(arm, world, dtype, **fields)
    plan = timing.CachePlan(2, 4, False, False)
    pool = inputs.make_pool(SMALL, inputs.TORCH_DTYPES[dtype], CPU, pages=200, seed=0)
    problem = inputs.build(p, CPU, caches=2, pool=pool)
    ids = worker.Expected(problem, plan, 4000).ids
    return layer_arms.prepare(p, problem, plan, ids, rank=0, device=CPU, llc_bytes=llc_bytes, make=lambda inner: worker.make_decode(inner, 0, CPU))


@pytest.mark.parametrize(
    "arm, world, dtype", [("attention", 1, "bf16"), ("attention", 2, "fp8_e4m3fn"), ("projections", 2, "bf16"), ("mixed_tp", 1, "bf16"), ("toy_tp", 1, "bf16")]
)
def test_what_was_not_written_again_is_wrong(arm, world, dtype):
    """Calls give the right answer each time they run; a check spoils it, so a call that does not run is found."""
    arm = made(arm, world, dtype)
    for _ in range(2):
        for call in arm["calls"]:
            call()
        check = arm["verify"]()
        assert check["passed"] and check["rows"] > 0
    for call in arm["calls"][1:]:
        call()
    check = arm["verify"]()
    assert not check["passed"] and 0 < check["mismatches"] < check["rows"]


@pytest.mark.parametrize("module, arm", [(layer_arms, "attention"), (toy, "toy_tp")])
def test_one_block_that_attention_loses_is_found(monkeypatch, module, arm):
    real = made(arm)
    attend = module.sparse_attention

    def loses(q, k, v, table, lens, ids):
        ids = ids.clone()
        ids[0, 0, 1] = -1
        return attend(q, k, v, table, lens, ids)

    monkeypatch.setattr(module, "sparse_attention", loses)
    for call in real["calls"]:
        call()
    assert not real["verify"]()["passed"]


@pytest.mark.parametrize("column", [0, -1])
def test_one_wrong_column_of_the_weights_is_found(monkeypatch, column):
    """The last one is of the other rank's index heads."""
    real = made("projections", 2, queries="replicated")
    product = layer_arms._product

    def wrong(x, weight, out):
        if out.shape[1] != traffic.HIDDEN:
            weight = weight.clone()
            weight[column] = weight[column].roll(1)
        product(x, weight, out)

    monkeypatch.setattr(layer_arms, "_product", wrong)
    for call in real["calls"]:
        call()
    check = real["verify"]()
    assert check["mismatches"] == 2 * len(real["calls"]) and check["rows"] == 2 * check["mismatches"]


def test_both_kinds_of_projections_rotate_through_as_many_weights():
    own = traffic.projection_bytes(point("projections", 2))
    both = [made("projections", 2, llc_bytes=own // 2 + 1, cache="cold", queries=queries) for queries in (None, "replicated")]
    assert [arm["caches"] for arm in both] == [2, 2] and both[1]["footprint_bytes"] - both[0]["footprint_bytes"] == 2 * 6144 * 64 * 2


def test_wrong_ids_are_no_base_for_attention(monkeypatch):
    real = worker.TPDecode.__call__
    monkeypatch.setattr(worker.TPDecode, "__call__", lambda *given, **named: real(*given, **named).flip(2))
    with pytest.raises(ValueError, match="wrong ids before attention: .* rows differ from the reference"):
        made("attention")


def test_bytes_of_what_stands_around():
    """Two requests of 700 tokens, 11 blocks each, 4 chosen; one of two heads on a rank; 64 x 64 elements of 2 bytes a block."""
    block = 64 * 64 * 2
    assert traffic.bytes_read(point("attention", 2)) == 2 * 4 * 1 * 2 * block
    assert traffic.bytes_read(point("attention", 1, "fp8_e4m3fn")) == 2 * 4 * 2 * block
    assert traffic.bytes_read(point("attention", 2, context_tokens=100)) == 2 * 2 * 2 * block
    assert traffic.bytes_read(point("projections", 2)) == 6144 * ((16 + 3) * 64 + 64 + 16 * 64) * 2
    assert traffic.bytes_read(point("projections", 2, queries="replicated")) == traffic.bytes_read(point("projections", 2)) + 6144 * 64 * 2
    m3, more = Point(32768, 1, world=2, arm="projections"), Point(32768, 1, world=4, arm="projections", queries="replicated")
    widths = [traffic.projection_widths(p)[0] // 128 for p in (m3, m3.replace(queries="replicated"), more.replace(queries=None), more)]
    assert widths == [2 * 19 + 1, 2 * 19 + 1 + 2, 19 + 1, 19 + 1 + 3]
    assert traffic.bytes_read(point("mixed_tp", 2)) == traffic.bytes_read(point("tp", 2)) == 2 * 10 * block
    assert traffic.bytes_read(point("toy_cp", 2)) == 3 * (traffic.bytes_read(point("cp", 2)) + 2 * 4 * 2 * block)
    assert traffic.bytes_exchanged(point("toy_cp", 2)) == {k: 3 * v for k, v in traffic.bytes_exchanged(point("cp", 2)).items()}
    assert traffic.bytes_exchanged(point("attention", 2)) == traffic.bytes_exchanged(point("mixed_tp", 2)) == {"queries": 0, "candidates": 0}


@pytest.mark.parametrize(
    "arm, change, said",
    [
        ("attention", {"query_len": 4}, "query_len=4: must be 1 for arm 'attention'"),
        ("attention", {"form": "staged"}, "form='staged': must be None"),
        ("mixed_tp", {"launch": "graph"}, "launch='graph': must be 'eager' for arm 'mixed_tp'"),
        ("mixed_cp", {"form": "one_launch"}, "exchange='collective': must be 'symmetric' for form 'one_launch'"),
        ("toy_tp", {"dtype": "fp8_e4m3fn"}, "dtype='fp8_e4m3fn': must be 'bf16' for arm 'toy_tp'"),
        ("toy_cp", {"world": 4}, "world=4: must be at most the 2 heads"),
        ("toy_cp", {"shared_prefix_tokens": 64}, "shared_prefix_tokens=64: must be 0"),
        ("projections", {"world": 2, "queries": "gathered"}, "queries='gathered': must be None .own heads. or 'replicated' for arm 'projections'"),
        ("projections", {"queries": "replicated"}, "queries='replicated': must be None"),
        ("attention", {"world": 2, "queries": "replicated"}, "queries='replicated': must be None: arm 'attention'"),
    ],
)
def test_points_that_make_no_sense_are_refused(arm, change, said):
    with pytest.raises(ValueError, match=said):
        point(arm).replace(**change)


def test_the_grid_for_two_gpus_is_short():
    points = planning.read_grid(frames.ROOT / "data" / "grids" / "layers.json", "cuda")
    plan = planning.make_plan(points, device="cuda", ranks=2, memory_bytes=141 << 30)
    assert not plan.skipped and len(plan.points) == len(points) and planning.plan_s(plan.groups, "cuda") < 90
    assert all(len(set(g.points)) == len(g.points) for g in plan.groups)
    both = {(p.world, p.batch): [q.queries for q in g.points if q.arm == "projections"] for g in plan.groups for p in g.points if p.arm == "projections"}
    assert both == {(w, b): [None, "replicated"] for w, bs in ((2, (1, 2, 4, 8, 16, 32)), (4, (1, 8, 32))) for b in bs}, "both kinds in alternating rounds"
    assert {p.arm for p in points} == {"tp", "cp", "page_read", *LAYER_ARMS} and {p.dtype for p in points if p.arm == "attention"} == {"bf16", "fp8_e4m3fn"}


def planted(us: dict[str, float]):
    return [synthetic.row(point(arm, 2), value, np.random.default_rng(0), jitter=0.0, limit_us=5.0, extra={"chunk_tokens": 64}) for arm, value in us.items()]


US = {"tp": 30.0, "cp": 20.0, "attention": 10.0, "mixed_tp": 100.0, "mixed_cp": 95.0, "toy_tp": 500.0, "toy_cp": 472.0}


def test_shares_and_changes_of_planted_rows():
    assert [s.share for s in layer_shares.shares(planted(US))] == [30 / 40, 20 / 30]
    found = layer_shares.shares(planted(US | {"projections": 20.0}))
    assert [(s.share, s.attention_of_limit) for s in found] == [(30 / 60, 2.0), (20 / 50, 2.0)]
    more = synthetic.row(point("projections", 2, queries="replicated"), 30.0, np.random.default_rng(0), jitter=0.0, limit_us=5.0)
    replicated = synthetic.row(point("cp", 2, queries="replicated"), 20.0, np.random.default_rng(0), jitter=0.0)
    for held, us in (([], 20.0), ([more], 30.0)):  # the other ranks' heads count where they are projected and were measured
        found = layer_shares.shares([*planted(US | {"projections": 20.0}), replicated, *held])
        assert {s.point.queries: s.projections_us for s in found} == {None: 20.0, "gathered": 20.0, "replicated": us}
    (mixed,), (toys,) = (layer_shares.changes(planted(US), kind) for kind in ("mixed", "toy"))
    assert (mixed.cp_us - mixed.tp_us, mixed.indexer_us, mixed.low_us, mixed.high_us) == (-5.0, -10.0, -5.0, -5.0)
    assert (toys.tp_us, toys.cp_us, toys.indexer_us) == (500.0, 472.0, -10.0)


@pytest.mark.parametrize("change", [{"query_len": 4}, {"shared_prefix_tokens": 64}, {"seed": 1}])
def test_rows_of_another_shape_stand_for_nobody(change):
    """Rows of the indexer that have no attention, no toy of their own: they change no share and no prediction."""
    rows = planted(US)
    others = [synthetic.row(point(arm, 2).replace(**change), us, np.random.default_rng(0), jitter=0.0) for arm, us in (("tp", 90.0), ("cp", 40.0))]
    assert layer_shares.shares(rows + others) == layer_shares.shares(rows) and layer_shares.changes(rows + others, "toy") == layer_shares.changes(rows, "toy")


def test_graphs_meet_graphs_and_a_warm_row_stands_for_no_cold_one():
    rows = planted(US)
    graphs = [dataclasses.replace(r, point=r.point.replace(launch="graph"), samples_us=[us / 2 for us in r.samples_us]) for r in rows if "mixed" not in r.point.arm]
    for both in (rows + graphs, graphs + rows):
        assert sorted((s.point.arm, s.point.launch, s.indexer_us, s.attention_us) for s in layer_shares.shares(both)) == [
            ("cp", "eager", 20.0, 10.0), ("cp", "graph", 10.0, 5.0), ("tp", "eager", 30.0, 10.0), ("tp", "graph", 15.0, 5.0),
        ]  # fmt: skip
        assert sorted((c.point.launch, c.tp_us, c.cp_us) for c in layer_shares.changes(both, "toy")) == [("eager", 500.0, 472.0), ("graph", 250.0, 236.0)]
    assert layer_shares.shares([dataclasses.replace(r, cache_state="warm") if r.point.arm == "attention" else r for r in rows]) == []


def test_an_interval_is_of_what_stands_before_it():
    """Rounds of two levels: their means, and an interval of those, lie elsewhere than the medians that are printed."""
    level = {"toy_tp": [100.0] * 6 + [140.0] * 5, "toy_cp": [90.0] * 11}
    rows = [dataclasses.replace(r, samples_us=level.get(r.point.arm, r.samples_us)) for r in planted(US)]
    (found,) = layer_shares.changes(rows, "toy")
    assert (found.cp_us - found.tp_us, found.low_us, found.high_us) == (-10.0, -50.0, -10.0)
    alone = [dataclasses.replace(r, samples_us=r.samples_us[:1]) for r in rows]
    assert math.isinf(layer_shares.changes(alone, "toy")[0].high_us)


def test_tables_of_planted_rows(tmp_path):
    records.append(tmp_path, *planted(US))
    records.append(tmp_path, *(
        dataclasses.replace(r, point=r.point.replace(cache="cold", queries=q), samples_us=[us] * 7, limit_us=us / 2)
        for r in planted({"projections": 1.0}) for q, us in ((None, 20.0), ("replicated", 20.5))
    ))  # fmt: skip
    lines = layer_shares.main(str(tmp_path))
    assert "| 2 | 2 | 20.00 | 20.50 | +0.50 (+0.50 to +0.50) | +0.25 |" in lines
    assert "| 700, 2 | 2 | TP staged | 30.0 | 10.0 | 2.00x | - | 75% |" in lines
    assert "| 700, 2 | 2 | CP staged, collective, gathered | 100.0 | 95.0 | -5.0 (-5.0 to -5.0) | -10.0 | +5.0 (+5.0 to +5.0) |" in lines
    assert "| 700, 2 | 2 | CP staged, collective, gathered | 0.500 | 0.472 | -0.0280 (-0.0280 to -0.0280) | -0.0300 |" in lines
    values = json.loads((tmp_path / records.ROWS_FILE).read_text().splitlines()[0])
    with open(tmp_path / records.ROWS_FILE, "a") as file:
        file.write(json.dumps(values | {"node": "another", "point": values["point"] | {"seed": 1}}) + "\n")
    with pytest.raises(ValueError, match="of one machine and one code version"):
        layer_shares.main(str(tmp_path))


def test_the_figure_of_shares_has_a_bar_a_way_as_long_as_its_parts(tmp_path):
    rows = planted(US | {"projections": 20.0})
    records.append(tmp_path, *rows)
    said = layer_shares.main(str(tmp_path), tmp_path / "figures")
    assert [Path(line).name for line in said if "layer_shares" in line] == ["layer_shares.svg", "layer_shares.png"]
    parts = layer_shares.shares(rows)
    (axis,) = plots.layer_shares([(f"shape {i}", "CP way" if i else "TP way", share) for i, share in enumerate(parts)], "shares").axes
    bars = axis.patches
    assert len(bars) == 3 * len(parts)
    for i, share in enumerate(parts):
        mine = bars[3 * i : 3 * i + 3]
        assert [b.get_width() for b in mine] == pytest.approx([share.indexer_us, share.attention_us, share.projections_us or 0.0])
        assert mine[2].get_x() == pytest.approx(share.indexer_us + share.attention_us)
        assert to_hex(mine[0].get_facecolor()).upper() == (plots.CP_COLOUR if i else plots.TP_COLOUR)
    assert [t.get_text() for t in axis.texts] == [f"{share.share:.0%}" for share in parts]
    with pytest.raises(ValueError, match="nothing to show"):
        plots.layer_shares([], "shares")


def test_a_run_without_these_rows_says_how_to_measure_them():
    said = CliRunner().invoke(cli.app, ["fit", "h200x2", "--layers"])
    assert said.exit_code == 1 and "m3cp sweep data/grids/layers.json" in said.output


def sweep_of(**place):
    """A worker's body without ranks: enough to make a row of given samples, or a run of given calls."""
    body = worker.Sweep.__new__(worker.Sweep)
    body.place = SimpleNamespace(**{"llc_bytes": 100, "l2_bytes": None, "peak_gbs": None, "evict_bytes": 0, "align": None, "hold": "hold"} | place)
    body.job, body.peers = {"node": "here", "provenance": {}}, SimpleNamespace(world=1)
    body._rates, body._pool = {"page_gbs": 1.0, "sequential_gbs": 1.0}, (None, torch.empty(1))
    return body


def arm_of(name, **fields):
    return worker.Arm(point(name).replace(cache="cold"), [print] * 3, name, [name], {"passed": True, "rows": 1, "against": "it"}, dict, **fields)


def test_a_row_says_what_it_rotates_through(run):
    caches = {row.point.arm: row.caches for row in records.load(run)}
    assert caches["toy_tp"] == caches["toy_cp"] == 1 == caches["projections"] and caches["tp"] >= 1  # warm: one copy of the weights
    made = sweep_of().row(arm_of("projections", caches=61), timing.CachePlan(4, 4, False, True), [[10.0] * 3], 0.0)
    assert made.caches == 61 and sweep_of().row(arm_of("attention"), timing.CachePlan(4, 4, False, True), [[10.0] * 3], 0.0).caches == 4


@pytest.mark.parametrize("footprint, state", [(199, "warm"), (201, "cold"), (None, "cold")])
def test_a_row_is_cold_when_its_own_rotation_is(footprint, state):
    row = sweep_of().row(arm_of("attention", footprint_bytes=footprint), timing.CachePlan(4, 4, False, True), [[1.0]], 0.0)
    assert row.cache_state == state
    assert row.footprint_over_llc == (footprint or 4 * traffic.bytes_read(row.point)) / 100


@pytest.mark.parametrize("name, held", [("mixed_tp", False), ("tp", True)])
def test_on_a_gpu_nothing_is_queued_ahead_of_a_mixed_step(monkeypatch, name, held):
    given = {}
    monkeypatch.setattr(timing, "timed_replays", lambda rotation, **named: given.update(named))
    monkeypatch.setattr(timing, "DeviceTimer", lambda: None)
    sweep_of(on_gpu=True, align=lambda: None, device=CPU)._eager_run(arm_of(name), timing.CachePlan(4, 4, False, True), None)
    assert (given["hold"] == "hold") == held and given["calls"] == 3
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: done.append("idle"))
    given["align"]()
    assert done == ([] if held else ["idle"]), "the rank that comes first must not queue its step while it waits for the other"
