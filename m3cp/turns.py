"""The kernel of `pingpong`: two GPUs pass tagged words in turns, in the spelling that all kernels use."""

from __future__ import annotations

import triton
import triton.language as tl

from m3cp.kernels.fused import peer
from m3cp.kernels.words import POLLED, await_words, put, tagged


@triton.jit(do_not_specialize=["words_ptr", "peers_ptr", "state_ptr", "first", "count", "other", "leads", "spin_limit"])
def turns_kernel(words_ptr, peers_ptr, state_ptr, first, count, other, leads, spin_limit):
    """`count` turns after turn `first` with the rank numbered `other`; who leads sends first. One program, four warps.

    Turns alternate, so a word is overwritten only after its reader has answered. After an expired wait the rest of the
    turns neither send nor wait, and `state_ptr` holds 1.
    """
    o = tl.arange(0, POLLED)
    everyone = o >= 0
    failed = 0
    for turn in range(1, count + 1):
        tag = (first + turn).to(tl.int32)
        if leads > 0:
            put(peer(peers_ptr, other) + o, tagged(o, tag), everyone & (failed == 0))
        _, _, left = await_words(words_ptr + o, everyone & (failed == 0), tag, spin_limit)
        failed = tl.where(left > 0, 1, failed)
        if leads == 0:
            put(peer(peers_ptr, other) + o, tagged(o, tag), everyone & (failed == 0))
    if failed > 0:
        tl.store(state_ptr, 1)
