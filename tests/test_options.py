"""CP is opt-in, and what was asked for either runs or is an error that names the setting; reused selections."""

import pytest
import torch
from problems import assert_ids, build, oracle

from m3cp.decode import CPDecode, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.indexer import CPOptions, Indexer
from m3cp.pagetable import PageTable
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

ON = dict(enabled=True, world=4)
SHAPE = IndexerShape(topk=4)


def test_cp_is_off_by_default_and_then_nothing_is_looked_at():
    options = CPOptions()
    assert not options.enabled and options.path == "tp"
    made = CPOptions(max_context=1024, max_requests=2, world=3, two_batch_overlap=True).build(Shard(0, 1, 4), "cpu")
    assert isinstance(made, TPDecode) and made.path == "tp"


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(enabled=1), "enabled=1: must be True or False"),
        (dict(world=1), "world=1: must be 2 to 1024 with CP enabled"),
        (dict(world=3), "world=3 with heads=4: the world size must divide the heads or be a multiple"),
        (dict(world=6), "world=6 with heads=4"),
        (dict(world=True), "world=True"),
        (dict(cache_dtype="fp8_e5m2"), "cache_dtype='fp8_e5m2': must be one of auto, bf16.*fp8_e4m3.*no CP kernel"),
        (dict(cache_dtype="uint8"), "cache_dtype='uint8'"),
        (dict(cache_dtype="int8"), "cache_dtype='int8'"),
        (dict(cache_dtype=torch.bfloat16), "cache_dtype=torch.bfloat16"),
        (dict(page_size=64), "page_size=64: must be the kernels' block size, 128"),
        (dict(page_size=1), "page_size=1"),
        (
            dict(fused_sparse_decode=True),
            "fused_sparse_decode=True: must be False with CP enabled: that kernel computes",
        ),
        (dict(decode_context_parallel=2), "decode_context_parallel=2: must be 1 with CP enabled: .* owns that axis"),
        (dict(attention_data_parallel=4), "attention_data_parallel=4: must be 1"),
        (dict(attention_data_parallel=True), "attention_data_parallel=True"),
        (dict(two_batch_overlap=True), "two_batch_overlap=True: must be False"),
        (dict(dense_sparse_decode=True), "dense_sparse_decode=True: must be False"),
        (dict(device="mps"), "device='mps': must be one of cuda, cpu"),
        (dict(query_dtype="fp8"), "query_dtype='fp8': must be one of .*no kernel takes fp8 queries"),
        (dict(query_dtype="fp16"), "query_dtype='fp16': must be fp16 with an fp16 cache"),
        (dict(query_dtype="bf16", cache_dtype="fp16"), "query_dtype='bf16'"),
        (
            dict(max_context=2**31),
            "max_context=2147483648: must be 1 to 2147483647 tokens: what lengths and keys can hold",
        ),
        (dict(max_context=0), "max_context=0"),
        (dict(max_requests=0), "max_requests=0"),
        (dict(max_query_len=9), "max_query_len=9: must be 1 to 8"),
        (dict(queries="shared"), "queries='shared': must be one of gathered, replicated"),
        (dict(exchange="nccl"), "exchange='nccl': must be one of collective, symmetric"),
        (dict(form="fused"), "form='fused': must be one of staged, two_launch, one_launch"),
        (dict(form="one_launch"), "exchange='collective': must be 'symmetric' for form 'one_launch'"),
        (dict(score_type="mean"), "score_type='mean': must be 'max'"),
        (dict(index_values=True), "index_values=True: must be False"),
        (dict(reuse_every=0), "reuse_every=0: must be 1 to 64 layers"),
    ],
)
def test_every_conflict_is_an_error_at_startup(change, named):
    with pytest.raises(ValueError, match=named):
        CPOptions(**(ON | change))


@pytest.mark.parametrize("world", [2, 4, 8, 16])
def test_worlds_that_fit(world):
    assert CPOptions(enabled=True, world=world).path == "cp"


@pytest.mark.parametrize(
    "given, arch, dtype",
    [
        ("auto", None, torch.bfloat16),
        ("bfloat16", None, torch.bfloat16),
        ("fp16", None, torch.float16),
        ("fp8", None, torch.float8_e4m3fn),
        ("fp8_e4m3", "gfx950", torch.float8_e4m3fn),
        ("fp8", "gfx942:sramecc+:xnack-", torch.float8_e4m3fnuz),
        ("fp8_e4m3", "gfx942", torch.float8_e4m3fnuz),
        ("fp8_e4m3fn", "gfx942", torch.float8_e4m3fn),
        ("fp8_e4m3fnuz", None, torch.float8_e4m3fnuz),
    ],
)
def test_names_of_cache_types(given, arch, dtype):
    assert CPOptions(**ON, cache_dtype=given, arch=arch).torch_cache_dtype == dtype


def everyone(out, payload):
    """A gather of four ranks that all have the same payload."""
    out.view(4, -1).copy_(payload.expand(4, -1))


def test_options_build_what_they_say():
    options = CPOptions(
        **ON, shape=SHAPE, device="cpu", max_requests=2, max_query_len=2, max_context=1024, queries="replicated"
    )
    made = options.build(Shard(1, 4, 4), "cpu", exchange=CollectiveExchange(gather=everyone))
    assert (
        isinstance(made, CPDecode)
        and made.path == "cp"
        and made.queries == "replicated"
        and made.cache_dtype == torch.bfloat16
    )
    with pytest.raises(ValueError, match="shard.world=2: must be the options' world=4"):
        options.build(Shard(1, 2, 4), "cpu")
    with pytest.raises(ValueError, match="device='cpu': must be of the type that the options state, 'cuda'"):
        CPOptions(**ON).build(Shard(0, 4, 4), "cpu")
    with pytest.raises(RuntimeError, match="SymmetricExchange needs an initialised process group"):
        CPOptions(**ON, device="cpu", exchange="symmetric", max_context=1024).build(Shard(0, 4, 4), "cpu")
    assert SymmetricExchange.name == "symmetric"


def indexer(reuse_every: int, enabled: bool = True):
    options = CPOptions(
        enabled=enabled,
        world=4,
        shape=SHAPE,
        device="cpu",
        max_requests=2,
        max_query_len=2,
        max_context=768,
        queries="replicated",
        reuse_every=reuse_every,
    )
    exchange = CollectiveExchange(gather=everyone)
    shard = Shard(0, 4, 4) if enabled else Shard(0, 1, 4)
    return Indexer(options, options.build(shard, "cpu", exchange=exchange)), exchange


PROBLEMS = [build(SHAPE, [128 * 6, 300], 2, max_context=768, seed=seed) for seed in range(6)]


def test_each_layer_selects_for_itself_by_default():
    made, exchange = indexer(1)
    for layer, problem in enumerate(PROBLEMS):
        made(layer, *problem.tensors, query_len=2)
        assert made.path == "cp" and exchange.calls == layer + 1


def test_reusing_layers_neither_score_nor_exchange():
    made, exchange = indexer(3)
    for layer, problem in enumerate(PROBLEMS):
        ids = made(layer, *problem.tensors, query_len=2)
        if layer % 3 == 0:
            kept = ids.clone()
        assert torch.equal(ids, kept) and made.path == ("cp" if layer % 3 == 0 else "reused")
        assert exchange.calls == 1 + layer // 3 and int(made.decode._state[0]) == 1 + layer // 3
        out = torch.full_like(ids, -9)
        if layer % 3:
            assert made(layer, *problem.tensors, query_len=2, out=out) is out and torch.equal(out, kept)


def test_reuse_belongs_to_cp():
    made, _ = indexer(3, enabled=False)
    for layer, problem in enumerate(PROBLEMS):
        assert_ids(made(layer, *problem.tensors, query_len=2), oracle(problem))
        assert made.path == "tp"


def test_reusing_layers_need_a_selection_of_the_same_rows():
    made, _ = indexer(2)
    with pytest.raises(ValueError, match="layer=1 of 4 rows reuses layer 0's selection, which has none"):
        made(1, *PROBLEMS[0].tensors, query_len=2)
    made(0, *PROBLEMS[0].tensors, query_len=2)
    q, cache, table, lens = PROBLEMS[0].tensors
    with pytest.raises(ValueError, match="layer=1 of 2 rows reuses layer 0's selection, which has 4"):
        made(1, q[:2], cache, table[:1], lens[:1], query_len=2)
    with pytest.raises(ValueError, match="layer=-1"):
        made(-1, *PROBLEMS[0].tensors, query_len=2)
    with pytest.raises(ValueError, match="layer=3 of 4 rows reuses layer 2's selection, which has none"):
        made(3, *PROBLEMS[0].tensors, query_len=2)  # layer 0's is not layer 2's
    with pytest.raises(ValueError, match="q of shape"):
        made(2, q[:3], cache, table, lens, query_len=2)
    with pytest.raises(ValueError, match="layer=3 of 4 rows reuses layer 2's selection, which has none"):
        made(3, *PROBLEMS[0].tensors, query_len=2)  # nor is one that was refused


def test_page_tables_are_reused_with_the_selection():
    made, _ = indexer(2)
    first, second = (PageTable.empty(SHAPE, local_heads=1, tokens=4, page_size=64) for _ in range(2))
    made(0, *PROBLEMS[0].tensors, query_len=2, pages=first)
    made(1, *PROBLEMS[1].tensors, query_len=2, pages=second)
    assert torch.equal(first.pages, second.pages) and torch.equal(first.attended, second.attended)
    made(2, *PROBLEMS[0].tensors, query_len=2)
    with pytest.raises(ValueError, match="pages of layer=3 .page_size=64, .*, which reuses layer 2: that layer wrote no page table"):
        made(3, *PROBLEMS[1].tensors, query_len=2, pages=second)


@pytest.mark.parametrize("given", [dict(page_size=16), dict(page_size=64, stride=4)], ids=str)
def test_a_page_table_of_another_layout_is_not_reused(given):
    """Pages of another size or stride are other pages, even where the table has the same shape."""
    made, _ = indexer(2)
    first, other = (PageTable.empty(SHAPE, local_heads=1, tokens=4, **layout) for layout in (dict(page_size=64), given))
    made(0, *PROBLEMS[0].tensors, query_len=2, pages=first)
    with pytest.raises(ValueError, match="pages of layer=1 .*which reuses layer 0: that layer wrote one of page_size=64, stride=None, shape"):
        made(1, *PROBLEMS[0].tensors, query_len=2, pages=other)
    same = PageTable.empty(SHAPE, local_heads=1, tokens=4, page_size=64, stride=2)  # what None means
    made(1, *PROBLEMS[0].tensors, query_len=2, pages=same)
    assert torch.equal(same.pages, first.pages)


def test_a_profiling_step_says_so_through_the_indexer():
    made, exchange = indexer(1)
    ids = made(0, PROBLEMS[0].q, None, *PROBLEMS[0].tensors[2:], query_len=2)
    assert made.path == "profiling" and bool((ids == -1).all()) and exchange.calls == 0
