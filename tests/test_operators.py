"""Decode and whole steps as operators: a compiled model around them is one graph, on one rank and on ranks."""

import pytest
import torch
import torch.distributed as dist
from mixed import BATCHES, step_of
from problems import POISON, assert_ids, build, oracle
from ranks import Ranks

from m3cp import operators
from m3cp.decode import CPDecode, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

SHAPE = IndexerShape(topk=4)
BACKENDS = ["eager", "aot_eager", "aot_eager_decomp_partition"]  # the last takes apart what inductor does, without a C++ compiler


class Layer(torch.nn.Module):
    """A projection, the operator, and something that uses the choice."""

    def __init__(self, select, heads: int):
        super().__init__()
        self.select, self.heads = select, heads
        self.register_buffer("weight", torch.eye(heads * 128, dtype=torch.bfloat16))

    def forward(self, hidden, *rest):
        ids = self.select((hidden @ self.weight).view(-1, self.heads, 128), *rest)
        return ids, (ids >= 0).sum(-1)


def compiled(layer, backend):
    torch._dynamo.reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return torch.compile(layer, fullgraph=True, backend=counting, dynamic=False), graphs


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_decode_layer_is_one_graph(backend):
    problem = build(SHAPE, [128 * 9, 128 * 6 + 5], 2, seed=3)
    tp = TPDecode(SHAPE, Shard(0, 1, 4), **problem.bounds())
    layer, graphs = compiled(Layer(operators.bind(tp), 4), backend)
    for lengths in ((128 * 9, 128 * 6 + 5), (128 * 8, 3)):
        problem.seq_lens.copy_(torch.tensor(lengths))
        ids, chosen = layer(problem.q.flatten(1), *problem.tensors[1:], 2)
        assert_ids(ids, oracle(problem), backend)
        assert torch.equal(chosen, (ids >= 0).sum(-1))
    assert len(graphs) == 1 and sum("m3cp.decode" in str(n.target) for n in graphs[0].graph.nodes) == 1
    operators.forget(tp)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_whole_step_is_one_graph(backend):
    batch = BATCHES["mixed"]
    step = step_of(batch, Shard(0, 1, 4))
    layer, graphs = compiled(Layer(operators.bind(step), 4), backend)
    q, *rest = batch.tensors
    ids, _ = layer(q.flatten(1), *rest, batch.decode_requests, 2)
    assert_ids(ids, batch.expect, backend)
    assert len(graphs) == 1 and sum("m3cp.whole_step" in str(n.target) for n in graphs[0].graph.nodes) == 1
    operators.forget(step)


def test_fresh_memory_is_poisoned_and_traced_code_is_left_alone():
    """A fill of fresh memory through a view would become part of the graph, and inductor refuses that."""
    layer, _ = compiled(lambda x: torch.empty(3, dtype=torch.int32).copy_(x) + x.new_empty(3, dtype=torch.int32).copy_(x), BACKENDS[-1])
    assert layer(torch.arange(3)).tolist() == [0, 2, 4]
    assert torch.empty(5, dtype=torch.uint8).tolist() == [POISON] * 5


def compiled_on_a_rank(rank, kind, forgotten):
    problem = build(SHAPE, [128 * 9, 128 * 6 + 5], 2, seed=3)
    shard = Shard(rank, dist.get_world_size(), 4)
    exchange = CollectiveExchange() if kind == "collective" else SymmetricExchange()
    cp = CPDecode(SHAPE, shard, exchange=exchange, **problem.bounds())
    select = operators.bind(cp)
    if forgotten:  # as in a process that loads a graph: the operator builds its object from the numbers and the name
        operators.forget(cp)
    layer, graphs = compiled(Layer(select, shard.local_heads), "aot_eager")
    q = problem.heads(shard.owned_heads).flatten(1)
    ids = [layer(q, *problem.tensors[1:], 2)[0].clone() for _ in range(2)]
    used = next(iter(operators._objects.values()))
    calls, same = used.exchange.calls, used is cp
    operators.forget(used)
    return ids, len(graphs), calls, same


def test_cp_is_what_a_compiled_model_runs():
    """No branch traces TP in place of CP: every call of the graph exchanges."""
    ranks = Ranks(2)
    expect = oracle(build(SHAPE, [128 * 9, 128 * 6 + 5], 2, seed=3))
    for kind in ("collective", "symmetric"):
        for forgotten in (False, True):
            for rank, (ids, graphs, calls, same) in enumerate(ranks.run(compiled_on_a_rank, kind, forgotten)):
                owned = Shard(rank, 2, 4).owned_heads
                for got in ids:
                    assert_ids(got, expect[owned.start : owned.stop], f"{kind}, rank {rank}")
                assert (graphs, calls, same) == (1, 4, not forgotten)
    ranks.close()


def test_operators_pass_torchs_own_checks():
    """Schema, fake implementation, and functionalised mutation."""
    problem = build(SHAPE, [128 * 6, 5], seed=3)
    tp = TPDecode(SHAPE, Shard(0, 1, 4), **problem.bounds())
    operators.bind(tp)
    out = torch.zeros(4, 2, 4, dtype=torch.int32)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    given = (*problem.tensors, out, 1, operators._settings(tp), "")
    torch.library.opcheck(torch.ops.m3cp.decode.default, given, test_utils=checks)
    operators.forget(tp)
    batch = BATCHES["mixed"]
    step = step_of(batch, Shard(0, 1, 4))
    operators.bind(step)
    out = torch.zeros(*batch.expect.shape, dtype=torch.int32)
    given = (*batch.tensors, out, 4, 2, operators._settings(step), "")
    torch.library.opcheck(torch.ops.m3cp.whole_step.default, given, test_utils=checks)
    operators.forget(step)


def test_what_a_graph_cannot_name_is_refused():
    problem = build(SHAPE, [128 * 6], seed=3)
    tp = TPDecode(SHAPE, Shard(0, 1, 4), **problem.bounds())
    operators.bind(tp)
    operators.bind(tp)
    with pytest.raises(ValueError, match="an object with the same settings was bound before"):
        operators.bind(TPDecode(SHAPE, Shard(0, 1, 4), **problem.bounds()))
    operators.forget(tp)


def callable_exchange(rank):
    problem = build(SHAPE, [128 * 6], seed=3)
    shard = Shard(rank, dist.get_world_size(), 4)
    exchange = CollectiveExchange(gather=lambda out, payload: None)
    try:
        operators.bind(CPDecode(SHAPE, shard, exchange=exchange, **problem.bounds()))
    except ValueError as error:
        return str(error)


def test_an_exchange_over_a_callable_is_refused():
    ranks = Ranks(2)
    assert all("must be over a process group, whose name a graph can hold" in said for said in ranks.run(callable_exchange))
    ranks.close()
