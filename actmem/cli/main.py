"""The `actmem` command: its subcommands, and how an error that reaches the top is shown.

A subcommand's file imports torch, and whatever imports torch, inside its function, so that `--help` stays quick.
"""

from __future__ import annotations

import io
import sys
import warnings
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from actmem.cli.bench import bench
from actmem.cli.calibrate import calibrate
from actmem.cli.check import check
from actmem.cli.explain import explain
from actmem.cli.fit import fit
from actmem.cli.pareto import pareto
from actmem.cli.plan import plan
from actmem.cli.screen import Screen, print_json
from actmem.cli.told_once import is_first_rank, is_news, wait_for_first
from actmem.cli.train import train
from actmem.errors import ActmemError, ConfigError

app = typer.Typer(
    help="Train transformers in less memory: every tensor autograd saves is saved, recomputed or swapped, by plan.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help and errors quote what the user typed, which may hold brackets
    pretty_exceptions_enable=False,
)
app.command()(check)
app.command()(plan)
app.command()(pareto)
app.command()(fit)
app.command()(explain)
app.command()(bench)
app.command()(calibrate)
app.command()(train)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"actmem {version('actmem')}")
    except PackageNotFoundError:
        typer.echo("actmem, run from its source without being installed")
    raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run() -> None:
    """Entry point. Exit code 2 for an `ActmemError`, which ``--json`` has on standard output as well, or wrong usage;
    130 after Ctrl-C, which is told in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name need not fit the terminal's encoding
    warnings.showwarning = _show_warning
    try:
        _run_app()
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        if is_first_rank():
            Screen(stderr=True).line("Stopped.")
        sys.exit(130)


def _run_app() -> None:
    try:
        app(prog_name="actmem")
    except ActmemError as error:
        if isinstance(error, ConfigError):  # all processes read one configuration
            wait_for_first()
        if not error.is_repeated and is_news(str(error)):
            if "--json" in sys.argv[1:]:
                print_json(_as_data(error))
            Screen(stderr=True).error(error)
        sys.exit(2)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether it goes back to Ctrl-C: a library that is being imported may make another error of that."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """In words alone: where in our code it comes from says nothing to whoever runs a command."""
    if is_news(str(message)):
        Screen(stderr=True).warning(str(message))


def _as_data(error: ActmemError) -> dict[str, object]:
    """For programs, which read no standard error."""
    faults = error.faults if isinstance(error, ConfigError) else ()
    return {"error": str(error), "faults": [asdict(fault) for fault in faults]}


if __name__ == "__main__":
    run()
