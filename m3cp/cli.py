"""The `m3cp` command: thin functions over the package, each importing what it needs when it is called."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Device = Annotated[
    str | None, typer.Option(help="cuda (NVIDIA and AMD alike) or cpu; default: the GPUs where there are any.")
]


@app.callback()
def m3cp() -> None:
    """Measure where context-parallel decode indexing beats tensor parallelism on this machine."""


@app.command()
def doctor(device: Device = None) -> None:
    """Say what this machine is, what will be measured and what skipped, and why."""
    from m3cp.doctor import inspect, report

    typer.echo(report(inspect(device)))


@app.command()
def fit(
    run: Annotated[
        str, typer.Argument(help="A run's folder or name; default: the latest here, else a recorded one.")
    ] = "",
    compare: Annotated[
        str, typer.Option(help="A recorded node to put beside it, or none; default: the first other one.")
    ] = "",
    figures: Annotated[Path, typer.Option(help="Where figures go.", show_default="figures/")] = ROOT / "figures",
) -> None:
    """Fit a run's rows and draw its figures, through papermill on notebooks/20_crossover.ipynb."""
    from m3cp.frames import find_run
    from m3cp.notebook import NotebookFailed, run_notebook

    started_s = time.time() - 1  # a file system may keep whole seconds
    figures = figures.resolve()
    try:
        folder = find_run(run).resolve()
        book = ROOT / "data" / "runs" / folder.name / "20_crossover.ipynb"
        run_notebook("20_crossover", {"run": str(folder), "compare": compare, "figures": str(figures)}, out=book)
    except (FileNotFoundError, ValueError, NotebookFailed) as error:
        typer.echo(f"m3cp fit: {error}", err=True)
        raise typer.Exit(1) from None
    drawn = sorted(p for p in figures.glob("*.*") if p.suffix in (".svg", ".png") and p.stat().st_mtime >= started_s)
    if not drawn:
        typer.echo(f"m3cp fit: {book} ran and drew no figure in {figures}", err=True)
        raise typer.Exit(1)
    typer.echo(f"Figures of {folder.name}, and the notebook that drew them:")
    for path in (*drawn, book):
        typer.echo(f"  {_near(path)}")


def _near(path: Path) -> str:
    """The path as seen from the working directory, where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def main(argv: list[str] | None = None) -> None:
    """Run the command; a refusal that names its fix ends with exit status 1, without a traceback."""
    from m3cp.doctor import NodeError

    try:
        app(argv, prog_name="m3cp")
    except NodeError as error:
        print(f"m3cp: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
