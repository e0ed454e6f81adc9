"""The node check: curves, latencies and checks from real workers, and its notebook under papermill."""

import ast
import json

import nbformat
import pytest

from m3cp import doctor, node_check, notebook, sweep

NOTEBOOK = notebook.FOLDER / "00_node_check.ipynb"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The executed notebook and what it wrote, quick, over one and two ranks and one world that can't fit."""
    folder = tmp_path_factory.mktemp("node")
    figures = folder / "figures"
    wanted = [figures / f"{n}.{e}" for n in ("node_bandwidth", "node_collectives") for e in ("svg", "png")]
    worlds = [1, 2, 1024]
    book = notebook.run_notebook(
        "00_node_check",
        {"device": "cpu", "worlds": worlds, "quick": True, "out": str(folder), "figures": str(figures)},
        folder / "out.ipynb",
        expect=[*wanted, folder / node_check.RESULT_FILE],
        progress=False,
    )
    return nbformat.read(str(book), as_version=4), json.loads((folder / node_check.RESULT_FILE).read_text())


def text(book):
    return "\n".join(
        str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", ""))
        for c in book.cells
        if c.cell_type == "code"
        for o in c.outputs
    )


def test_every_path_was_checked(done):
    book, found = done
    paths = {(c["world"], c["path"], c["queries"]) for c in found["checks"]}
    assert paths == {
        (1, "tp", None),
        (2, "tp", None),
        (2, "cp", "gathered"),
        (2, "cp", "replicated"),
        (2, "cp_local", None),
    }
    assert all(c["passed"] and c["rows"] > 0 and c["mismatches"] == 0 for c in found["checks"])


def test_the_curve_and_the_latencies_have_samples_and_sense(done):
    _, found = done
    sizes = sorted({c["footprint_bytes"] for c in found["curve"]})
    assert sizes[0] == 1 << 20 and sizes[-1] >= 1 << 26 and len(found["curve"]) == 2 * len(sizes)
    for entry in found["curve"]:
        assert 0.01 < entry["gbs"] < 1000 and len(entry["samples_us"]) == 5
        assert entry["gbs"] == pytest.approx(entry["footprint_bytes"] * entry["reads"] / (entry["us"] * 1e3))
    payloads = [c["payload_bytes"] for c in found["collectives"]]
    assert payloads == sorted(payloads) and payloads[0] == 1024 and payloads[-1] == 4 << 20
    assert all(c["world"] == 2 and c["us"] > 1 and len(c["samples_us"]) == 10 for c in found["collectives"])
    assert found["collectives"][-1]["us"] > found["collectives"][0]["us"], "4 MiB faster than 1 KiB"


def test_what_does_not_fit_is_said_in_words(done):
    book, found = done
    assert [s["world"] for s in found["skipped"]] == [1024]
    said = text(book)
    assert "P = 1024 skipped: needs 1024 cores" in said and "Devices" in said
    pictures = [
        o for c in book.cells if c.cell_type == "code" for o in c.outputs if "image/svg+xml" in o.get("data", {})
    ]
    assert len(pictures) == 2


def test_footprints_reach_two_gib_on_a_gpu():
    sizes = node_check.footprints("cuda", quick=False)
    assert sizes[0] == 1 << 20 and sizes[-1] == 2 << 30 and len(sizes) == 12
    assert node_check.PAYLOADS[0] == 1 << 10 and node_check.PAYLOADS[-1] == 4 << 20


def test_a_path_with_wrong_ids_is_not_hidden(monkeypatch, tmp_path):
    def wrong(module, job, processes, *, follow):
        (tmp_path / "result.json").write_text(
            json.dumps({"checks": [{"passed": False}], "collectives": [], "curve": [], "gaps": [], "datasheet_gbs": None})
        )
        follow(tmp_path)

    monkeypatch.setattr(sweep, "launch", wrong)
    assert node_check.run("cpu", [1])["checks"] == [{"passed": False}]
    monkeypatch.setattr(sweep, "launch", lambda *a, **k: None)
    with pytest.raises(sweep.WorkersFailed, match="1 ranks ended without a result"):
        node_check.run("cpu", [1])
    with pytest.raises(doctor.NodeError):
        node_check.run("tpu")


def test_a_misspelt_parameter_fails(tmp_path):
    with pytest.raises(ValueError, match="world.*has none of that name"):
        notebook.run_notebook("00_node_check", {"world": [1]}, tmp_path / "out.ipynb")


@pytest.mark.parametrize("name", ["00_node_check", "10_sweep"])
def test_the_files_are_clean(name):
    """No outputs, no counts, a python3 kernel, literals in the parameters cell, no function in a cell."""
    book = nbformat.read(str(notebook.FOLDER / f"{name}.ipynb"), as_version=4)
    assert book.metadata.kernelspec.name == "python3" and "widgets" not in book.metadata
    assert len({c.id for c in book.cells}) == len(book.cells)
    code = [c for c in book.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in code)
    assert not [
        n
        for c in code
        for n in ast.walk(ast.parse(c.source))
        if isinstance(n, (ast.FunctionDef, ast.For)) and len(n.body) > 3
    ]
    (cell,) = [c for c in code if "parameters" in c.metadata.get("tags", [])]
    for statement in ast.parse(cell.source).body:
        ast.literal_eval(statement.value)
