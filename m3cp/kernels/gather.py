"""All-gather of a small payload through peers' memory, in one launch: each rank pushes tagged words, then awaits.

The `symmetric` transport of the staged form, and of an engine's kernels in place of NCCL. Wins below some hundred
kilobytes, where a collective's fixed cost dominates; a word carries 4 bytes of payload in 8.

Every launch makes every rank await words of every peer, so two slots by parity suffice (see `fused`). A program waits
only for the programs of its own number on other ranks, which push before they wait: no co-residency is needed as
long as a rank's programs start in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3cp.kernels.fused import WAIT_ERROR, peer, report_wait
from m3cp.kernels.words import await_words, put, tagged

CHUNK, WARPS, PROGRAMS = 512, 4, 64


@triton.jit(do_not_specialize=["payload_ptr", "out_ptr", "words_ptr", "peers_ptr", "counters_ptr", "state_ptr", "n", "rank", "world", "capacity", "spin_limit"])
def gather_kernel(
    payload_ptr, out_ptr, words_ptr, peers_ptr, counters_ptr, state_ptr, n, rank, world, capacity, spin_limit, CHUNK: tl.constexpr
):  # fmt: skip
    i_program = tl.program_id(0)
    programs = tl.num_programs(0)
    launch = tl.load(counters_ptr + i_program) + 1
    tag = launch.to(tl.int32)
    slot = (launch & 1) * world * capacity
    n = tl.where(tl.load(state_ptr + 1) == WAIT_ERROR, 0, n)  # after an expired wait nothing is sent and none awaited
    for start in range(i_program * CHUNK, n, programs * CHUNK):
        o = start + tl.arange(0, CHUNK)
        word = tagged(tl.load(payload_ptr + o, mask=o < n, other=0), tag)
        for i_rank in range(world):
            put(peer(peers_ptr, i_rank) + slot + rank * capacity + o, word, o < n)
    for start in range(i_program * CHUNK, n, programs * CHUNK):
        o = start + tl.arange(0, CHUNK)
        for i_rank in range(world):
            payload, _, left = await_words(words_ptr + slot + i_rank * capacity + o, o < n, tag, spin_limit)
            tl.store(out_ptr + tl.cast(i_rank, tl.int64) * n + o, payload, mask=o < n)
            if left > 0:
                report_wait(state_ptr, launch, i_rank)
    tl.store(counters_ptr + i_program, launch)


def gather(
    out: torch.Tensor,
    payload: torch.Tensor,
    *,
    words: torch.Tensor,
    peers: torch.Tensor,
    counters: torch.Tensor,
    state: torch.Tensor,
    rank: int,
    world: int,
    capacity: int,
    spin_limit: int,
    programs: int,
) -> None:
    """Gather flat int32 `payload` `[n]` of every rank into flat int32 `out` `[world * n]`.

    Args:
        words: this rank's symmetric buffer, two slots of `world * capacity` int64.
        peers: `[world]` int64 addresses of every rank's buffer.
        counters: `[>= programs]` int64; state: `[4]` int64 with the error word.
    """
    gather_kernel[(programs,)](
        payload, out, words, peers, counters, state, payload.numel(), rank, world, capacity, spin_limit, CHUNK=CHUNK, num_warps=WARPS
    )
