"""Stand-ins for vLLM's modules, from plain torch: the same functions and layouts, ids by score, ties to the higher id.

They carry the glue of `m3cp.engine_kernels` (what is passed, in which order and layout) on a machine without the engines.
"""

from __future__ import annotations

import sys
import types

import torch

from m3cp import engine_kernels, keys, reference
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

calls: list[tuple[str, int]] = []  # (function, its module's constant at that moment)


def install() -> list[types.ModuleType]:
    """Put the stand-ins where `engine_kernels` looks for vLLM's modules, parents included."""
    made = []
    for name in (*engine_kernels.MODULES["vllm_tp"], *engine_kernels.MODULES["vllm_cp"]):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
            sys.modules[".".join(parts[:depth])].__path__ = []
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__file__ = __file__
        made.append(sys.modules[name])
    tp, scoring, exchanging = made
    tp.minimax_m3_index_decode = _decode
    tp._topk_index_partial_kernel = types.SimpleNamespace(fn=types.SimpleNamespace(best_config="a tile"))
    tp._decode_index_score_kernel = scoring._context_score = None
    scoring.indexer_context_scores = _scores
    scoring.DECODE_SCORE_MIN_BLOCKS = 3
    exchanging.DECODE_TOPK_NUM_WARPS, exchanging.DECODE_TOPK_TILE = 8, 512
    exchanging.local_topk_keys = lambda *a, **k: (calls.append(("keys", exchanging.DECODE_TOPK_NUM_WARPS)), _keys(*a, **k))[1]
    exchanging.merge_topk_keys = _merge
    engine_kernels.missing.cache_clear()
    return made


def _scores(q, cache, table, lens, max_seq_len, rank, world, query_len, scale, out=None):
    shape, shard = IndexerShape(heads=q.shape[1]), Shard(rank, world, world)
    found = reference.score(q, cache, table, lens, shape=shape, shard=shard, query_len=query_len, max_context=max_seq_len)
    scores = out[:, : q.shape[0], : -(-shape.blocks(max_seq_len) // world)]
    scores.fill_(float("nan"))  # what was never scored must not be read
    scores[..., : found.shape[2]] = found.permute(1, 0, 2) * scale
    return scores


def _keys(scores, lens, *, topk, rank, world, query_len, global_blocks, init_blocks, local_blocks, out):
    visible = ((reference.row_lengths(lens, query_len, 2**31 - 1) + 127) // 128)[None, :, None]
    block = torch.arange(scores.shape[2])[None, None] * world + rank
    order = keys.order_code(scores.nan_to_num(nan=-float("inf")))
    ranked = keys.encode(order, block, torch.minimum(visible, torch.tensor(global_blocks)), init_blocks, local_blocks)
    key = torch.where(ranked == keys.EMPTY, 0, (ranked >> keys.ID_BITS << 17) + block + 1)  # the higher id wins
    best = key.topk(min(topk, key.shape[2]), dim=2).values
    out.zero_()
    out[..., : best.shape[2]] = best
    return out


def _merge(gathered, out, lens, *, query_len, init_blocks, local_blocks):
    best = gathered.permute(1, 2, 0, 3).flatten(2).topk(out.shape[2], dim=2).values
    return out.copy_((best & (2**17 - 1)) - 1)


def _decode(q, cache, table, lens, max_seq_len, topk, init, local, kv_heads, query_len, max_query_len, out=None, score_out=None):
    assert kv_heads == q.shape[1] and score_out.shape[0] == kv_heads and score_out.shape[2] % 16 == 0
    scores = _scores(q, cache, table, lens, max_seq_len, 0, 1, query_len, 1.0, out=score_out)
    blocks = dict(global_blocks=2**24, init_blocks=init, local_blocks=local)
    found = torch.empty(*out.shape, dtype=torch.int64)
    _keys(scores, lens, topk=topk, rank=0, world=1, query_len=query_len, out=found, **blocks)
    return _merge(found[None], out, lens, query_len=query_len, init_blocks=init, local_blocks=local)
