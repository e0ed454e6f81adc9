"""Compile what tests launch, by many processes at once, into Triton's cache: tests then load it. Results are discarded.

    python prepare.py PART PARTS          the kernels of every case
    python prepare.py ranks PART PARTS    the one-launch kernels of tests that take two GPUs, which can't run side by side
"""

import sys

from cases import CASES, SPREAD, check


def main(part: int, parts: int) -> None:
    for case in CASES[part::parts]:
        try:
            check(case, path="cp", world=SPREAD[case.name], device="cuda")
            check(case, path="tp", world=1, device="cuda")
        except Exception as error:  # the test itself reports it
            print(f"{case.name}: {type(error).__name__}", file=sys.stderr)


def ranks(part: int, parts: int) -> None:
    import torch

    from m3cp.kernels import fused
    from m3cp.shapes import IndexerShape
    from m3cp.shard import Shard

    # (requests, query_len) of test_gpu_ranks, of its fresh processes, of test_gpu_toy and of small sweeps
    calls = [(1, 1), (4, 1), (4, 4), (32, 1), (256, 1), (512, 1), (1, 2), (1, 3), (1, 4), (4, 2), (4, 3)]
    todo = [(call, way) for call in calls for way in ((False, False), (True, False), (True, True))]
    for (requests, query_len), (exchange, gather) in todo[part::parts]:
        shard = Shard(0, 2, 4) if exchange else Shard(0, 1, 2)  # TP's rank of two owns two heads
        fused.heaviest(IndexerShape(), shard, requests, query_len, torch.bfloat16, exchange, gather, False, fused.ONE_LAUNCH)


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        ranks(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
