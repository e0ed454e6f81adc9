"""Read pages and nothing else: the floor under every scoring kernel, launch included.

The pages are those that a rank's shard needs, in the order of its requests, so random in memory. Sequential reads are
the same kernel on a list that counts upwards. Several readers are offered, since none is best from one page to
a quarter of a million; a floor is the best of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Reader:
    """How the kernel reads: words of 4 bytes that a program takes at a time, its warps, programs a compute unit."""

    tile_words: int
    warps: int
    programs_per_unit: int


# Small tiles spread few pages over all units; large ones keep more bytes in flight. On wave64 GPUs eight warps are 512
# threads, still two programs a unit and more.
READERS = (
    Reader(1024, 4, 8),
    Reader(2048, 4, 4),
    Reader(2048, 4, 8),
    Reader(4096, 8, 4),
    Reader(8192, 8, 2),
    Reader(8192, 8, 4),
)
# On a host a reader is the number of pages that it copies together at a time into its own cache.
HOST_READERS = (Reader(0, 0, 8), Reader(0, 0, 32))


@triton.jit(do_not_specialize=["count", "stride_units"])
def page_read_kernel(words_ptr, pages_ptr, out_ptr, count, stride_units, PAGE_WORDS: tl.constexpr, TILE: tl.constexpr):
    """Wrapping sum of all words of `count` pages; the store keeps the loads from being eliminated."""
    i_program = tl.program_id(0)
    n_programs = tl.num_programs(0)
    TILES: tl.constexpr = PAGE_WORDS // TILE
    o_word = tl.arange(0, TILE)
    b_sum = tl.zeros([TILE], dtype=tl.int32)
    for i in tl.range(i_program, count * TILES, n_programs):
        page = tl.load(pages_ptr + i // TILES).to(tl.int64)
        # The stride comes in units of 16 words, and the host has checked the base: loads are 16 bytes wide.
        p_page = tl.multiple_of(words_ptr + page * stride_units * 16, 16)
        b_sum += tl.load(p_page + (i % TILES) * TILE + o_word)  # [TILE]
    # 64 bits: the interpreter does not wrap a 32-bit reduction.
    tl.store(out_ptr + i_program, tl.sum(b_sum.to(tl.int64), axis=0).to(tl.int32))


def page_read(cache: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, *, reader: Reader) -> torch.Tensor:
    """Read `pages` of `cache`; returns `out`, whose sum modulo 2**32 is the words' (`checksum`).

    Args:
        cache: `[all pages, block_size, D]`, each page contiguous and a multiple of 64 bytes from the next.
        pages: `[count]` int32 page ids, all valid; a page may stand there twice and is then read twice.
        out: `[partials(device, reader)]` int32.
        reader: one of `readers(device)`.

    Raises:
        ValueError: a cache whose pages are not contiguous or not aligned.
    """
    words = _words(cache)
    if cache.device.type != "cuda":
        return _read_on_host(words, pages, out, reader)
    page_words = words.shape[1]
    page_read_kernel[(out.numel(),)](
        words, pages, out, pages.numel(), words.stride(0) // 16,
        PAGE_WORDS=page_words, TILE=min(reader.tile_words, page_words), num_warps=reader.warps,
    )  # fmt: skip
    return out


def readers(device: torch.device) -> tuple[Reader, ...]:
    """The readers worth trying on a device."""
    return READERS if device.type == "cuda" else HOST_READERS


def partials(device: torch.device, reader: Reader) -> int:
    """Length of `page_read`'s `out`: the programs of its grid."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * reader.programs_per_unit


def checksum(cache: torch.Tensor, pages: torch.Tensor) -> int:
    """What `page_read` must find, modulo 2**32, computed by plain torch in another order."""
    words = _words(cache)
    total = 0
    for chunk in pages.split(4096):
        total += int(words.index_select(0, chunk.to(torch.int64)).sum(dtype=torch.int64))
    return total % 2**32


def _words(cache: torch.Tensor) -> torch.Tensor:
    """The cache as `[pages, words]` int32."""
    contiguous = cache.dim() == 3 and cache.stride(2) == 1 and cache.stride(1) == cache.shape[2]
    if not contiguous or cache.stride(0) * cache.element_size() % 64 or cache.data_ptr() % 16:
        raise ValueError(
            f"cache of shape {tuple(cache.shape)} with strides {cache.stride()} at address {cache.data_ptr():#x}: pages must be contiguous, "
            "aligned to 16 bytes and a multiple of 64 bytes apart"
        )
    page = cache.as_strided((cache.shape[0], cache.shape[1] * cache.shape[2]), (cache.stride(0), 1))
    return page.view(torch.int32)


def _read_on_host(words: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, reader: Reader) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int32)
    for chunk in pages.split(reader.programs_per_unit):
        total += words.index_select(0, chunk).sum(dtype=torch.int32)
    return out.fill_(total)
