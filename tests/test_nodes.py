"""Ranks across nodes: two torchrun agents on this machine, each one node of one rank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import drivers

from m3cp import grid as planning
from m3cp import records

ROOT = Path(__file__).resolve().parents[1]
GRID = {"contexts": [2176], "batches": [1], "worlds": [2], "arms": ["tp", "cp", "page_read"], "queries": ["gathered"],
        "exchanges": ["collective", "symmetric"], "max_context": 4096, "cache": "warm"}  # fmt: skip


def agents(grid, out, logs):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "m3cp", "--local-addr", "127.0.0.1", "-m", "m3cp.nodes", str(grid),
               "--device", "cpu", "--out", str(out)]  # fmt: skip
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(command, cwd=ROOT, env=env, stdout=open(log, "wb"), stderr=subprocess.STDOUT) for log in logs]
    return [agent.wait(timeout=150) for agent in both]


def test_two_agents_measure_one_run_and_go_on(tmp_path):
    grid, out, logs = tmp_path / "grid.json", tmp_path / "run", [tmp_path / "log0", tmp_path / "log1"]
    grid.write_text(json.dumps(GRID))
    said = lambda: "\n".join(log.read_text() for log in logs)  # noqa: E731
    assert agents(grid, out, logs) == [0, 0], said()
    before, rows = drivers.check_rows(out / records.ROWS_FILE, b"")
    assert {r.point for r in rows} == set(planning.expand(GRID, device="cpu"))
    timed = {(r.point.arm, r.point.exchange): r for r in rows if r.status == "ok"}
    assert set(timed) == {("tp", None), ("cp", "collective"), ("page_read", None)}
    assert all(r.node.startswith("2 nodes of 1x cpu") and r.check["passed"] for r in timed.values())
    assert timed["cp", "collective"].ranks == 2 and len(timed["cp", "collective"].rank_samples_us) == 2
    (skipped,) = [r for r in rows if r.status == "skipped"]
    assert "peers' memory does not reach across nodes" in skipped.error
    assert agents(grid, out, logs) == [0, 0], said()
    after, _ = drivers.check_rows(out / records.ROWS_FILE, before)
    assert after == before and "there already" in said()
