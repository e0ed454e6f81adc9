"""What every scoring kernel shares: which blocks a request needs, who reads them, and the one geometry of a dot.

Bit-identity of TP and CP rests on `score_columns`: a block's keys times COLUMNS columns, whatever the heads, rows, ranks
or form. (row, head) pairs fill the columns in groups of COLUMNS, row-major; the last group is padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl


# Narrowest dot of each vendor's matrix unit: eight columns on NVIDIA (1 to 7% faster than sixteen on an H200, whose clock
# sinks as the unit works), sixteen on CDNA.
def columns(hip: bool = bool(torch.version.hip)) -> int:
    """Columns of every dot of a vendor's kernels."""
    return 16 if hip else 8


COLUMNS = columns()
# The interpreter computes bf16 dots wrongly (triton #11584): there, and only there, operands are upcast first.
INTERPRETED = triton.knobs.runtime.interpret
# How a cache's elements are read: as their own type, or as bytes of one of the fp8 formats, which integer moves turn into
# fp16 anywhere, and an instruction where the GPU has one: NVIDIA's compiler knows no fnuz, and gfx942 has no fn.
NATIVE, E4M3FN, E4M3FNUZ, E4M3FN_CAST, E4M3FNUZ_CAST = (tl.constexpr(i) for i in range(5))
_FORMATS = {torch.float8_e4m3fn: (1, 3), torch.float8_e4m3fnuz: (2, 4)}


def casts(dtype: torch.dtype) -> bool:
    """Whether this process's GPU has an instruction that turns fp8 of this format into fp16."""
    if INTERPRETED or not torch.cuda.is_available():
        return False
    if torch.version.hip:
        return {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}.get(torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]) == dtype
    return dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(0) >= (8, 9)


def cache_format(dtype: torch.dtype, cast: bool | None = None) -> int:
    """NATIVE, or which fp8 format, and whether by an instruction (`cast`; by default where `casts`)."""
    formats = _FORMATS.get(dtype)
    return formats[casts(dtype) if cast is None else cast] if formats else 0


def as_stored(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels take it: fp8 as bytes, the rest as it is."""
    return cache.view(torch.uint8) if cache.dtype in _FORMATS else cache


WARPS = 4  # the dot of 128 keys without spills, but for the cells of `setting`


@dataclass(frozen=True)
class Setting:
    """How a scoring kernel is launched over one format of cache.

    Args:
        stages: of the pipeline; a tile less is in flight while another is multiplied.
        programs_per_unit: of the persistent grid, a compute unit.
        options: the compiler's.
    """

    stages: int
    programs_per_unit: int
    options: dict[str, int] = field(default_factory=dict)


def setting(cache: int, groups: int = 1, adaptive: bool = False, hip: bool = bool(torch.version.hip), staged: bool = False) -> Setting:
    """The setting for a format of `cache_format` and so many groups of columns: what was fastest on an H200 (LOG.md, 2026-11-30).

    On NVIDIA the registers that so many programs leave to a thread are stated: without the statement the compiler
    spills a few bytes of some kernels to fit one program more than are launched. Where four warps spill at 255, eight
    run, one program a unit (`staged`: in the staged form, whose kernel is smaller, fewer do); wave64 has registers for
    four, and eight would be more threads than a polled tensor has words.
    """
    moved = cache in (E4M3FN.value, E4M3FNUZ.value)
    most = 1 if moved or adaptive else 2  # groups of columns that four warps hold
    if not hip and cache != NATIVE.value and groups > most and (moved or not staged):
        return Setting(3, 1, {"num_warps": 2 * WARPS, "maxnreg": 255})
    if cache == NATIVE.value:
        stages, programs = 2, 4 if groups == 1 else 3 if groups == 2 else 2
    else:
        stages, programs = 3, 3 if groups == 1 and not adaptive and not moved else 2
    registers = min(255, 65_536 // (32 * WARPS * programs) // 8 * 8)
    return Setting(stages, programs, {"num_warps": WARPS} | ({} if hip else {"maxnreg": registers}))


@triton.jit
def row_tokens(seq_len, row, query_len, max_context):
    """Tokens that query row `row` of a request sees; 0 for padding and for a length beyond the bound."""
    n = tl.maximum(seq_len, 0) - query_len + row + 1
    return tl.where((n > 0) & (n <= max_context), n, 0)


@triton.jit
def blocks_of(tokens, BLOCK: tl.constexpr):
    """ceil(tokens / BLOCK), written so that 2**31 - 1 tokens do not overflow."""
    return tokens // BLOCK + (tokens % BLOCK != 0).to(tl.int32)


@triton.jit
def shard_count(n, rank, world):
    """How many of the logical blocks below `n` (>= 0) the shard `block % world == rank` holds."""
    return (n - rank + world - 1) // world


@triton.jit
def longest_row(seq_len, query_len, max_context):
    """Tokens that the request's longest row within the bound sees; 0 where it has none. Alike on every rank."""
    length = tl.maximum(seq_len, 0)
    return tl.where(length - max_context < query_len, tl.minimum(length, max_context), 0)


@triton.jit
def read_span(seq_len, query_len, rank, world, max_context, init, local, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """(first, last) numbers within the shard of the blocks whose keys a request needs; empty where none is.

    Requests with at most TOPK visible blocks choose them all, and forced blocks are chosen unseen.
    """
    visible = blocks_of(longest_row(seq_len, query_len, max_context), BLOCK)
    last = tl.where(visible > TOPK, visible - local, 0)
    first = tl.minimum(init, tl.maximum(last, 0))
    last = tl.maximum(last, first)
    return shard_count(first, rank, world), shard_count(last, rank, world)


@triton.jit
def load_columns(
    q_ptr, i_request, group, query_len, stride_rank, stride_token, stride_head,
    HEADS: tl.constexpr, LOCAL_HEADS: tl.constexpr, REPLICAS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Query columns of one group, [DIM, COLUMNS], zeros where the group is padding. Gathered queries are read in place.

    The host has checked that every (token, head) row is 16-byte aligned.
    """
    o_column = group * COLUMNS + tl.arange(0, COLUMNS)
    o_row = o_column // HEADS
    o_head = o_column % HEADS
    m_column = o_row < query_len
    p_column = q_ptr + (o_head // LOCAL_HEADS * REPLICAS).to(tl.int64) * stride_rank
    p_column += (i_request.to(tl.int64) * query_len + o_row) * stride_token + (o_head % LOCAL_HEADS) * stride_head
    p_q = tl.multiple_of(p_column, 16)[None, :] + tl.arange(0, DIM)[:, None]
    return tl.load(p_q, mask=m_column[None, :], other=0.0)


@triton.jit
def column_tokens(seq_len, group, query_len, max_context, HEADS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tokens that each of a group's columns sees, [COLUMNS]."""
    o_row = (group * COLUMNS + tl.arange(0, COLUMNS)) // HEADS
    return tl.where(o_row < query_len, row_tokens(seq_len, o_row, query_len, max_context), 0)


@triton.jit
def decode_e4m3(code, FORMAT: tl.constexpr):
    """Values of fp8 bytes as fp16, exactly: all 256 codes, subnormals and NaN among them."""
    if FORMAT == E4M3FN_CAST:
        half = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == E4M3FNUZ_CAST:
        half = code.to(tl.float8e4b8, bitcast=True).to(tl.float16)
    else:
        # The exponent field of fp16 has one bit more: moved there, a code is its value but for a power of two.
        code = code.to(tl.int16)
        bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
        half = bits.to(tl.int16).to(tl.float16, bitcast=True) * (128.0 if FORMAT == E4M3FNUZ else 256.0)
        is_nan = code == 0x80 if FORMAT == E4M3FNUZ else (code & 0x7F) == 0x7F
        half = tl.where(is_nan, float("nan"), half).to(tl.float16)
    return half


@triton.jit
def operands(b_q, FORMAT: tl.constexpr):
    """Query columns [DIM, COLUMNS] as dots with keys of this format take them: (columns, scale, lossy, whether any is).

    fp8 keys are fp16 numbers, and a column of bf16 is one too but for a power of two, unless its elements' exponents
    lie some thirty apart. `lossy` marks such columns, each by itself, whatever stands beside it: their scores must be
    taken from bf16 dots. `scale` is what fp16 dots must be multiplied by, a power of two. Both [COLUMNS].
    """
    if FORMAT == NATIVE:
        return b_q, 1.0, 0, 0
    else:
        column = b_q.to(tl.float32)
        exponent = tl.max((column.to(tl.int32, bitcast=True) >> 23) & 0xFF, 0)  # [COLUMNS], biased by 127
        up = tl.minimum(tl.maximum(268 - exponent, 27), 227)  # the largest element comes to 2**14 or 2**15
        b_half = (column * (up << 23).to(tl.float32, bitcast=True)[None, :]).to(tl.float16)
        scale = ((254 - up) << 23).to(tl.float32, bitcast=True)
        lossy = tl.max((b_half.to(tl.float32) * scale[None, :] != column).to(tl.int32), 0)
        return b_half, scale, lossy, tl.max(lossy, 0)


@triton.jit
def load_keys(
    cache_ptr, page, pages, stride_page, BLOCK: tl.constexpr, DIM: tl.constexpr, ALIGN: tl.constexpr, FORMAT: tl.constexpr = 0
):  # fmt: skip
    """One block's keys, [BLOCK, DIM]. A page id outside [0, pages) is never dereferenced: page 0 stands in.

    ALIGN: bytes that divide every page's address. FORMAT: how elements are read; fp8 becomes fp16.
    """
    page = tl.where((page >= 0) & (page < pages), page, 0)
    p_page = tl.multiple_of(cache_ptr + page.to(tl.int64) * stride_page, ALIGN)
    b_k = tl.load(p_page + tl.arange(0, BLOCK)[:, None] * DIM + tl.arange(0, DIM)[None, :])
    if FORMAT != NATIVE:
        b_k = decode_e4m3(b_k, FORMAT)
    return b_k


@triton.jit
def score_columns(b_k, columns, n_column, block, valid, BLOCK: tl.constexpr, FORMAT: tl.constexpr, UPCAST: tl.constexpr):
    """Maximum over the block's visible tokens of q . k for each column of `operands`, fp32 [COLUMNS]; -inf where nothing counts.

    With fp8, those of lossy columns are not to be used.
    """
    b_q = columns[0]
    if UPCAST:
        b_k = b_k.to(tl.float32)
        b_q = b_q.to(tl.float32)
    dots = tl.dot(b_k, b_q, input_precision="ieee")  # [BLOCK, COLUMNS]
    if FORMAT != NATIVE:
        dots *= columns[1][None, :]
    position = block * BLOCK + tl.arange(0, BLOCK)
    usable = (position[:, None] < n_column[None, :]) & (dots == dots) & valid
    return tl.max(tl.where(usable, dots, float("-inf")), axis=0)


@triton.jit
def my_share(counts, i_program, programs, REQUESTS: tl.constexpr):
    """One program's share of the flattened (request, block) list: shares differ by at most one block.

    counts: blocks that each request needs, [REQUESTS]. Returns (item, stop, i_request, start): the share [item, stop),
    the request that holds its first item, and the item at which that request starts.
    """
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    share = total // programs
    extra = total - share * programs
    item = i_program * share + tl.minimum(i_program, extra)
    stop = item + share + (i_program < extra).to(tl.int32)
    passed = ends <= item
    return item, stop, tl.sum(passed.to(tl.int32), 0), tl.sum(tl.where(passed, counts, 0), 0)
