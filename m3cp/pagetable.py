"""Page tables that a selecting pass can write beside the ids: what the attention kernel after it reads.

For each row the chosen blocks, translated through the block table into physical pages of `page_size` tokens: an entry
`p` of the block table (a block of `block_size` tokens) holds pages `p * stride ... p * stride + r - 1`, with
`r = block_size / page_size`. Full blocks come first and the row's own last block last; pages past the row's length are
left out, and so are blocks whose table entry names no page of the cache. Then -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m3cp.shapes import IndexerShape, require

PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class PageTable:
    """Where a call writes.

    Args:
        pages: `[local_heads, tokens, topk * block_size / page_size]` int32, contiguous.
        attended: `[local_heads, tokens]` int32, contiguous: tokens that those pages hold for the row.
        page_size: tokens a page, 16 to 128, a divisor of the block size.
        stride: pages from one entry of the block table to the next; larger than `block_size / page_size` where K and V
            share a block; None: exactly that.
    """

    pages: torch.Tensor
    attended: torch.Tensor
    page_size: int
    stride: int | None = None

    @classmethod
    def empty(cls, shape: IndexerShape, *, local_heads: int, tokens: int, page_size: int, stride: int | None = None, device="cpu") -> PageTable:
        """A table with fresh memory for a call of `tokens` rows."""
        _require_page_size(shape, page_size)
        width = shape.topk * (shape.block_size // page_size)
        pages = torch.empty(local_heads, tokens, width, dtype=torch.int32, device=device)
        return cls(pages, torch.empty(local_heads, tokens, dtype=torch.int32, device=device), page_size, stride)

    def per_block(self, shape: IndexerShape) -> int:
        """Pages a block."""
        return shape.block_size // self.page_size

    def entry_stride(self, shape: IndexerShape) -> int:
        """Pages from one entry of the block table to the next."""
        return self.per_block(shape) if self.stride is None else self.stride

    def checked(self, shape: IndexerShape, *, local_heads: int, tokens: int, cache_pages: int, device: torch.device) -> None:
        """Raise a ValueError unless the tensors fit a call.

        Args:
            cache_pages: pages of the index cache, which bound the entries of the block table.
        """
        _require_page_size(shape, self.page_size)
        r, stride = self.per_block(shape), self.entry_stride(shape)
        bound = (2**31 - 1) // max(1, cache_pages)
        allowed = f"None or {r} to {bound}: block_size / page_size = {r}, and page ids of {cache_pages} entries must fit int32"
        require("pages.stride", self.stride, isinstance(stride, int) and r <= stride <= bound, allowed)
        for name, value, size in (("pages", self.pages, (local_heads, tokens, shape.topk * r)), ("attended", self.attended, (local_heads, tokens))):
            if tuple(value.shape) != size or value.dtype != torch.int32 or value.device != device or not value.is_contiguous():
                raise ValueError(f"pages.{name} of shape {tuple(value.shape)}, {value.dtype} on {value.device}: must be contiguous {size} int32 on {device}")


@dataclass(frozen=True)
class Emission:
    """A page table with what translating needs: the call's own tensors and bounds."""

    table: PageTable
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_len: int
    max_context: int
    cache_pages: int

    def stride(self, shape: IndexerShape) -> int:
        return self.table.entry_stride(shape)


def _require_page_size(shape: IndexerShape, page_size: int) -> None:
    fits = page_size in PAGE_SIZES and shape.block_size % page_size == 0
    require("page_size", page_size, fits, f"one of {', '.join(map(str, PAGE_SIZES))} that divides block_size={shape.block_size}")
