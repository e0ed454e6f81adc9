"""Rows survive a disk, a crash in the middle of a line, and refuse what they are not."""

import dataclasses
import json
import shutil
import subprocess

import pytest
import synthetic

from m3cp import records
from m3cp.shapes import Point


@pytest.fixture
def row():
    return synthetic.rows(contexts=(8192,), batches=(8,))[0]


def test_round_trip(tmp_path, row):
    for _ in range(3):
        records.append(tmp_path / "run", row)
    assert records.load(tmp_path / "run") == [row] * 3
    assert records.load(tmp_path / "run" / records.ROWS_FILE, tmp_path / "run") == [row] * 6


def test_a_torn_last_line_is_left_out_and_then_cut(tmp_path, row):
    records.append(tmp_path, row)
    with open(tmp_path / records.ROWS_FILE, "a") as file:
        file.write('{"point": {"context_tok')
    assert records.load(tmp_path) == [row]
    records.append(tmp_path, row)
    assert records.load(tmp_path) == [row, row]


def test_a_bad_line_is_named(tmp_path, row):
    records.append(tmp_path, row)
    with open(tmp_path / records.ROWS_FILE, "a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: schema=None"):
        records.load(tmp_path)


def test_unknown_fields_and_schemas_are_refused(row):
    values = json.loads(json.dumps(row.to_dict()))
    assert records.Row.from_dict(values) == row
    with pytest.raises(ValueError, match="meaning_of_life"):
        records.Row.from_dict({**values, "meaning_of_life": 42})
    with pytest.raises(ValueError, match="schema=99"):
        records.Row.from_dict({**values, "schema": 99})
    with pytest.raises(TypeError, match="colour"):
        records.Row.from_dict({**values, "point": {**values["point"], "colour": "red"}})


def test_a_missing_run_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="m3cp sweep"):
        records.load(tmp_path / "nowhere")


def test_a_wrong_answer_never_gets_a_time(row):
    with pytest.raises(ValueError, match="passed check"):
        dataclasses.replace(row, check={"passed": False, "mismatches": 3})
    with pytest.raises(ValueError, match="samples_us"):
        dataclasses.replace(row, samples_us=[])
    failed = dataclasses.replace(row, status="failed", samples_us=[], check={}, error="out of memory")
    assert failed.median_us != failed.median_us


def test_the_median_of_slowest_ranks():
    """Case B04: rank r takes 20 us at iteration r, 10 us otherwise; the sample is each round's maximum."""
    ranks = [[20.0 if i == r else 10.0 for i in range(5)] for r in range(4)]
    samples = [max(column) for column in zip(*ranks, strict=True)]
    made = synthetic.row(
        Point(8192, 1, world=4, form="staged"),
        1.0,
        synthetic.np.random.default_rng(0),
        samples_us=samples,
        rank_samples_us=ranks,
    )
    assert samples == [20, 20, 20, 20, 10] and made.median_us == 20


def test_measured_wants_the_same_code_and_node(row):
    assert records.measured([row], "synthetic000", row.node) == {row.point}
    assert records.measured([row], "another", row.node) == set()
    assert records.measured([row], "synthetic000", "another") == set()
    assert (
        records.measured([dataclasses.replace(row, status="skipped", samples_us=[])], "synthetic000", row.node) == set()
    )


def test_frame_keeps_every_field(row):
    frame = records.frame([row])
    assert frame["median_us"].iloc[0] == row.median_us
    assert {f.name for f in dataclasses.fields(Point)} <= set(frame.columns)


def test_the_code_hash_covers_the_measuring_path(tmp_path, monkeypatch):
    names = [tmp_path / n for n in ("shapes.py", "sweep.py")]
    for path in names:
        path.write_text("a = 1\n")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "score.py").write_text("b = 1\n")
    monkeypatch.setattr(records, "PACKAGE", tmp_path)
    monkeypatch.setattr(records, "MEASURING", ("shapes.py", "kernels", "sweep.py"))
    first = records.code_hash()
    (tmp_path / "README.md").write_text("changed")
    assert records.code_hash() == first
    (tmp_path / "kernels" / "score.py").write_text("b = 2\n")
    assert records.code_hash() != first


def test_the_code_version_of_a_commit_is_that_of_its_files(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", tmp_path, *words], check=True, capture_output=True)

    package = tmp_path / "m3cp"
    shutil.copytree(records.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(records, "PACKAGE", package)
    git("init", "-q"), git("add", "."), git("commit", "-qm", "one")
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert records.committed_hash(head) == records.code_hash()
    (package / "plots.py").write_text("")  # not on the measuring path
    assert records.committed_hash(head) == records.code_hash()
    (package / "kernels" / "score.py").write_text("")
    assert records.committed_hash(head) != records.code_hash()
    assert records.committed_hash("0" * 40) is None and records.committed_hash("--output=x") is None
