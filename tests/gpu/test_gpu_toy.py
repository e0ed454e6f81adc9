"""A toy M3 on two GPUs: TP and CP, in every form, decode the same tokens and the same logits over 1,000 steps.

pytest starts torchrun on this very file; rank 0 prints what each way gave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LATE = 5  # steps after which the last request begins
# name: (class, form, exchange, queries)
WAYS = {
    "tp, staged": ("tp", "staged", None, None),
    "tp, one launch": ("tp", "one_launch", None, None),
    "cp, staged, collective, gathered": ("cp", "staged", "collective", "gathered"),
    "cp, one launch, gathered": ("cp", "one_launch", "symmetric", "gathered"),
    "cp, one launch, replicated": ("cp", "one_launch", "symmetric", "replicated"),
}


@pytest.mark.gpu
@pytest.mark.multigpu(gpus=2)
@pytest.mark.parametrize("draft", [0, 3])
def test_tp_and_cp_decode_the_same_tokens(draft):
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, str(draft)]
    done = subprocess.run(command, env=env, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    found = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert list(found) == list(WAYS)
    first = found["tp, staged"]
    for way, runs in found.items():
        for rank, run in enumerate(runs):
            assert run == first[0], f"{way}, rank {rank}: tokens or logits differ"
    assert first[0]["longest"] >= 3000 + 1000 - LATE


def main(draft: int) -> None:
    import dataclasses

    import torch
    import torch.distributed as dist
    from toy_m3 import generate

    from m3cp.decode import CPDecode, TPDecode
    from m3cp.exchange import CollectiveExchange, SymmetricExchange
    from m3cp.shapes import IndexerShape
    from m3cp.shard import Shard
    from m3cp.toy import Size, ToyM3

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, world = dist.get_rank(), dist.get_world_size()
    size = Size(shape=IndexerShape(), layers=3, hidden=1024, group=16, inner=1024, max_context=8192)
    bounds = dict(max_requests=4, max_query_len=4, max_context=size.max_context, device="cuda")
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, size.vocabulary, (n,), generator=g).tolist() for n in (2100, 900, 3000)]
    found = {}
    for name, (path, form, exchange, queries) in WAYS.items():
        shard = Shard(rank, world, 4)
        if path == "tp":
            decode = TPDecode(size.shape, shard, form=form, **bounds)
        else:
            transport = CollectiveExchange() if exchange == "collective" else SymmetricExchange()
            decode = CPDecode(size.shape, shard, exchange=transport, queries=queries, form=form, **bounds)
        decode.warmup()
        run = generate(ToyM3(size, shard, decode, requests=3, max_prefill=8192), prompts, steps=1000, draft=draft, late=LATE)
        runs = [None] * world
        dist.all_gather_object(runs, dataclasses.asdict(run))
        found[name] = runs
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
