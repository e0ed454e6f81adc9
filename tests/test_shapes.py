"""Shapes and Points refuse what they cannot be, by name."""

import pytest

from m3cp.shapes import IndexerShape, Point


@pytest.mark.parametrize(
    "change, named",
    [
        ({"heads": 0}, "heads=0"),
        ({"heads": True}, "heads=True"),
        ({"head_dim": 96}, "head_dim=96: must be 64 or 128"),
        ({"block_size": 256}, "block_size=256: must be 64 or 128"),
        ({"block_size": 1}, "block_size=1"),
        ({"topk": 0}, "topk=0: must be an integer from 1 to 64"),
        ({"topk": -1}, "topk=-1"),
        ({"topk": 65}, "topk=65"),
        ({"topk": 16.0}, "topk=16.0"),
        ({"init_blocks": -1}, "init_blocks=-1"),
        ({"local_blocks": 2**24}, "local_blocks=16777216"),
    ],
)
def test_shapes_name_what_is_wrong(change, named):
    with pytest.raises(ValueError, match=named.replace("*", r"\*")):
        IndexerShape(**change)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"context_tokens": 0}, "context_tokens=0"),
        ({"context_tokens": 300_000}, "max_context=262144"),
        ({"batch": 0}, "batch=0"),
        ({"query_len": 9}, "query_len=9"),
        ({"dtype": "fp8"}, "dtype='fp8'"),
        ({"arm": "cp"}, "exchange=None: must be one of collective, symmetric"),
        ({"arm": "tp", "form": "staged", "queries": "gathered"}, "queries='gathered'"),
        ({"arm": "cp", "form": "one_launch", "exchange": "collective", "queries": "gathered"}, "exchange='collective'"),
        ({"arm": "tp", "form": "staged", "threshold_blocks": 3}, "threshold_blocks=3"),
        ({"max_context": 2**31}, "max_context=2147483648"),
    ],
)
def test_points_name_what_is_wrong(change, named):
    with pytest.raises(ValueError, match=named):
        Point(**({"context_tokens": 1024, "batch": 1, "form": "staged"} | change))


def test_a_point_survives_the_round_trip():
    point = Point(
        8192,
        4,
        arm="cp",
        form="staged",
        exchange="collective",
        queries="replicated",
        shape=IndexerShape(topk=8),
        world=4,
    )
    assert Point.from_dict(point.to_dict()) == point
    assert len({point, point.replace(seed=1), Point.from_dict(point.to_dict())}) == 2
