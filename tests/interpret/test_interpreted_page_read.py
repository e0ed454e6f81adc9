"""The page-read kernel in Triton's interpreter: every word of every page, whatever the stride, tile and grid."""

import pytest
import torch

from m3cp import inputs
from m3cp.kernels import page_read as op
from m3cp.shapes import IndexerShape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tile", [1024, 4096])
def test_every_word_is_read_once_a_mention(dtype, tile):
    pool = inputs.make_pool(IndexerShape(), dtype, "cpu", pages=9, seed=1)
    interleaved = torch.zeros(9, 2, 128, 128, dtype=dtype)
    interleaved[:, 1] = pool
    pages = torch.tensor([3, 1, 8, 8, 0, 2, 7], dtype=torch.int32)
    for cache in (pool, interleaved[:, 1]):
        for listed in (pages, pages[:0]):
            words = op._words(cache)
            out = torch.full((5,), 7, dtype=torch.int32)
            op.page_read_kernel[(5,)](
                words, listed, out, listed.numel(), words.stride(0) // 16, PAGE_WORDS=words.shape[1], TILE=tile
            )
            assert int(out.sum(dtype=torch.int64)) % 2**32 == op.checksum(cache, listed)
