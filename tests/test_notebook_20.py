"""The crossover notebook under papermill, and the driver that believes results and not exit codes (cases P02, P06)."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import notebook_cells
import pytest
import synthetic

from m3cp import notebook, records
from m3cp.explore import State

NOTEBOOK = notebook.FOLDER / "20_crossover.ipynb"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "synthetic-run"
    for row in synthetic.rows(contexts=(1024, 8192, 32_768, 131_072), batches=(1, 8), noise=0.01):
        records.append(folder, row)
    return folder


def outputs(path):
    book = nbformat.read(str(path), as_version=4)
    return "\n".join(
        str(o.get("text", "")) + json.dumps(o.get("data", {}).get("text/plain", "")) + str(o.get("data", {}).get("text/html", ""))
        for c in book.cells
        if c.cell_type == "code"
        for o in c.outputs
    )


def test_it_runs_headless_and_without_ipywidgets(run, tmp_path, monkeypatch):
    """Case P06: every conclusion is a static figure or table; a run without ipywidgets passes and says so."""
    blocked = tmp_path / "blocked" / "ipywidgets"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('blocked by a test')\n")
    monkeypatch.setenv("PYTHONPATH", str(blocked.parent))
    figures = tmp_path / "figures"
    wanted = [
        figures / f"{name}.{ending}"
        for name in ("crossover_break_even", "crossover_map", "published_map", "crossover_explorer", "crossover_curves_p2_bf16_uniform_q1_cold_graph")
        for ending in ("svg", "png")
    ]
    opened = State("synthetic-run", way="staged/collective", batch=1, context_tokens=131_072, exchange_us=4.0)
    file, done = tmp_path / "state.yaml", tmp_path / "out.ipynb"
    file.write_text(opened.to_yaml())  # what the explorer exports
    given = [word for name, value in (("run", run), ("compare", run), ("figures", figures)) for word in ("-r", name, str(value))]
    command = [sys.executable, "-m", "papermill", str(NOTEBOOK), str(done), "-f", str(file), *given, "--no-progress-bar"]
    ended = subprocess.run(command, cwd=notebook.FOLDER.parent, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    notebook.check_executed(done)
    assert sorted(figures.iterdir()) == sorted(wanted)
    said = outputs(done)
    for words in (
        "ipywidgets is not installed",
        "figures  '",
        "about context",
        "at batch 8",
        "none in range",
        "57 sparse layers",
        "GB/s of memory",
        "what-if difference",
        "minimax_m3_indexer_cp",
    ):
        assert words in said, words
    book = nbformat.read(str(done), as_version=4)
    pictures = [
        o for c in book.cells if c.cell_type == "code" for o in c.outputs if "image/svg+xml" in o.get("data", {})
    ]
    assert len(pictures) == 5


def test_a_misspelt_parameter_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="runn.*has none of that name.*run, compare, figures, state"):
        notebook.run_notebook("20_crossover", {"runn": "x"}, tmp_path / "out.ipynb")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "words"), [({"figurs": "x"}, "figurs.*extra inputs"), ({"state": {"contexts": 8192}}, "contexts.*context_tokens")], ids=str
)
def test_a_misspelt_parameter_and_a_state_with_a_typo_fail_past_the_driver_too(run, given, words):
    with pytest.raises(ValueError, match=words):
        notebook_cells.run("20_crossover", "resolve", run=str(run), **given)


def test_the_page_is_the_notebook_without_what_is_static(tmp_path):
    path = notebook.page("20_crossover", tmp_path / "pages")
    page, book = (nbformat.read(str(p), as_version=4) for p in (path, NOTEBOOK))
    sources = [c.source for c in page.cells if c.cell_type == "code"]
    whole = [c.source for c in book.cells if c.cell_type == "code"]
    assert len(sources) < len(whole) and all(s.removeprefix("%%capture\n") in whole for s in sources)
    assert "widgets.explorer" in sources[-1] and not any("plots." in s for s in sources)
    with pytest.raises(ValueError, match="no cell tagged 'static'"):
        notebook.page("10_sweep", tmp_path)
    with pytest.raises(ValueError, match="name='21_x'.*20_crossover"):
        notebook.page("21_x", tmp_path)


def small(folder, *cells, parameters="a: int = 1"):
    """A notebook of the given code cells behind a parameters cell."""
    book = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    book.cells = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]} if parameters else {})]
    book.cells += [nbformat.v4.new_code_cell(c) for c in cells]
    path = Path(folder) / "small.ipynb"
    nbformat.write(book, str(path))
    return str(path)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit(0)", "SystemExit|completed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "DeadKernelError"),
        ("raise ValueError('seven')", "seven"),
    ],
)
def test_failures_that_may_exit_0(tmp_path, code, words):
    path = small(tmp_path, code, "b = 2")
    with pytest.raises(notebook.NotebookFailed, match=words):
        notebook.run_notebook(path, {}, tmp_path / "out.ipynb", progress=False)


def test_a_result_must_exist_and_be_new(tmp_path):
    path = small(tmp_path, "b = 2")
    old, empty = tmp_path / "old.svg", tmp_path / "empty.svg"
    old.write_text("x")
    import os

    os.utime(old, (1, 1))
    empty.write_text("")
    monkey = {old: "older than this run", empty: "is empty", tmp_path / "none.svg": "without writing"}
    real = notebook.check_executed
    for file, words in monkey.items():
        with pytest.raises(notebook.NotebookFailed, match=words):
            with pytest.MonkeyPatch.context() as patch:  # the kernel's work is not what is tested here
                import papermill

                patch.setattr(papermill, "execute_notebook", lambda *a, **k: None)
                patch.setattr(notebook, "check_executed", lambda p: None)
                notebook.run_notebook(path, {"a": 2}, tmp_path / "out.ipynb", expect=[file], progress=False)
    assert real is notebook.check_executed


def test_pending_cells_are_not_completed(tmp_path):
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("1", metadata={"papermill": {"status": "pending"}})]
    )
    nbformat.write(book, str(tmp_path / "x.ipynb"))
    with pytest.raises(notebook.NotebookFailed, match="'pending'"):
        notebook.check_executed(tmp_path / "x.ipynb")
    book.cells[0].metadata["papermill"] = {"status": "completed", "exception": True}
    nbformat.write(book, str(tmp_path / "x.ipynb"))
    with pytest.raises(notebook.NotebookFailed):
        notebook.check_executed(tmp_path / "x.ipynb")


def test_notebooks_without_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no cell tagged 'parameters'"):
        notebook.run_notebook(small(tmp_path, "1", parameters=""), {}, tmp_path / "out.ipynb")
    with pytest.raises(ValueError, match="20_crossover"):
        notebook.run_notebook("21_crossover", {}, tmp_path / "out.ipynb")


class Settings(notebook.Parameters):
    count: int
    name: str = "x"


def test_resolve_prints_the_table(capsys):
    found = notebook.resolve(
        Settings, {"count": 3, "__name__": "__main__", "In": [""], "Out": {}, "exit": object(), "pytest": pytest}
    )
    assert found == Settings(count=3)
    assert capsys.readouterr().out == "count  3\nname   'x'\n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"count": 1, "cuont": 2}, "cuont=2: extra inputs are not permitted.*allowed: count: int, name: str"),
        ({"count": "1"}, "count='1'.*valid integer"),
        ({"count": True}, "count=True"),
        ({}, "count=None: field required"),
        ({"count": 1, "extra": None}, "extra"),
    ],
)
def test_resolve_refuses(given, words):
    with pytest.raises(ValueError, match=words):
        notebook.resolve(Settings, given)


def test_the_file_is_clean():
    """No outputs, no counts, a python3 kernel, literals in the parameters cell, short cells."""
    import ast

    book = nbformat.read(str(NOTEBOOK), as_version=4)
    assert book.metadata.kernelspec.name == "python3" and "widgets" not in book.metadata
    assert len({c.id for c in book.cells}) == len(book.cells)
    code = [c for c in book.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None and len(c.source.splitlines()) <= 12 for c in code)
    (cell,) = [c for c in code if "parameters" in c.metadata.get("tags", [])]
    for statement in ast.parse(cell.source).body:
        ast.literal_eval(statement.value)
