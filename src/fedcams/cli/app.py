"""The application: its commands, and what becomes of errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from fedcams.cli.benching import bench
from fedcams.cli.listing import list_
from fedcams.cli.planning import plan
from fedcams.cli.reporting import report
from fedcams.cli.running import resume, run
from fedcams.cli.sweeping import sweep
from fedcams.errors import FedcamsError, SpecError
from fedcams.version import __version__

STOPPED = "stopped; give the same command again to go on from the last checkpoint"


class Commands(TyperGroup):
    """Shows what fedcams refuses as one line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except FedcamsError as error:
            fail(f"[bold red]error:[/] [red]{escape(str(error))}[/]", code=2)
        except KeyboardInterrupt:
            fail(f"[yellow]{STOPPED}[/]", code=130)


def fail(message: str, code: int) -> None:
    """Says why on standard error, and leaves."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(message)
    raise typer.Exit(code)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`fedcams run demo` compares seven methods on a small problem, with nothing to download.",
)
app.command()(run)
app.command()(resume)
app.command()(report)
app.command()(sweep)
app.command()(plan)
app.command("list")(list_)
app.add_typer(bench, name="bench")


def show_version(asked: bool) -> None:
    """Prints the version and leaves."""
    if asked:
        Console(highlight=False).print(f"fedcams {__version__}")
        raise typer.Exit


def load(modules: Sequence[str]) -> None:
    """Imports what registers pieces of one's own, from the working directory too."""
    sys.path.insert(0, str(Path.cwd()))
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise SpecError(f"--import {module}: {error}; give a module that lies here or in PYTHONPATH") from None


@app.callback()
def main(
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            envvar="FEDCAMS_IMPORT",
            help="Import a module that registers pieces of your own; may be given several times.",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Communication-efficient adaptive federated learning: FedAMS, FedCAMS and their relatives."""
    if modules:
        load(modules)
