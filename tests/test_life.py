"""Failures from life, on the eager backend; and broken rules (mutants) that the table of cases must catch."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import CASES, check
from life import CASES_FROM_LIFE, k13_problem, select

from m3cp import decode, reference


@pytest.mark.parametrize("case", CASES_FROM_LIFE, ids=lambda f: f.__name__)
def test_life(case):
    case()


def mutant(monkeypatch, tmp_path, *changes: tuple[str, str]) -> None:
    """Put a copy of `m3cp.reference` with some text replaced in the place of the eager backend."""
    text = Path(reference.__file__).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"the mutant's text occurs {text.count(old)} times: {old!r}"
        text = text.replace(old, new)
    path = tmp_path / "mutated_reference.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("mutated_reference", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutated_reference", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(decode, "reference", module)


LONGEST_ROW = (
    "    row_n = n.reshape(requests, query_len)",
    "    row_n = n.reshape(requests, query_len).amax(1, keepdim=True).expand(-1, query_len)",
)
MUTANTS = {
    "queries not shared": [("distinct = q[:: max(1, ranks * local_heads // shape.heads)]", "distinct = q[:1].expand(shape.heads // local_heads, -1, -1, -1)")],
    "replicas counted as heads": [("distinct = q[:: max(1, ranks * local_heads // shape.heads)]", "distinct = q[: shape.heads // local_heads]")],
    "k / P per shard": [("best = key.topk(min(shape.topk, width)", "best = key.topk(min(max(1, shape.topk // shard.world), width)")],
    "owner = b // P": [
        ("block = torch.arange(shard.local_blocks(width), device=seq_lens.device) * shard.world + shard.rank", "block = torch.arange(shard.rank * shard.world, min(width, (shard.rank + 1) * shard.world))"),
    ],
    "contiguous shards in the keys": [("* shard.world + shard.rank)[None, None]", "+ shard.rank * width)[None, None]")],
    "heads merged together": [("    mine = gathered[:, owned.start : owned.stop]", "    mine = gathered.permute(0, 2, 1, 3).flatten(2)[:, None].expand(-1, len(owned), -1, -1)")],
    "another rank's heads": [("    mine = gathered[:, owned.start : owned.stop]", "    mine = gathered[:, : len(owned)]")],
    "mask by the group's longest row": [LONGEST_ROW],
    "block validity by the group's longest row": [
        ("    n = row_lengths(seq_lens, query_len, max_context)\n    visible", "    n = row_lengths(seq_lens, query_len, max_context).view(-1, query_len).amax(1).repeat_interleave(query_len)\n    visible"),
    ],
    "NaN wins": [("seen[:, :, span] & ~torch.isnan(dots)", "seen[:, :, span]")],
    "bad pages are read": [("~torch.isnan(dots) & valid[:, None, None]", "~torch.isnan(dots)")],
    "forced by a large number": [
        ("key = keys.encode(keys.order_code(scores), block, visible, shape.init_blocks, shape.local_blocks)",
         "key = keys.encode(keys.order_code(torch.where((block < shape.init_blocks) | (block >= visible - shape.local_blocks), float('inf'), scores)), block, visible, 0, 0)"),
    ],  # fmt: skip
    "lengths beyond the bound are cut": [("return torch.where((n > 0) & (n <= max_context), n, 0)", "return n.clamp(0, max_context)")],
    "tokens behind the row are scored": [("(b[:, None] * shape.block_size + position)[:, :, None] < n_column[:, None, :]", "(b[:, None] * shape.block_size + 0 * position)[:, :, None] < n_column[:, None, :]")],
    "ids not sorted": [(".sort(2).values\n    ids = torch.where(ids == keys.MAX_BLOCKS", ".flip(2)\n    ids = torch.where(ids == keys.MAX_BLOCKS")],
}  # fmt: skip


def caught(path: str = "cp") -> Iterator[str]:
    """Names of the cases that fail, one by one."""
    for case in CASES:
        try:
            for world in case.worlds:
                check(case, path=path, world=world)
        except (AssertionError, RuntimeError, IndexError):
            yield case.name


def test_the_code_as_it_is_fails_no_case():
    assert list(caught()) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail_the_table_of_cases(name, monkeypatch, tmp_path):
    mutant(monkeypatch, tmp_path, *MUTANTS[name])
    assert any(caught()), f"no case notices: {name}"


def test_where_the_mask_of_the_longest_row_can_be_seen(monkeypatch, tmp_path):
    """K13: the mutant fails with nothing forced, and passes with two local blocks: a test with them would prove nothing."""
    right = {forced: select(k13_problem(*forced), 4) for forced in ((0, 0), (1, 2))}
    mutant(monkeypatch, tmp_path, LONGEST_ROW)
    assert not torch.equal(select(k13_problem(0, 0), 4), right[0, 0])
    assert torch.equal(select(k13_problem(1, 2), 4), right[1, 2])
