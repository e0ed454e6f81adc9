"""Transports of context-parallel decode. The only user of torch.distributed.

A transport moves bits: payloads travel as int32 views, never as numeric casts, so that any collective (gloo, NCCL,
RCCL, an engine's own gather of 32-bit words) carries bf16 queries and int64 keys alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from m3cp.shard import Shard


class CollectiveExchange:
    """All-gathers over a process group (NCCL, RCCL, gloo), or over a callable.

    Args:
        group: a torch.distributed group; None is the default group. It must have as many ranks as the shard's world.
        gather: an engine's own all-gather in the group's place, called as `gather(out, payload)` with int32 tensors,
            `out` flat `[ranks * n]` and `payload` flat `[n]`; rank r's words must land at `out[r * n : (r + 1) * n]`.

    Raises:
        ValueError: both a group and a callable were given.
    """

    name = "collective"

    def __init__(self, group=None, *, gather: Callable[[torch.Tensor, torch.Tensor], None] | None = None):
        if group is not None and gather is not None:
            raise ValueError("group and gather: give one of them, not both")
        self.group = group
        self._gather = gather
        self._alone = False
        self.calls = 0  # collectives issued from the host, for tests and for rows

    def attach(self, shard: Shard, device: torch.device) -> None:
        """Check that the group fits the shard.

        Raises:
            ValueError: `shard.world` differs from the group's size, or the rank differs.
            RuntimeError: no process group exists and the shard's world is larger than 1.
        """
        if self._gather is not None:
            return
        if not dist.is_initialized():
            if shard.world > 1:
                raise RuntimeError(f"shard.world={shard.world}: CollectiveExchange needs an initialised process group of that size")
            self._alone = True
            return
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if size != shard.world:
            raise ValueError(f"shard.world={shard.world}: the process group has {size} ranks; they must be equal")
        if rank != shard.rank:
            raise ValueError(f"shard.rank={shard.rank}: this process is rank {rank} of its group; they must be equal")

    def gather(self, out: torch.Tensor, payload: torch.Tensor) -> None:
        """Gather `payload` of every rank into `out`, `[ranks, *payload.shape]`, both contiguous. Bit-exact."""
        self.calls += 1
        flat_out, flat = out.view(-1).view(torch.int32), payload.view(-1).view(torch.int32)
        if self._alone:
            flat_out.copy_(flat)
        elif self._gather is not None:
            self._gather(flat_out, flat)
        elif hasattr(dist, "all_gather_single"):  # its name since torch 2.13
            dist.all_gather_single(flat_out, flat, group=self.group)
        else:
            dist.all_gather_into_tensor(flat_out, flat, group=self.group)
