"""The reference against an independent implementation: `MiniMaxM3VLIndexer` of transformers, from 5.17 on.

It works on hidden states, forces by +inf and leaves ties open, so: identity norms, projections and rotary; init = 0;
finite, exactly summable keys; and rows whose last chosen score is nobody else's. Choices are compared as sets.
"""

import pytest
import torch
from problems import build, fp64_scores, rows
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

from m3cp.reference import select_blocks
from m3cp.shapes import IndexerShape


class Columns(torch.nn.Module):
    """A projection that picks some of the hidden state's columns."""

    def __init__(self, start: int, stop: int):
        super().__init__()
        self.columns = slice(start, stop)

    def forward(self, hidden):
        return hidden[..., self.columns]


def independent(problem, request: int, length: int) -> list[list[set[int]]]:
    """[heads][rows of the request] sets of blocks, from a hidden state that holds queries and keys side by side."""
    shape = problem.shape
    config = modeling.MiniMaxM3VLTextConfig(
        hidden_size=(shape.heads + 1) * shape.head_dim, index_n_heads=shape.heads, index_head_dim=shape.head_dim,
        index_block_size=shape.block_size, index_topk_blocks=shape.topk, index_local_blocks=shape.local_blocks,
    )  # fmt: skip
    indexer = modeling.MiniMaxM3VLIndexer(config, 0)
    split = shape.heads * shape.head_dim
    indexer.q_proj, indexer.k_proj = Columns(0, split), Columns(split, split + shape.head_dim)
    indexer.q_norm, indexer.k_norm = torch.nn.Identity(), torch.nn.Identity()
    pages = problem.block_table[request, : shape.blocks(length)].long()
    hidden = torch.zeros(1, length, split + shape.head_dim)
    hidden[0, :, split:] = problem.cache[pages].float().flatten(0, 1)[:length]
    mine = problem.q[request * problem.query_len : (request + 1) * problem.query_len].float()
    hidden[0, -problem.query_len :, :split] = mine.flatten(1)
    rotary = torch.ones(1, length, shape.head_dim), torch.zeros(1, length, shape.head_dim)
    with torch.no_grad():
        ids = indexer(hidden, rotary, None, torch.arange(length)[None])[0, :, -problem.query_len :]
    return [[set(row) - {-1} for row in head] for head in ids.tolist()]


@pytest.mark.parametrize(
    "heads, topk, local, block, dim", [(4, 16, 1, 128, 128), (1, 4, 2, 128, 128), (8, 5, 0, 64, 64), (2, 12, 3, 64, 128)]
)
def test_choices_agree_as_sets(heads, topk, local, block, dim):
    shape = IndexerShape(heads=heads, head_dim=dim, block_size=block, topk=topk, local_blocks=local)
    lengths = [block * (topk + 7) - 3, block * (topk + 2) + 2, block * 3 + 1]
    problem = build(shape, lengths, 4, seed=heads)
    ids = select_blocks(*problem.tensors, shape=shape, query_len=4).tolist()
    scores, seen = fp64_scores(problem), rows(problem)
    compared = 0
    for request, length in enumerate(lengths):
        other = independent(problem, request, length)
        for row in range(4):
            token = request * 4 + row
            visible = shape.blocks(seen[token])
            for head in range(heads):
                free = sorted(scores[token, head, : max(0, visible - local)], reverse=True)
                last = min(topk, visible) - min(local, visible)
                if 0 < last < len(free) and free[last - 1] == free[last]:
                    continue  # a tie at the edge: either choice is right there
                assert set(ids[head][token]) - {-1} == other[head][row], (request, row, head)
                compared += 1
    assert compared >= 0.8 * heads * 4 * len(lengths)
