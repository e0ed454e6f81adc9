"""What stands around the indexer in a sparse layer, made ready to be timed (`shapes.LAYER_ARMS`).

- attention: sparse attention of one rank's heads over the chosen blocks, at MiniMax-M3's group of query heads.
- projections: one rank's share of the products before and behind attention, two plain ones at M3's hidden size; with
  queries="replicated" the one before also holds the other ranks' index heads, as CP with replicated queries needs.
- mixed_tp, mixed_cp: a whole step: the decode rows by TP or CP, and a prefill chunk behind them. Runs eager, as in engines,
  and is timed from an idle device on, so that the host's launches count.
- toy_tp, toy_cp: one decode step of a toy model (`m3cp.toy`): microseconds per token of a request.

`prepare` returns the fields of a `worker.Arm`; each arm's `verify` checks what its calls last wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from m3cp import inputs, reference, timing, traffic
from m3cp.attention import sparse_attention
from m3cp.decode import CPDecode, TPDecode
from m3cp.indexer import WholeStep
from m3cp.kernels import tile
from m3cp.prefill import Prefill
from m3cp.shapes import TOY_LAYERS, Point
from m3cp.shard import Shard
from m3cp.toy import Size, ToyM3

CHUNK_TOKENS = {"cuda": 512, "cpu": 64}  # prefill rows of a mixed step; they end where the longest request ends
# The toy's widths: M3's hidden size and group on a GPU; `inner` stands in for the experts.
TOY = {
    "cuda": dict(hidden=traffic.HIDDEN, group=traffic.GROUP, inner=3072),
    "cpu": dict(hidden=128, group=2, inner=128),
}
FEW_CALLS = 2  # of a rotation, where one call reads so much that the next finds nothing of it in a cache
ROUNDING = 2**-7  # of the largest value: bf16 results whose sums were ordered otherwise


def prepare(
    point: Point, problem: inputs.Problem, plan: timing.CachePlan, ids: dict[int, torch.Tensor], *, rank: int, device: torch.device,
    llc_bytes: int, make: Callable[[Point], TPDecode | CPDecode],
) -> dict[str, Any]:  # fmt: skip
    """An arm of `LAYER_ARMS`: calls, path, stages, verify, launches, collectives, extra and footprint of a `worker.Arm`.

    Args:
        problem, plan: of the Point's group.
        ids: the reference's choice of all heads for some of the problem's caches, `[heads, tokens, topk]`.
        rank: of this process.
        llc_bytes: last-level cache, for weights that must be cold.
        make: the decode object of a Point of arm "tp" or "cp".

    Raises:
        ValueError: a choice that differs from the reference's, or a pool that is too small.
    """
    shard = Shard(rank % point.world, point.world, point.shape.heads)
    if point.arm == "attention":
        return _attention(point, problem, plan, ids, make(point.replace(arm="tp", form="staged")))
    if point.arm == "projections":
        return _projections(point, shard, device, llc_bytes)
    arm = point.arm.split("_")[1]
    decode = make(point.replace(arm=arm))
    decode.warmup()
    return _mixed(point, problem, plan, ids, decode) if point.arm.startswith("mixed_") else _toy(point, decode)


def pool_pages(point: Point) -> int:
    """Pages of the pool that one cache of the Point's arm takes: attention's is made of those that its chosen blocks need."""
    heads = Shard(0, point.world, point.shape.heads).local_heads
    chosen = traffic.attention_bytes(point) // point.shape.key_bytes(point.dtype) * heads if point.arm == "attention" else 0
    return max(inputs.pages_of_a_cache(point), chosen)


def _values(rows: int, heads: int, point: Point, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`[rows, heads, D]` of the problems' own values, the same on every rank of one kind of device."""
    shape = point.shape
    pages = -(-rows * heads // shape.block_size)
    return inputs.make_pool(shape, dtype, device, pages=pages, seed=seed).view(-1, shape.head_dim)[: rows * heads].view(rows, heads, -1)


def _counted(checks: list[tuple[int, torch.Tensor]], against: str) -> dict[str, Any]:
    """A row's check of (rows, those that are wrong)."""
    wrong = sum(int(bad.sum()) for _, bad in checks)
    return {"passed": wrong == 0, "rows": sum(rows for rows, _ in checks), "mismatches": wrong, "against": against}


def _beyond_rounding(found: torch.Tensor, expect: torch.Tensor) -> torch.Tensor:
    """[rows]: whether a row has an element (or NaN) further than rounding from what it should be."""
    error = (found.float() - expect).abs().flatten(1)
    return ~(error.amax(1) <= ROUNDING * expect.abs().max())


def _attention(point: Point, problem: inputs.Problem, plan: timing.CachePlan, ids: dict[int, torch.Tensor], tp: TPDecode) -> dict[str, Any]:
    """The pool's bytes stand in for K and V, a page of which is `2 * local heads` of its pages: only chosen blocks have one."""
    shape, shard, device = point.shape, tp.shard, problem.cache.device
    heads, owned, tokens = shard.local_heads, slice(shard.owned_heads.start, shard.owned_heads.stop), problem.seq_lens.shape[0]
    tp.warmup()
    local_q = problem.local_q(shard)
    chosen = [tp(local_q, problem.cache, table, problem.seq_lens).clone() for table in problem.block_tables]
    wrong = sum(int((chosen[c] != found[owned]).any(2).sum()) for c, found in ids.items())
    if wrong:
        raise ValueError(f"wrong ids before attention: {wrong} rows differ from the reference")
    pages = problem.cache.shape[0] // (2 * heads)
    kv = problem.cache[: pages * 2 * heads].view(pages, 2, shape.block_size, heads, shape.head_dim)
    k, v = kv[:, 0], kv[:, 1]
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(point.seed + 3)).to(torch.int32).to(device)
    width, used, tables = problem.block_table.shape[1], 0, []
    request = torch.arange(tokens, device=device)[None, :, None]
    for found in chosen:
        entries = (request * width + found)[found >= 0].unique()
        if entries.numel() > pages:
            raise ValueError(f"a pool of {pages} pages of K and V: one call chooses {entries.numel()} blocks")
        table = torch.full((tokens, width), -1, dtype=torch.int32, device=device)
        table.view(-1)[entries] = order[(used + torch.arange(entries.numel(), device=device)) % pages]
        tables.append(table)
        used += entries.numel()
    group = traffic.GROUP
    q = _values(tokens, shape.heads * group, point, device, point.seed + 1, problem.q.dtype)
    q = q[:, owned.start * group : owned.stop * group].contiguous()
    outs: list[torch.Tensor] = [q] * plan.calls

    def call(number: int) -> None:
        c = number % plan.caches
        outs[number] = sparse_attention(q, k, v, tables[c], problem.seq_lens, chosen[c])

    checked = [min(ids), max(ids)]
    expect = {c: dense(q, k, v, tables[c], problem.seq_lens, chosen[c]) for c in checked}

    def verify() -> dict[str, Any]:
        checks = []
        for number, out in enumerate(outs):
            if number % plan.caches in expect:
                checks.append((tokens, _beyond_rounding(out, expect[number % plan.caches])))
            out.fill_(float("nan"))
        return _counted(checks, "torch's attention in fp32")

    kernels = device.type == "cuda" or tile.INTERPRETED
    return dict(
        calls=[lambda n=n: call(n) for n in range(plan.calls)], path="attention", stages=["attention"], verify=verify,
        launches=2 if kernels else None, collectives=0, extra={"query_heads": heads * group},
        footprint_bytes=plan.caches * traffic.distinct_bytes_read(point) * min(used, pages) // used,
    )  # fmt: skip


def dense(q, k_cache, v_cache, block_table, seq_lens, ids) -> torch.Tensor:
    """Torch's own attention in fp32 over each row's chosen tokens, a row and KV head at a time: `[tokens, query heads, D]`.

    Arguments are those of `sparse_attention`, query_len 1.
    """
    kv_heads, block = ids.shape[0], k_cache.shape[1]
    group = q.shape[1] // kv_heads
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    at = torch.arange(block, device=q.device)
    for t, n in enumerate(seq_lens.tolist()):
        for h in range(kv_heads if n else 0):
            blocks = ids[h, t][ids[h, t] >= 0].to(torch.int64)
            seen = (blocks[:, None] * block + at < n).flatten()
            page = block_table[t, blocks].to(torch.int64)
            bits = {1: torch.uint8, 2: torch.int16}[k_cache.element_size()]  # not every device indexes fp8
            keys, values = (c.view(bits)[page, :, h].view(c.dtype).float().flatten(0, 1)[seen] for c in (k_cache, v_cache))
            mine = slice(h * group, (h + 1) * group)
            out[t, mine] = torch.nn.functional.scaled_dot_product_attention(q[t, mine].float()[None], keys[None], values[None])[0]
    return out


def _projections(point: Point, shard: Shard, device: torch.device, llc_bytes: int) -> dict[str, Any]:
    tokens = point.batch + point.rows_padded
    own = point.replace(queries=None)  # both kinds rotate through as many copies, so that they differ in the foreign heads alone
    before, behind = traffic.projection_widths(own)
    foreign = traffic.projection_widths(point)[0] - before
    copies = 1 if point.cache == "warm" else timing.COLD_OVER_LLC * llc_bytes // traffic.projection_bytes(own) + 1
    calls = max(FEW_CALLS, copies)
    g = torch.Generator(device).manual_seed(point.seed + shard.rank)
    given = dict(generator=g, device=device, dtype=torch.float32)

    def drawn(inputs: int, outputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, **given).mul_(inputs**-0.5).to(torch.bfloat16)  # as engines keep them

    weights = [(drawn(traffic.HIDDEN, before), drawn(behind, traffic.HIDDEN)) for _ in range(copies)]
    rows = torch.randn(tokens, traffic.HIDDEN, **given).to(torch.bfloat16), torch.randn(tokens, behind, **given).to(torch.bfloat16)
    if foreign:
        weights = [(torch.cat([w, drawn(traffic.HIDDEN, foreign)]), out) for w, out in weights]
    outs = [tuple(torch.empty(tokens, w.shape[0], dtype=torch.bfloat16, device=device) for w in weights[0]) for _ in range(calls)]

    def call(number: int) -> None:
        for x, weight, out in zip(rows, weights[number % copies], outs[number], strict=True):
            _product(x, weight, out)

    expect = {c: [x.float() @ w.float().T for x, w in zip(rows, weights[c], strict=True)] for c in {0, copies - 1}}

    def verify() -> dict[str, Any]:
        checks = []
        for number, pair in enumerate(outs):
            for i, out in enumerate(pair):
                if number % copies in expect:
                    checks.append((tokens, _beyond_rounding(out, expect[number % copies][i])))
                out.fill_(float("nan"))
        return _counted(checks, "products in fp32")

    return dict(
        calls=[lambda n=n: call(n) for n in range(calls)], path="projections", stages=["projections"] + ["extra_projection"] * bool(foreign),
        verify=verify, launches=2, collectives=0, extra={"hidden": traffic.HIDDEN}, footprint_bytes=copies * traffic.projection_bytes(point), caches=copies,
    )  # fmt: skip


def _product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    if x.device.type == "cpu":  # few CPUs multiply bf16
        out.copy_(x.float() @ weight.float().T)
    else:
        torch.mm(x, weight.T, out=out)


def _mixed(
    point: Point, problem: inputs.Problem, plan: timing.CachePlan, ids: dict[int, torch.Tensor], decode: TPDecode | CPDecode
) -> dict[str, Any]:
    shape, shard, device = point.shape, decode.shard, problem.cache.device
    rows, requests = min(CHUNK_TOKENS[device.type], point.context_tokens), problem.seq_lens.shape[0]
    bounds = dict(max_context=point.max_context, device=device, cache_dtype=decode.cache_dtype)
    step = WholeStep(decode, Prefill(shape, shard, max_tokens=rows, **bounds))
    longest = int(problem.seq_lens.argmax())
    chunk = _values(rows, shape.heads, point, device, point.seed + 1, problem.q.dtype)
    owned = slice(shard.owned_heads.start, shard.owned_heads.stop)
    q = torch.cat([problem.q, chunk])[:, slice(None) if point.queries == "replicated" else owned].contiguous()
    tables = [torch.cat([table, table[longest : longest + 1]]) for table in problem.block_tables]
    lens = torch.cat([problem.seq_lens, problem.seq_lens[longest : longest + 1]])
    starts = torch.tensor([0, rows], dtype=torch.int32, device=device)
    outs = [torch.empty(shard.local_heads, q.shape[0], shape.topk, dtype=torch.int32, device=device) for _ in range(plan.calls)]

    def call(number: int) -> None:
        step(q, problem.cache, tables[number % plan.caches], lens, starts, decode_requests=requests, out=outs[number])

    chunk_ids = {c: reference.select_blocks(chunk, problem.cache, tables[c][-1:], lens[-1:], shape=shape, query_len=rows) for c in {min(ids), max(ids)}}

    def verify() -> dict[str, Any]:
        step.check()
        checks = []
        for number, out in enumerate(outs):
            for expect, found in ((ids, out[:, :requests]), (chunk_ids, out[:, requests:])):
                if number % plan.caches in expect:
                    differ = (found != expect[number % plan.caches][owned]).any(2)
                    checks.append((differ.numel(), differ))
            out.fill_(-2)
        return _counted(checks, "reference")

    call(0)
    return dict(
        calls=[lambda n=n: call(n) for n in range(plan.calls)], path=step.path, stages=[*decode.stages, "prefill"], verify=verify,
        collectives=decode.collectives, extra={"chunk_tokens": rows}, footprint_bytes=None,
    )  # fmt: skip


def _toy(point: Point, decode: TPDecode | CPDecode) -> dict[str, Any]:
    shape, shard, device = point.shape, decode.shard, decode.device
    size = Size(shape=shape, layers=TOY_LAYERS, max_context=point.max_context, **TOY[device.type])
    lengths = traffic.context_lengths(point)
    model = ToyM3(size, shard, decode, requests=point.batch, held_tokens=point.context_tokens, max_prefill=1, seed=point.seed)
    for cache, seed in ((model.index_cache, point.seed + 1), (model.kv_cache, point.seed + 2 + shard.rank)):
        pages = cache.numel() // (shape.block_size * shape.head_dim)
        cache.copy_(inputs.make_pool(shape, cache.dtype, device, pages=pages, seed=seed).view(cache.shape))
    positions = torch.tensor(lengths, device=device) - 1
    batch = model.plan(positions, list(range(point.batch)), decode_requests=point.batch, query_len=1, chunks=[])
    tokens = torch.arange(point.batch, device=device) % size.vocabulary
    checks: list[tuple[int, torch.Tensor]] = []

    def checking(q, cache, table, lens, starts, **counts):
        """The step's own choice, beside the reference's from the same queries of this rank's heads."""
        ids = model.step(q, cache, table, lens, starts, **counts)
        mine = q[:, shard.owned_heads.start : shard.owned_heads.stop] if model.replicated else q
        found = reference.select_blocks(mine, cache, table, lens, shape=dataclasses.replace(shape, heads=shard.local_heads))
        differ = (ids != found).any(2)
        checks.append((differ.numel(), differ))
        return ids

    model.select = checking
    expect = model.forward(tokens, batch)
    model.select = model.step
    outs = [expect] * FEW_CALLS
    weights = sum(w.numel() * w.element_size() for layer in model.layers for w in layer.values())

    def call(number: int) -> None:
        outs[number] = model.forward(tokens, batch)

    def verify() -> dict[str, Any]:
        model.step.check()
        logits = [(point.batch, _beyond_rounding(out, expect)) for out in outs]
        for out in outs:
            if out is not expect:
                out.fill_(float("nan"))
        return _counted([*checks, *logits], "reference's ids in every layer, then those logits")

    return dict(
        calls=[lambda n=n: call(n) for n in range(FEW_CALLS)], path=decode.path, stages=["projections", *decode.stages, "attention", "mlp"], verify=verify,
        extra={"layers": TOY_LAYERS, **TOY[device.type]}, footprint_bytes=traffic.distinct_bytes_read(point) + weights, caches=1,
    )  # fmt: skip
