"""The application: its commands, and what becomes of errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import click
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

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Begins; where the terminal has no letter for something it shows a question mark."""
        if isinstance(sys.stdout, TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
            sys.stdout.reconfigure(errors="replace")
        return super().main(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except FedcamsError as error:
            refuse(str(error))
        except click.NoSuchOption as error:
            refuse_key(error)
            raise
        except KeyboardInterrupt:
            fail(f"[yellow]{STOPPED}[/]", code=130)


def refuse_key(error: click.NoSuchOption) -> None:
    """Says how a key of the experiment is set: `--rounds 5` is what one tries first."""
    if error.ctx is None or error.ctx.info_name != "run":
        return
    from fedcams.experiment.preset import KEYS

    key = error.option_name.lstrip("-").replace("-", "_")
    if key in (*KEYS, "seeds"):
        refuse(f"{error.option_name} is no option; {key} is a key of the experiment: give -s {key}=VALUE")


def refuse(message: str) -> None:
    """Leaves with an error."""
    fail(f"[bold red]error:[/] [red]{escape(message)}[/]", code=2)


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
