"""Predictions for four ranks, made from rows of two and compared with a later run of a synthetic node."""

import json

import pytest
import synthetic

from m3cp import predictions, records

CONTEXTS, BATCHES = (4096, 8192, 16_384, 32_768, 65_536, 131_072), (1, 2, 8, 32)
GRID = {"worlds": [4], "contexts": [8192, 32_768, 131_072], "batches": [1, 8, 32], "forms": ["one_launch"], "exchanges": ["symmetric"],
        "queries": ["gathered"], "max_context": 2**20}  # fmt: skip


def node(folder, world, slower=1.0):
    """A run of the synthetic node; CP's rows `slower` than its truth."""
    rows = synthetic.rows(
        synthetic.FUSED_TP, synthetic.FUSED_CP, contexts=CONTEXTS, batches=BATCHES, world=world, form="one_launch", noise=0.002,
        provenance=synthetic.PROVENANCE, timed_region=["decode"],
    )  # fmt: skip
    for row in rows:
        if row.point.arm == "cp":
            row.samples_us[:] = [s * slower for s in row.samples_us]
    folder.mkdir()
    records.append(folder / records.ROWS_FILE, *rows)
    return str(folder)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """A file made from rows of two ranks, and what making it said."""
    folder = tmp_path_factory.mktemp("predictions")
    file = folder / "four.json"
    return file, predictions.make(node(folder / "two", 2), GRID, file)


def test_four_ranks_come_out_as_predicted_from_two(predicted, tmp_path):
    file, said = predicted
    assert said[0].startswith("18 of 18 Points predicted from two") and "peers assumed 0.3" in said[1]
    lines = predictions.against(file, node(tmp_path / "four", 4))
    summary = [line for line in lines if line.startswith(("| tp ", "| cp ")) and " of 9 |" in line]
    assert len(summary) == 2 and all("9 of 9" in line for line in summary), summary
    assert sum(line.startswith("| 8k, 1 |") for line in lines) == 2
    assert lines[0].startswith("Predicted 20") and "from two (commit synthetic), measured by four" in lines[0]


def test_a_node_that_is_otherwise_is_said_to_be(predicted, tmp_path):
    lines = predictions.against(predicted[0], node(tmp_path / "four", 4, slower=1.6))
    (cp,) = [line for line in lines if line.startswith("| cp ") and " of 9 |" in line]
    worst = float(cp.split(" | ")[3].rstrip("%"))
    assert "| 0 of 9 |" in cp and 40 < worst < 62, cp
    assert sum("outside" in line for line in lines) == 9


def test_predictions_are_not_changed_afterwards(predicted, tmp_path):
    file, _ = predicted
    before = file.read_bytes()
    with pytest.raises(ValueError, match="not changed afterwards"):
        predictions.make("h200x2", GRID, file)
    assert file.read_bytes() == before
    with pytest.raises(ValueError, match="rows of"):
        predictions.make(node(tmp_path / "two", 2), GRID | {"query_lens": [4]}, tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()
    with pytest.raises(ValueError, match=r"measured Points of four\.json"):
        predictions.against(file, str(tmp_path / "two"))
    other = tmp_path / "newer.json"
    other.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 2}))
    with pytest.raises(ValueError, match="schema=2: must be 1"):
        predictions.against(other, str(tmp_path / "two"))


def test_the_recorded_predictions_are_of_four_ranks_and_can_be_read():
    """They stand in the repository before anybody ran on four GPUs."""
    (file,) = (records.PACKAGE.parent / "data" / "predictions").glob("*.json")
    said = json.loads(file.read_text())
    points = [predictions.Point.from_dict(p["point"]) for p in said["predictions"]]
    assert len(points) > 100 and {p.world for p in points} == {4} and all(p["low_us"] <= p["us"] <= p["high_us"] for p in said["predictions"])
