"""Whole steps through the kernels themselves, in Triton's interpreter."""

import pytest
import torch
from mixed import BATCHES, M3, check_mixed, mixed, step_of
from problems import assert_ids

from m3cp.decode import TPDecode
from m3cp.shard import Shard


@pytest.mark.parametrize("name", BATCHES)
def test_every_row_is_chosen_as_the_oracle_chooses(name):
    check_mixed(BATCHES[name], 1 if len(name) % 2 else BATCHES[name].problem.shape.heads, scores_bytes=1 << 15)


def test_a_prefilled_token_chooses_as_when_decoded():
    batch = mixed(M3, [], [(8, 128 * 6 + 3)], kind="ulp", seed=3)
    step = step_of(batch, Shard(0, 1, 4))
    tp = TPDecode(M3, Shard(0, 1, 4), **batch.problem.bounds(max_query_len=8))
    ids = step(*batch.tensors, decode_requests=0)
    assert_ids(tp(*batch.problem.tensors, query_len=8), ids, "decoded")
    scores = tp._scores[:8, :, 3:5]
    assert len(scores.unique()) > 2 and torch.equal(step.prefill._scores[:8, :, 3:5], scores)


def test_lengths_beyond_the_bound_are_found():
    batch = BATCHES["chunks longer than the bound"]
    step = step_of(batch, Shard(0, 1, 4))
    step(*batch.tensors, decode_requests=1)
    with pytest.raises(RuntimeError, match="a prefill's sequence length exceeds max_context=768, found by rank 0"):
        step.check()
