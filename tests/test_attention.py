"""The eager form of sparse attention against dense attention under the same mask."""

import pytest
import torch
from attention_cases import CASES, check, check_refusals, dense, problem

from m3cp.attention import sparse_attention


@pytest.mark.parametrize("name", CASES)
def test_sparse_attention_is_dense_attention_under_the_mask(name):
    check(name)


def test_blocks_and_heads_of_64():
    check("m3", dim=64, block=64)


def test_what_does_not_fit_is_refused():
    check_refusals()


def test_no_request():
    q, k, v, table, lens, ids, _ = problem("m3")
    assert sparse_attention(q[:0], k, v, table[:0], lens[:0], ids[:, :0]).shape == (0, 64, 128)


def test_with_every_block_chosen_it_is_torchs_attention():
    q, k, v, table, lens, ids, _ = problem("one rank of four, all of topk")
    lens = lens.clamp(max=128 * 16)
    table[0, 2] = table[0, 19]  # every block names a page
    ids[0, 0] = torch.arange(16)
    pages = table[0, :16].long()
    keys, values = (c[pages].flatten(0, 1)[:, 0].float().expand(16, -1, -1) for c in (k, v))
    expect = torch.nn.functional.scaled_dot_product_attention(q[0, :, None].float(), keys, values)[:, 0]
    got = sparse_attention(q, k, v, table, lens, ids)
    assert (got[0].float() - expect).abs().max() < 2**-8 and expect.abs().max() > 0.05
    assert (dense(q, k, v, table, lens, ids, 1)[0] - expect).abs().max() < 1e-5
