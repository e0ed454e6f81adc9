"""The table of decode cases that the eager backend, the interpreted kernels and the compiled kernels all must pass."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from problems import Problem, assert_ids, build, oracle, rows

from m3cp.shapes import IndexerShape, Point
from m3cp.shard import Shard
from m3cp.testing import select_virtual
from m3cp.traffic import read_range

WORLDS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Case:
    """A problem by name; `seed` makes the tables of different cases different."""

    name: str
    shape: IndexerShape
    lengths: tuple[int, ...]
    query_len: int = 1
    kind: str = "exact"
    bad_pages: int = 0
    page_slots: int = 2
    max_context: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @functools.cached_property
    def problem(self) -> Problem:
        return build(
            self.shape, self.lengths, self.query_len, kind=self.kind, bad_pages=self.bad_pages, page_slots=self.page_slots,
            max_context=self.max_context, seed=self.seed,
        )  # fmt: skip

    @functools.cached_property
    def expect(self) -> torch.Tensor:
        return oracle(self.problem)

    @property
    def worlds(self) -> tuple[int, ...]:
        return tuple(w for w in WORLDS if self.shape.heads % w == 0 or w % self.shape.heads == 0)


def _shape(topk: int, heads: int = 4, init: int = 0, local: int = 1, block: int = 128, dim: int = 128) -> IndexerShape:
    return IndexerShape(heads=heads, head_dim=dim, block_size=block, topk=topk, init_blocks=init, local_blocks=local)


CASES = [
    Case("m3", _shape(16), (128 * 21 - 5, 128 * 3)),
    Case("published table's forced counts", _shape(16, init=1, local=2), (128 * 22,)),
    Case("one head", _shape(4, heads=1), (128 * 9, 128 * 6 + 1), 2),
    Case("eight heads fill the tile twice", _shape(3, heads=8), (128 * 7 - 1,), 3),
    Case("short lengths", _shape(2), (0, 1, 127, 128, 129, 256, 257)),
    Case("short lengths of draft tokens", _shape(2), (0, 1, 2, 3, 4, 130), 4),
    Case("eight query tokens", _shape(3, heads=1), (128 * 5 + 4, 5), 8),
    Case("nothing forced", _shape(5, local=0), (128 * 11 + 7,), 2),
    Case("more local than fit", _shape(3, local=7), (128 * 9,)),
    Case("more init than fit", _shape(3, init=7), (128 * 9,)),
    Case("init and local both overflow", _shape(5, init=4, local=4), (128 * 12, 128 * 6)),
    Case("forced covers all", _shape(4, init=200, local=300), (128 * 9, 128 * 2)),
    Case("init overlaps local", _shape(6, init=5, local=5), (128 * 8, 128 * 7)),
    Case("topk 1", _shape(1, local=0), (128 * 6, 100)),
    Case("topk 1, forced", _shape(1, local=1), (128 * 6,)),
    Case("topk 7", _shape(7), (128 * 13,), 2),
    Case("topk 12", _shape(12), (128 * 17, 128 * 12, 128 * 13)),
    Case("topk 33", _shape(33, heads=1), (128 * 40 + 1,)),
    Case("topk 64", _shape(64, heads=1), (128 * 68,)),
    Case("ties", _shape(6, heads=2, local=0), (128 * 30,), kind="ties"),
    Case("ties across the forced edge", _shape(5, heads=2, init=1), (128 * 16 + 3,), 2, kind="ties"),
    Case("NaN and infinities among the keys", _shape(6, local=0), (128 * 14, 128 * 9 + 60), kind="special"),
    Case("bad pages", _shape(4, local=0), (128 * 9, 128 * 6), bad_pages=3),
    Case("more bad pages than good", _shape(5, heads=2, local=1), (128 * 9,), bad_pages=6),
    Case("blocks of 64", _shape(4, block=64), (64 * 9 + 3, 64), 2),
    Case("head dim 64", _shape(4, dim=64), (128 * 7,)),
    Case("blocks and head dim 64", _shape(4, block=64, dim=64), (64 * 11 - 1,)),
    Case("dense pages", _shape(4), (128 * 7,), page_slots=1),
    Case("a layer's slice of a wide page", _shape(4), (128 * 7,), page_slots=5),
    Case("bound far beyond the lengths", _shape(4), (128 * 7, 5), max_context=128 * 90),
    Case("longer than the bound", _shape(4), (128 * 7, 128 * 9 + 1, 3), max_context=128 * 9),
    Case("only the last draft rows are too long", _shape(3, heads=2), (128 * 8 + 2,), 4, max_context=128 * 8),
    Case("no request", _shape(4), (), max_context=128 * 6),
    Case("padding only", _shape(4), (0, 0, 0), 2, max_context=128 * 6),
]
CASES = [Case(**{**vars(case), "seed": i}) for i, case in enumerate(CASES)]
SPREAD = {
    case.name: case.worlds[i % len(case.worlds)] for i, case in enumerate(CASES)
}  # one world a case, all worlds in turn


def check(case: Case, *, path: str, world: int, device="cpu", queries: str = "gathered") -> None:
    """Ids of every rank's real kernels equal the oracle's."""
    problem = case.problem if str(device) == "cpu" else case.problem.to(device)
    got = select_virtual(
        *problem.tensors,
        shape=case.shape,
        world=world,
        query_len=case.query_len,
        path=path,
        queries=queries,
        max_context=problem.max_context,
    )
    assert_ids(got, case.expect, f"{case.name}, {path} of {world}")


def scored_blocks(problem: Problem, shard: Shard) -> torch.Tensor:
    """`[tokens, local blocks]` bool: which scores of a shard a kernel must write; it may write no others."""
    shape = problem.shape
    width = problem.block_table.shape[1]
    blocks = torch.tensor([shard.to_global(i) for i in range(shard.local_blocks(width))], dtype=torch.int64)
    out = torch.zeros(problem.seq_lens.numel(), blocks.numel(), dtype=torch.bool)
    seen = rows(problem)
    for r in range(out.shape[0]):
        longest = max(seen[r * problem.query_len : (r + 1) * problem.query_len])
        if longest:
            first, last = read_range(
                Point(longest, 1, shape=shape, form="staged", max_context=problem.max_context), longest
            )
            out[r] = (blocks >= first) & (blocks < last)
    return out.repeat_interleave(problem.query_len, 0)
