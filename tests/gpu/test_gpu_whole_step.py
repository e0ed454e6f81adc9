"""Whole steps and sparse attention on a GPU: what the interpreter's tests check, compiled."""

import attention_cases
import pytest
import torch
from mixed import BATCHES, check_mixed, step_of

from m3cp import operators
from m3cp.shard import Shard

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", BATCHES)
def test_every_row_is_chosen_as_the_oracle_chooses(name):
    for world in {1, BATCHES[name].problem.shape.heads}:
        check_mixed(BATCHES[name], world, device="cuda")
    check_mixed(BATCHES[name], 1, device="cuda", scores_bytes=1 << 14)


@pytest.mark.parametrize("name", attention_cases.CASES)
def test_sparse_attention_is_dense_attention_under_the_mask(name):
    attention_cases.check(name, device="cuda")
    attention_cases.check(name, device="cuda", splits=None)


@pytest.mark.parametrize("name", ["mixed", "prefill alone"])
def test_a_compiled_step_with_inductor(name):
    batch = BATCHES[name].to("cuda")
    step = step_of(batch, Shard(0, 1, 4))
    select = operators.bind(step)
    model = torch.compile(lambda *given: select(*given) + 0, fullgraph=True)
    ids = model(*batch.tensors, batch.decode_requests, batch.problem.query_len)
    assert torch.equal(ids.cpu(), BATCHES[name].expect)
    operators.forget(step)
