"""Batch sweeps: one grid as papermill runs or as jobs, one table at the end, and kills on the way (P03)."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import drivers
import pytest

from m3cp import batch, records, rowformat, sweep
from m3cp import grid as planning

ROOT = Path(__file__).resolve().parents[1]
GRID = {"contexts": [1024, 2176], "batches": [1], "arms": ["tp", "cp", "page_read"], "queries": ["gathered"], "max_context": 4096, "cache": "warm"}


def write(folder, **axes):
    path = folder / "grid.json"
    path.write_text(json.dumps({**GRID, **axes}))
    return path


def test_a_grid_becomes_one_run_for_each_start_of_workers(tmp_path):
    grid = write(tmp_path, worlds=[1, 2], dtypes=["bf16", "fp16"])
    made = batch.notebook_batches(grid, "cpu")
    assert [(b.parameters["worlds"], b.parameters["dtypes"]) for b in made] == [([w], [d]) for w in (1, 2) for d in ("bf16", "fp16")]
    assert {p for b in made for p in b.points} == set(planning.read_grid(grid, "cpu"))
    assert len({b.name for b in made}) == 4 and len(batch.notebook_batches(grid, "cpu", worlds=[2])) == 2
    for bad, words in (({"context": [1]}, "grid has context"), ({"launch": "eager"}, "grid='launch': must be axes that 10_sweep takes")):
        with pytest.raises(ValueError, match=words):
            batch.notebook_batches(write(tmp_path, **bad), "cpu")
    grid.write_text(json.dumps([p.to_dict() for b in made for p in b.points]))
    with pytest.raises(ValueError, match="must be a mapping of a notebook's axes"):
        batch.notebook_batches(grid, "cpu")


def test_jobs_share_a_start_of_workers_and_are_cut_by_time():
    points = planning.expand({**GRID, "contexts": [1024, 2176, 8192], "batches": [1, 2], "worlds": [1, 2], "max_context": 8192}, device="cpu")
    made = batch.cluster_batches(points, "cpu")
    assert len(made) == 2 and sorted(map(repr, (p for b in made for p in b.points))) == sorted(map(repr, points))
    finer = batch.cluster_batches(points, "cpu", minutes=0.334)  # little more than a start
    assert len(finer) >= 4 and sorted(map(repr, (p for b in finer for p in b.points))) == sorted(map(repr, points))


@pytest.fixture(scope="module")
def noted(tmp_path_factory):
    """A sweep by papermill of a grid of which some is there already and some not for this machine; its output."""
    folder = tmp_path_factory.mktemp("notebooks")
    first = write(folder, contexts=[1024], worlds=[2])
    assert sweep.main(first, device="cpu", out=folder / "run") == 0
    grid = write(folder, worlds=[2, 3])
    command = [sys.executable, "-m", "m3cp.cli", "sweep", str(grid), "--notebook", "--device", "cpu", "--out", str(folder / "run")]
    dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, cwd=ROOT)
    before = len(records.load(folder / "run"))
    return folder, subprocess.run(command, capture_output=True, text=True, cwd=ROOT), dry, before


@pytest.mark.slow
def test_papermill_measures_what_is_left_and_ends_with_a_table(noted):
    folder, done, dry, before = noted
    assert done.returncode == 0, done.stdout + done.stderr
    assert "     4 Points measured" in done.stdout and "     4 there already" in done.stdout
    assert "not applicable here\n" in done.stdout and "     0 failed" in done.stdout and "     0 not reached" in done.stdout
    assert ": world=3 does not fit 4 heads" in done.stdout
    assert done.stderr.count("point/s") and "<" in done.stderr  # one bar with the time that is left
    rows = records.load(folder / "run")
    assert len(rows) > before and {r.point.context_tokens for r in rows if r.status == "ok"} == {1024, 2176}
    assert [p.name.startswith("10_sweep.P2-bf16-") for p in (folder / "run" / "notebooks").glob("*.ipynb")] == [True]


@pytest.mark.slow
def test_a_dry_run_lists_points_memory_and_time(noted):
    _, _, dry, before = noted
    assert dry.returncode == 0 and before == 4
    assert "1 papermill runs of 10_sweep.ipynb" in dry.stdout and "KiB  2 ranks" in dry.stdout and " s " in dry.stdout
    assert "cp/staged/collective/gathered 2176 x1 P=2 warm" in dry.stdout


KILL_WORDS = {"kernel": "ipykernel", "sweep": "m3cp.sweep", "rank": "m3cp.ranks", "driver": "m3cp.cli"}


def told(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def kills(tmp_path, targets, chance):
    """One papermill sweep, killed at each target in turn; it must go on and finish."""
    out, grid = tmp_path / "run", write(tmp_path, worlds=[2])
    command = [sys.executable, "-m", "m3cp.cli", "sweep", str(grid), "--notebook", "--device", "cpu", "--out", str(out)]
    before = b""
    for target in targets:
        with open(tmp_path / "log", "wb") as log:
            driver = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        deadline, family = time.monotonic() + 120, []
        while not any(KILL_WORDS[target] in told(p) for p in family) and time.monotonic() < deadline and driver.poll() is None:
            family = drivers.family(driver.pid)
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 4))
        family = list(dict.fromkeys([*family, *drivers.family(driver.pid)]))
        victims = [p for p in family if KILL_WORDS[target] in told(p)]
        for pid in victims[:1] if target != "driver" else [driver.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        status = driver.wait(timeout=180)
        assert drivers.wait_until_gone(family, 10.0) == [], (target, (tmp_path / "log").read_text())
        before, rows = drivers.check_rows(out / records.ROWS_FILE, before)
        whole = {r.point for r in rows if r.status == "ok"} == set(planning.read_grid(grid, "cpu"))
        assert (status == 0) <= whole, (target, status)
        if whole:
            (out / records.ROWS_FILE).unlink()
            before = b""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    _, rows = drivers.check_rows(out / records.ROWS_FILE, before)
    assert {r.point for r in rows if r.status == "ok"} == set(planning.read_grid(grid, "cpu"))


def test_a_killed_kernel_ends_in_words_and_leaves_nobody(tmp_path):
    kills(tmp_path, ["kernel"], random.Random(1))


@pytest.mark.slow
def test_ten_kills_through_papermill(tmp_path):
    kills(tmp_path, ["driver", "kernel", "sweep", "rank", "driver", "kernel", "rank", "sweep", "driver", "kernel"], random.Random(3))


def test_a_job_that_dies_is_named_the_others_are_measured_and_the_same_call_fills_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(batch, "LOOK_S", 0.5)
    monkeypatch.setattr(batch, "LATE_S", 1.0)
    grid, out = write(tmp_path, contexts=[1024], worlds=[1, 2]), tmp_path / "run"
    killed = []

    def kill():  # as a node that is lost: nothing of the job has time for a word
        while not killed:
            time.sleep(0.05)
            for job in batch.left_jobs(out / batch.JOBS_FOLDER, "local"):
                family = drivers.family(int(job))
                if not killed and any("m3cp.ranks" in told(pid) for pid in family):
                    killed.append(job)
                    for pid in family:
                        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    options = dict(out=out, device="cpu", commit="unknown")
    assert batch.on_cluster("local", grid, **options) == sweep.FAILED
    killer.join()
    said = capsys.readouterr()
    words = f", job {killed[0]}: ended without a result; jobs/{killed[0]}_0_log.err ends with: "
    assert words in said.out and words in said.err
    points, other = set(planning.read_grid(grid, "cpu")), {r.point for r in records.load(out)}
    assert other and other < points and len({p.world for p in points - other}) == 1
    assert batch.on_cluster("local", grid, **options) == 0
    rows = records.load(out)
    assert {r.point for r in rows} == points and len(rows) == len(points) and {r.status for r in rows} == {"ok"}
    assert len(records.rows_files(out)) in (2, 3) and not (out / records.ROWS_FILE).exists(), "a file a job, also of the one that died where it has rows"
    assert (out / batch.JOBS_FOLDER).stat().st_mode & 0o777 == 0o700
    assert rowformat.main(str(out), tmp_path / "run.parquet")[-1].startswith(f"{len(points)} rows in ")
    assert batch.on_cluster("local", grid, **options) == 0
    assert len(records.load(out)) == len(points)


@pytest.mark.slow  # seen to fail once on a loaded machine, before drivers asked their jobs again; not yet often enough since
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["told to end", "killed"])
def test_a_driver_that_ends_cancels_its_jobs_or_the_next_one_finds_them(tmp_path, how):
    grid, out = write(tmp_path, worlds=[2]), tmp_path / "run"
    command = [sys.executable, "-m", "m3cp.cli", "sweep", str(grid), "--on", "local", "--device", "cpu", "--out", str(out)]
    log = tmp_path / "log"  # not a pipe: a job that outlives its driver would hold it open
    driver = subprocess.Popen(command, cwd=ROOT, stdout=log.open("wb"), stderr=subprocess.STDOUT)
    jobs, deadline = [], time.monotonic() + 30
    while not jobs and time.monotonic() < deadline:
        jobs = list(batch.left_jobs(out / batch.JOBS_FOLDER, "local"))
        time.sleep(0.05)
    assert len(jobs) == 1
    family = drivers.family(int(jobs[0]))
    driver.send_signal(how)
    driver.wait(timeout=60)
    assert driver.returncode != 0
    if how == signal.SIGTERM:
        assert f"cancelled jobs {jobs[0]}" in log.read_text()
    else:
        with pytest.raises(ValueError, match=f"still run: {jobs[0]}; wait for them, or cancel them: kill -INT {jobs[0]}"):
            batch.on_cluster("local", grid, out=out, device="cpu")
        while batch.left_jobs(out / batch.JOBS_FOLDER, "local") and time.monotonic() < deadline + 60:  # one that is starting may swallow it
            os.kill(int(jobs[0]), signal.SIGINT)
            time.sleep(2)
    assert drivers.wait_until_gone(family, 30.0) == [] and batch.left_jobs(out / batch.JOBS_FOLDER, "local") == {}
