"""Who owns what: heads and blocks of a rank, as pure arithmetic of (rank, world).

Heads shard like KV heads, in contiguous runs; blocks are dealt round-robin (`block = local * world + rank`), so
that every rank's share of any context differs by at most one block (`spec.md`, sections 2 and 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from m3cp.shapes import require


@dataclass(frozen=True)
class Shard:
    """The share of rank `rank` among `world` ranks of an indexer with `heads` heads.

    With more ranks than heads, `replicas` ranks own the same head; blocks are still dealt to all ranks.

    Raises:
        ValueError: a rank outside the world, or a world that neither divides the heads nor is a multiple of them.
    """

    rank: int
    world: int
    heads: int

    def __post_init__(self) -> None:
        require("heads", self.heads, isinstance(self.heads, int) and self.heads >= 1, "a positive integer")
        require("world", self.world, isinstance(self.world, int) and self.world >= 1, "a positive integer")
        if self.heads % self.world and self.world % self.heads:
            raise ValueError(f"world={self.world} with heads={self.heads}: the world size must divide the heads or be a multiple of them")
        require("rank", self.rank, isinstance(self.rank, int) and 0 <= self.rank < self.world, f"from 0 to {self.world - 1} (world={self.world})")

    @property
    def replicas(self) -> int:
        """Ranks that own each head: 1 while the world is not larger than the number of heads."""
        return max(1, self.world // self.heads)

    @property
    def local_heads(self) -> int:
        """Heads that a rank owns."""
        return max(1, self.heads // self.world)

    @property
    def owned_heads(self) -> range:
        """Global ids of the heads that this rank owns."""
        first = self.rank // self.replicas if self.replicas > 1 else self.rank * self.local_heads
        return range(first, first + self.local_heads)

    def owns(self, block: int) -> bool:
        """Whether this rank's CP shard holds logical block `block`."""
        return block % self.world == self.rank

    def to_global(self, local: int) -> int:
        """Logical block id of the shard's block number `local`."""
        return local * self.world + self.rank

    def local_blocks(self, n: int) -> int:
        """How many of the logical blocks below `n` this rank's shard holds."""
        return max(0, -(-(n - self.rank) // self.world))
