"""Needles on the eager backend; and each broken rule (mutant) loses one."""

import pytest
import torch
from needles import DEPTHS, check
from test_life import MUTANTS, mutant


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("query_len", [1, 4])
def test_every_needle_is_chosen_and_its_value_retrieved(world, query_len):
    for depth in DEPTHS:
        check(world=world, query_len=query_len, depth=depth)
    check(world=world, query_len=query_len, depth=0.5, local=0)
    check(world=world, query_len=query_len, depth=0.25, infinite=True)
    if world <= 4:
        check(world=world, query_len=query_len, depth=0.5, path="tp")


def test_needles_in_fp8():
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        check(world=2, query_len=4, depth=0.5, dtype=dtype)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_loses_a_needle(name, monkeypatch, tmp_path):
    mutant(monkeypatch, tmp_path, *MUTANTS[name])
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        for world in (2, 8):
            for local, infinite in ((1, False), (0, False), (1, True)):
                check(world=world, query_len=4, depth=0.5, local=local, infinite=infinite, attend=False)
