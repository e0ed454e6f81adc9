"""Ranks that share one GPU: the stress check for P = 4 and 8 where there are fewer GPUs than ranks.

The driver runs one rank's kernels at a time and takes turns every few milliseconds, so a wait between ranks lasts turns:
the kernels, their mapped memory and every id are those of P GPUs, its times are not. NCCL refuses two ranks on one GPU, so the group,
which the exchange needs to set up only, is gloo's.

    PYTHONPATH=. python3 tests/gpu/test_gpu_shared.py RANKS MINUTES OUT.json [WORDS OF LEGS]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

LAYERS = 6  # of a step: turns make each call slower by a thousand times
ONLY = ["small cp", "large cp/one_launch/symmetric/gathered 50000"]
MINUTES = {4: 1.0, 8: 2.5}  # of ranks; with set-up and compiling 100 and 200 s on one H200


def stress_shared(ranks: int, minutes: float, out: Path, only=ONLY) -> int:
    """`stress.stress` on CUDA with its ranks in turns on the GPUs that are here."""
    from m3cp import stress, sweep

    launch, facts = sweep.launch, sweep.job_facts
    sweep.launch = lambda module, job, processes, **given: launch(__file__, job, processes, **given)
    sweep.job_facts = lambda device: (found := facts(device)) | {"node": f"{found['node']}, shared by {ranks} ranks"}
    try:
        return stress.stress("cuda", ranks, minutes, out=out, only=list(only))
    finally:
        sweep.launch, sweep.job_facts = launch, facts


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_that_share_a_gpu_choose_right(ranks, tmp_path):
    out = tmp_path / "stress.json"
    assert stress_shared(ranks, MINUTES[ranks], out) == 0
    legs = json.loads(out.read_text())["legs"]
    assert all(leg["launches"] for leg in legs), [leg["leg"] for leg in legs if not leg["launches"]]
    assert sum(leg["exchanging"] for leg in legs) > 100


def rank(job: dict) -> None:
    """One rank, on GPU (rank mod GPUs)."""
    import os

    import torch
    import torch.distributed as dist

    from m3cp import stress, worker

    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    join, begin = worker.join, dist.init_process_group
    dist.init_process_group = lambda **group: begin(**group | {"backend": "gloo", "device_id": None})
    worker.join = lambda job, peers, local_rank: join(job, peers, local_rank % torch.cuda.device_count())
    worker.Place.align = lambda place: place.peers.exchange(0)
    stress.LAYERS = LAYERS
    worker.run(job, stress.body)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        rank(json.loads(Path(sys.argv[1]).read_text()))
    sys.exit(stress_shared(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] or ONLY))
