"""One integer order: keys sort as the contract ranks blocks, and give back the block."""

import math
import struct

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from m3cp import keys

scores = st.floats(width=32, allow_nan=False)
blocks = st.integers(0, keys.MAX_BLOCKS - 1)


def code(value: float) -> int:
    return int(keys.order_code(torch.tensor([value], dtype=torch.float32)))


def key(value: float, block: int, visible: int, init: int = 0, local: int = 0) -> int:
    made = keys.encode(torch.tensor([code(value)]), torch.tensor([block]), torch.tensor([visible]), init, local)
    return int(made)


@given(scores, scores)
@example(-0.0, 0.0)
@example(math.inf, 3.4028234663852886e38)
@example(-math.inf, -3.4028234663852886e38)
@example(1e-45, 0.0)
def test_codes_order_as_scores_do(a, b):
    assert (code(a) < code(b)) == (a < b)
    assert (code(a) == code(b)) == (a == b)
    assert 0 <= code(a) < 2**32


@given(st.integers(0, 2**32 - 2))
def test_neighbouring_floats_have_neighbouring_codes(bits):
    a, b = (struct.unpack("f", struct.pack("I", x))[0] for x in (bits, bits + 1))
    if not (math.isnan(a) or math.isnan(b)) and bits not in (0x7FFFFFFF, 0x80000000):
        assert abs(code(a) - code(b)) == (1 if bits < 0x7FFFFFFF or bits > 0x80000000 else 0)


row = st.tuples(st.integers(1, 2**24), st.integers(0, 40), st.integers(0, 40))


@settings(max_examples=300)
@given(
    row, st.lists(st.tuples(scores, st.integers(0, 2**24 - 1)), min_size=1, max_size=12, unique_by=lambda pair: pair[1])
)
def test_sorting_keys_is_the_selection_order(row, entries):
    visible, init, local = row
    entries = [(score, block % visible) for score, block in entries]
    entries = list({block: (score, block) for score, block in entries}.values())

    def rank(entry):
        score, block = entry
        if block < init:
            return (3, 0, -block)
        if block >= visible - local:
            return (2, 0, -block)
        return (1, score, -block)

    made = {key(score, block, visible, init, local): (score, block) for score, block in entries}
    assert len(made) == len(entries), "keys of different blocks differ"
    assert [made[k] for k in sorted(made)] == sorted(entries, key=rank)
    for k, (_, block) in made.items():
        assert k > keys.EMPTY and int(keys.block_of(torch.tensor([k]))) == block


@given(scores, blocks, st.integers(0, keys.MAX_BLOCKS))
def test_what_is_not_visible_is_empty(score, block, visible):
    k = key(score, block, visible, init=3, local=2)
    assert (k == keys.EMPTY) == (block >= visible)
    assert int(keys.block_of(torch.tensor([k]))) == (block if block < visible else -1)


def test_forcing_is_a_rank_not_a_number():
    best = key(math.inf, 50, 100)
    assert key(-math.inf, 99, 100, local=1) > best
    assert key(-math.inf, 0, 100, init=1, local=1) > key(math.inf, 99, 100, init=1, local=1)
    assert key(-math.inf, 50, 100) > keys.EMPTY


def test_every_block_id_of_the_longest_context_comes_back():
    for block in (0, 65_534, 65_535, 65_536, 2**24 - 1, 2**24, 2**25 - 1, 2**28 - 1):
        assert int(keys.block_of(torch.tensor([key(1.0, block, block + 1)]))) == block
        assert int(keys.block_of(torch.tensor([key(-math.inf, block, block + 1)]))) == block


def test_equal_scores_go_by_lower_id():
    assert key(-0.0, 3, 10) > key(0.0, 5, 10)
    assert key(0.0, 3, 10) > key(-0.0, 5, 10)
