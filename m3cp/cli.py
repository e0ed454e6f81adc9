"""The `m3cp` command: thin functions over the package, each importing what it needs when it is called."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

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
