"""The `m3cp` command: thin functions over the package, each importing what it needs when it is called."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
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


def _numbers(text: str | None) -> list[int] | None:
    """The numbers in "1,2,4"."""
    try:
        return None if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: must be numbers with commas between them, such as 1,2,4") from None


@app.command()
def check(
    stress: Annotated[bool, typer.Option("--stress", help="Launches between ranks, every one compared.")] = False,
    minutes: Annotated[float, typer.Option(help="About how long the stress lasts.")] = 5.0,
    ranks: Annotated[int | None, typer.Option(help="Processes, one a GPU; default: all that fit.")] = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the stress's table.")] = None,
    device: Device = None,
    thrash: Annotated[bool, typer.Option(help="A kernel that thrashes L2 on a second stream.")] = True,
    seed: Annotated[int, typer.Option(help="Of inputs, delays and order.")] = 0,
) -> None:
    """Compare every path's ids with the reference's, once; with --stress, as many launches as the time allows.

    Exit status 1 when an id was wrong, a wait expired or a rank failed.
    """
    from m3cp import stress as stressing

    given = dict(stressed=stress, minutes=minutes, ranks=ranks, out=out, thrash=thrash, seed=seed)
    try:
        raise typer.Exit(stressing.main(device, **given))
    except ValueError as error:
        typer.echo(f"m3cp check: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def sweep(
    grid: Annotated[
        Path | None, typer.Argument(help="A YAML or JSON file of axes or Points; default: a grid for this machine.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small warm grid, under a minute.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print Points and an estimate, measure nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="The run's folder; default: one a machine, in data/runs.")] = None,
    device: Device = None,
    world: Annotated[str | None, typer.Option(help="Numbers of ranks, such as 1,2; default: what fits here.")] = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure again what the run already holds.")] = False,
    processes: Annotated[int, typer.Option(help="Measure every Point in so many fresh starts of the ranks.")] = 1,
    minutes: Annotated[float | None, typer.Option(help="Stop cleanly after so long; a later call goes on.")] = None,
    commit: Annotated[str | None, typer.Option(help="Of this code, where the copy has no git history.")] = None,
    draw: Annotated[bool, typer.Option("--fit", help="Then fit and draw, as `m3cp fit` does.")] = False,
    notebook: Annotated[bool, typer.Option("--notebook", help="By papermill runs of notebooks/10_sweep.ipynb.")] = False,
    on: Annotated[str | None, typer.Option(help="slurm: as jobs on a cluster, by submitit (local: on this machine).")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    job_minutes: Annotated[float, typer.Option(help="About how long one cluster job measures.")] = 60.0,
    slurm: Annotated[
        list[str] | None, typer.Option("--slurm", help="Further sbatch options, NAME=VALUE, as often as needed.")
    ] = None,
) -> None:
    """Measure this machine and append the rows to a run; Points that the run holds are not measured again.

    Exit status 1 when a Point failed or was not reached, 2 when nothing could be measured.
    """
    from m3cp import sweep as measuring

    shared = dict(grid=grid, out=out, device=device, worlds=_numbers(world), remeasure=remeasure, dry_run=dry_run)
    try:
        if notebook or on:
            from m3cp import batch

            if notebook and (on or quick or minutes or processes > 1 or grid is None):
                raise ValueError("--notebook: takes a grid file, and none of --on, --quick, --minutes, --processes")
            if on and (quick or minutes or processes > 1 or out is None):
                raise ValueError("--on: takes --out, a folder that all nodes see, and none of --quick, --minutes, --processes")
        if notebook:
            status = batch.by_notebooks(**shared)
        elif on:
            bad = [word for word in slurm or [] if "=" not in word]
            if bad:
                raise ValueError(f"--slurm={bad[0]!r}: must be NAME=VALUE, such as account=mine")
            given = dict(word.split("=", 1) for word in slurm or [])
            status = batch.on_cluster(on, **shared, partition=partition, job_minutes=job_minutes, slurm=given, commit=commit)
        else:
            status = measuring.main(**shared, quick=quick, processes=processes, minutes=minutes, commit=commit)
    except (ValueError, OSError) as error:
        typer.echo(f"m3cp sweep: {error}", err=True)
        raise typer.Exit(measuring.NOT_MEASURED) from None
    if draw and not dry_run and status != measuring.NOT_MEASURED:
        fit(run="" if out is None else str(out))
    raise typer.Exit(status)


@app.command()
def node(
    name: Annotated[str, typer.Option(help="Of the run's folder and of its archive.")] = "node",
    out: Annotated[Path | None, typer.Option(help="The run's folder; default: one a code version, in data/runs.")] = None,
    minutes: Annotated[float, typer.Option(help="At most so long now; the same command goes on where it stopped.")] = 9.0,
    retry: Annotated[bool, typer.Option("--retry", help="Try steps again that failed or were left out.")] = False,
    only: Annotated[str | None, typer.Option(help="Steps, with commas between them; default: all.")] = None,
    device: Device = None,
    commit: Annotated[str | None, typer.Option(help="Of this code, where the copy has no git history.")] = None,
) -> None:
    """Everything that a first run on a node should do, in rising risk, each step under a watchdog; one archive, one page.

    Exit status 1 when a step failed (the rest is usable), 2 when the time was up before the end.
    """
    from m3cp import kit

    try:
        raise typer.Exit(kit.main(name, out, minutes, retry, only.split(",") if only else (), device, commit))
    except ValueError as error:
        typer.echo(f"m3cp node: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def fit(
    run: Annotated[
        str, typer.Argument(help="A run's folder or name; default: the latest here, else a recorded one.")
    ] = "",
    compare: Annotated[
        str, typer.Option(help="A recorded node to put beside it, or none; default: the first other one.")
    ] = "",
    figures: Annotated[Path, typer.Option(help="Where figures go.", show_default="figures/")] = ROOT / "figures",
    errors: Annotated[bool, typer.Option("--errors", help="Print how good the cost model is instead.")] = False,
    targets: Annotated[
        bool, typer.Option("--targets", help="Print the rows against the aims, and measured break-even, instead.")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Print the indexer's share of a layer, mixed steps and the toy model instead.")
    ] = False,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Print what adaptive calls cost over the better path, against the aims, instead.")
    ] = False,
) -> None:
    """Fit a run's rows and draw its figures, through papermill on notebooks/20_crossover.ipynb."""
    modules = {"heldout": errors, "targets": targets, "layer_shares": layers, "adaptive": adaptive}
    asked = [name for name, given in modules.items() if given]
    if len(asked) > 1:
        raise typer.BadParameter("give one of --errors, --targets, --layers and --adaptive")
    if asked:
        text = importlib.import_module(f"m3cp.{asked[0]}")
        _say("fit", lambda: text.main(run, figures) if layers else text.main(run))
        return
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
        path = Path(path).resolve()
        typer.echo(f"  {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _say(command: str, lines: Callable[[], list[str]]) -> None:
    """Print what a function of the analysis returns; its refusals end with exit status 1, in words."""
    try:
        for line in lines():
            typer.echo(line)
    except (FileNotFoundError, ValueError) as error:
        typer.echo(f"m3cp {command}: {error}", err=True)
        raise typer.Exit(1) from None


Run = Annotated[str, typer.Argument(help="A run's folder or name; default: the latest here, else a recorded one.")]


@app.command()
def predict(
    file: Annotated[Path, typer.Argument(help="Predictions: written with --grid, read with --against.")],
    run: Annotated[str, typer.Option(help="The run whose rows the models are fitted to; default as of `m3cp fit`.")] = "",
    grid: Annotated[Path | None, typer.Option(help="The grid to predict, before anybody runs it.")] = None,
    world: Annotated[int | None, typer.Option(help="Only its Points of so many ranks.")] = None,
    against: Annotated[str | None, typer.Option(help="The run that measured what the file predicts.")] = None,
) -> None:
    """Write down what a grid will take on more ranks than were measured, or print how that came out."""
    if (grid is None) == (against is None):
        raise typer.BadParameter("give --grid to predict, or --against RUN to compare: one of them")
    from m3cp import predictions

    _say("predict", lambda: predictions.make(run, grid, file, world) if grid is not None else predictions.against(file, against))



@app.command()
def policy(
    run: Run = "",
    out: Annotated[Path | None, typer.Option(help="The policy file; default: beside the rows.")] = None,
    arm: Annotated[str, typer.Option(help="cp, vllm_cp or sglang_cp.")] = "cp",
    exchange: Annotated[
        str | None, typer.Option(help="collective or symmetric; default: what was measured most.")
    ] = None,
    queries: Annotated[
        str | None, typer.Option(help="gathered or replicated; default: what was measured most.")
    ] = None,
    form: Annotated[str | None, typer.Option(help="staged, two_launch or one_launch; default likewise.")] = None,
    traffic: Annotated[Path | None, typer.Option(help="JSON lines: the context lengths of each decode step.")] = None,
    trace: Annotated[Path | None, typer.Option(help="JSON lines of requests: time, input, output, block ids.")] = None,
    world: Annotated[int | None, typer.Option(help="Ranks, for the answer; default: the most measured.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the index-K cache, for the answer.")] = "bf16",
    query_len: Annotated[int, typer.Option(help="Query tokens a request, for the answer.")] = 1,
    figures: Annotated[Path, typer.Option(help="Where the figures go.", show_default="figures/")] = ROOT / "figures",
) -> None:
    """Write a run's policy file, say what deciding per step is worth, and whether CP should be on for a traffic."""
    from m3cp import advice

    asked = (run, out, arm, exchange, queries, form, traffic, trace, world, dtype, query_len, figures)
    _say("policy", lambda: advice.main(*asked))


@app.command()
def report(
    node: Annotated[
        str, typer.Option(help="A recorded node or a run; default: the latest run on GPUs here, else a recorded node.")
    ] = "",
    traffic: Annotated[
        Path | None, typer.Option(help="JSON lines: the context lengths of each decode step; the page answers for them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page and its figures.", show_default="data/runs/NODE/report")
    ] = None,
) -> None:
    """Write the design review: one HTML page with the answer first, and its figures as SVG and PNG."""
    from m3cp.notebook import NotebookFailed

    def lines() -> list[str]:
        from m3cp import report as reporting

        try:
            return reporting.main(node, traffic, out)
        except NotebookFailed as error:
            raise ValueError(error) from None

    _say("report", lines)


@app.command()
def record(
    run: Annotated[str, typer.Argument(help="A run's folder or name.")],
    name: Annotated[str, typer.Option("--as", help="The node's name, such as mi355x4.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is recorded under that name.")] = False,
) -> None:
    """Check a run's rows and keep them as a named node in data/measured, for figures, policies and reports."""
    from m3cp import recording

    _say("record", lambda: recording.record(run, name, overwrite))


@app.command()
def compare(
    run_a: Annotated[str, typer.Argument(help="A run's folder or name: what was before.")],
    run_b: Annotated[str, typer.Argument(help="Another: what is judged.")],
    across: Annotated[
        str, typer.Option(help="Differences to allow: shape, cache_state, timed_region, clocks, variables.")
    ] = "",
    tolerance: Annotated[float, typer.Option(help="Ratios this close to 1 are called SAME.")] = 0.03,
    strict: Annotated[bool, typer.Option("--strict", help="UNDECIDED fails too.")] = False,
    figures: Annotated[Path, typer.Option(help="Where the figure goes.", show_default="figures/")] = ROOT / "figures",
) -> None:
    """Say for each Point whether run B is SAME, FASTER, SLOWER or UNDECIDED against run A.

    Exit status 1 when a Point is SLOWER, 2 when the runs can't be compared: a gate for performance.
    """
    from m3cp import compare as comparing

    try:
        lines, status = comparing.main(run_a, run_b, [w for w in across.split(",") if w], tolerance, strict, figures)
    except (FileNotFoundError, ValueError) as error:
        typer.echo(f"m3cp compare: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo("\n".join(lines))
    raise typer.Exit(status)


@app.command()
def rows(
    run: Run = "",
    parquet: Annotated[Path | None, typer.Option(help="Also write the rows as this parquet file.")] = None,
) -> None:
    """Check a run's rows against the documented format (data/README.md); exit status 1 when a line is no row of it."""
    from m3cp import rowformat

    _say("rows", lambda: rowformat.main(run, parquet))


serving_app = typer.Typer(no_args_is_help=False, help="What CP changes for a served model, from a run's cost model.")
app.add_typer(serving_app, name="serving")


@serving_app.callback(invoke_without_command=True)
def serving(
    context: typer.Context,
    run: Annotated[
        str, typer.Option(help="A run's folder or name; default: the latest here, else a recorded one.")
    ] = "",
    tokens: Annotated[int, typer.Option(help="Context of each request.")] = 74_000,
    batch: Annotated[int, typer.Option(help="Requests that decode at once.")] = 8,
    reuse: Annotated[int, typer.Option(help="Layers that share one selection.")] = 1,
    acceptance: Annotated[float, typer.Option(help="Tokens a step under speculation.")] = 1.0,
    concurrency: Annotated[int | None, typer.Option(help="Requests offered; 22 to 41% of them decode at once.")] = None,
) -> None:
    """Time per output token, a table of levers, and the published figures beside what the layer's time explains."""
    if context.invoked_subcommand is None:
        from m3cp import serving as served

        _say("serving", lambda: served.main(run, tokens, batch, reuse, acceptance, concurrency))


@serving_app.command("import")
def serving_import(
    base: Annotated[Path, typer.Argument(help="Result of `vllm bench serve` or aiperf, without CP.")],
    cp: Annotated[Path, typer.Argument(help="The same with CP.")],
    run: Annotated[str | None, typer.Option(help="Predict from this run and draw; default: only compare.")] = None,
    figures: Annotated[Path, typer.Option(help="Where the figure goes.", show_default="figures/")] = ROOT / "figures",
    other: Annotated[float | None, typer.Option(help="Seconds a request spends not decoding, if known.")] = None,
) -> None:
    """Compare two serving results; pairs with failed requests or other inputs are refused."""
    from m3cp import serving as served

    _say("serving import", lambda: served.main_import(base, cp, run, figures, other))


def main(argv: list[str] | None = None) -> None:
    """Run the command; a refusal that names its fix ends with exit status 2, without a traceback."""
    from m3cp.doctor import NodeError

    try:
        app(argv, prog_name="m3cp")
    except NodeError as error:
        print(f"m3cp: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
