"""Needles: keys planted among noise, which must be chosen, and their values retrieved by attention over the choice.

Every (draft row, head) pair has lanes of its own, so its needles score for it and for nobody else. A context also holds
what a broken rule would choose in their place: NaN keys, a table entry that names no page (page 0, read instead, would
win), keys behind a row's own length, and a request beyond the bound. So the choice is known block by block.
"""

from __future__ import annotations

import torch
from problems import assert_ids

from m3cp.attention import sparse_attention
from m3cp.shapes import IndexerShape
from m3cp.testing import select_virtual

LANES = 8
GROUP = 2  # query heads a KV head


def check(
    *,
    world: int,
    query_len: int,
    depth: float,
    local: int = 1,
    infinite: bool = False,
    blocks: int = 0,
    topk: int = 4,
    path: str = "cp",
    form: str = "staged",
    device="cpu",
    dtype: torch.dtype = torch.bfloat16,
    attend: bool = True,
) -> None:
    """Every head and draft row chooses its needles, planted at `depth` of the context, all in one shard of `world`.

    Args:
        depth: 0 (the first blocks) to 1 (the last before the forced one).
        infinite: needles score +inf, one more of them than fit beside the forced blocks.
        blocks: of the context; 0: just enough.
    """
    shape = IndexerShape(topk=topk, local_blocks=local)
    heads, block, dim = shape.heads, shape.block_size, shape.head_dim
    pairs = heads * query_len
    needles = topk if infinite else topk - local
    span = world * (needles - 1) + pairs  # blocks from the first needle to the last
    blocks = max(blocks, span + 8)
    n = (blocks - 1) * block + 2  # two tokens in the last block: with four draft rows, the first two do not see it
    g = torch.Generator(device=device).manual_seed(world * 100 + query_len)
    given = dict(generator=g, device=device)
    # Page 0 is never referenced; NaN and unnamed blocks are the two before the last that everybody sees.
    table = 1 + torch.randperm(blocks, **given).to(torch.int32)[None]
    at = table[0].long()
    cache = (torch.randint(-2, 3, (blocks + 1, block, dim), dtype=torch.int8, **given) / 8).to(torch.bfloat16)
    kv = torch.randn(blocks + 1, 2, block, heads, dim, dtype=torch.bfloat16, **given) * 0.5
    q = torch.zeros(query_len, heads, dim, device=device)
    asked = torch.zeros(query_len, heads, GROUP, dim, device=device)
    expect = torch.full((heads, query_len, topk), -1, dtype=torch.int32)
    values = torch.zeros(query_len, heads, dim, device=device)
    cache[0] = 4.0
    nan_block, lost_block = blocks - 4, blocks - 5
    first = int(depth * (lost_block - span))
    cache[at[nan_block]] = float("nan")
    cache[at[-1], n % block :] = 4.0  # behind the length: would win
    cache[at[-1], n % block + 1 :: 2] = float("nan")
    kv[at[-1], :, n % block :] = float("nan")
    for row in range(query_len):
        sees = n - query_len + row + 1
        for p in range(sees, n):  # keys of the draft tokens behind this row would win for it
            cache[at[p // block], p % block, LANES * row * heads : LANES * (row + 1) * heads] = 4.0
    for row in range(query_len):
        visible = -(-(n - query_len + row + 1) // block)
        for head in range(heads):
            pair = row * heads + head
            lane = slice(LANES * pair, LANES * (pair + 1))
            q[row, head, lane] = 1.0
            mine = [first + pair + world * i for i in range(needles)]
            for i, b in enumerate(mine):
                token = (37 * pair + 11 * i) % block
                cache[at[b], token, lane] = float("inf") if infinite else 2.0
            chosen = sorted(mine[: topk - local] + [visible - 1 - i for i in range(local)])
            expect[head, row] = torch.tensor(chosen, dtype=torch.int32)
            # One needle carries the key that attention asks for, and a value of its own.
            i = pair % (topk - local)
            token = (37 * pair + 11 * i) % block
            asked[row, head, :, lane] = 8.0
            kv[at[mine[i]], 0, token, head] = 0.0
            kv[at[mine[i]], 0, token, head, lane] = 8.0
            values[row, head] = torch.randint(-8, 9, (dim,), **given) / 4
            kv[at[mine[i]], 1, token, head] = values[row, head].to(torch.bfloat16)
    table[0, lost_block] = -1
    bound = blocks * block
    lens = torch.tensor([n, bound + query_len], dtype=torch.int32, device=device)  # the second request is beyond the bound
    tables = table.repeat(2, 1)
    q = torch.cat([q, q]).to(torch.bfloat16)
    ids = select_virtual(
        q, cache.to(dtype), tables, lens, shape=shape, world=world, query_len=query_len, path=path, form=form, max_context=bound
    )  # fmt: skip
    what = f"{path} of {world}, {form}, query_len {query_len}, depth {depth}, local {local}"
    expect = torch.cat([expect, torch.full_like(expect, -1)], 1)
    assert_ids(ids, expect, what)
    if attend:
        asked = torch.cat([asked, asked]).flatten(1, 2).to(torch.bfloat16)
        got = sparse_attention(asked, kv[:, 0], kv[:, 1], tables, lens, ids, query_len=query_len).float()
        error = (got[:query_len].view(query_len, heads, GROUP, dim) - values[:, :, None]).abs().max()
        assert error <= 2**-6, f"{what}: rows differ: a needle's value is off by {float(error)}"
        assert not got[query_len:].any()


DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
