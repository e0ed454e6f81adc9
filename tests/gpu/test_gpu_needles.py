"""Needles on a GPU, in contexts to 1M tokens."""

import pytest
import torch
from needles import DEPTHS, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("context", [131_072, 1_048_576])
@pytest.mark.parametrize("world, query_len", [(1, 1), (2, 4), (4, 1), (8, 4)])
def test_needles_at_every_depth(context, world, query_len):
    for depth in DEPTHS:
        check(world=world, query_len=query_len, depth=depth, blocks=context // 128, topk=16, device="cuda")
        check(world=world, query_len=query_len, depth=depth, blocks=context // 128, topk=16, device="cuda", form="two_launch", attend=False)
        torch.cuda.empty_cache()
    check(world=world, query_len=query_len, depth=0.5, local=0, blocks=context // 128, topk=16, device="cuda")
    if world <= 4:
        check(world=world, query_len=query_len, depth=0.5, blocks=context // 128, topk=16, device="cuda", path="tp")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_needles_by_type(dtype):
    check(world=2, query_len=4, depth=0.5, blocks=1024, topk=16, device="cuda", dtype=dtype)
