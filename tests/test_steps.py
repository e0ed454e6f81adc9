"""What a step does besides choosing: profiling runs, page tables, one launch in flight."""

import pytest
import torch
from cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import assert_ids, assert_pages, build, expected_pages, oracle

from m3cp import exchange as exchange_module
from m3cp.decode import CPDecode, CPLocal, TPDecode
from m3cp.exchange import CollectiveExchange, OneInFlight
from m3cp.pagetable import PageTable
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

SHAPE = IndexerShape(topk=4)
PROBLEM = build(SHAPE, [128 * 6 + 40, 300], 2)


def cp(**changes):
    return CPDecode(SHAPE, Shard(0, 1, 4), exchange=CollectiveExchange(), **PROBLEM.bounds(**changes))


def tp(**changes):
    return TPDecode(SHAPE, Shard(0, 1, 4), **PROBLEM.bounds(**changes))


@pytest.mark.parametrize("make, path", [(cp, "cp"), (tp, "tp")])
@pytest.mark.parametrize(
    "cache", [None, torch.empty(0, 128, 128, dtype=torch.bfloat16), torch.tensor([])], ids=["none", "no pages", "empty"]
)
def test_a_profiling_run_chooses_nothing_and_says_so(make, path, cache):
    made = make()
    q, _, *rest = PROBLEM.tensors
    ids = made(q, PROBLEM.cache, *rest, query_len=2)
    assert made.path == path and bool((ids >= 0).any())
    pages = PageTable.empty(SHAPE, local_heads=4, tokens=4, page_size=16)
    calls = made.exchange.calls if make is cp else 0
    ids = made(q, cache, *rest, query_len=2, pages=pages)
    assert made.path == "profiling" and ids.shape == (4, 4, 4) and bool((ids == -1).all())
    assert bool((pages.pages == -1).all()) and bool((pages.attended == 0).all())
    assert calls == (made.exchange.calls if make is cp else 0), "a profiling run exchanges nothing"
    assert_ids(made(q, PROBLEM.cache, *rest, query_len=2), oracle(PROBLEM))
    assert made.path == path


@pytest.mark.parametrize("make", [cp, tp])
def test_a_profiling_run_still_checks_its_arguments(make):
    with pytest.raises(ValueError, match="q of shape"):
        make()(PROBLEM.q[:3], None, *PROBLEM.tensors[2:], query_len=2)
    with pytest.raises(ValueError, match="buffers hold max_requests=2"):
        make()(PROBLEM.q, None, PROBLEM.block_table.repeat(2, 1), PROBLEM.seq_lens.repeat(2), query_len=1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_page_tables_of_every_case(case):
    problem = case.problem
    for page_size in (16, 64):
        for factor in (1, 2):
            stride = factor * case.shape.block_size // page_size
            assert_pages(
                problem, case.expect, page_size=page_size, stride=stride, world=2 if case.shape.heads > 1 else 1
            )


lengths = st.lists(st.integers(0, 64 * 9), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(1, 3), st.sampled_from([1, 3, 8]), st.sampled_from([16, 32, 64]), st.integers(0, 50))
def test_page_tables_of_any_problem(lengths, query_len, topk, page_size, seed):
    shape = IndexerShape(heads=2, head_dim=64, block_size=64, topk=topk, local_blocks=seed % 3, init_blocks=seed % 2)
    problem = build(shape, lengths, query_len, seed=seed, bad_pages=seed % 4)
    assert_pages(problem, oracle(problem), page_size=page_size, stride=64 // page_size + seed % 5, world=1 + seed % 2)


def test_the_tail_block_comes_last_with_the_pages_that_the_row_reaches():
    """One row of 2 blocks and 40 tokens in pages of 16: two whole blocks, then three pages of the third."""
    problem = build(SHAPE, [128 * 2 + 40])
    problem.block_table[0, :3] = torch.tensor([2, 0, 1])
    pages = PageTable.empty(SHAPE, local_heads=4, tokens=1, page_size=16, stride=16)
    TPDecode(SHAPE, Shard(0, 1, 4), **problem.bounds())(*problem.tensors, pages=pages)
    expect = [*range(32, 40), *range(0, 8), *range(16, 19)]
    assert pages.pages[0, 0].tolist() == expect + [-1] * (32 - len(expect))
    assert pages.attended.tolist() == [[2 * 128 + 40]] * 4
    assert_pages(problem, oracle(problem), page_size=16, stride=16)


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(page_size=8), "page_size=8: must be one of 16, 32, 64, 128"),
        (dict(page_size=48), "page_size=48"),
        (dict(stride=7), "pages.stride=7: must be None or 8 to"),
        (dict(stride=2**31), "pages.stride=2147483648"),
        (dict(pages=torch.empty(4, 4, 31, dtype=torch.int32)), r"pages.pages of shape \(4, 4, 31\)"),
        (dict(pages=torch.empty(4, 4, 32)), "pages.pages .*torch.float32"),
        (dict(attended=torch.empty(4, 3, dtype=torch.int32)), r"pages.attended of shape \(4, 3\)"),
        (dict(attended=torch.empty(4, 8, dtype=torch.int32)[:, ::2]), "pages.attended .*must be contiguous"),
    ],
)
def test_page_tables_that_do_not_fit_are_refused(changes, named):
    given = vars(PageTable.empty(SHAPE, local_heads=4, tokens=4, page_size=16)) | changes
    with pytest.raises(ValueError, match=named):
        tp()(*PROBLEM.tensors, query_len=2, pages=PageTable(**given))


def test_pages_larger_than_a_block_are_refused():
    with pytest.raises(ValueError, match="page_size=128: must be one of .* that divides block_size=64"):
        PageTable.empty(IndexerShape(block_size=64), local_heads=1, tokens=1, page_size=128)


class FakeDevice:
    """Streams and events as a GPU would have them, with the test deciding what has finished."""

    def __init__(self):
        self.stream, self.finished, self.capturing = 1, False, False

    def current_stream(self, device):
        stream = type(
            "Stream", (), {"cuda_stream": self.stream, "__eq__": lambda a, b: a.cuda_stream == b.cuda_stream}
        )()
        return stream

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self):
        return self

    def record(self, stream):
        self.finished = False

    def query(self):
        return self.finished


def test_a_second_stream_while_the_first_still_runs(monkeypatch):
    fake, guard, device = FakeDevice(), OneInFlight(), torch.device("cuda")
    monkeypatch.setattr(exchange_module.torch, "cuda", fake)

    def call(stream):
        fake.stream = stream
        guard.begin(device)
        guard.end(device)

    call(1)
    call(1)  # the same stream orders itself
    with pytest.raises(RuntimeError, match="on stream 0x2 while the last one, on stream 0x1, still runs"):
        call(2)
    fake.finished = True
    call(2)
    fake.capturing = True
    call(3)  # a capture runs nothing


def test_every_cp_call_is_guarded(monkeypatch):
    made, seen = cp(), []
    monkeypatch.setattr(OneInFlight, "begin", lambda self, device: seen.append("begin"))
    monkeypatch.setattr(OneInFlight, "end", lambda self, device: seen.append("end"))
    made(*PROBLEM.tensors, query_len=2)
    assert seen == ["begin", "end"]


def test_expected_pages_by_hand():
    """The oracle of page tables itself, on a row worked out on paper."""
    problem = build(SHAPE, [128 + 17])
    problem.block_table[0, :2] = torch.tensor([1, 0])
    pages, attended = expected_pages(problem, oracle(problem), page_size=64, stride=2)
    assert pages[0, 0].tolist() == [2, 3, 0] + [-1] * 5 and attended[0, 0] == 145
    assert CPLocal(SHAPE, Shard(0, 1, 4), **problem.bounds()).path == "cp_local"
