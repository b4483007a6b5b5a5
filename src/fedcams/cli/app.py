"""The application: its commands, and what becomes of errors."""

from __future__ import annotations

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
from fedcams.errors import FedcamsError
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


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Communication-efficient adaptive federated learning: FedAMS, FedCAMS and their relatives."""
