"""Sparse attention's kernels in Triton's interpreter, against dense attention under the same mask."""

import pytest
from attention_cases import CASES, check, check_refusals


@pytest.mark.parametrize("name", CASES)
def test_sparse_attention_is_dense_attention_under_the_mask(name):
    check(name)


def test_splits_change_nothing_but_the_last_bits():
    whole = check("one rank of four, all of topk", splits=1).float()
    for splits in (3, 16, None):
        assert (check("one rank of four, all of topk", splits=splits).float() - whole).abs().max() <= 2**-6
    check("topk 1", dim=64, block=64)


def test_what_does_not_fit_is_refused():
    check_refusals()
