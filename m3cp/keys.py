"""Candidate keys: one int64 whose integer order is the selection order (`spec.md`, section 3).

    bits 60..61  class: 3 init, 2 local, 1 scored; 0 is nothing at all
    bits 28..59  order code of the unscaled fp32 score (0 for a forced block: forcing is a rank, not a number)
    bits  0..27  2**28 - 1 - block, so that the lower block id is the larger key

Keys are never negative, all distinct within a row, and `EMPTY` (0) sorts last: merging candidates is sorting keys.
The torch form and the jit form of each function stand side by side; both give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

EMPTY = 0
CLASS_SCORED, CLASS_LOCAL, CLASS_INIT = 1, 2, 3
ID_BITS = 28
MAX_BLOCKS = 1 << ID_BITS  # ids 0 .. 2**28 - 1; a context of 2**31 - 1 tokens has 2**25 blocks of 64

_ID_MASK = tl.constexpr(MAX_BLOCKS - 1)
_CODE_SHIFT = tl.constexpr(ID_BITS)
_CLASS_SHIFT = tl.constexpr(ID_BITS + 32)


def order_code(score: torch.Tensor) -> torch.Tensor:
    """fp32 scores (no NaN) as int64 codes in [0, 2**32) of the same order; -0.0 and +0.0 get one code."""
    bits = torch.where(score == 0, 0.0, score).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return torch.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit
def order_code_jit(score):
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    # A negative number's bits are complemented, a positive one's get the sign bit: then unsigned order is float order.
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


def encode(code: torch.Tensor, block: torch.Tensor, visible: torch.Tensor, init: int, local: int) -> torch.Tensor:
    """Keys of blocks with order codes `code` (int64) in rows that see `visible` blocks; EMPTY where not visible.

    All arguments broadcast; `block` and `visible` are int64. A block that is both init and local counts as init.
    """
    forced = torch.where(block < init, CLASS_INIT, CLASS_LOCAL)
    is_forced = (block < init) | (block >= visible - local)
    rank = torch.where(is_forced, forced << 32, (CLASS_SCORED << 32) | code)
    return torch.where((block >= 0) & (block < visible), (rank << ID_BITS) | (MAX_BLOCKS - 1 - block), EMPTY)


@triton.jit
def encode_jit(code, block, visible, init, local):
    block = block.to(tl.int64)
    is_init = block < init
    is_forced = is_init | (block >= visible - local)
    one = tl.full(block.shape, 1, tl.int64)
    scored = (one << _CLASS_SHIFT) | (code.to(tl.int64) << _CODE_SHIFT)
    forced = tl.where(is_init, one * 3, one * 2) << _CLASS_SHIFT
    key = tl.where(is_forced, forced, scored) | (_ID_MASK - block)
    return tl.where((block >= 0) & (block < visible), key, 0)


def block_of(key: torch.Tensor) -> torch.Tensor:
    """Block ids (int64) of keys; -1 for EMPTY."""
    return torch.where(key == EMPTY, -1, MAX_BLOCKS - 1 - (key & (MAX_BLOCKS - 1)))


@triton.jit
def block_of_jit(key):
    return tl.where(key == 0, -1, _ID_MASK - (key & _ID_MASK)).to(tl.int32)


@triton.jit
def forced_code_jit(code, block, visible, init, local):
    """32-bit codes for choosing within one row: forced blocks above every score, 0 for what is not visible.

    `code` is `order_code_jit` of the scored blocks (0x007FFFFF for -inf to 0xFF800000 for +inf). With lanes in block
    order, ties go to the lower lane. No class, no id: half the bits of a key to sort.
    """
    forced = tl.where(block < init, 0xFFFFFFFF, 0xFFFFFFFE).to(tl.uint32)
    code = tl.where((block < init) | (block >= visible - local), forced, code.to(tl.uint32, bitcast=True))
    return tl.where((block >= 0) & (block < visible), code, 0)
