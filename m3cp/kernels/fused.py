"""Decode in one launch, TP and CP: score, hand the scores over as tagged words, choose where the heads live.

Every program (a fixed, co-resident grid) takes an equal share of the flattened (request, block) list, scores it and
stores each score as one word straight into the memory of the rank that owns the head; the programs then wait for the
words of the rows they own and choose. There are no local candidates, no collective and no merge of lists: CP is TP
with a store over the link. Rows of more than SEGMENT blocks are chosen in two levels, a program a segment. TP is the
same code with a world of one, whose words stay in a private buffer.

Wins wherever the fixed cost matters, that is below some thousand blocks a call; the staged form costs two launches
and two collectives more. `PHASE` cuts the same code in two launches (score and push; wait and choose), which need no
co-residency: the second waits for words of launches that were already issued.

Why a slot can be reused (checked exhaustively in tests/test_protocol.py). A launch *exchanges* when a row has more
than TOPK blocks, which the lengths alone decide, alike on every rank. Exchanging launches count g = 1, 2, ...; words
of launch g carry the tag g and go to slot g % 2 of the peers' buffers.
  1. In an exchanging launch every rank awaits at least one word of every peer: each peer holds a block of the row's
     list (its length is at least TOPK + 1 - init - local >= world; else PRESENCE words are exchanged) and each rank
     owns a head.
  2. So when a rank has finished launch g + 1, every peer has begun g + 1, hence has finished g and all its reads of
     slot g % 2. Launch g + 2 may overwrite that slot. One stream orders a rank's launches.
  3. Launches that do not exchange store nothing in a peer's memory and leave g alone.
An adaptive launch of few blocks is one of those: it takes TP's path, which the sum of blocks decides, alike on every
rank. It deals all blocks to each rank, keeps the words of the rank's own heads in memory that no peer writes, and tags
them with the launch counter.
Words between programs of one rank live in a buffer that no peer writes and carry the launch counter.
Each program keeps its own copy of both counters and brings it forward once all its warps have read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from m3cp.kernels import tile
from m3cp.kernels.candidates import keep_best, kept
from m3cp.kernels.pages import store_row_pages
from m3cp.kernels.score import LENGTH_ERROR, constants
from m3cp.kernels.tile import (
    NATIVE,
    blocks_of,
    column_tokens,
    load_columns,
    load_keys,
    longest_row,
    my_share,
    operands,
    read_span,
    row_tokens,
    score_columns,
)
from m3cp.kernels.words import POLLED, await_words, put, tagged
from m3cp.keys import forced_code_jit, order_code_jit
from m3cp.pagetable import Emission
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

# Blocks that one program chooses from at once: 256 keys sort in about a microsecond; the interpreter sorts slowly.
SEGMENT = 64 if tile.INTERPRETED else 256
WAIT_ERROR = tl.constexpr(2)
ONE_LAUNCH, PUSH, CHOOSE = 0, 1, 2  # phases
NO_PAGES = dict(pages_ptr=None, attended_ptr=None, entry_stride=None, PER_BLOCK=0)  # None: no argument of the compiled kernel

_SEGMENT = tl.constexpr(SEGMENT)
_FEW = tl.constexpr(64)  # lanes that are chosen by counting: quicker than sorting them; 256 sort quicker (LOG.md, 2026-11-30)
_FAILED = tl.constexpr(-1)  # stands for the block ids of a segment whose wait expired


@triton.jit
def report_wait(state_ptr, launch, rank):
    """Write the error word (kind, rank waited for, launch), unless a wait's stands there."""
    first = tl.load(state_ptr + 1) != WAIT_ERROR
    tl.store(state_ptr + 2, tl.cast(rank, tl.int64), mask=first)
    tl.store(state_ptr + 3, launch, mask=first)
    tl.store(state_ptr + 1, WAIT_ERROR, mask=first)


@triton.jit
def this_launch(p_launch, PHASE: tl.constexpr):
    """Number of this launch, from the program's own counter: pushing leaves the counting to the choosing launch."""
    return tl.load(p_launch) + (1 if PHASE == 1 else 0)


@triton.jit
def peer(peers_ptr, i_rank):
    """Base of rank `i_rank`'s symmetric buffer as this rank maps it; `i_rank` may be a tensor."""
    return tl.load(peers_ptr + i_rank).to(tl.pointer_type(tl.int64))


@triton.jit
def query_row(q_ptr, i_row, rows, stride_token, stride_head, LOCAL_HEADS: tl.constexpr, DIM: tl.constexpr):
    """One of this rank's (token, head) rows of queries, two numbers a lane, int32 [DIM // 2]; zeros beyond the last."""
    p_row = q_ptr + (i_row // LOCAL_HEADS).to(tl.int64) * stride_token + i_row % LOCAL_HEADS * stride_head
    o_pair = tl.arange(0, DIM // 2)
    return tl.load(p_row.to(tl.pointer_type(tl.int32)) + o_pair, mask=(i_row < rows) & (o_pair >= 0), other=0)


@triton.jit
def push_queries(
    pairs, peers, q_ptr, lens_ptr, slot_queries, tag, i_program, programs, tokens, query_len, rank, max_context,
    stride_token, stride_head, HEADS: tl.constexpr, LOCAL_HEADS: tl.constexpr, REPLICAS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Send this rank's query rows to every rank (itself included), two numbers a word; rows that need no keys stay home.

    pairs: the program's first row, loaded ahead. peers: every rank's buffer, int64, 0 in lanes beyond the last rank.
    """
    rows = tokens * LOCAL_HEADS
    o_pair = tl.arange(0, DIM // 2)
    p_peers = peers.to(tl.pointer_type(tl.int64))[:, None]
    for i_row in range(i_program, rows, programs):
        i_token = i_row // LOCAL_HEADS
        longest = longest_row(tl.load(lens_ptr + i_token // query_len), query_len, max_context)
        needed = blocks_of(longest, BLOCK) > TOPK
        to = slot_queries + (i_token.to(tl.int64) * HEADS + rank // REPLICAS * LOCAL_HEADS + i_row % LOCAL_HEADS) * (DIM // 2) + o_pair
        word = tl.broadcast_to(tagged(pairs, tag)[None, :], [peers.shape[0], DIM // 2])
        put(p_peers + to[None, :], word, needed & (peers != 0)[:, None] & (o_pair >= 0)[None, :])
        pairs = query_row(q_ptr, i_row + programs, rows, stride_token, stride_head, LOCAL_HEADS, DIM)


@triton.jit
def await_columns(
    p_queries, i_request, group, query_len, tag, spin_limit, LIKE, HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Query columns of one group from their words, [DIM, COLUMNS], and a head waited for in vain (-1 when all came)."""
    o_column = group * COLUMNS + tl.arange(0, COLUMNS)
    row = i_request.to(tl.int64) * query_len * HEADS + o_column
    o_pair = tl.arange(0, DIM // 2)
    mask = (o_column < query_len * HEADS)[:, None] & (o_pair >= 0)[None, :]
    pair, missing, left = await_words(p_queries + row[:, None] * (DIM // 2) + o_pair[None, :], mask, tag, spin_limit)
    low = (pair & 0xFFFF).to(tl.uint16).to(LIKE, bitcast=True)
    high = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(LIKE, bitcast=True)
    columns = tl.reshape(tl.join(low, high), [COLUMNS, DIM])
    late = -1
    if left > 0:
        late = tl.max(tl.max(tl.where(missing, (o_column % HEADS)[:, None], -1), 1), 0)
    return tl.trans(columns), late


@triton.jit
def query_columns(
    q_ptr, p_queries, i_request, group, query_len, alone, tag, spin_limit, stride_token, stride_head,
    HEADS: tl.constexpr, LOCAL_HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Query columns of one group, from this rank's tensor or, gathered, from the words of all; and as `await_columns`."""
    late = -1
    if GATHER:
        if alone:
            b_q = load_columns(q_ptr, i_request, group, query_len, 0, stride_token, stride_head, HEADS, LOCAL_HEADS, 1, DIM, COLUMNS)
        else:
            b_q, late = await_columns(p_queries, i_request, group, query_len, tag, spin_limit, q_ptr.dtype.element_ty, HEADS, DIM, COLUMNS)
    else:
        b_q = load_columns(q_ptr, i_request, group, query_len, 0, stride_token, stride_head, HEADS, HEADS, 1, DIM, COLUMNS)
    return b_q, late


@triton.jit
def row_pointers(
    words_ptr, peers_ptr, slot, i_request, group, query_len, max_tokens, width, i_replica, alone, rank,
    HEADS: tl.constexpr, LOCAL_HEADS: tl.constexpr, REPLICAS: tl.constexpr, COLUMNS: tl.constexpr, EXCHANGE: tl.constexpr,
):  # fmt: skip
    """Where the score words of a group's columns start, in the memory of the rank that owns each column's head, [COLUMNS].

    `alone` (an adaptive launch on TP's path): in this rank's own memory.
    """
    o_column = group * COLUMNS + tl.arange(0, COLUMNS)
    o_head = o_column % HEADS
    i_token = i_request * query_len + o_column // HEADS
    if EXCHANGE:
        row = (o_head % LOCAL_HEADS).to(tl.int64) * max_tokens + i_token
        owner = tl.where(alone, rank, o_head // LOCAL_HEADS * REPLICAS + i_replica)
        return peer(peers_ptr, owner) + slot + row * width
    else:
        return words_ptr + (o_head.to(tl.int64) * max_tokens + i_token) * width


@triton.jit
def await_scores(
    p_row, first, visible, init, local, failed, tag, spin_limit, state_ptr, p_launch, WORLD: tl.constexpr, TOPK: tl.constexpr, PHASE: tl.constexpr
):  # fmt: skip
    """Codes of blocks [first, first + SEGMENT) of a row, int32 in the order of scores, and whether a word failed to come."""
    o_block = first + tl.arange(0, _SEGMENT)
    awaited = (visible > TOPK) & (o_block >= init) & (o_block < visible - local) & (failed == 0)
    word, missing, late = await_words(p_row + o_block, awaited, tag, spin_limit)
    if late > 0:
        report_wait(state_ptr, this_launch(p_launch, PHASE), tl.max(tl.where(missing, o_block % WORLD, 0), 0))
    # A row that chooses everything was not scored: any code will do, the same for all.
    code = tl.where(awaited, word, tl.where(visible > TOPK, 0, 1))
    return signed(forced_code_jit(code, o_block, visible, init, local)), late + failed.to(tl.int32)


@triton.jit
def await_parts(
    row_parts, begin, parts, visible, turn, spin_limit, state_ptr, p_launch, rank, TOPK: tl.constexpr, KEEP: tl.constexpr, PHASE: tl.constexpr
):  # fmt: skip
    """Candidates [begin, begin + POLLED) of a row's segments: codes as `await_scores`, block ids, how many failed."""
    o = begin + tl.arange(0, POLLED)
    # A segment hands over its TOPK best; the last one may see fewer blocks than that.
    there = (o < parts) & (o % KEEP < tl.minimum(visible - o // KEEP * _SEGMENT, TOPK))
    p_part = row_parts + o // KEEP * (2 * KEEP) + o % KEEP
    code, _, late = await_words(p_part, there, turn, spin_limit)
    block, _, late_block = await_words(p_part + KEEP, there, turn, spin_limit)
    late += late_block
    if late > 0:
        report_wait(state_ptr, this_launch(p_launch, PHASE), rank)
    late += tl.sum((there & (block == _FAILED)).to(tl.int32))
    return tl.where(there, code, -2147483648), block, late


@triton.jit
def signed(code):
    """uint32 codes as int32 of the same order; 0, nothing at all, becomes the least."""
    return (code ^ 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def cut(best, TOPK: tl.constexpr, KEEP: tl.constexpr):
    """From a row's KEEP largest codes, descending: the TOPK-th, and how many lanes may be taken at that very level."""
    threshold = tl.max(tl.where(tl.arange(0, KEEP) >= TOPK - 1, best, -2147483648), 0)
    return threshold, TOPK - tl.sum((best > threshold).to(tl.int32))


@triton.jit
def place_lanes(code, threshold, free, above_before, level_before):
    """Which lanes are chosen, and each one's place among the chosen in lane order, which is ascending block order.

    Everything above the threshold is, and of the lanes at it the first `free`: equal scores go to the lower id. The
    last two arguments count what earlier lanes held, and are returned brought forward.
    """
    above = (code > threshold).to(tl.int32)
    level = ((code == threshold) & (code != -2147483648)).to(tl.int32)
    upto = tl.cumsum(above * 65536 + level, 0)
    above_upto = above_before + (upto >> 16)
    level_upto = level_before + (upto & 0xFFFF)
    taken = (above > 0) | ((level > 0) & (level_upto <= free))
    place = above_upto - above + tl.minimum(level_upto - level, free)
    both = tl.sum(above * 65536 + level)
    return taken, place, above_before + (both >> 16), level_before + (both & 0xFFFF)


@triton.jit
def few_lanes(code):
    """The first _FEW of a segment's lanes, where the rest hold nothing."""
    return tl.max(tl.reshape(code, [code.shape[0] // _FEW, _FEW]), 0)


@triton.jit
def place_few(code, TOPK: tl.constexpr):
    """Of _FEW lanes, which are chosen and each one's place, as `place_lanes`: every lane counts those that come before it."""
    o = tl.arange(0, _FEW)
    key = (code.to(tl.int64) << 6) | (_FEW - 1 - o)  # equal scores: the lower lane first
    taken = ((tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0) < TOPK) & (code != -2147483648)).to(tl.int32)
    return taken > 0, tl.cumsum(taken, 0) - taken


@triton.jit
def store_row(p_out, block, taken, place, visible, late, TOPK: tl.constexpr, KEEP: tl.constexpr):
    """Store a row's chosen ids at their places, and -1 behind them; -1 everywhere when a wait expired."""
    o_k = tl.arange(0, KEEP)
    count = tl.where(late > 0, 0, tl.minimum(visible, TOPK))
    tl.store(p_out + place, block, mask=taken & (late == 0))
    tl.store(p_out + o_k, -1, mask=(o_k >= count) & (o_k < TOPK))


@triton.jit(
    do_not_specialize=[
        "q_ptr", "cache_ptr", "table_ptr", "lens_ptr", "out_ptr", "words_ptr", "peers_ptr", "parts_ptr", "counters_ptr", "state_ptr",
        "requests", "query_len", "pages", "rank", "max_context", "init", "local", "spin_limit",
        "stride_token", "stride_head", "stride_page", "stride_table", "width", "slot_words", "max_tokens", "threshold",
        "pages_ptr", "attended_ptr", "entry_stride",
    ]
)  # fmt: skip
def fused_kernel(
    q_ptr, cache_ptr, table_ptr, lens_ptr, out_ptr, words_ptr, peers_ptr, parts_ptr, counters_ptr, state_ptr,
    requests, query_len, pages, rank, max_context, init, local, spin_limit,
    stride_token, stride_head, stride_page, stride_table, width, slot_words, max_tokens, threshold, pages_ptr, attended_ptr, entry_stride,
    HEADS: tl.constexpr, LOCAL_HEADS: tl.constexpr, REPLICAS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, REQUESTS: tl.constexpr, ALIGN: tl.constexpr, KEEP: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr, PHASE: tl.constexpr, EXCHANGE: tl.constexpr, GATHER: tl.constexpr, PRESENCE: tl.constexpr,
    FORMAT: tl.constexpr, ADAPTIVE: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    WORLD: tl.constexpr = HEADS // LOCAL_HEADS * REPLICAS if EXCHANGE else 1  # a constant: two divisions less before the page ids
    i_program = tl.program_id(0)
    programs = tl.num_programs(0)
    tokens = requests * query_len
    if GATHER and PHASE != 2:
        # Asked for before the lengths: every rank's first dot waits for these rows (0.4 us less, LOG.md, 2026-11-30).
        pairs = query_row(q_ptr, i_program, tokens * LOCAL_HEADS, stride_token, stride_head, LOCAL_HEADS, DIM)
        o_rank = tl.arange(0, triton.next_power_of_2(WORLD))
        peers = tl.load(peers_ptr + o_rank, mask=o_rank < WORLD, other=0)
    p_exchange = counters_ptr + i_program
    p_launch = p_exchange + programs
    exchange = tl.load(p_exchange) + 1
    launch = tl.load(p_launch) + 1
    turn = launch.to(tl.int32)  # tags words between programs of this rank
    kind = tl.load(state_ptr + 1)
    failed = kind == WAIT_ERROR
    o_request = tl.arange(0, REQUESTS)
    lens = tl.load(lens_ptr + o_request, mask=o_request < requests, other=0)  # [REQUESTS]
    most = blocks_of(tl.max(longest_row(lens, query_len, max_context), 0), BLOCK)  # blocks of the longest row
    exchanges = (most > TOPK) & (failed == 0)
    dealt, hands = rank, WORLD  # this rank's blocks are those with block % hands == dealt
    alone = False
    if ADAPTIVE:
        alone = tl.sum(blocks_of(longest_row(lens, query_len, max_context), BLOCK).to(tl.int64), 0) <= threshold
        exchanges = exchanges & (alone == 0)
        dealt, hands = tl.where(alone, 0, rank), tl.where(alone, 1, WORLD)
    if EXCHANGE:
        tag = exchange.to(tl.int32)
        slot = (exchange & 1) * slot_words
        # A slot holds, in this order: score words of owned rows, query words of all rows, presence words.
        slot_queries = slot + max_tokens.to(tl.int64) * LOCAL_HEADS * width
        presence = slot_queries + max_tokens.to(tl.int64) * ((HEADS * DIM // 2) if GATHER else 0)
        if ADAPTIVE:
            tag = tl.where(alone, turn, tag)
            slot = tl.where(alone, 2 * slot_words.to(tl.int64), slot)  # behind both slots: no peer writes there
    else:
        tag = turn
        slot = launch & 0
        slot_queries = slot
    p_mine = words_ptr + slot
    if PHASE != 1:
        tl.debug_barrier()  # a warp that is ahead would change what others have yet to read
        tl.store(p_launch, launch)
        if EXCHANGE:
            tl.store(p_exchange, exchange, mask=exchanges)
        if i_program == 0:
            tl.store(state_ptr, launch)
            if (tl.max(lens, 0) > max_context) & (kind == 0):
                tl.store(state_ptr + 2, rank.to(tl.int64))
                tl.store(state_ptr + 3, launch)
                tl.store(state_ptr + 1, LENGTH_ERROR)

    if PHASE != 2:
        if PRESENCE:
            if (i_program == 0) & exchanges:
                for i_rank in range(WORLD):
                    put(peer(peers_ptr, i_rank) + presence + rank, tagged(rank, tag), exchanges)
        if GATHER:
            if exchanges:
                push_queries(
                    pairs, peers, q_ptr, lens_ptr, slot_queries, tag, i_program, programs, tokens, query_len, rank, max_context,
                    stride_token, stride_head, HEADS, LOCAL_HEADS, REPLICAS, DIM, BLOCK, TOPK,
                )  # fmt: skip
        # --- score this program's share; push every score to the owner of its head ---
        first, last = read_span(lens, query_len, dealt, hands, max_context, init, local, TOPK, BLOCK)
        item, stop, i_request, start = my_share(last - first, i_program, programs, REQUESTS)
        stop = tl.where(failed, item, stop)
        while item < stop:
            seq_len = tl.load(lens_ptr + i_request)
            first_here, last_here = read_span(seq_len, query_len, dealt, hands, max_context, init, local, TOPK, BLOCK)
            end = start + last_here - first_here
            upto = tl.minimum(stop, end)
            p_table = table_ptr + i_request.to(tl.int64) * stride_table
            page = tl.load(p_table + (first_here + item - start) * hands + dealt, mask=item < upto, other=0)
            # All are awaited and kept here: a wait inside the loop would end its pipeline. A request that needs no keys lies
            # between others in a share: nobody sends its queries.
            patience = tl.where(item < upto, spin_limit, 0)
            b_q, late = query_columns(
                q_ptr, words_ptr + slot_queries, i_request, 0, query_len, alone, tag, patience, stride_token, stride_head,
                HEADS, LOCAL_HEADS, DIM, COLUMNS, GATHER,
            )  # fmt: skip
            kept = (operands(b_q, FORMAT),)
            lossy = kept[0][3]
            for group in tl.static_range(1, GROUPS):
                b_q, late_here = query_columns(
                    q_ptr, words_ptr + slot_queries, i_request, group, query_len, alone, tag, patience, stride_token, stride_head,
                    HEADS, LOCAL_HEADS, DIM, COLUMNS, GATHER,
                )  # fmt: skip
                late = tl.maximum(late, late_here)
                more = operands(b_q, FORMAT)
                lossy = tl.maximum(lossy, more[3])
                kept = kept + (more,)
            if GATHER:
                if (late >= 0) & (item < upto):
                    report_wait(state_ptr, this_launch(p_launch, PHASE), late // LOCAL_HEADS * REPLICAS)
                    stop = item
                    upto = item
            p_first = row_pointers(
                words_ptr, peers_ptr, slot, i_request, 0, query_len, max_tokens, width, 0, alone, rank, HEADS, LOCAL_HEADS, REPLICAS, COLUMNS, EXCHANGE
            )  # fmt: skip
            for i in tl.range(item, upto, num_stages=STAGES):
                block = (first_here + i - start) * hands + dealt
                # The next page's id is fetched an iteration early, so that its keys can be in flight during this dot.
                next_page = tl.load(p_table + block + hands, mask=i + 1 < upto, other=0)
                b_k = load_keys(cache_ptr, page, pages, stride_page, BLOCK, DIM, ALIGN, FORMAT)  # [BLOCK, DIM]
                valid = (page >= 0) & (page < pages)
                for group in tl.static_range(GROUPS):
                    n_column = column_tokens(seq_len, group, query_len, max_context, HEADS, COLUMNS)
                    visible = blocks_of(n_column, BLOCK)
                    # Exactly the words that the row's reader awaits: choosers mask by the same condition.
                    sent = (visible > TOPK) & (block < visible - local)
                    if ADAPTIVE:
                        o_head = (group * COLUMNS + tl.arange(0, COLUMNS)) % HEADS
                        sent &= (alone == 0) | (o_head // LOCAL_HEADS == rank // REPLICAS)
                    best = score_columns(b_k, kept[group], n_column, block, valid, BLOCK, FORMAT, UPCAST)  # [COLUMNS]
                    if FORMAT != NATIVE:
                        sent &= kept[group][2] == 0
                    word = tagged(order_code_jit(best), tag)
                    for i_replica in tl.static_range(REPLICAS):
                        if (group == 0) & (i_replica == 0):
                            put(p_first + block, word, sent)  # alone, replicas store the same word in the same place
                        else:
                            p_row = row_pointers(
                                words_ptr, peers_ptr, slot, i_request, group, query_len, max_tokens, width, i_replica, alone, rank,
                                HEADS, LOCAL_HEADS, REPLICAS, COLUMNS, EXCHANGE,
                            )  # fmt: skip
                            put(p_row + block, word, sent)
                if FORMAT != NATIVE:
                    if lossy > 0:
                        # The words of lossy columns, from bf16 dots: rare, so what they need is loaded again.
                        b_exact = b_k.to(tl.bfloat16)
                        for i_group in range(GROUPS):  # at run time: unrolled, its columns would live at once
                            b_q, _ = query_columns(
                                q_ptr, words_ptr + slot_queries, i_request, i_group, query_len, alone, tag, 0, stride_token, stride_head,
                                HEADS, LOCAL_HEADS, DIM, COLUMNS, GATHER,
                            )  # fmt: skip
                            n_column = column_tokens(seq_len, i_group, query_len, max_context, HEADS, COLUMNS)
                            visible = blocks_of(n_column, BLOCK)
                            sent = (visible > TOPK) & (block < visible - local) & (operands(b_q, FORMAT)[2] > 0)
                            if ADAPTIVE:
                                o_head = (i_group * COLUMNS + tl.arange(0, COLUMNS)) % HEADS
                                sent &= (alone == 0) | (o_head // LOCAL_HEADS == rank // REPLICAS)
                            best = score_columns(b_exact, operands(b_q, NATIVE), n_column, block, valid, BLOCK, NATIVE, UPCAST)
                            word = tagged(order_code_jit(best), tag)
                            for i_replica in tl.static_range(REPLICAS):
                                p_row = row_pointers(
                                    words_ptr, peers_ptr, slot, i_request, i_group, query_len, max_tokens, width, i_replica, alone, rank,
                                    HEADS, LOCAL_HEADS, REPLICAS, COLUMNS, EXCHANGE,
                                )  # fmt: skip
                                put(p_row + block, word, sent)
                page = next_page
            item = upto
            start = end
            i_request += 1

    if PHASE == 0:
        # --- choose: a program a (row, segment); the grid's last programs first, they have the smaller shares ---
        rows = LOCAL_HEADS * tokens
        segments = tl.maximum((most + _SEGMENT - 1) // _SEGMENT, 1)
        for i_task in range(programs - 1 - i_program, rows * segments, programs):
            i_row = i_task // segments
            i_segment = i_task % segments
            i_token = i_row % tokens
            row = (i_row // tokens).to(tl.int64) * tokens + i_token
            n = row_tokens(tl.load(lens_ptr + i_token // query_len), i_token % query_len, query_len, max_context)
            visible = blocks_of(n, BLOCK)
            begin_block = i_segment * _SEGMENT
            if (begin_block < visible) | (i_segment == 0):
                p_row = p_mine + ((i_row // tokens).to(tl.int64) * max_tokens + i_token) * width
                code, late = await_scores(
                    p_row, begin_block, visible, init, local, failed, tag, spin_limit, state_ptr, p_launch, WORLD, TOPK, PHASE
                )  # fmt: skip
                o_block = begin_block + tl.arange(0, _SEGMENT)
                if visible <= _FEW:
                    taken, place = place_few(few_lanes(code), TOPK)
                    store_row(out_ptr + row * TOPK, tl.arange(0, _FEW), taken, place, visible, late, TOPK, KEEP)
                else:
                    threshold, free = cut(tl.topk(code, KEEP), TOPK, KEEP)
                    of_many, place_of_many, _, _ = place_lanes(code, threshold, free, 0, 0)  # another shape, so another name
                    if visible <= _SEGMENT:
                        store_row(out_ptr + row * TOPK, o_block, of_many, place_of_many, visible, late, TOPK, KEEP)
                    else:
                        p_part = parts_ptr + (row * segments + i_segment) * 2 * KEEP + place_of_many
                        put(p_part, tagged(code, turn), of_many)
                        put(p_part + KEEP, tagged(tl.where(late > 0, _FAILED, o_block), turn), of_many)
                if visible <= _SEGMENT:
                    if PER_BLOCK > 0:
                        store_row_pages(
                            out_ptr, row, i_token // query_len, n, table_ptr, stride_table, pages_ptr, attended_ptr, pages, entry_stride,
                            TOPK, KEEP, BLOCK, PER_BLOCK,
                        )  # fmt: skip
        # --- rows of several segments: choose among their parts ---
        if segments > 1:
            for i_row in range(i_program, rows, programs):
                i_token = i_row % tokens
                row = (i_row // tokens).to(tl.int64) * tokens + i_token
                n = row_tokens(tl.load(lens_ptr + i_token // query_len), i_token % query_len, query_len, max_context)
                visible = blocks_of(n, BLOCK)
                if visible > _SEGMENT:
                    row_parts = parts_ptr + row * segments * 2 * KEEP
                    parts = (visible + _SEGMENT - 1) // _SEGMENT * KEEP
                    code, o_block, late = await_parts(row_parts, 0, parts, visible, turn, spin_limit, state_ptr, p_launch, rank, TOPK, KEEP, PHASE)
                    if parts <= _FEW:
                        taken, place = place_few(few_lanes(code), TOPK)
                        chosen_from = few_lanes(tl.where(tl.arange(0, POLLED) < parts, o_block, -1))
                        store_row(out_ptr + row * TOPK, chosen_from, taken, place, visible, late, TOPK, KEEP)
                    else:
                        best = tl.topk(code, KEEP)
                        for begin in range(POLLED, parts, POLLED):
                            more, _, late_here = await_parts(row_parts, begin, parts, visible, turn, spin_limit, state_ptr, p_launch, rank, TOPK, KEEP, PHASE)
                            best = keep_best(best, tl.topk(more, KEEP), KEEP)
                            late += late_here
                        threshold, free = cut(best, TOPK, KEEP)
                        of_many, place_of_many, above, level = place_lanes(code, threshold, free, 0, 0)
                        p_out = out_ptr + row * TOPK
                        store_row(p_out, o_block, of_many, place_of_many, visible, late, TOPK, KEEP)
                        for begin in range(POLLED, parts, POLLED):
                            code, o_block, _ = await_parts(row_parts, begin, parts, visible, turn, spin_limit, state_ptr, p_launch, rank, TOPK, KEEP, PHASE)
                            of_many, place_of_many, above, level = place_lanes(code, threshold, free, above, level)
                            store_row(p_out, o_block, of_many, place_of_many, visible, late, TOPK, KEEP)
                    if PER_BLOCK > 0:
                        store_row_pages(
                            out_ptr, row, i_token // query_len, n, table_ptr, stride_table, pages_ptr, attended_ptr, pages, entry_stride,
                            TOPK, KEEP, BLOCK, PER_BLOCK,
                        )  # fmt: skip
    if PHASE == 2:
        # --- choose, one program a row over all its segments: once for the threshold, once to store what passes ---
        for i_row in range(programs - 1 - i_program, LOCAL_HEADS * tokens, programs):
            i_token = i_row % tokens
            row = (i_row // tokens).to(tl.int64) * tokens + i_token
            n = row_tokens(tl.load(lens_ptr + i_token // query_len), i_token % query_len, query_len, max_context)
            visible = blocks_of(n, BLOCK)
            p_row = p_mine + ((i_row // tokens).to(tl.int64) * max_tokens + i_token) * width
            best = tl.full([KEEP], -2147483648, tl.int32)
            late = 0
            for begin_block in range(0, visible, _SEGMENT):
                code, late_here = await_scores(
                    p_row, begin_block, visible, init, local, failed, tag, spin_limit, state_ptr, p_launch, WORLD, TOPK, PHASE
                )  # fmt: skip
                late += late_here
                best = keep_best(best, tl.topk(code, KEEP), KEEP)
            threshold, free = cut(best, TOPK, KEEP)
            above = 0
            level = 0
            for begin_block in range(0, tl.maximum(visible, 1), _SEGMENT):
                code, _ = await_scores(
                    p_row, begin_block, visible, init, local, failed, tag, spin_limit, state_ptr, p_launch, WORLD, TOPK, PHASE
                )  # fmt: skip
                taken, place, above, level = place_lanes(code, threshold, free, above, level)
                o_block = begin_block + tl.arange(0, _SEGMENT)
                store_row(out_ptr + row * TOPK, o_block, taken, place, visible, late, TOPK, KEEP)
        if PER_BLOCK > 0:  # a loop of its own: inside the one above a pointer spilled on sm_90
            for i_row in range(programs - 1 - i_program, LOCAL_HEADS * tokens, programs):
                i_token = i_row % tokens
                row = (i_row // tokens).to(tl.int64) * tokens + i_token
                n = row_tokens(tl.load(lens_ptr + i_token // query_len), i_token % query_len, query_len, max_context)
                store_row_pages(
                    out_ptr, row, i_token // query_len, n, table_ptr, stride_table, pages_ptr, attended_ptr, pages, entry_stride,
                    TOPK, KEEP, BLOCK, PER_BLOCK,
                )  # fmt: skip
    if PHASE != 1 and PRESENCE:
        if (i_program == 0) & exchanges:
            o = tl.arange(0, POLLED)
            _, missing, left = await_words(words_ptr + presence + o, o < WORLD, tag, spin_limit)
            if left > 0:
                report_wait(state_ptr, this_launch(p_launch, PHASE), tl.max(tl.where(missing, o, 0), 0))


@dataclass(frozen=True)
class Memory:
    """What a fused object keeps on its device; all int64.

    Args:
        words: this rank's score words (private without peers, else its symmetric buffer of two slots).
        peers: `[world]` addresses of every rank's symmetric buffer as mapped here; `words` itself without peers.
        parts: candidates of segments, from program to program of this rank.
        counters: `[2, programs]`: exchanges and launches so far, a copy for each program.
        state: `[4]`: launches, then the error word (kind, rank, launch).
        width: score words a row; slot_words: words of a slot; max_tokens: rows a head.
    """

    words: torch.Tensor
    peers: torch.Tensor
    parts: torch.Tensor
    counters: torch.Tensor
    state: torch.Tensor
    width: int
    slot_words: int
    max_tokens: int


def owned_words(shape: IndexerShape, shard: Shard, *, max_tokens: int, max_context: int) -> int:
    """int64 words of the scores of the rows that a rank owns."""
    return max_tokens * shard.local_heads * row_words(shape, max_context)


def words_a_slot(shape: IndexerShape, shard: Shard, *, max_tokens: int, max_context: int, gather: bool) -> int:
    """int64 words of one slot of a rank's symmetric buffer: scores of owned rows, queries of all rows, presence."""
    queries = max_tokens * shape.heads * shape.head_dim // 2 if gather else 0
    return owned_words(shape, shard, max_tokens=max_tokens, max_context=max_context) + queries + shard.world


def row_words(shape: IndexerShape, max_context: int) -> int:
    """Score words a row: its blocks, rounded up to whole segments."""
    return -(-shape.blocks(max_context) // SEGMENT) * SEGMENT


def needs_presence(shape: IndexerShape, shard: Shard) -> bool:
    """Whether an exchanging launch might leave a rank without a word from some peer (see the module's docstring)."""
    return shape.topk + 1 - shape.init_blocks - shape.local_blocks < shard.world


def fused(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    shape: IndexerShape,
    shard: Shard,
    query_len: int,
    max_context: int,
    memory: Memory,
    out: torch.Tensor,
    phase: int,
    spin_limit: int,
    exchange: bool,
    gather: bool,
    threshold: int | None = None,
    emit: Emission | None = None,
):
    """Launch the kernel once. Returns the compiled kernel (None under the interpreter).

    Args:
        q: `[tokens, heads, D]`: TP's own heads, CP's all heads, or CP's own heads when `gather`.
        shard: which blocks are scored and which heads are owned; a world of one for TP, with the heads it was given.
        phase: ONE_LAUNCH, or PUSH and then CHOOSE.
        spin_limit: polls after which a wait gives up.
        exchange: scores go to peers; gather: queries do too.
        threshold: with `exchange`: a batch of at most so many blocks takes TP's path; None always exchanges.
        emit: a page table that the choosing phase writes with the ids.
        out: contiguous `[owned heads, tokens, topk]` int32.
    """
    paging = NO_PAGES
    if emit is not None and phase != PUSH:
        table = emit.table
        paging = dict(pages_ptr=table.pages, attended_ptr=table.attended, entry_stride=emit.stride(shape), PER_BLOCK=table.per_block(shape))
    heads = shape.heads if exchange else q.shape[1]
    form = tile.cache_format(cache.dtype)
    fixed = constants(shape, heads, shard.local_heads if exchange else heads, shard.world if exchange else 1, query_len, seq_lens.numel(), cache)
    setting = tile.setting(form, fixed["GROUPS"], threshold is not None)
    return fused_kernel[(memory.counters.shape[1],)](
        q, tile.as_stored(cache), block_table, seq_lens, out, memory.words, memory.peers, memory.parts, memory.counters, memory.state,
        seq_lens.numel(), query_len, cache.shape[0], shard.rank, max_context, shape.init_blocks, shape.local_blocks, spin_limit,
        q.stride(0), q.stride(1), cache.stride(0), block_table.stride(0), memory.width, memory.slot_words, memory.max_tokens,
        min(threshold or 0, 2**31 - 1), **fixed, KEEP=kept(shape.topk), STAGES=setting.stages, UPCAST=tile.INTERPRETED, PHASE=phase, EXCHANGE=exchange, GATHER=gather,
        PRESENCE=exchange and needs_presence(shape, shard), FORMAT=form, ADAPTIVE=threshold is not None, **paging, **setting.options,
    )  # fmt: skip


def heaviest(
    shape: IndexerShape, shard: Shard, max_requests: int, max_query_len: int, dtype: torch.dtype, exchange: bool, gather: bool, adaptive: bool, phase: int
):  # fmt: skip
    """The compiled kernel of the largest call, for its resources; nothing is launched."""
    from triton.runtime.jit import MockTensor

    heads = shape.heads if exchange else shard.local_heads
    example = torch.empty(1, 1, shape.head_dim, dtype=dtype)
    fixed = constants(shape, heads, shard.local_heads, shard.world if exchange else 1, max_query_len, max_requests, example)
    long, word = MockTensor(torch.int64), MockTensor(torch.int32)
    form = tile.cache_format(dtype)
    setting = tile.setting(form, fixed["GROUPS"], adaptive)
    query, stored = (torch.bfloat16, torch.uint8) if form else (dtype, dtype)
    return fused_kernel.warmup(
        MockTensor(query), MockTensor(stored), word, word, word, long, long, long, long, long, *[1] * 16,
        **(fixed | dict(ALIGN=16)), KEEP=kept(shape.topk), STAGES=setting.stages, UPCAST=tile.INTERPRETED, PHASE=phase, EXCHANGE=exchange,
        GATHER=gather, PRESENCE=exchange and needs_presence(shape, shard), FORMAT=form, ADAPTIVE=adaptive, **NO_PAGES, **setting.options, grid=(1,),
    )  # fmt: skip
