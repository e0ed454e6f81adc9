"""Ranks across nodes: what torchrun starts on each of them, one process a rank, meeting at its rendezvous.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m m3cp.nodes GRID --out DIR

Global rank 0 plans, appends the rows and holds the rows file; DIR need only be its own. Peers' memory does not reach
across nodes, so the collective exchange is measured and the symmetric one skipped in words. A rank that dies ends the
run (torchrun names it); the same command goes on with what has no row.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from m3cp import doctor, grid, records, sweep, worker


class NodePeers(worker.Peers):
    """The ranks' control channel over the store of torchrun's rendezvous, which every node reaches."""

    def __init__(self, rank: int, world: int, scratch: Path):
        self.rank, self.world, self._scratch, self._step = rank, world, scratch, 0
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world,
            is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True", timeout=timedelta(seconds=worker.JOIN_S),
        )  # fmt: skip
        self.store = dist.PrefixStore("m3cp", store)


def node_name(facts: dict[str, Any], world: int) -> str:
    """The hardware as rows name it: "2 nodes of 1x NVIDIA H200"."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    name = facts["node"].replace(f"{len(facts['devices'])}x ", "", 1) if facts["devices"] else facts["node"]
    return f"{world // local} nodes of {local}x {name}"


def skip_reason(point, world: int) -> str | None:
    """Why a Point is not for so many ranks on several nodes; None when it is."""
    if point.world != world and point.arm != "page_read":
        return f"world={point.world}: torchrun started {world} ranks"
    if point.exchange == "symmetric" or point.form in ("one_launch", "two_launch"):
        return f"exchange={point.exchange!r}, form={point.form!r}: peers' memory does not reach across nodes"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """One rank of a run; 0, or 1 when a Point failed."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m m3cp.nodes", description="Measure a grid with ranks on several nodes.")
    parser.add_argument("grid", help="a YAML or JSON file of axes or Points")
    parser.add_argument("--out", type=Path, required=True, help="the run's folder, on the node of rank 0")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPUs where there are any")
    parser.add_argument("--commit", help="of this code, where the copy that runs has no git history")
    given = parser.parse_args(argv)
    missing = [n for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR") if n not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: torchrun starts this (`torchrun ... -m m3cp.nodes GRID --out DIR`)")
    facts = sweep.job_facts(doctor.sweep_device(given.device))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    facts["node"] = node_name(facts, world)
    with tempfile.TemporaryDirectory(prefix="m3cp-", ignore_cleanup_errors=True) as folder:
        place = worker.join(facts, NodePeers(rank, world, Path(folder)), int(os.environ["LOCAL_RANK"]))
        if rank:
            job = place.peers.exchange(None, worker.JOIN_S)[0]
            _run(place, {**job, "scratch": folder})
            return 0
        return _lead(place, given, facts, folder)


def _lead(place: worker.Place, given: argparse.Namespace, facts: dict[str, Any], scratch: str) -> int:
    world, device = place.peers.world, facts["device"]
    points = grid.read_grid(given.grid, device)
    provenance = {**doctor.provenance(), "code_hash": records.code_hash(), **sweep.git_state(given.commit)}
    provenance["command"] = "torchrun -m m3cp.nodes GRID"
    file = records.rows_file(given.out)
    with records.locked(given.out):
        known, said = sweep._known(given.out, set(points), facts["node"], provenance)
        skipped = {p: reason for p in points if (reason := skip_reason(p, world))}
        plan = grid.make_plan([p for p in points if p not in skipped], device=device, ranks=world, known=known)
        groups = [grid.Group(world, g.points, g.record) for g in plan.groups]  # every rank takes part in every group
        skipped |= plan.skipped
        new = {p: reason for p, reason in skipped.items() if p not in said}
        if new:
            records.append(file, *(records.Row(p, "skipped", p.arm, facts["node"], 0, error=reason) for p, reason in new.items()))
        outcome = sweep.Outcome(plan.points, file)
        job = {**facts, "out": str(file), "provenance": provenance, "seconds": None, "groups": [sweep._as_json(g) for g in groups]}
        place.peers.exchange(job)
        _run(place, {**job, "scratch": scratch})
        outcome.look()
        print("\n".join([f"rows: {file}", *sweep.table(outcome, len(plan.measured), skipped)]), flush=True)
        return sweep.status(outcome, len(plan.measured), len(skipped), in_time=False)


def _run(place: worker.Place, job: dict[str, Any]) -> None:
    worker.Sweep(place, job).groups()
    place.peers.leave()


if __name__ == "__main__":
    try:
        code = main()
    except (ValueError, OSError) as problem:
        print(f"m3cp nodes: {problem}", file=sys.stderr, flush=True)
        code = sweep.NOT_MEASURED
    sys.stdout.flush()
    os._exit(code)  # a process group with captured collectives can hang in its destructor
