"""`m3cp sweep GRID --on slurm` against a real Slurm of one node; `make test-slurm` runs it."""

import json
import os
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


def test_jobs_of_a_real_slurm_fill_one_run_and_go_on(tmp_path):
    grid, out = tmp_path / "grid.json", tmp_path / "run"
    grid.write_text(json.dumps(GRID))
    points = set(planning.read_grid(grid, "cpu"))
    slurm = slurm_node.Slurm(tmp_path / "slurm")
    try:
        command = [sys.executable, "-m", "m3cp.cli", "sweep", str(grid), "--on", "slurm", "--partition", "test", "--device", "cpu", "--out", str(out)]
        env = {**os.environ, **slurm.environment}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = records.load(out)
        assert len(rows) == len(points) and {r.point for r in rows} == points and {r.status for r in rows} == {"ok"}
        assert len(records.rows_files(out)) == 2, "one job, one rows file"
        assert f"{len(points):>6} Points measured" in done.stdout and "in 2 jobs on slurm" in done.stdout
        assert (out / batch.JOBS_FOLDER).stat().st_mode & 0o777 == 0o700
        again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)
        assert again.returncode == 0 and f"{len(points):>6} there already" in again.stdout, again.stdout + again.stderr
        assert len(records.load(out)) == len(points)
        deadline = time.monotonic() + 20  # a job that has left its result is about to end
        while slurm.ask("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.3)
        assert slurm.ask("squeue", "-h") == ""
        refused = subprocess.run([*command, "--slurm", "account"], capture_output=True, text=True, cwd=ROOT, env=env, timeout=100)
        assert refused.returncode == 2 and "--slurm" in refused.stderr
    finally:
        slurm.close()
