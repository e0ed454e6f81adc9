"""Words to and fro between every two GPUs through mapped memory: does it work, how long is a turn, what memory is it?

The smallest test of what the symmetric exchange stands on. Two ranks pass 256 tagged words in turns inside one launch
each, as the kernels hand words over; a turn is the difference of two launches of different lengths, so that neither
launches nor their skew count. `python -m m3cp.pingpong` is a worker; `run` starts it.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from m3cp import sweep
from m3cp.exchange import COARSE as COARSE  # what `grain` may say
from m3cp.exchange import SymmetricExchange, spin_limit
from m3cp.shapes import IndexerShape

WORDS = 256  # a poll needs an element a thread (`kernels.words.POLLED`)
TURNS = {"cuda": (100, 2100), "cpu": (10, 110)}
REPEATS = 5


def run(device: str, ranks: int) -> dict[str, Any]:
    """Start `ranks` workers and return {"node", "pairs"}: flat dicts, one a pair.

    Raises:
        sweep.WorkersFailed: a rank failed, died or waited in vain; the message names it.
    """
    facts, found = sweep.job_facts(device), {}

    def look(scratch: Path) -> None:
        if not found and (scratch / "result.json").exists():
            found.update(json.loads((scratch / "result.json").read_text()))

    sweep.launch("m3cp.pingpong", facts, ranks, follow=look, stall_s=60.0)
    if not found:
        raise sweep.WorkersFailed(f"{ranks} ranks ended without a result")
    return {"node": facts["node"], "pairs": found["pairs"]}


def body(place, job: dict[str, Any]) -> None:
    """What a rank does: all pairs one after the other; rank 0 leaves the result in the scratch folder."""
    pairs = [pair(place, a, b) for a, b in itertools.combinations(range(place.peers.world), 2)]
    if place.peers.rank == 0:
        path = Path(job["scratch"]) / "result.json"
        path.with_suffix(".new").write_text(json.dumps({"pairs": pairs}))
        path.with_suffix(".new").rename(path)


def pair(place, a: int, b: int) -> dict[str, Any]:
    """Turns between ranks `a` and `b`; all ranks come here, the others only agree.

    Returns:
        {"a", "b", "turn_us" (there and back), "samples_us", "memory", "grain"} of the slower of the two.

    Raises:
        worker.Failed: words that did not come, on all ranks.
    """
    import torch
    import torch.distributed as dist

    from m3cp import timing
    from m3cp.shard import Shard

    rank = place.peers.rank
    group = dist.new_group([a, b])
    mine = rank in (a, b)
    exchange = SymmetricExchange(group) if mine else None
    shard = Shard((a, b).index(rank), 2, IndexerShape().heads) if mine else None
    state = torch.zeros(1, dtype=torch.int32, device=place.device)

    def set_up():
        return exchange.allocate(shard, place.device, WORDS, allow_coarse=True) if mine else None

    buffers = place.peers.together(set_up)
    tag = 0

    def turns(count: int) -> float:
        """Microseconds of one launch of `count` turns; 0.0 on ranks that only watch."""
        nonlocal tag
        first, tag = tag, tag + count
        if not mine:
            return 0.0
        words, peers, mapped = buffers
        if not place.on_gpu:
            return _turns_on_host(mapped, shard.rank, first, count)
        timer = timing.DeviceTimer()
        timer.start()
        _kernel()[(1,)](words, peers, state, first, count, 1 - shard.rank, int(shard.rank == 0), spin_limit(place.device), num_warps=4)
        us = timer.stop()
        if int(state[0]):
            raise RuntimeError(f"rank {rank}: words of rank {b if rank == a else a} did not come within {spin_limit(place.device)} polls")
        return us

    few, many = TURNS[place.device.type]
    place.peers.together(lambda: turns(few))  # compiles
    samples = []
    for _ in range(REPEATS):
        short, long = (place.peers.together(lambda n=n: turns(n)) for n in (few, many))
        samples.append((long - short) / (many - few))
    said = place.peers.exchange([samples, exchange.memory if mine else "", exchange.grain if mine else ""])
    slow = max((a, b), key=lambda r: timing.median(said[r][0]))
    return {
        "a": a, "b": b, "turn_us": timing.median(said[slow][0]), "samples_us": said[slow][0], "memory": said[slow][1],
        "grain": said[slow][2], "words": WORDS,
    }  # fmt: skip


def _kernel():
    """The kernel, made when a GPU asks for it: a node check of a CPU needs no triton."""
    from m3cp.turns import turns_kernel

    return turns_kernel


def _turns_on_host(mapped: list, side: int, first: int, count: int) -> float:
    """The kernel's protocol in torch, over host shared memory."""
    import time

    import torch

    start = time.perf_counter()
    word = torch.arange(WORDS, dtype=torch.int64)
    for turn in range(first + 1, first + count + 1):
        if side == 0:
            mapped[1].copy_(word | (turn << 32))
        deadline = time.monotonic() + 20
        while not bool((mapped[side] >> 32 == turn).all()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"side {side}: words of turn {turn} did not come within 20 s")
            time.sleep(0)
        if side == 1:
            mapped[0].copy_(word | (turn << 32))
    return (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    from m3cp import worker

    worker.run(json.loads(Path(sys.argv[1]).read_text()), body)
