"""`m3cp sweep GRID --on slurm` against a real Slurm of one node; `make test-slurm` runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm_node

from m3cp import batch, records
from m3cp import grid as planning

ROOT = Path(__file__).resolve().parents[1]
GRID = {"contexts": [1024, 2176], "batches": [1], "worlds": [1, 2], "arms": ["tp", "cp", "page_read"], "queries": ["gathered"],
        "max_context": 4096, "cache": "warm"}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(slurm_node.missing()), reason=slurm_node.missing() or "there")]


@pytest.fixture
def slurm(tmp_path):
    made = slurm_node.Slurm(tmp_path / "slurm")
    yield made
    made.close()
    assert made.left() == []


def command(grid, out):
    return [sys.executable, "-m", "m3cp.cli", "sweep", str(grid), "--on", "slurm", "--partition", "test", "--device", "cpu", "--out", str(out)]


def write(tmp_path, **axes):
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({**GRID, **axes}))
    return path


def told(pid):
    """The words of a process's command; none where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return [""]


def until(true, seconds):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert true()


def test_jobs_of_a_real_slurm_fill_one_run_and_go_on(tmp_path, slurm):
    grid, out, env = write(tmp_path), tmp_path / "run", {**os.environ, **slurm.environment}
    points = set(planning.read_grid(grid, "cpu"))
    done = subprocess.run(command(grid, out), capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records.load(out)
    assert len(rows) == len(points) and {r.point for r in rows} == points and {r.status for r in rows} == {"ok"}
    assert len(records.rows_files(out)) == 2, "one job, one rows file"
    assert f"{len(points):>6} Points measured" in done.stdout and "in 2 jobs on slurm" in done.stdout and "sacct" not in done.stderr
    assert (out / batch.JOBS_FOLDER).stat().st_mode & 0o777 == 0o700
    again = subprocess.run(command(grid, out), capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)
    assert again.returncode == 0 and f"{len(points):>6} there already" in again.stdout, again.stdout + again.stderr
    assert len(records.load(out)) == len(points)
    until(lambda: slurm.ask("squeue", "-h") == "", 20)  # a job that has left its result is about to end


def test_a_closed_slurm_leaves_no_job_of_its_own(slurm):
    slurm.ask("sbatch", "--wrap", "srun sleep 1000", "-o", "/dev/null")
    until(lambda: any(told(pid)[:2] == ["/usr/bin/sleep", "1000"] for pid in slurm.left()), 20)
    slurm.close()
    assert slurm.left() == []


def test_what_slurm_refuses_or_lets_wait_is_said(tmp_path, slurm):
    grid, out, env = write(tmp_path), tmp_path / "run", {**os.environ, **slurm.environment}
    for option, words in (("account", "--slurm"), ("acount=mine", "Unknown argument 'acount'"), ("partition=nope", "invalid partition specified: nope")):
        refused = subprocess.run([*command(grid, out), "--slurm", option], capture_output=True, text=True, cwd=ROOT, env=env, timeout=100)
        assert refused.returncode == 2 and words in refused.stderr and "Traceback" not in refused.stderr, refused.stderr
    assert slurm.ask("squeue", "-h") == ""
    driver = subprocess.Popen([*command(grid, out), "--slurm", "constraint=moon"], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    assert driver.wait(60) == 2 and "moon" not in slurm.ask("squeue") and "Invalid feature" in driver.stderr.read()


@pytest.mark.parametrize("way", ["driver told to end", "job killed"])
def test_what_ends_early_is_cancelled_or_named(tmp_path, slurm, way):
    grid, out, env, log = write(tmp_path), tmp_path / "run", {**os.environ, **slurm.environment}, tmp_path / "log"
    driver = subprocess.Popen(command(grid, out), cwd=ROOT, env=env, stdout=log.open("wb"), stderr=subprocess.STDOUT)
    state = lambda: dict(line.split() for line in slurm.ask("squeue", "-h", "-o", "%i %T").splitlines())  # noqa: E731
    sweeping = lambda: [pid for pid in slurm.left() if "m3cp.ranks" in told(pid)]  # noqa: E731
    until(lambda: state() and sweeping(), 90)
    if way == "job killed":
        (running,) = [number for number, said in state().items() if said == "RUNNING"]
        for pid in slurm.left():
            if "-m submitit.core._submit" in " ".join(told(pid)) and told(pid)[0] != "srun":
                os.kill(pid, signal.SIGKILL)
        assert driver.wait(240) == 1, log.read_text()
        assert f", job {running}: ended without a result; jobs/{running}_0_log.err ends with: " in log.read_text(), log.read_text()
        points, other = set(planning.read_grid(grid, "cpu")), {r.point for r in records.load(out)}
        assert other and other < points, "the other job was measured"
        done = subprocess.run(command(grid, out), capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)
        assert done.returncode == 0 and {r.point for r in records.load(out)} == points, done.stdout + done.stderr
        return
    jobs = state()
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) != 0
    assert len(jobs) == 2 and f"cancelled jobs {', '.join(sorted(jobs))}; the same command goes on" in log.read_text()
    until(lambda: state() == {} and not sweeping(), 30)
