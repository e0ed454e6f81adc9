"""The table of decode cases that the eager backend, the interpreted kernels and the compiled kernels all must pass."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from problems import Problem, assert_ids, build, fp64_scores, oracle, rows

from m3cp.decode import CPLocal, TPDecode
from m3cp.kernels import score as score_op
from m3cp.shapes import IndexerShape, Point
from m3cp.shard import Shard
from m3cp.testing import select_virtual
from m3cp.traffic import read_range

WORLDS = (1, 2, 4, 8, 16)
UNWRITTEN = 1e30


@dataclass(frozen=True)
class Case:
    """A problem by name; `seed` makes the tables of different cases different."""

    name: str
    shape: IndexerShape
    lengths: tuple[int, ...]
    query_len: int = 1
    kind: str = "exact"
    dtype: torch.dtype = torch.bfloat16
    bad_pages: int = 0
    page_slots: int = 2
    max_context: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @functools.cached_property
    def problem(self) -> Problem:
        return build(
            self.shape, self.lengths, self.query_len, kind=self.kind, dtype=self.dtype, bad_pages=self.bad_pages, page_slots=self.page_slots,
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
    Case("infinities against forced blocks", _shape(4, local=2), (128 * 14, 128 * 9), kind="infinite"),
    Case(
        "infinities against forced blocks on both sides",
        _shape(5, heads=2, init=1, local=1),
        (128 * 14,),
        kind="infinite",
    ),
    Case("a late winner", _shape(3, heads=2, local=0), (128 * 8 + 2, 128 * 5 + 77), 4, kind="late"),
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
    Case("fp16", _shape(4), (128 * 7 - 1, 128 * 5), 2, dtype=torch.float16),
    Case("fp16, infinities and NaN", _shape(5, heads=2, local=0), (128 * 9,), kind="special", dtype=torch.float16),
    Case("e4m3fn", _shape(4), (128 * 7 - 1, 128 * 5), 2, dtype=torch.float8_e4m3fn),
    Case("e4m3fn with NaN", _shape(5, heads=2, local=0), (128 * 9,), kind="special", dtype=torch.float8_e4m3fn),
    Case("e4m3fnuz", _shape(4, heads=8), (128 * 6 + 9,), dtype=torch.float8_e4m3fnuz, page_slots=3),
    Case(
        "e4m3fnuz with NaN and bad pages",
        _shape(5, heads=2, local=0),
        (128 * 9,),
        kind="special",
        dtype=torch.float8_e4m3fnuz,
        bad_pages=2,
    ),
    Case("ties in e4m3fn", _shape(6, heads=2, local=0), (128 * 30,), kind="ties", dtype=torch.float8_e4m3fn),
    Case("every e4m3fn code", _shape(5, local=0), (128 * 9,), 4, kind="codes", dtype=torch.float8_e4m3fn),
    Case("every e4m3fnuz code", _shape(5, local=0), (128 * 9,), 4, kind="codes", dtype=torch.float8_e4m3fnuz),
    Case("every fp16 code", _shape(5, local=0, dim=64), (128 * 9,), 4, kind="codes", dtype=torch.float16),
    Case("bf16's mantissas", _shape(5, local=0), (128 * 9,), 4, kind="codes"),
    Case("no request", _shape(4), (), max_context=128 * 6),
    Case("padding only", _shape(4), (0, 0, 0), 2, max_context=128 * 6),
]
CASES = [Case(**{**vars(case), "seed": i}) for i, case in enumerate(CASES)]
SPREAD = {
    case.name: case.worlds[i % len(case.worlds)] for i, case in enumerate(CASES)
}  # one world a case, all worlds in turn


def check(case: Case, *, path: str, world: int, device="cpu", queries: str = "gathered", form: str = "staged") -> None:
    """Ids of every rank's real kernels equal the oracle's."""
    problem = case.problem if str(device) == "cpu" else case.problem.to(device)
    got = select_virtual(
        *problem.tensors,
        shape=case.shape,
        world=world,
        query_len=case.query_len,
        path=path,
        queries=queries,
        form=form,
        max_context=problem.max_context,
    )
    assert_ids(got, case.expect, f"{case.name}, {form} {path} of {world}")


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


def kernel_scores(
    problem: Problem,
    shard: Shard,
    *,
    programs: int = 3,
    q=None,
    max_context: int | None = None,
    heads: int | None = None,
) -> torch.Tensor:
    """The score kernel's `[tokens, heads, local blocks]` of a shard, UNWRITTEN where it stored nothing.

    Args:
        q: queries in another layout or of fewer `heads` than the problem's.
    """
    shape, device = problem.shape, problem.q.device
    bound = max_context or problem.max_context
    width = shard.local_blocks(shape.blocks(bound))
    out = torch.full((problem.tokens, heads or shape.heads, max(1, width)), UNWRITTEN, device=device)
    score_op.score(
        problem.q if q is None else q, *problem.tensors[1:], shape=shape, shard=shard, query_len=problem.query_len, max_context=bound, out=out,
        state=torch.zeros(4, dtype=torch.int64, device=device), programs=programs,
    )  # fmt: skip
    return out[:, :, :width]


def check_same_bits(problem: Problem, worlds=(2, 4, 8), grids=(1, 7)) -> torch.Tensor:
    """Scores have the same bits in TP and CP, on every rank, for any grid; and CP chooses by them. Returns the scores."""
    shape = problem.shape
    whole = kernel_scores(problem, Shard(0, 1, shape.heads))
    for programs in grids:
        assert torch.equal(kernel_scores(problem, Shard(0, 1, shape.heads), programs=programs), whole), (
            f"{programs} programs"
        )
    for world in worlds:
        for rank in {0, world // 2, world - 1}:
            part = kernel_scores(problem, Shard(rank, world, world))
            assert torch.equal(part, whole[:, :, rank::world]), f"CP, rank {rank} of {world}"
    for head in {0, shape.heads - 1}:
        alone = kernel_scores(problem, Shard(0, 1, shape.heads), q=problem.q[:, head : head + 1].contiguous(), heads=1)
        assert torch.equal(alone, whole[:, head : head + 1]), f"TP, head {head}"
    expect = oracle(problem.to("cpu"), whole.cpu().numpy())
    for path in ("tp", "cp"):
        world = min(worlds[-1], shape.heads)
        assert_ids(
            select_virtual(*problem.tensors, shape=shape, world=world, query_len=problem.query_len, path=path),
            expect,
            f"{path} of {world}",
        )
    return whole


def check_written(problem: Problem, world: int) -> None:
    """A shard's kernel writes the scores that decide, exactly right on exact data, and no others."""
    for rank in {0, world - 1}:
        shard = Shard(rank, world, world)
        got = kernel_scores(problem, shard).cpu()
        needed = scored_blocks(problem, shard)[:, None, :].expand_as(got)
        assert torch.equal(got != UNWRITTEN, needed), f"rank {rank} of {world}"
        expect = torch.from_numpy(fp64_scores(problem.to("cpu"))[:, :, rank::world]).float()
        assert torch.equal(got[needed], expect[needed]), f"rank {rank} of {world}"


def check_grid_bound(problem: Problem) -> None:
    """Buffers sized for a bound eight times larger: the same scores."""
    bound = problem.max_context
    small, large = (
        kernel_scores(problem, Shard(1, 2, problem.shape.heads), max_context=b) for b in (bound // 8, bound)
    )
    assert torch.equal(small, large[:, :, : small.shape[2]]) and (large[:, :, small.shape[2] :] == UNWRITTEN).all()


def check_length_error(device="cpu", form: str = "staged") -> None:
    """A length beyond the bound: those rows are -1, the others right, and `check` raises once and for all."""
    shape = IndexerShape(topk=2)
    problem = build(shape, [128 * 5, 128 * 6 + 1, 7], max_context=128 * 6).to(device)
    fine = build(shape, [128 * 5, 128 * 6, 7], max_context=128 * 6).to(device)
    made = [TPDecode(shape, Shard(0, 1, 4), form=form, **fine.bounds())]
    if form == "staged":
        made.append(CPLocal(shape, Shard(0, 1, 4), **fine.bounds()))
    for decode in made:
        decode(*fine.tensors)
        decode.check()
        ids = decode(*problem.tensors)
        assert_ids(ids, oracle(problem.to("cpu")))
        assert bool((ids[:, 1] == -1).all())
        decode(*fine.tensors)
        with pytest.raises(RuntimeError, match="a sequence length exceeds max_context, found by rank 0 .launch 2 of 3"):
            decode.check()


def check_nothing_kept(device="cpu", form: str = "staged") -> None:
    """One object, batches of changing size: what one call leaves never shows in the next."""
    shape = IndexerShape(topk=4)
    long, short = (
        build(shape, [128 * 12, 128 * 11], 2, seed=1),
        build(shape, [128 * 2], 1, seed=2, max_context=128 * 12),
    )
    decode = TPDecode(shape, Shard(0, 1, 4), form=form, **long.to(device).bounds())
    for problem in (long, short, long):
        assert_ids(decode(*problem.to(device).tensors, query_len=problem.query_len), oracle(problem), form)
