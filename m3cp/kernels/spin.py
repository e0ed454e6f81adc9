"""A wait of a length that stands on the device, so that captured launches can be late by another time at each replay."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_ptr", "turn_ptr", "columns", "column"])
def spin_kernel(table_ptr, turn_ptr, columns, column):
    left = tl.load(table_ptr + tl.load(turn_ptr) * columns + column)
    while left > 0:
        # A load that no compiler may drop; what it reads is never above the table's values, so the sum is not either.
        here = tl.load(turn_ptr, volatile=True, cache_modifier=".cv")
        left -= 1 + (here < 0).to(tl.int32)


def spin(table: torch.Tensor, turn: torch.Tensor, *, column: int) -> None:
    """Wait for `table[turn, column]` loads.

    Args:
        table: `[turns, columns]` int32, contiguous; 0 waits for nothing.
        turn: `[1]` int32 on the device: the row of the table.
    """
    spin_kernel[(1,)](table, turn, table.shape[1], column, num_warps=1)


@functools.cache
def spins_a_us(device: torch.device) -> float:
    """Loads a microsecond of `spin` on a GPU, measured once."""
    table = torch.tensor([[1], [20_000]], dtype=torch.int32, device=device)
    turns = [torch.tensor([i], dtype=torch.int32, device=device) for i in range(2)]
    spin(table, turns[0], column=0)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    spin(table, turns[1], column=0)
    end.record()
    end.synchronize()
    return 20_000 / (start.elapsed_time(end) * 1e3)
