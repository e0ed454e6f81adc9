"""Rows survive a disk, a crash in the middle of a line, and refuse what they are not."""

import dataclasses
import json
import resource
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
    line = (tmp_path / records.ROWS_FILE).read_bytes()
    for length in (1, 12, 300, len(line) - 1):
        with open(tmp_path / records.ROWS_FILE, "ab") as file:
            file.write(line[:length])
        before = records.load(tmp_path)
        records.append(tmp_path, row)
        assert records.load(tmp_path) == [*before, row]
    assert (tmp_path / records.ROWS_FILE).read_bytes() == line * 5


@pytest.mark.parametrize("foreign", [b"a diary", b"x" * 200_000, b'{"point": {"', b"\0" * 4096])
def test_a_foreign_file_is_left_as_it_is(tmp_path, row, foreign):
    path = tmp_path / records.ROWS_FILE
    path.write_bytes(foreign)
    with pytest.raises(ValueError, match=r"rows\.jsonl: its last line is no row"):
        records.append(tmp_path, row)
    assert path.read_bytes() == foreign


def test_rows_of_all_drivers_are_one_run(tmp_path, row):
    records.append(tmp_path / "rows.b.jsonl", row)
    grown = records.Growth(tmp_path)
    other = dataclasses.replace(row, process=1)
    records.append(tmp_path, other)
    assert records.load(tmp_path) == [other, row] and grown.look() == 1
    records.append(tmp_path / "rows.c.jsonl", row)
    records.append(tmp_path / "rows.b.jsonl", row)
    assert grown.look() == grown.look() == 3 and len(records.load(tmp_path)) == 4


def test_one_driver_a_rows_file(tmp_path, row):
    with records.locked(tmp_path):
        with pytest.raises(ValueError, match=r"rows\.jsonl: another driver is writing there.*--out"):
            with records.locked(tmp_path, patience_s=0.1):
                raise AssertionError("two drivers hold one file")
        with records.locked(tmp_path / "rows.job.jsonl", patience_s=0.1):
            records.append(tmp_path, row)
    assert [p.name for p in tmp_path.iterdir()] == [records.ROWS_FILE]  # the empty one is gone
    with records.locked(tmp_path, patience_s=0.1):
        pass
    assert records.load(tmp_path) == [row]


@pytest.mark.parametrize("room", [0, 1, 500])
def test_a_full_disk_loses_nothing(tmp_path, row, room):
    records.append(tmp_path, row)
    before = (tmp_path / records.ROWS_FILE).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, hard))
    try:
        with pytest.raises(records.CannotWrite, match=r"rows\.jsonl: can't be written: File too large"):
            records.append(tmp_path, row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / records.ROWS_FILE).read_bytes() == before


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


def test_measured_wants_the_same_code_node_and_versions(row):
    runs = {"torch": "2.11.0", "triton": "3.6.0", "nccl": "2.28.9", "matplotlib": "3.11"}
    row = dataclasses.replace(row, provenance={**row.provenance, "versions": runs})
    here = ("synthetic000", row.node, {**runs, "matplotlib": "3.12"})
    assert records.measured([row], *here) == {row.point}
    assert records.measured([row], "another", *here[1:]) == records.measured([row], here[0], "another", here[2]) == set()
    for name in ("torch", "triton", "nccl"):
        assert records.measured([row], *here[:2], {**runs, name: "9"}) == set()
        assert records.measured([row], *here[:2], {k: v for k, v in runs.items() if k != name}) == set()
    skipped = dataclasses.replace(row, status="skipped", samples_us=[])
    assert records.measured([skipped], *here) == set()


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
