"""Whole steps and sparse attention on a GPU: what the interpreter's tests check, compiled."""

import attention_cases
import pytest
import torch
from graphs import capture
from mixed import BATCHES, check_mixed, step_of
from problems import assert_ids, build, oracle

from m3cp import operators
from m3cp.decode import TPDecode
from m3cp.shapes import IndexerShape
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


@pytest.mark.parametrize("form", ["staged", "one_launch"])
def test_a_captured_graph_replays_the_operator_of_a_compiled_layer(form):
    shape = IndexerShape()
    problem = build(shape, [128 * 40, 128 * 20 + 5], 2, seed=3)
    here = problem.to("cuda")
    tp = TPDecode(shape, Shard(0, 1, 4), max_requests=2, max_query_len=2, max_context=problem.max_context, device="cuda", form=form)
    tp.warmup()
    select = operators.bind(tp)
    layer = torch.compile(lambda *given: select(*given, 2) + 0, fullgraph=True)
    layer(*here.tensors)
    found: list[torch.Tensor] = []
    graph = capture(lambda: found.append(layer(*here.tensors)))
    for lengths in ((128 * 40, 128 * 20 + 5), (128 * 31, 3), (0, 128 * 19)):
        for lens in (problem.seq_lens, here.seq_lens):
            lens.copy_(torch.tensor(lengths))
        found[0].fill_(-7)
        graph.replay()
        assert_ids(found[0].cpu(), oracle(problem), f"{form} {lengths}")
    tp.check()
    operators.forget(tp)


def test_a_captured_graph_replays_the_operator_of_a_whole_step():
    batch = BATCHES["mixed"].to("cuda")
    step = step_of(batch, Shard(0, 1, 4))
    step.decode.warmup()
    select = operators.bind(step)
    given = (*batch.tensors, batch.decode_requests, batch.problem.query_len)
    select(*given)
    found: list[torch.Tensor] = []
    graph = capture(lambda: found.append(select(*given)))
    for _ in range(2):
        found[0].fill_(-7)
        graph.replay()
        assert_ids(found[0].cpu(), BATCHES["mixed"].expect, "mixed")
    step.check()
    operators.forget(step)
