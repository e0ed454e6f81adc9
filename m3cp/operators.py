"""Decode and whole steps as custom operators, for models that are compiled: Dynamo puts one node where they stand.

An operator takes tensors, integers and a process group's name. The object whose buffers it uses is the one with those
settings in this process: `bind` enters an object, and a graph that meets settings nobody entered builds one, which is
collective over the group. Nothing depends on whether a graph is being traced or captured: what runs is what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from m3cp.decode import CACHE_DTYPES, CPDecode, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.indexer import WholeStep
from m3cp.prefill import Prefill
from m3cp.shapes import FORMS, QUERIES, IndexerShape
from m3cp.shard import Shard

_objects: dict[tuple, TPDecode | CPDecode | WholeStep] = {}
_SHAPE = ("heads", "head_dim", "block_size", "topk", "init_blocks", "local_blocks")
_BOUNDS = ("max_requests", "max_query_len", "max_context")


def bind(made: TPDecode | CPDecode | WholeStep) -> Callable[..., torch.Tensor]:
    """A function that calls `made` through its operator, and that `torch.compile` traces without a break.

    Args:
        made: a decode object or a whole step; `warmup()` and `check()` stay its own.

    Returns:
        For a decode object `f(q, cache, block_table, seq_lens, query_len=1)`, for a whole step
        `f(q, cache, block_table, seq_lens, starts, decode_requests, query_len=1)`: ids in a fresh tensor,
        `[local_heads, tokens, topk]` int32.

    Raises:
        ValueError: an exchange over a callable, which has no name to put into a graph; or another object with the same
            settings was bound, whose buffers the operator would use.
    """
    whole = isinstance(made, WholeStep)
    decode = made.decode if whole else made
    settings, group = _settings(made), _group_name(decode)
    held = _objects.setdefault((*settings, group, str(decode.device)), made)
    if held is not made:
        raise ValueError(f"made={made!r}: an object with the same settings was bound before; bind and use one")
    size = (decode.shard.local_heads, decode.shape.topk)

    def call(q, cache, block_table, seq_lens, query_len: int = 1) -> torch.Tensor:
        out = q.new_empty((size[0], seq_lens.shape[0] * query_len, size[1]), dtype=torch.int32)
        torch.ops.m3cp.decode(q, cache, block_table, seq_lens, out, query_len, settings, group)
        return out

    def call_whole(q, cache, block_table, seq_lens, starts, decode_requests: int, query_len: int = 1) -> torch.Tensor:
        out = q.new_empty((size[0], q.shape[0], size[1]), dtype=torch.int32)
        torch.ops.m3cp.whole_step(q, cache, block_table, seq_lens, starts, out, decode_requests, query_len, settings, group)
        return out

    return call_whole if whole else call


def forget(made: TPDecode | CPDecode | WholeStep) -> None:
    """Let go of a bound object; its operator would build another."""
    for key in [k for k, held in _objects.items() if held is made]:
        del _objects[key]


@torch.library.custom_op("m3cp::decode", mutates_args=("out",))
def _decode(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor, query_len: int,
    settings: list[int], group: str,
) -> None:  # fmt: skip
    _object(settings, group, q.device)(q, cache, block_table, seq_lens, query_len=query_len, out=out)


@torch.library.custom_op("m3cp::whole_step", mutates_args=("out",))
def _whole_step(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, out: torch.Tensor,
    decode_requests: int, query_len: int, settings: list[int], group: str,
) -> None:  # fmt: skip
    _object(settings, group, q.device)(q, cache, block_table, seq_lens, starts, decode_requests=decode_requests, query_len=query_len, out=out)


@_decode.register_fake
def _(q, cache, block_table, seq_lens, out, query_len, settings, group) -> None:
    torch._check(q.shape[0] == out.shape[1], lambda: f"out of {out.shape[1]} rows: must be q's {q.shape[0]}")


@_whole_step.register_fake
def _(q, cache, block_table, seq_lens, starts, out, decode_requests, query_len, settings, group) -> None:
    torch._check(q.shape[0] == out.shape[1], lambda: f"out of {out.shape[1]} rows: must be q's {q.shape[0]}")


def _settings(made: TPDecode | CPDecode | WholeStep) -> list[int]:
    """What `_build` needs to make such an object again."""
    decode = made.decode if isinstance(made, WholeStep) else made
    cp = isinstance(decode, CPDecode)
    numbers = [getattr(decode.shape, name) for name in _SHAPE] + [decode.shard.rank, decode.shard.world] + [getattr(decode, name) for name in _BOUNDS]
    numbers += [CACHE_DTYPES.index(decode.cache_dtype), FORMS.index(decode.form), int(cp)]
    threshold = decode.threshold_blocks if cp else None
    numbers += [QUERIES.index(decode.queries), int(isinstance(decode.exchange, SymmetricExchange))] if cp else [0, 0]
    numbers += [-1 if threshold is None else threshold]
    return numbers + ([made.prefill.max_tokens] if isinstance(made, WholeStep) else [])


def _group_name(decode: TPDecode | CPDecode) -> str:
    if not isinstance(decode, CPDecode) or not dist.is_initialized():
        return ""
    if isinstance(decode.exchange, CollectiveExchange) and decode.exchange._gather is not None:
        raise ValueError(f"exchange={decode.exchange!r}: must be over a process group, whose name a graph can hold")
    return (decode.exchange.group or dist.group.WORLD).group_name


def _object(settings: list[int], group: str, device: torch.device):
    key = (*settings, group, str(device))
    if key not in _objects:
        _objects[key] = _build(settings, group, device)
    return _objects[key]


def _build(settings: list[int], group: str, device: torch.device) -> TPDecode | CPDecode | WholeStep:
    shape = IndexerShape(**dict(zip(_SHAPE, settings[:6], strict=True)))
    shard = Shard(*settings[6:8], shape.heads)
    dtype, form, cp, queries, symmetric, threshold, *prefill_tokens = settings[11:]
    bounds = dict(zip(_BOUNDS, settings[8:11], strict=True)) | dict(device=device, cache_dtype=CACHE_DTYPES[dtype])
    if cp:
        named = dist.distributed_c10d._resolve_process_group(group) if group else None
        exchange = (SymmetricExchange if symmetric else CollectiveExchange)(named)
        decode = CPDecode(shape, shard, exchange=exchange, queries=QUERIES[queries], form=FORMS[form], **bounds,
                          threshold_blocks=None if threshold < 0 else threshold)  # fmt: skip
    else:
        decode = TPDecode(shape, shard, form=FORMS[form], **bounds)
    if not prefill_tokens:
        return decode
    given = {name: bounds[name] for name in ("max_context", "device", "cache_dtype")}
    return WholeStep(decode, Prefill(shape, shard, max_tokens=prefill_tokens[0], **given))
