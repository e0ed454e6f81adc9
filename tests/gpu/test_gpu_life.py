"""Failures from life on one GPU, at full size."""

import pytest
from life import CASES_FROM_LIFE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES_FROM_LIFE, ids=lambda f: f.__name__)
def test_life(case):
    case("cuda")
