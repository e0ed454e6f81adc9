"""Prefill's block selection: the unsharded path, for the heads that a rank owns (`spec.md`, section 3, "Decode only").

A prefill reads the cache once for many query rows, so nothing is gained by sharding it over the context. Rows come in
chunks with the context before them; each sees the tokens up to itself.
"""

from __future__ import annotations

import torch

from m3cp import reference
from m3cp.kernels import prefill as prefill_op
from m3cp.kernels import tile
from m3cp.shapes import MAX_CONTEXT_LIMIT, IndexerShape, require, require_int
from m3cp.shard import Shard

SCORES_BYTES = 256 << 20  # of scratch: rows are scored this many bytes of scores at a time
_HOST_ROWS = 16  # that the eager backend scores together


class Prefill:
    """Selection of prefill rows over persistent scratch; runs eager, as engines run steps with prefill.

    Args:
        shape, shard, max_context, device, cache_dtype: as `TPDecode`.
        max_tokens: prefill rows a call.
        scores_bytes: scratch for scores; more rows than fit are scored window by window.
    """

    def __init__(
        self,
        shape: IndexerShape,
        shard: Shard,
        *,
        max_tokens: int,
        max_context: int,
        device: torch.device | str,
        cache_dtype: torch.dtype = torch.bfloat16,
        scores_bytes: int = SCORES_BYTES,
    ):
        require_int("max_tokens", max_tokens, 1, 1 << 22)
        require_int("max_context", max_context, 1, MAX_CONTEXT_LIMIT, " tokens")
        self.shape, self.shard, self.device, self.cache_dtype = shape, shard, torch.device(device), cache_dtype
        self.max_tokens, self.max_context = max_tokens, max_context
        width = shape.blocks(max_context)
        window = max(1, min(max_tokens, scores_bytes // (4 * shard.local_heads * width)))
        self._triton = self.device.type == "cuda" or tile.INTERPRETED
        if not self._triton:
            window = min(window, _HOST_ROWS)
        self._scores = torch.empty(window, shard.local_heads, width, dtype=torch.float32, device=self.device)
        self._row_tokens = torch.empty(window, dtype=torch.int32, device=self.device)
        self._error = torch.zeros(2, dtype=torch.int64, device=self.device)  # kind, rank
        units = torch.cuda.get_device_properties(self.device).multi_processor_count if self.device.type == "cuda" else 1
        self._programs = units * tile.setting(tile.NATIVE.value).programs_per_unit

    @property
    def nbytes(self) -> int:
        """Bytes of scratch."""
        return sum(b.numel() * b.element_size() for b in (self._scores, self._row_tokens, self._error))

    def check(self) -> None:
        """Raise a RuntimeError for a length beyond `max_context` since construction; synchronises."""
        kind, rank = self._error.tolist()
        if kind:
            raise RuntimeError(f"a prefill's sequence length exceeds max_context={self.max_context}, found by rank {rank}; the rows concerned are -1")

    def checked(self, q, cache, block_table, seq_lens, starts) -> None:
        """Raise a ValueError for arguments of a call that don't fit."""
        shape, rows, requests = self.shape, q.shape[0], seq_lens.shape[0]
        if tuple(q.shape[1:]) != (self.shard.local_heads, shape.head_dim):
            raise ValueError(f"q of shape {tuple(q.shape)}: must be [rows, local heads={self.shard.local_heads}, head_dim={shape.head_dim}]")
        require("q.shape[0]", rows, rows <= self.max_tokens, f"at most max_tokens={self.max_tokens} prefill rows")
        for name, value, size in (("starts", starts, (requests + 1,)), ("block_table", block_table, (requests, *block_table.shape[1:]))):
            if tuple(value.shape) != size or value.dtype != torch.int32 or value.device != self.device:
                raise ValueError(f"{name} of shape {tuple(value.shape)}, {value.dtype} on {value.device}: must be {size} int32 on {self.device}")
        if block_table.shape[1] * shape.block_size < self.max_context:
            raise ValueError(f"block_table of width {block_table.shape[1]}: its {block_table.shape[1] * shape.block_size} tokens are less than max_context={self.max_context}")
        if rows and (q.stride(2) != 1 or q.data_ptr() % 16 or any(q.stride(d) * q.element_size() % 16 for d in (0, 1))):
            raise ValueError(f"q with strides {q.stride()} at address {q.data_ptr():#x}: each (token, head) row must be contiguous and 16-byte aligned")
        if cache is None or cache.numel() == 0:
            return
        if tuple(cache.shape[1:]) != (shape.block_size, shape.head_dim) or cache.stride(2) != 1 or cache.stride(1) != shape.head_dim:
            raise ValueError(f"cache of shape {tuple(cache.shape)} and strides {cache.stride()}: must be contiguous pages [pages, {shape.block_size}, {shape.head_dim}]")

    def __call__(self, q, cache, block_table, seq_lens, starts, *, out: torch.Tensor) -> torch.Tensor:
        """Choose blocks for every row.

        Args:
            q: `[rows, local_heads, D]`, request by request, post-RoPE.
            cache: `[pages, block_size, D]`; None or no pages: a profiling run, all -1.
            block_table: `[requests, width]` int32.
            seq_lens: `[requests]` int32: tokens before and in this chunk; row i of a chunk of c sees `seq_len - c + i + 1`.
            starts: `[requests + 1]` int32 on the device: the requests' first rows, ascending from 0 to `rows`.
            out: `[local_heads, rows, topk]` int32, a slice of a buffer of more rows or all of one.

        Raises:
            ValueError: naming the argument, what was given and what is allowed.
        """
        self.checked(q, cache, block_table, seq_lens, starts)
        shape, rows = self.shape, q.shape[0]
        if tuple(out.shape) != (self.shard.local_heads, rows, shape.topk) or out.dtype != torch.int32 or out.stride()[1:] != (shape.topk, 1):
            raise ValueError(f"out of shape {tuple(out.shape)}, {out.dtype}: must be {(self.shard.local_heads, rows, shape.topk)} int32, its rows contiguous")
        if cache is None or cache.numel() == 0:
            return out.fill_(-1)
        cache = cache.view(self.cache_dtype)
        if not self._triton:
            return self._eager(q, cache, block_table, seq_lens, starts, out)
        window = self._scores.shape[0]
        for first in range(0, rows, window):
            last = min(rows, first + window)
            tiles = -(-(last - first) * self.shard.local_heads // prefill_op.PAIRS)
            prefill_op.prefill(
                q, cache, block_table, seq_lens, starts, shape=shape, rank=self.shard.rank, max_context=self.max_context, first_row=first, last_row=last,
                scores=self._scores, row_tokens=self._row_tokens, state=self._error, splits=max(1, self._programs // tiles), out=out,
            )  # fmt: skip
        return out

    def _eager(self, q, cache, block_table, seq_lens, starts, out: torch.Tensor) -> torch.Tensor:
        heads, window = self.shard.local_heads, self._scores.shape[0]
        out.fill_(-1)
        common = dict(shape=self.shape, shard=Shard(0, 1, heads), max_context=self.max_context)
        for r, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            if end > start and int(seq_lens[r]) > self.max_context and not self._error[0]:
                self._error[:] = torch.tensor([1, self.shard.rank])
            for first in range(start, end, window):
                last = min(end, first + window)
                sees = seq_lens[r : r + 1] - (end - last)  # the last of these rows
                given = common | dict(query_len=last - first)
                scores = reference.score(q[first:last], cache, block_table[r : r + 1], sees, out=self._scores, **given)
                found = reference.candidates(scores, sees, **given)
                out[:, first:last] = reference.merge(found[None], shape=self.shape, owned=range(heads))
        return out
