"""Whole steps through the kernels themselves, in Triton's interpreter."""

import pytest
import torch
from mixed import BATCHES, M3, check_mixed, mixed, step_of
from problems import assert_ids

from m3cp import operators
from m3cp.decode import TPDecode
from m3cp.shapes import IndexerShape
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


@pytest.mark.parametrize("form", ["one_launch", "two_launch"])
def test_the_fused_forms_decode_in_a_mixed_step_and_through_its_operator(form):
    shape = IndexerShape(heads=1, topk=2)
    batch = mixed(shape, [128 * 4, 0], [(3, 128 * 4 - 1)])
    decode = TPDecode(shape, Shard(0, 1, 1), form=form, **batch.problem.bounds())
    step = step_of(batch, Shard(0, 1, 1), decode)
    assert_ids(operators.bind(step)(*batch.tensors, decode_requests=2), batch.expect, form)
    operators.forget(step)
