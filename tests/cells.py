"""What the one- and two-launch forms must do as the staged form does, a small problem each; every check covers the page table too."""

from __future__ import annotations

import functools

import torch
from problems import Problem, assert_pages, build, oracle

from m3cp.kernels.fused import SEGMENT
from m3cp.shapes import IndexerShape

BLOCK = 64
FORMS = ("one_launch", "two_launch")


def shape_of(**changes) -> IndexerShape:
    return IndexerShape(**(dict(heads=2, head_dim=64, block_size=BLOCK, topk=3) | changes))


# name: (changes of the shape, lengths, query_len, bound in tokens or None for the longest length)
GIVEN: dict[str, tuple[dict, list[int], int, int | None]] = {
    "padding rows of a bucket": ({}, [BLOCK * 5 + 9, 0, BLOCK * 3 + 1, 0], 2, None),
    "a bound of 1M tokens": ({}, [7, BLOCK * 6 - 5, 0, BLOCK * 5], 1, 1 << 20),
    "a batch of 33, compiled as up to 256 are": (dict(heads=1, topk=1, local_blocks=0), [(BLOCK * 2, 40, 0, BLOCK)[i % 7 % 4] for i in range(33)], 1, None),
    "a batch of 256": (dict(heads=1, topk=1, local_blocks=0), [(BLOCK * 2, 40, 0, BLOCK)[i % 37 % 4] for i in range(256)], 1, None),
    "a context of 1M tokens": (dict(topk=16), [1 << 20, 7, (1 << 20) - BLOCK * 5000 - 3], 1, 1 << 20),
    "topk 64": (dict(topk=64), [BLOCK * (SEGMENT + 5) - 3, BLOCK * 64], 1, None),
}
SLOW = ("a batch of 256",)  # a minute interpreted
INTERPRETED = [name for name in GIVEN if name not in (*SLOW, "a context of 1M tokens")]


@functools.cache
def problem_of(name: str) -> Problem:
    """The problem by name; a padding row holds queries that are no numbers and, like a recycled row, a table of pages that exist."""
    changes, lengths, query_len, bound = GIVEN[name]
    problem = build(shape_of(**changes), lengths, query_len, max_context=bound, bad_pages=1, seed=len(name))
    for row, length in enumerate(lengths):
        if not length:
            problem.q[row * query_len : (row + 1) * query_len] = float("nan")
            problem.block_table[row] = torch.arange(problem.block_table.shape[1]) % problem.cache.shape[0]
    return problem


@functools.cache
def ids_of(name: str) -> torch.Tensor:
    """The right choice of `problem_of`."""
    return oracle(problem_of(name))


def threshold_of(problem: Problem, above: bool) -> int:
    """A threshold that the problem's sum of blocks is just above, or just not."""
    return int((-(-problem.seq_lens.long() // BLOCK)).sum()) - above


def check(name: str, form: str, *, world: int = 1, page_size: int = 16, device="cpu", **cp) -> None:
    """Ids and page tables of all virtual ranks, as `assert_pages`, which takes `cp`."""
    problem = problem_of(name)
    assert_pages(problem, ids_of(name), page_size=page_size, stride=2 * BLOCK // page_size, world=world, form=form, device=device, **cp)
