"""What a Point must move, as pure arithmetic: lengths, blocks, bytes read, bytes exchanged, and the limit they set.

`limit_us` is bytes over bandwidth and is computed; the arm `page_read` is the measured floor. Neither torch nor
triton is imported here.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from m3cp.shapes import LAYER_ARMS, TOY_LAYERS, Point
from m3cp.shard import Shard

HIDDEN = 6144  # MiniMax-M3's hidden size
GROUP = 16  # and its query heads a KV head
QUERY_BYTES = 2  # bf16 or fp16 queries
CANDIDATE_BYTES = 8  # one int64 key
AGENTIC_SPREAD = 1.33  # mean of ln(max/min) of the contexts in an agentic batch


@dataclass(frozen=True)
class Node:
    """What traffic must know of a machine.

    Args:
        name: such as "4x MI355X" or "2x NVIDIA H200".
        page_bandwidth_gbs: best measured rate of reading randomly permuted pages, GB/s (1e9 bytes a second).
        llc_bytes: last-level cache that a re-read may hit.
        sequential_bandwidth_gbs: best measured sequential read rate, GB/s; None when it was not measured.
        datasheet_bandwidth_gbs: the vendor's figure, GB/s; None when unknown.
    """

    name: str
    page_bandwidth_gbs: float
    llc_bytes: int
    sequential_bandwidth_gbs: float | None = None
    datasheet_bandwidth_gbs: float | None = None


def context_lengths(point: Point) -> list[int]:
    """Total tokens of each request of the batch (padding rows excluded), reproducible from the Point's seed.

    - uniform: every request has `context_tokens`.
    - one_long_rest_1k, one_long_rest_4k: one request of `context_tokens`, the others 1,024 or 4,096 (or
      `context_tokens` where that is less); the published skewed rows are of the first kind.
    - log_uniform: logarithms spread evenly between 1,024 and `context_tokens`, both ends present from 2 requests on.
    - agentic: the logarithm of the batch's max/min ratio is drawn from an exponential distribution of mean 1.33, the
      logarithms of the lengths are spread at random between the two ends, and one request has `context_tokens`. Over
      seeds the ratio is 2.5 at the median and 21 at the 90th percentile, near what ATOM's authors report of agentic
      decode steps (2.5 and 22; `data/published/README.md`).
    """
    tokens, batch = point.context_tokens, point.batch
    if point.mix == "uniform":
        return [tokens] * batch
    if point.mix in ("one_long_rest_1k", "one_long_rest_4k"):
        rest = 1024 if point.mix == "one_long_rest_1k" else 4096
        return [tokens] + [min(rest, tokens)] * (batch - 1)
    low = min(1024, tokens)
    rng = random.Random(point.seed)
    if point.mix == "log_uniform":
        steps = [i / (batch - 1) for i in range(batch)] if batch > 1 else [1.0]
        lengths = [round(low * (tokens / low) ** s) for s in steps]
        rng.shuffle(lengths)
        return lengths
    if batch == 1:
        return [tokens]
    spread = min(rng.expovariate(1 / AGENTIC_SPREAD), math.log(tokens / low))
    drawn = [0.0, spread] + [rng.uniform(0.0, spread) for _ in range(batch - 2)]
    rng.shuffle(drawn)
    return [max(low, round(tokens * math.exp(-d))) for d in drawn]


def read_range(point: Point, tokens: int) -> tuple[int, int]:
    """Logical blocks [first, last) whose keys a request of `tokens` tokens needs.

    Rows with at most `topk` visible blocks choose them all, and forced blocks are chosen unseen: none is read.
    """
    shape = point.shape
    visible = shape.blocks(tokens)
    if visible <= shape.topk:
        return 0, 0
    first, last = shape.init_blocks, visible - shape.local_blocks
    return (first, last) if last > first else (0, 0)


def blocks_read(point: Point, rank: int) -> int:
    """Blocks of keys that `rank` requests in one call, re-reads of shared pages counted each time."""
    return sum(last - first for first, last in _shares(point, rank, context_lengths(point)))


def distinct_blocks_read(point: Point, rank: int) -> int:
    """Like `blocks_read`, with the pages of a shared prefix counted once."""
    shared = point.shared_prefix_tokens // point.shape.block_size
    ranges = [read_range(point, n) for n in context_lengths(point)]
    in_prefix = [(first, min(last, shared)) for first, last in ranges if first < min(last, shared)]
    union = (min(f for f, _ in in_prefix), max(last for _, last in in_prefix)) if in_prefix else (0, 0)
    own = [(max(first, shared), last) for first, last in ranges if last > max(first, shared)]
    return sum(_owned(point, rank, first, last) for first, last in [union, *own])


def bytes_read(point: Point, rank: int | None = None) -> int:
    """Bytes requested by `rank` in one call; of the busiest rank when None.

    Index keys; of arms "attention" and "projections" the chosen blocks' K and V and the weights; of the toy's arms index keys
    and the chosen blocks' K and V of all layers (weights left out); of the mixed arms the decode rows' index keys.
    """
    return _bytes(point, _worst(point, rank, blocks_read))


def distinct_bytes_read(point: Point, rank: int | None = None) -> int:
    """As `bytes_read`, each page once."""
    return _bytes(point, _worst(point, rank, distinct_blocks_read))


def attention_bytes(point: Point) -> int:
    """Bytes of the K and V that one rank's heads read in one layer: every row's chosen blocks, query_len 1."""
    shape, heads = point.shape, Shard(0, point.world, point.shape.heads).local_heads
    chosen = sum(min(shape.topk, shape.blocks(tokens)) for tokens in context_lengths(point))
    return chosen * heads * 2 * shape.key_bytes(point.dtype)


def projection_widths(point: Point) -> tuple[int, int]:
    """(columns of the weights before attention, rows of those behind it) of one rank's share of a layer.

    Before: `GROUP` query heads, a key and a value head and an index query a KV head, and the one index key; with replicated
    queries the other ranks' index queries too.
    """
    heads = Shard(0, point.world, point.shape.heads).local_heads
    foreign = point.shape.heads - heads if point.queries == "replicated" else 0
    return (heads * (GROUP + 3) + 1 + foreign) * point.shape.head_dim, heads * GROUP * point.shape.head_dim


def projection_bytes(point: Point) -> int:
    """Bytes of one rank's projection weights of a layer, bf16, between `HIDDEN` and `projection_widths`."""
    return HIDDEN * sum(projection_widths(point)) * 2


def bytes_exchanged(point: Point) -> dict[str, int]:
    """Bytes that one rank sends to each of its peers in one call of arm "cp": {"queries": ..., "candidates": ...}.

    Collective gathers carry every head's candidates to every rank: `heads * topk * 8` bytes a token.
    Arm "toy_cp" does so in each of its layers. Other arms exchange nothing.
    """
    if not point.arm.endswith("cp") or point.world == 1:
        return {"queries": 0, "candidates": 0}
    tokens = (point.batch + point.rows_padded) * point.query_len
    shard = Shard(0, point.world, point.shape.heads)
    layers = TOY_LAYERS if point.arm == "toy_cp" else 1
    queries = tokens * shard.local_heads * point.shape.head_dim * QUERY_BYTES if point.queries == "gathered" else 0
    return {"queries": layers * queries, "candidates": layers * tokens * point.shape.heads * point.shape.topk * CANDIDATE_BYTES}


def limit_us(point: Point, node: Node) -> float:
    """Microseconds that the busiest rank's distinct bytes take at the node's page-read bandwidth (computed)."""
    return distinct_bytes_read(point) / (node.page_bandwidth_gbs * 1e3)


def floor_point(point: Point) -> Point:
    """The `page_read` Point that reads the same pages: the measured floor of the Point's arm.

    The Point itself where there is none: a floor, or an arm that reads more than index keys.
    """
    if point.arm == "page_read" or point.arm in LAYER_ARMS:
        return point
    return point.replace(arm="page_read", form=None, exchange=None, queries=None, threshold_blocks=None, world=shards(point))


def shards(point: Point) -> int:
    """Number of shards that the cache is read in: the world size for CP arms and their floor, 1 for TP arms."""
    return 1 if point.arm.endswith("tp") else point.world


def _bytes(point: Point, blocks: int) -> int:
    """Of a call whose index-key blocks these are."""
    keys = blocks * point.shape.key_bytes(point.dtype)
    if point.arm == "attention":
        return attention_bytes(point)
    if point.arm == "projections":
        return projection_bytes(point)
    return TOY_LAYERS * (keys + attention_bytes(point)) if point.arm.startswith("toy_") else keys


def _owned(point: Point, rank: int, first: int, last: int) -> int:
    count = shards(point)
    if count == 1:
        return last - first
    shard = Shard(rank, count, count)
    return shard.local_blocks(last) - shard.local_blocks(first)


def _shares(point: Point, rank: int, lengths: list[int]):
    for tokens in lengths:
        first, last = read_range(point, tokens)
        yield 0, _owned(point, rank, first, last)


def _worst(point: Point, rank: int | None, count) -> int:
    ranks = range(shards(point)) if rank is None else (rank,)
    return max(count(point, r) for r in ranks)
