"""The sweep on a CPU: Points from grids, ranks over gloo, rows on disk, and ranks that fail (X14, B02, B06)."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import drivers
import pytest

from m3cp import doctor, records, sweep, timing, traffic
from m3cp import grid as planning
from m3cp.shapes import IndexerShape, Point

ROOT = Path(__file__).resolve().parents[1]
TINY = {"contexts": [1024, 3072], "batches": [2], "max_context": 4096, "cache": "warm", "rows_padded": 1}
GPU = dict(device="cuda", ranks=2)


def run_main(capsys, **options):
    status = sweep.main(device="cpu", **options)
    return status, capsys.readouterr().out


def descendants():
    """Children of this process that still run, from the kernel's own table."""
    me, found = os.getpid(), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == me and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One small real sweep over one and two ranks; its folder, status and output."""
    folder = tmp_path_factory.mktemp("sweep") / "run"
    grid = {**TINY, "worlds": [1, 2], "arms": ["tp", "cp", "cp_local", "page_read"]}
    path = folder.parent / "grid.json"
    path.write_text(json.dumps(grid))
    command = [sys.executable, "-m", "m3cp.sweep", str(path), "--device", "cpu", "--out", str(folder), "--world", "1,2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_every_point_of_the_grid_has_one_checked_row(run):
    folder, said = run
    rows = records.load(folder)
    grid = {**TINY, "worlds": [1, 2], "arms": ["tp", "cp", "cp_local", "page_read"]}
    points = planning.expand(grid, device="cpu")
    assert len(points) == len(rows) == len({r.point for r in rows}) == 2 * (1 + 4 + 2)
    assert {r.point for r in rows} == set(points)
    assert f"{len(rows)} Points measured" in said and "     0 failed\n" in said
    for row in rows:
        assert row.status == "ok" and row.check["passed"] and row.check["mismatches"] == 0, row
        assert row.check["rows"] > 0 or row.point.arm == "page_read" and row.bytes_read == 0
        assert row.samples_us == timing.slowest(row.rank_samples_us) and len(row.rank_samples_us) == row.ranks
        assert row.page_read_us > 0 and row.cache_state == "warm" and row.footprint_over_llc < 2
        assert row.bytes_read == traffic.bytes_read(row.point)
        assert {"code_hash", "commit", "dirty", "command", "time_utc", "versions", "cpu_model"} <= set(row.provenance)
        assert row.limit_us == pytest.approx(row.distinct_bytes_read / (row.extra["page_gbs"] * 1e3))


def test_rows_say_what_ran(run):
    rows = {(r.point.arm, r.point.queries, r.point.world, r.point.context_tokens): r for r in records.load(run[0])}
    cp = rows["cp", "gathered", 2, 3072]
    assert cp.path == "cp" and cp.collectives == 2 and cp.ranks == 2
    assert cp.timed_region == ["gather_queries", "score", "candidates", "gather_keys", "merge"]
    assert rows["cp", "replicated", 2, 3072].collectives == 1
    assert rows["tp", None, 2, 3072].path == "tp" and rows["tp", None, 2, 3072].collectives == 0
    assert rows["tp", None, 1, 3072].ranks == 1
    assert rows["tp", None, 2, 1024].bytes_read == 0
    assert rows["cp_local", None, 2, 3072].distinct_bytes_read * 2 < rows["tp", None, 2, 3072].distinct_bytes_read * 1.2


def test_a_second_run_measures_nothing_and_a_dry_run_says_so(run, capsys):
    folder, before = run[0], len(records.load(run[0]))
    grid = {**TINY, "worlds": [1, 2], "arms": ["tp", "cp", "cp_local", "page_read"]}
    status, said = run_main(capsys, grid=grid, out=folder)
    assert status == 0 and f"{before} Points are there already" in said and len(records.load(folder)) == before
    status, said = run_main(capsys, grid=grid, out=folder, dry_run=True, remeasure=True)
    assert status == 0 and said.count(" ranks  ") == 4 and "about" in said and "minutes" in said
    assert len(records.load(folder)) == before


def test_every_point_in_fresh_processes(tmp_path, capsys, monkeypatch):
    grid = {**TINY, "worlds": [1, 2], "arms": ["tp", "cp"], "contexts": [3072]}
    with drivers.forked():
        status, said = run_main(capsys, grid=grid, out=tmp_path, processes=2)
    rows = records.load(tmp_path)
    found = Counter((r.point, r.process) for r in rows)
    points = {r.point for r in rows}
    assert status == 0 and set(found) == {(p, n) for p in points for n in (0, 1)} and set(found.values()) == {1}
    assert len({r.point.world for r in rows}) == 2 and "process 2 of 2:" in said
    kept = [row for row in rows if (row.process, row.point.world) != (1, 2)]  # as a kill in the second process leaves it
    (tmp_path / records.ROWS_FILE).unlink()
    records.append(tmp_path, *kept)
    with drivers.forked():
        status, said = run_main(capsys, grid=grid, out=tmp_path, processes=3)
    rows = records.load(tmp_path)
    assert status == 0 and Counter((r.point, r.process) for r in rows) == Counter({(p, n): 1 for p in points for n in (0, 1, 2)})
    assert f"{len(points)} Points are there already" in said
    with pytest.raises(ValueError, match="processes=0: must be 1 to 100"):
        run_main(capsys, grid=grid, out=tmp_path, processes=0)


def test_time_that_is_up_leaves_a_list(tmp_path, capsys):
    status, said = run_main(capsys, grid={**TINY, "worlds": [1], "arms": ["tp"]}, out=tmp_path, minutes=1e-6)
    assert "2 not reached\n         tp/staged 1k x2 P=1 warm" in said
    assert status == sweep.NOT_MEASURED and not (tmp_path / records.ROWS_FILE).exists()


def test_what_a_cpu_cannot_run_is_skipped_in_words(tmp_path, capsys):
    points = planning.expand({**TINY, "worlds": [2], "arms": ["tp"], "launch": "graph"}, device="cpu")
    points += [Point(1024, 1, arm="vllm_tp", max_context=4096, launch="eager")]
    status, said = run_main(capsys, grid=points, out=tmp_path)
    rows = records.load(tmp_path)
    assert status == 0 and [r.status for r in rows] == ["skipped"] * 3
    assert "a CPU has no graphs" in rows[0].error and "vllm_tp" in rows[2].error and "2 Points skipped" in said
    run_main(capsys, grid=points, out=tmp_path)
    assert len(records.load(tmp_path)) == 3


# Workers that go wrong.


def worker(tmp_path, body):
    path = tmp_path / "worker.py"
    path.write_text(
        "import os, sys, json\nfrom pathlib import Path\nfrom m3cp import worker\nrank = int(os.environ['RANK'])\n"
        + textwrap.dedent(body)
        + "\nworker.main(sys.argv[1:])\n"
    )
    return str(path)


def job(tmp_path, *points):
    facts = {**sweep.job_facts("cpu"), "out": str(tmp_path / "out"), "seconds": None, "provenance": {}}
    return {**facts, "groups": [{"points": [p.to_dict() for p in points], "record": [True] * len(points)}]}


CP4 = Point(
    4096,
    1,
    world=4,
    arm="cp",
    form="staged",
    exchange="collective",
    queries="gathered",
    max_context=4096,
    cache="warm",
    launch="eager",
)
TP1 = Point(4096, 1, form="staged", max_context=4096, cache="warm", launch="eager")


def test_a_rank_with_a_bad_table_is_named_and_no_rank_is_left(tmp_path):
    # X14: rank 2 gets a block table of another dtype, raises before its exchange, and the others wait inside it.
    body = """
        import torch
        from m3cp import inputs
        build = inputs.build
        def bad(*args, **options):
            problem = build(*args, **options)
            problem.block_tables[:] = [t.to(torch.int64) for t in problem.block_tables]
            return problem
        worker.FAILED_PATIENCE_S = 2.0
        if rank == 2:
            worker.inputs.build = bad
    """
    start = time.monotonic()
    with pytest.raises(
        sweep.WorkersFailed, match="rank 2: ValueError: block_table.dtype=torch.int64: must be torch.int32"
    ), drivers.forked():
        sweep.launch(worker(tmp_path, body), job(tmp_path, CP4), 4)
    assert time.monotonic() - start < 60 and not descendants()


def test_a_rank_that_dies_before_its_first_exchange_is_named_and_no_rank_is_left(tmp_path):
    body = """
        from m3cp.exchange import CollectiveExchange
        if rank == 2:
            CollectiveExchange.gather = lambda self, out, payload: os._exit(3)
    """
    start = time.monotonic()
    with pytest.raises(sweep.WorkersFailed, match="rank 2: ended with exit status 3"), drivers.forked():
        sweep.launch(worker(tmp_path, body), job(tmp_path, CP4), 4)
    assert time.monotonic() - start < 60 and not descendants()


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """Rows of one worker in which several things go wrong, one a group; by the group's seed."""
    folder = tmp_path_factory.mktemp("faults")
    body = """
        import dataclasses, torch
        make, prepare, pool = worker.make_decode, worker.prepare_decode, worker.inputs.make_pool
        def make_decode(point, *rest):
            if point.seed == 1:
                raise MemoryError("no room for this one")
            return make(point, *rest)
        def prepare_decode(place, point, *rest):
            arm = prepare(place, point.replace(arm="tp") if point.seed == 3 else point, *rest)
            if point.seed == 2:
                verify = arm.verify
                arm.verify = lambda: {**verify(), "passed": False, "mismatches": 1}
            return dataclasses.replace(arm, point=point)
        def make_pool(shape, dtype, device, *, pages, seed):
            made = pool(shape, dtype, device, pages=pages, seed=seed)
            return torch.zeros_like(made) if seed == 4 else made
        worker.make_decode, worker.prepare_decode, worker.inputs.make_pool = make_decode, prepare_decode, make_pool
    """
    groups = {seed: [TP1.replace(seed=seed, world=2)] for seed in range(1, 6)}
    groups[3].append(TP1.replace(seed=3, world=2, arm="cp_local"))
    work = job(folder)
    work["groups"] = [{"points": [p.to_dict() for p in g], "record": [True] * len(g)} for g in groups.values()]
    with drivers.forked():
        sweep.launch(worker(folder, body), work, 1)
    rows = records.load(folder / "out")
    assert [r.point for r in rows] == [p for g in groups.values() for p in g]
    return {seed: [r for r in rows if r.point.seed == seed] for seed in groups}


def test_an_error_on_a_point_is_a_failed_row_and_the_next_points_are_measured(faults):
    (row,) = faults[1]
    assert row.status == "failed" and row.error == "rank 0: MemoryError: no room for this one"
    assert faults[5][0].status == "ok"


def test_a_wrong_answer_never_gets_a_time(faults):
    (row,) = faults[2]
    assert row.status == "failed" and "wrong answer: 1 of " in row.error and not row.samples_us


def test_two_arms_that_ran_the_same_path_are_an_error(faults):
    # B06: both arms forced to TP.
    assert [r.status for r in faults[3]] == ["failed", "failed"]
    assert all("'tp' and 'cp_local' executed the same path 'tp' (score, choose)" in r.error for r in faults[3])


def test_constant_keys_are_never_timed(faults):
    # B02: an all-zero cache.
    (row,) = faults[4]
    assert row.status == "failed" and "cache is constant (0.0)" in row.error


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Rows of two ranks that time graphs, with a stand-in for graphs and device events on a CPU."""
    folder = tmp_path_factory.mktemp("graphs")
    body = """
        import time, torch
        from m3cp import timing
        now = [0.0]
        class Graph:
            def __init__(self, calls, evict=None):
                self.calls, self.evict = calls, evict
            def replay(self):
                for call in self.calls:
                    if self.evict is not None:
                        self.evict()
                        now[0] += 30.0
                    call()
                    now[0] += 10.0 if call.__defaults__ else 0.0  # the arms' calls know their number, the empty one none
            def reset(self):
                pass
        class Timer:
            def start(self):
                self.at, self.real = now[0], time.perf_counter()
            def stop(self):
                return now[0] - self.at or (time.perf_counter() - self.real) * 1e6
        timing.capture, timing.DeviceTimer = Graph, Timer
        timing.COLD_ROUND_US, timing.COLD_ROUNDS = 100, 3
        torch.cuda._sleep = lambda cycles: None
        worker.Place.on_gpu = property(lambda self: True)
        torch.cuda.mem_get_info = lambda: (1 << 30, 1 << 30)
        worker.POOL_BYTES["cuda"] = worker.POOL_BYTES["cpu"] = 1 << 27
    """
    cp = dict(arm="cp", exchange="collective", queries="gathered")
    groups = []
    for context in (1024, 3072):
        tp = Point(context, 1, world=2, form="staged", max_context=4096)
        arms = [tp, tp.replace(**cp)]
        groups.append([*dict.fromkeys(traffic.floor_point(p) for p in arms), *arms])
    work = job(folder)
    work["cpu_last_level_bytes"] = 1 << 20
    work["groups"] = [{"points": [p.to_dict() for p in g], "record": [True] * len(g)} for g in groups]
    path = worker(folder, body)
    with drivers.forked():
        sweep.launch(path, work, 2)
    return {(r.point.arm, r.point.world, r.point.context_tokens): r for r in records.load(folder / "out")}


def test_graphs_are_checked_timed_and_called_cold_for_what_they_touch(graphs):
    assert {r.status for r in graphs.values()} == {"ok"}, [r.error for r in graphs.values()]
    for (arm, world, context), row in graphs.items():
        assert row.ranks == 2 and len(row.samples_us) == 3 and row.replays_per_round >= 2
        assert row.calls_per_replay >= 8 and row.calls_per_replay % row.caches == 0
        assert row.median_us == pytest.approx(10), "ten a call, thirty an evicting read, on the stand-in's clock"
        if context == 1024:
            assert row.cache_state == "warm" and row.evict_us == pytest.approx(30) and row.bytes_read == 0
        else:
            assert row.cache_state == "cold" and row.evict_us is None
            assert row.footprint_over_llc > 2
            shares = 1 if arm == "tp" or world == 1 else 2
            assert row.caches * row.distinct_bytes_read == pytest.approx(row.footprint_over_llc * (1 << 20))
            assert row.distinct_bytes_read == -(-(context // 128 - 1) // shares) * 32768
    # Every call of every replay was compared, before and after the rounds.
    cp = graphs["cp", 2, 3072]
    assert cp.check["rows"] >= 2 * 3 * 2 * cp.calls_per_replay


def test_workers_that_stand_still_are_ended(tmp_path):
    body = "import time; time.sleep(600)"
    with pytest.raises(sweep.WorkersFailed, match="no rank has moved for 1 s"):
        sweep.launch(worker(tmp_path, body), job(tmp_path, TP1), 2, stall_s=1.0)
    assert not descendants()


def test_workers_die_with_the_launcher(tmp_path):
    # P03: the launcher is killed, nobody is there to clean up.
    script = tmp_path / "rank.py"  # that imports nothing of a worker: how it was started is what ends it
    script.write_text(f"import os, pathlib, time\npathlib.Path(r'{tmp_path}/pid.' + os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(600)\n")
    code = f"from m3cp import sweep; sweep.launch({str(script)!r}, {{'device': 'cpu'}}, 2)"
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    files = [tmp_path / f"pid.{r}" for r in range(2)]
    deadline = time.monotonic() + 60
    while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(f.read_text()) for f in files]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + 10
    while any(alive(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(p) for p in pids)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# Points and plans, without a worker.


def test_grids_expand_to_points_of_each_arms_own_fields():
    points = planning.expand(
        {"contexts": [8192], "batches": [1], "worlds": [1, 2, 4], "arms": ["tp", "cp", "cp_local", "page_read"]},
        device="cuda",
    )
    names = {(p.arm, p.world, p.queries) for p in points}
    assert names == {
        *(("tp", w, None) for w in (1, 2, 4)),
        *(("cp", w, q) for w in (2, 4) for q in ("gathered", "replicated")),
        *(("cp_local", w, None) for w in (2, 4)),
        *(("page_read", w, None) for w in (1, 2, 4)),
    }
    assert all(p.launch == "graph" and p.max_context == 8192 for p in points)
    assert {p.launch for p in planning.expand({"contexts": [1024]}, device="cpu")} == {"eager"}


def test_bad_grids_are_refused_by_name():
    for grid, words in (
        ({"context": [1]}, "grid has context: allowed are contexts"),
        ({"contexts": 1024}, "contexts=1024: must be a list"),
        ({"batches": []}, "batches="),
        ({"arms": ["tq"]}, "arms='tq'"),
        ({"contexts": [0, 8]}, "context_tokens=0"),
    ):
        with pytest.raises(ValueError, match=words):
            planning.expand(grid, device="cpu")


def test_grids_come_from_yaml_json_and_points(tmp_path):
    grid = {"contexts": [1024, 2048], "batches": [3], "worlds": [2]}
    points = planning.expand(grid, device="cpu")
    for name, text in (
        ("g.json", json.dumps(grid)),
        ("p.json", json.dumps([p.to_dict() for p in points])),
        ("g.yaml", "contexts: [1024, 2048]\nbatches: [3]\nworlds: [2]\n"),
    ):
        (tmp_path / name).write_text(text)
        assert planning.read_grid(tmp_path / name, "cpu") == points
    assert planning.read_grid(points, "cpu") == points
    (tmp_path / "n.yaml").write_text("3")
    with pytest.raises(ValueError, match="mapping of axes, or a list"):
        planning.read_grid(tmp_path / "n.yaml", "cpu")


@pytest.mark.parametrize("worlds", [[1], [1, 2], [2]])
def test_the_default_gpu_grid_is_what_the_issue_asks_for(worlds):
    points = planning.default_grid("cuda", worlds)
    assert len(points) == len(set(points)) <= 155 and {p.cache for p in points} == {"cold"}
    assert {p.form for p in points if p.arm == "tp"} == {"one_launch", "staged"}
    unreached = planning.default_grid("cuda", worlds, peers=False)
    assert {p.form for p in unreached} <= {"staged", None} and {p.exchange for p in unreached} <= {"collective", None}
    top = max(worlds)
    arms = {"tp", "cp", "page_read"} if top > 1 else {"tp", "cp_local", "page_read"}
    for context in (1024, 8192, 32768, 131072, 524288):
        for batch in (1, 8, 32, 64):
            assert arms <= {p.arm for p in points if p.context_tokens == context and p.batch == batch}
    assert len({(p.context_tokens, p.batch) for p in points if p.query_len == 4}) == 3
    # B05: one long row among short ones, and lengths spread evenly in their logarithm.
    assert len({(p.batch, p.mix) for p in points if p.mix != "uniform"}) == 3
    assert {p.mix for p in points} == {"uniform", "one_long_rest_1k", "log_uniform"}
    assert {p.queries for p in points if p.arm == "cp"} == ({"gathered", "replicated"} if top > 1 else set())


def test_the_default_cpu_grid_straddles_what_reads_nothing_and_what_reads_much():
    points = planning.default_grid("cpu", [1, 2])
    shape = IndexerShape()
    blocks = {shape.blocks(p.context_tokens) for p in points}
    assert min(blocks) <= shape.topk < max(blocks) and {p.launch for p in points} == {"eager"}
    assert len(planning.default_grid("cpu", [1, 2], quick=True)) < len(points) / 3


def test_every_arm_stands_in_one_group_with_its_floor():
    points = planning.default_grid("cuda", [1, 2])
    plan = planning.make_plan(points, **GPU)
    assert sorted(map(repr, plan.points)) == sorted(map(repr, points)) and not plan.skipped
    for group in plan.groups:
        assert len({(p.context_tokens, p.batch, p.mix, p.query_len) for p in group.points}) == 1
        for point in group.record:
            assert traffic.floor_point(point) in group.points
            assert point.arm != "cp" or group.processes == point.world
    assert [g.processes for g in plan.groups] == sorted(g.processes for g in plan.groups)


def test_what_needs_more_devices_is_skipped_and_what_meets_no_peer_is_not():
    points = planning.expand(
        {"contexts": [8192], "batches": [1], "worlds": [4], "arms": ["tp", "cp", "cp_local", "page_read"]},
        device="cuda",
    )
    plan = planning.make_plan(points, **GPU)
    assert {p.arm for p in plan.skipped} == {"cp"} and set(plan.skipped.values()) == {"needs 4 GPUs, found 2"}
    assert {p.arm for p in plan.points} == {"tp", "cp_local", "page_read"} and {g.processes for g in plan.groups} == {1}
    big = [Point(524_288, 64, max_context=524_288, form="staged")]
    plan = planning.make_plan(big, **GPU, memory_bytes=12 << 30)
    assert "its cache of 8 GiB does not fit a device of 12 GiB" in plan.skipped[big[0]]
    odd = [Point(8192, 1, world=3, form="staged")]
    assert "does not fit 4 heads" in planning.make_plan(odd, **GPU).skipped[odd[0]]


def test_known_points_are_left_out_but_their_groups_floor_stays():
    points = planning.expand({"contexts": [8192], "batches": [1], "worlds": [2]}, device="cuda")
    known = {p for p in points if p.arm in ("tp", "page_read")}
    plan = planning.make_plan(points, **GPU, known=known)
    (group,) = plan.groups
    assert {p.arm for p in group.record} == {"cp"} and {p.arm for p in group.points} == {"cp", "page_read"}
    assert set(plan.measured) == known


def test_a_node_that_cannot_measure_says_so():
    with pytest.raises(doctor.NodeError):
        sweep.main(device="tpu")
    with pytest.raises(ValueError, match="minutes=-1"):
        sweep.main(device="cpu", minutes=-1)


def test_the_death_signal_is_there():
    assert hasattr(ctypes.CDLL(None), "prctl") or sys.platform != "linux"


def test_a_row_of_an_fp8_cache_says_how_many_of_bf16s_blocks_it_chooses(tmp_path):
    grid = {**TINY, "contexts": [3072], "batches": [1], "worlds": [1], "arms": ["tp", "page_read"], "dtypes": ["fp8_e4m3fn"]}
    with drivers.forked():
        assert sweep.main({k: v for k, v in grid.items() if k != "rows_padded"}, device="cpu", out=tmp_path / "run") == 0
    of = {row.point.arm: row.extra.get("overlap_bf16") for row in records.load(tmp_path / "run")}
    assert 0.8 < of["tp"] < 1 and of["page_read"] is None
