"""The command line: light, thin, and exactly what the README's table says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from m3cp import cli, doctor, notebook, sweep

ROOT = Path(__file__).resolve().parents[1]


def _run(*args):
    return CliRunner().invoke(cli.app, list(args), prog_name="m3cp")


def commands():
    """Names that `m3cp --help` lists."""
    env = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-m", "m3cp.cli", "--help"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = done.stdout.split("Commands", 1)[1]
    return re.findall(r"^\W*([a-z][a-z-]*) {2,}\S", listed, re.M)


def targets():
    """Names that `make` lists."""
    text = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^  make ([a-z0-9-]+) ", text, re.M)


def test_the_readme_table_is_the_list_of_commands_and_targets():
    text = (ROOT / "README.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    named = [words.split() for line in table for words in re.findall(r"`((?:make|m3cp) [^`]+)`", line)]
    assert {words[1] for words in named if words[0] == "m3cp"} == set(commands())
    assert {words[1] for words in named if words[0] == "make"} == set(targets())


def test_the_readme_names_no_command_that_does_not_exist():
    text = (ROOT / "README.md").read_text()
    code = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^(?: {4}|\$ ?)?((?:make|m3cp) .+)$", text, re.M)
    words = [m.groups() for span in code for m in [re.match(r"(make|m3cp) ([a-z][a-z0-9-]*)\b(?!=)", span)] if m]
    known = {("make", t) for t in targets()} | {("m3cp", c) for c in commands()}
    assert words and set(words) <= known


def test_help_is_light():
    heavy = ("torch", "triton", "pandas", "scipy", "lmfit", "matplotlib", "papermill", "pydantic", "IPython")
    code = (
        "import sys, m3cp, m3cp.cli\n"
        "try: m3cp.cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"print('loaded', [m for m in {heavy} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("loaded []")


@pytest.mark.parametrize("name", [c.callback.__name__ for c in cli.app.registered_commands])
def test_every_command_explains_itself(name):
    done = _run(name, "--help")
    assert done.exit_code == 0 and f"Usage: m3cp {name}" in done.output
    assert "--help" in done.output and len(done.output.splitlines()) > 5


def test_an_unknown_option_is_refused():
    done = _run("doctor", "--devise", "cpu")
    assert done.exit_code == 2 and "--devise" in done.output


def test_doctor_prints_the_report():
    done = _run("doctor", "--device", "cpu")
    assert done.exit_code == 0 and "A sweep here" in done.output and "page_read: measured" in done.output


def test_a_refusal_is_one_line_without_a_traceback(monkeypatch, capsys):
    def refuse(*_):
        raise doctor.NodeError("this machine has an AMD GPU that torch cannot use")

    monkeypatch.setattr(doctor, "inspect", refuse)
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "m3cp: this machine has an AMD GPU that torch cannot use\n"


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """A run to fit and a stand-in for papermill that draws what it is told to; yields (folder, calls, names)."""
    run = tmp_path / "some-run"
    run.mkdir()
    (run / "rows.jsonl").touch()
    names, calls = ["map.svg", "map.png"], []

    def run_notebook(name, parameters, out):
        calls.append((name, parameters, out))
        for figure in names:
            Path(parameters["figures"]).mkdir(exist_ok=True)
            (Path(parameters["figures"]) / figure).write_text("drawn")

    monkeypatch.setattr(notebook, "run_notebook", run_notebook)
    return run, calls, names


def test_fit_draws_through_the_notebook_and_prints_the_paths(drawn, tmp_path):
    run, calls, _ = drawn
    old = tmp_path / "figures" / "old.svg"
    old.parent.mkdir()
    old.touch()
    os.utime(old, (1, 1))
    done = _run("fit", str(run), "--figures", str(tmp_path / "figures"), "--compare", "none")
    assert done.exit_code == 0, done.output
    ((name, parameters, out),) = calls
    assert name == "20_crossover" and out == ROOT / "data" / "runs" / "some-run" / "20_crossover.ipynb"
    assert parameters == {"run": str(run), "compare": "none", "figures": str(tmp_path / "figures")}
    assert str(tmp_path / "figures" / "map.svg") in done.output and "old.svg" not in done.output


def test_fit_that_draws_nothing_fails(drawn, tmp_path):
    run, _, names = drawn
    names.clear()
    done = _run("fit", str(run), "--figures", str(tmp_path / "figures"))
    assert done.exit_code == 1 and "drew no figure" in done.output


@pytest.mark.parametrize("given", [("--targets", "--layers"), ("--errors", "--adaptive")])
def test_fit_prints_one_thing_at_a_time(given):
    done = _run("fit", "h200x2", *given)
    assert done.exit_code == 2 and "give one of --errors" in done.output


def test_fit_of_a_run_that_is_not_there_says_so(tmp_path):
    done = _run("fit", str(tmp_path / "nothing"))
    assert done.exit_code == 1 and "nothing" in done.output and "Traceback" not in done.output


@pytest.fixture
def measured(monkeypatch):
    """A stand-in for the sweep that records its arguments and returns `status[0]`; fits are recorded too."""
    calls, status = [], [0]

    def main(**options):
        calls.append(options)
        if isinstance(status[0], Exception):
            raise status[0]
        return status[0]

    monkeypatch.setattr(sweep, "main", main)
    monkeypatch.setattr(cli, "fit", lambda **options: calls.append(options))
    return calls, status


def test_sweep_passes_its_options_on(measured):
    calls, _ = measured
    words = ["--quick", "--out", "here", "--device", "cpu", "--world", "1,2", "--minutes", "3", "--remeasure", "--processes", "3"]
    assert _run("sweep", "grid.yaml", *words, "--commit", "abc", "--dry-run").exit_code == 0
    assert calls == [
        dict(
            grid=Path("grid.yaml"), quick=True, out=Path("here"), device="cpu", worlds=[1, 2], remeasure=True,
            processes=3, dry_run=True, minutes=3.0, commit="abc",
        )
    ]  # fmt: skip
    assert _run("sweep").exit_code == 0
    assert calls[1] == vars(sweep._arguments([]))  # the command and `python3 -m m3cp.sweep` mean the same


@pytest.mark.parametrize(
    "status, words, exit_code, fits",
    [
        (0, ["--fit"], 0, [{"run": ""}]),
        (0, ["--fit", "--out", "here"], 0, [{"run": "here"}]),
        (1, ["--fit"], 1, [{"run": ""}]),
        (2, ["--fit"], 2, []),
        (0, ["--fit", "--dry-run"], 0, []),
        (0, [], 0, []),
        (ValueError("grid has contextss: allowed are ..."), ["--fit"], 2, []),
        (FileNotFoundError("no grid.yaml"), [], 2, []),
    ],
)
def test_sweep_fits_what_was_measured_and_keeps_its_status(measured, status, words, exit_code, fits):
    calls, held = measured
    held[0] = status
    done = _run("sweep", *words)
    assert done.exit_code == exit_code, done.output
    assert calls[1:] == fits
    if isinstance(status, Exception):
        assert str(status) in done.output and "Traceback" not in done.output


def test_worlds_that_are_no_numbers_are_refused(measured):
    done = _run("sweep", "--world", "two")
    assert done.exit_code == 2 and "1,2,4" in done.output and not measured[0]
