"""The sweep notebook under papermill: typed parameters in, checked rows out, failures that can't exit 0 (P02, B06)."""

import re
import shutil

import nbformat
import notebook_cells
import pytest
import yaml

from m3cp import notebook, records, sweep
from m3cp.explore import State
from m3cp.shapes import Point

SMALL = {
    "contexts": [3072],
    "batches": [2],
    "worlds": [1, 2],
    "arms": ["tp", "cp", "page_read"],
    "queries": ["gathered"],
    "cache": "warm",
    "device": "cpu",
}


def text(path):
    book = nbformat.read(str(path), as_version=4)
    return "\n".join(
        str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", ""))
        for c in book.cells
        if c.cell_type == "code"
        for o in c.outputs
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The executed notebook of SMALL, and its run."""
    folder = tmp_path_factory.mktemp("measured")
    run = folder / "run"
    given = {**SMALL, "out": str(run)}
    return notebook.run_notebook("10_sweep", given, folder / "out.ipynb", expect=[run / records.ROWS_FILE], progress=False), run


def test_parameters_become_rows(measured):
    book, run = measured
    rows = records.load(run)
    assert {(r.point.arm, r.point.world) for r in rows} == {
        ("tp", 1),
        ("tp", 2),
        ("cp", 2),
        ("page_read", 1),
        ("page_read", 2),
    }
    assert all(r.status == "ok" and r.check["passed"] and r.point.cache == "warm" for r in rows)
    said = text(book)
    assert "5 rows, every check passed" in said and "cp/staged/collective/gathered 3k x2 P=2 warm" in said
    assert "max_context           0" in said  # the resolved table


def test_a_state_of_the_explorer_becomes_its_rows(tmp_path, measured, capsys):
    """Its Points are some of SMALL's, which the same run holds already: a Point of its own would be measured, and found there.

    That papermill takes the exported file as it is, 20_crossover's test sees.
    """
    run = tmp_path / "run"
    shutil.copytree(measured[1], run)
    exported = yaml.safe_load(State("elsewhere", context_tokens=3072, batch=2, way="staged/collective", exchange_us=3.0).to_yaml())
    names = notebook_cells.run("10_sweep", "resolve", "points", "measure", "summary", "complete", device="cpu", cache="warm", out=str(run), **exported)
    said = capsys.readouterr().out
    assert [r.point for r in records.load(run)] == [r.point for r in records.load(measured[1])]
    assert "4 Points on cpu" in said and "4 rows, every check passed" in said
    assert {(r.point.arm, r.point.world) for r in names["rows"]} == {("tp", 2), ("cp", 2), ("page_read", 1), ("page_read", 2)}
    with pytest.raises(ValueError, match="batch=3"):
        notebook_cells.run("10_sweep", "resolve", "points", state={"batch": 3})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batchs": [1]}, "batchs.*has none of that name"),
        ({"context": [1]}, "context.*has none of that name"),
    ],
)
def test_a_misspelt_parameter_is_refused_before_anything_starts(tmp_path, given, words):
    with pytest.raises(ValueError, match=words):
        notebook.run_notebook("10_sweep", given, tmp_path / "out.ipynb")
    assert not list(tmp_path.iterdir())


def test_bad_values_fail_the_notebook(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(notebook.NotebookFailed, match="batches.0=.*valid integer"):
        notebook.run_notebook("10_sweep", {**SMALL, "out": str(run), "batches": ["four"]}, tmp_path / "out.ipynb", progress=False)
    with pytest.raises(ValueError, match="arms='tq'"):
        notebook_cells.run("10_sweep", "resolve", "points", **{**SMALL, "out": str(run), "arms": ["tq"]})
    assert not run.exists()


def test_a_point_that_failed_fails_the_notebook_after_its_table(tmp_path, monkeypatch, capsys):
    """P02, B06: the sweep's process may end as it likes; rows decide."""
    stub = tmp_path / "stub" / "sitecustomize.py"
    stub.parent.mkdir()
    stub.write_text(
        "import sys\n"
        "if sys.argv[:1] == ['-m'] or any('m3cp.worker' in a for a in sys.orig_argv):\n"
        "    import m3cp.inputs, torch\n"
        "    m3cp.inputs.make_pool = lambda shape, dtype, device, *, pages, seed: torch.zeros(pages, 128, 128, dtype=dtype)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(stub.parent))
    run = tmp_path / "run"
    given = {**SMALL, "worlds": [1], "arms": ["tp"], "out": str(run)}
    with pytest.raises(sweep.WorkersFailed, match="1 Points failed, 0 were not reached.*cache is constant"):
        notebook_cells.run("10_sweep", "resolve", "points", "measure", "summary", "complete", **given)
    (row,) = records.load(run)
    assert row.status == "failed" and re.search("failed .*cache is constant", capsys.readouterr().out), "the table comes first"


POINT = Point(3072, 2, form="staged", max_context=4096, launch="eager")


def row(status, **changes):
    return records.Row(POINT, status, "tp", "cpu", 1, **changes)


def test_complete_means_measured_or_skipped_and_something_measured():
    ok = row("ok", samples_us=[1.0], check={"passed": True, "rows": 3})
    sweep.require_complete([POINT], [ok])
    for rows, words in (
        ([], "1 were not reached"),
        ([row("failed", error="out of memory")], "1 Points failed.*out of memory"),
        ([row("skipped", error="needs 4 GPUs, found 2")], "nothing was measured: needs 4 GPUs"),
    ):
        with pytest.raises(sweep.WorkersFailed, match=words):
            sweep.require_complete([POINT], rows)
    other = POINT.replace(batch=3)
    sweep.require_complete([POINT, other], [ok, records.Row(other, "skipped", "tp", "cpu", 1, error="why")])
    table = sweep.summary([POINT, other], [ok])
    assert list(table["status"]) == ["ok", "not reached"] and table["median_us"].iloc[0] == 1.0


def test_a_sweep_process_that_breaks_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.sys, "executable", "/bin/false")
    with pytest.raises(sweep.WorkersFailed, match="exit status 1, 1 Points have no row: it said nothing"):
        sweep.in_subprocess([POINT], device="cpu", out=tmp_path)
