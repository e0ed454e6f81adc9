"""Failures from life that are small enough for the interpreter."""

import life
import pytest

pytestmark = pytest.mark.usefixtures("short_waits")
SMALL = [
    life.k02_lengths_include_the_draft_tokens,
    life.k13_a_draft_token_is_seen_from_its_own_row_on,
    life.x07_fewer_candidates_than_topk,
    life.n02_zeros_of_both_signs_are_one_score,
    life.m01_pages_beyond_two_to_the_31_elements,
]


@pytest.mark.parametrize("case", SMALL, ids=lambda f: f.__name__)
def test_life(case, monkeypatch):
    monkeypatch.setattr(life, "WORLDS", (2,))
    case()
