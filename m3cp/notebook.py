"""What all notebooks share: parameters that refuse typos, and a driver that believes results and not exit codes.

Papermill injects names that a notebook does not have, says so in a log line, and exits 0 (papermill 2.7). So names
are checked twice: here before anything starts, and in the notebook's own second cell against its globals.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from m3cp import records

FOLDER = records.PACKAGE.parent / "notebooks"
LITERALS = (str, int, float, bool, list, tuple, dict, type(None))
INTERACTIVE = {"In", "Out"}  # IPython's own


class NotebookFailed(RuntimeError):
    """A notebook that did not do its work, whatever its exit code was."""


class Parameters(BaseModel):
    """Base of a notebook's typed parameters: unknown names and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Model = TypeVar("Model", bound=Parameters)

STATIC, QUIET = "static", "quiet"  # tags of cells that a page with a kernel behind it leaves out, or whose prints it hides
PAGES = records.PACKAGE.parent / "data" / "runs" / "pages"


def resolve(model: type[Model], names: Mapping[str, Any]) -> Model:
    """Validate a notebook's parameters out of its globals and print the resolved table.

    Call it in the cell after `parameters`, before any other name is assigned: every public global that holds a
    literal is taken for a parameter, so a misspelt name that papermill injected is found.

    Args:
        model: the notebook's class of parameters.
        names: `globals()`.

    Raises:
        ValueError: a name the model does not have, a missing one, or a value of another type or range; the message
            names them and what is allowed.
    """
    given = {
        k: v for k, v in names.items() if not k.startswith("_") and k not in INTERACTIVE and isinstance(v, LITERALS)
    }
    try:
        found = model(**given)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc']))}={given.get(str(e['loc'][0]))!r}: {e['msg'].lower()}"
            for e in error.errors()
        ]
        raise ValueError(f"parameters: {'; '.join(lines)} (allowed: {_allowed(model)})") from None
    width = max((len(name) for name in type(found).model_fields), default=0)
    for name in type(found).model_fields:
        print(f"{name:<{width}}  {getattr(found, name)!r}")
    return found


def _allowed(model: type[Parameters]) -> str:
    return ", ".join(
        f"{name}: {getattr(info.annotation, '__name__', info.annotation)}" for name, info in model.model_fields.items()
    )


def run_notebook(
    name: str,
    parameters: Mapping[str, Any],
    out: Path | str,
    expect: Sequence[Path | str] = (),
    timeout_s: float | None = None,
    progress: bool = True,
) -> Path:
    """Execute a notebook of this project through papermill and check that its work was done.

    Args:
        name: such as "20_crossover", or a path to a notebook.
        parameters: names and values to inject; a name the notebook does not have is an error before it starts.
        out: where the executed notebook goes; its folder is created.
        expect: files that must exist afterwards and be newer than the start, none of them empty.
        timeout_s: for each cell; None waits.
        progress: show a bar over the cells.

    Returns:
        The executed notebook's path.

    Raises:
        ValueError: a notebook without a `parameters` cell, or unknown parameter names.
        NotebookFailed: an error in a cell, a kernel that died, a cell that did not complete, an expected file that
            is missing, empty or older than the start.
    """
    import papermill

    source = Path(name) if str(name).endswith(".ipynb") else FOLDER / f"{name}.ipynb"
    if not source.exists():
        raise ValueError(
            f"name={name!r}: no such notebook; there are {', '.join(sorted(p.stem for p in FOLDER.glob('*.ipynb'))) or 'none'}"
        )
    known = papermill.inspect_notebook(str(source))
    if not known:
        raise ValueError(f"name={name!r}: it has no cell tagged 'parameters' with a literal in it")
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ValueError(
            f"parameters {', '.join(unknown)}: {source.name} has none of that name; it has {', '.join(known)}"
        )

    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.time()
    try:
        papermill.execute_notebook(
            str(source), str(out), parameters=dict(parameters), kernel_name="python3", progress_bar=progress,
            execution_timeout=timeout_s, cwd=str(records.PACKAGE.parent),
        )  # fmt: skip
    except Exception as error:
        raise NotebookFailed(
            f"{source.name}: {type(error).__name__}: {error}; the executed notebook is {out}"
        ) from error
    check_executed(out)
    for path in map(Path, expect):
        if not path.exists():
            raise NotebookFailed(f"{source.name}: it ended without writing {path}")
        if path.stat().st_size == 0:
            raise NotebookFailed(f"{source.name}: {path} is empty")
        if path.stat().st_mtime < start - 1e-3:
            raise NotebookFailed(f"{source.name}: {path} is older than this run; it was not written")
    return out


def page(name: str, folder: Path | str = PAGES) -> Path:
    """Write the part of a notebook that voila serves: without the cells tagged `static`, which take most of its time,
    and without what cells tagged `quiet` print.

    Args:
        name: such as "20_crossover".
        folder: where the page's notebook goes; created when missing.

    Raises:
        ValueError: no such notebook, or one without a static cell.
    """
    import nbformat

    source = FOLDER / f"{name}.ipynb"
    if not source.exists():
        raise ValueError(f"name={name!r}: no such notebook; there are {', '.join(sorted(p.stem for p in FOLDER.glob('*.ipynb')))}")
    book = nbformat.read(str(source), as_version=4)
    kept = [cell for cell in book.cells if STATIC not in cell.metadata.get("tags", [])]
    if len(kept) == len(book.cells):
        raise ValueError(f"name={name!r}: it has no cell tagged {STATIC!r}, so it is a page as it is")
    for cell in kept:
        if QUIET in cell.metadata.get("tags", []):
            cell.source = "%%capture\n" + cell.source
    book.cells = kept
    path = Path(folder) / source.name
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, str(path))
    return path


def check_executed(path: Path | str) -> None:
    """Raise unless every code cell of an executed notebook completed without an error.

    `SystemExit(0)` in a cell, a killed kernel or a timeout leave a notebook that papermill may not complain about.

    Raises:
        NotebookFailed: naming the first cell at fault.
    """
    import nbformat

    book = nbformat.read(str(path), as_version=4)
    for number, cell in enumerate(book.cells, start=1):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        status = cell.metadata.get("papermill", {})
        errors = [o for o in cell.get("outputs", []) if o.output_type == "error"]
        if errors:
            raise NotebookFailed(f"{Path(path).name}: cell {number} raised {errors[0].ename}: {errors[0].evalue}")
        if status.get("exception") or status.get("status") != "completed":
            raise NotebookFailed(
                f"{Path(path).name}: cell {number} is {status.get('status', 'not executed')!r}, not 'completed'"
            )
