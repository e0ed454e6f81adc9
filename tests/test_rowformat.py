"""Rows as an open format: what the page says, what the validator refuses, and what other readers make of a run."""

import json
import re

import pytest
import synthetic
from typer.testing import CliRunner

from m3cp import cli, frames, records, rowformat
from m3cp.shapes import IndexerShape, Point

PAGE = (frames.ROOT / "data" / "README.md").read_text()


@pytest.fixture
def run(tmp_path):
    rows = synthetic.rows(contexts=(8192, 32768), batches=(1, 8))
    rows += [records.Row(rows[0].point, "skipped", "tp", "here", 0, error="needs 4 GPUs, found 2")]
    for row in rows:
        records.append(tmp_path, row)
    return tmp_path, rows


@pytest.mark.parametrize(("title", "cls"), [("A row", records.Row), ("`point`", Point), ("`point.shape`", IndexerShape)])
def test_the_page_documents_every_field_with_its_type(title, cls):
    part = PAGE.split(f"### {title}\n")[1].split("\n### ")[0]
    told = {name: kind for name, kind, meaning in re.findall(r"^\| `(\w+)` \| ([^|]+) \| (.+) \|$", part, re.M) if meaning.strip()}
    assert told == {name: rowformat.words(kind) for name, kind in rowformat.fields(cls).items()}
    assert f"schema {records.SCHEMA}" in PAGE


def test_what_is_recorded_is_valid():
    for folder in sorted((frames.ROOT / "data" / "measured").iterdir()):
        counts, found = rowformat.check(folder)
        assert found == [] and counts["ok"] > 0, folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(schema=2), "schema=2: this version reads rows of schema 1; a newer m3cp wrote it"),
        (lambda v: v.update(schema=0), "schema=0: .*; there was none before 1"),
        (lambda v: v.pop("ranks"), "ranks: missing"),
        (lambda v: v.update(colour="red"), "colour: not a field of schema 1"),
        (lambda v: v.update(caches=1.5), "caches=1.5: must be integer"),
        (lambda v: v.update(unsteady=1), "unsteady=1: must be boolean"),
        (lambda v: v.update(samples_us=["1"]), "samples_us=.*: must be list of numbers"),
        (lambda v: v["point"].update(batch="two"), "point.batch='two': must be integer"),
        (lambda v: v["point"].update(arm="tq"), "arm='tq'"),
        (lambda v: v["point"]["shape"].pop("topk"), "point.shape.topk: missing"),
        (lambda v: v.update(check={"passed": False}), "passed check"),
        (lambda v: v.update(samples_us=[x * 2 for x in v["samples_us"]]), "a sample that is not the slowest rank's"),
        (lambda v: v.update(point=[]), r"point=\[\]: must be object"),
    ],
)
def test_the_validator_names_what_is_wrong(run, change, words):
    folder, rows = run
    assert rowformat.check(folder)[1] == []
    values = json.loads(json.dumps(rows[0].to_dict()))
    change(values)
    assert any(re.search(words, fault) for fault in rowformat.faults(values)), rowformat.faults(values)
    with open(folder / records.ROWS_FILE, "a") as file:
        file.write(json.dumps(values) + "\n")
    done = CliRunner().invoke(cli.app, ["rows", str(folder)])
    assert done.exit_code == 1 and f"rows.jsonl, line {len(rows) + 1}: " in done.output


def test_parquet_holds_every_field(run, tmp_path):
    import duckdb
    import pandas

    folder, rows = run
    file = tmp_path / "rows.parquet"
    done = CliRunner().invoke(cli.app, ["rows", str(folder), "--parquet", str(file)])
    assert done.exit_code == 0 and f"{len(rows)} rows in" in done.output and "8 ok, 1 skipped" in done.output
    assert rowformat.from_parquet(file) == rows
    assert pandas.read_parquet(file)["median_us"].iloc[0] == rows[0].median_us
    assert duckdb.sql(f"SELECT arm, context_tokens, shape_topk, list_max(samples_us) FROM '{file}'").fetchall()[0] == (
        "tp", 8192, 16, max(rows[0].samples_us),
    )  # fmt: skip


def test_other_readers_need_one_line(run):
    import duckdb
    import pandas

    folder, rows = run
    file = folder / records.ROWS_FILE
    assert list(pandas.read_json(file, lines=True)["status"]) == [r.status for r in rows]
    found = duckdb.sql(f"SELECT point.arm, point.context_tokens, list_median(samples_us) FROM '{file}'").fetchall()
    assert found[0][:2] == ("tp", 8192) and found[0][2] == pytest.approx(rows[0].median_us)
