"""Self-tagged words: hand-over between programs and between GPUs without atomics, fences or flags.

A word is one aligned int64: 32 bits of payload under a 32-bit generation tag. Eight bytes are written and read as one
piece, so a reader that sees its own tag also sees the payload that was stored with it: the tag replaces release and
acquire, in this GPU's memory and in a peer's alike (the idea of NCCL's LL protocol). A reader polls the data itself.

Both vendors need different spellings of a load that does not stop at a stale line, and ignore the other's:
NVIDIA takes `volatile` (and drops `.cv`), CDNA takes `.cv`; stores write through with `.wt`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A polled tensor needs an element a thread (four warps: 128 on NVIDIA, 256 on wave64). A smaller one is replicated
# over threads; each copy loads for itself, the reduction looks at one, and later code may use another, stale one.
POLLED = tl.constexpr(256)


@triton.jit
def tagged(payload, tag):
    """Words of 32-bit payloads (int32 or uint32) under an int32 tag."""
    return (tag.to(tl.int64) << 32) | payload.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def put(p_word, word, mask):
    tl.store(p_word, word, mask=mask, cache_modifier=".wt")


@triton.jit
def await_words(p_word, mask, tag, spin_limit):
    """Poll until every word in `mask` carries `tag`, or `spin_limit` polls went by.

    Returns (payloads as int32, missing mask, how many are missing). The tensor must have at least POLLED elements.
    """
    word = tl.load(p_word, mask=mask, other=0, volatile=True, cache_modifier=".cv")
    missing = mask & ((word >> 32).to(tl.int32) != tag)
    left = tl.sum(missing.to(tl.int32))
    spins = 0
    while (left > 0) & (spins < spin_limit):
        word = tl.load(p_word, mask=mask, other=0, volatile=True, cache_modifier=".cv")
        missing = mask & ((word >> 32).to(tl.int32) != tag)
        left = tl.sum(missing.to(tl.int32))
        spins += 1
    return word.to(tl.int32), missing, left
