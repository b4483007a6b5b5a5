"""The command `fedcams`: its subcommands, its own options, and how it reports errors."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from fedcams.cli.deferred import defer
from fedcams.cli.new import new
from fedcams.cli.runs import report, resume, run, sweep
from fedcams.cli.theory import theory
from fedcams.cli.tools import bench, list_, plan
from fedcams.errors import FedcamsError, SpecError
from fedcams.version import __version__

STOPPED = "stopped; run the same command again to continue from the last checkpoint"


class Commands(TyperGroup):
    """Print an error of fedcams as one line instead of a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line and run it; a character that the terminal cannot show becomes a question mark."""
        defer("torch")
        if isinstance(sys.stdout, TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
            sys.stdout.reconfigure(errors="replace")
        with stopped_by_sigterm():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen subcommand and turn errors into messages and exit codes."""
        try:
            return super().invoke(ctx)
        except FedcamsError as error:
            refuse(str(error))
        except KeyboardInterrupt:
            fail(f"[yellow]{STOPPED}[/]", code=130)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # of click, or of the copy that newer versions of typer bring
                refuse_key(error)
            if "Did you mean" in getattr(error, "message", ""):  # by typer; newer versions of click would repeat it
                vars(error)["possibilities"] = None
            raise


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, which batch systems and containers send, stop a command as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def refuse_key(error: Any) -> None:
    """Explain how to set a key of the experiment when it is given as an option, such as `--rounds 5`."""
    if error.ctx is None or error.ctx.info_name != "run":
        return
    from fedcams.experiment.preset import KEYS

    key = error.option_name.lstrip("-").replace("-", "_")
    if key in (*KEYS, "seeds"):
        refuse(f"{error.option_name} is not an option; {key} is a key of the experiment: use -s {key}=VALUE")


def refuse(message: str) -> None:
    """Print an error and exit with code 2."""
    fail(f"[bold red]error:[/] [red]{escape(message)}[/]", code=2)


def fail(message: str, code: int) -> None:
    """Print a message on standard error and exit with the given code."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(message)
    raise typer.Exit(code)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`fedcams run demo` compares eight methods on a small problem. It downloads nothing.",
)
app.command()(new)
app.command()(run)
app.command()(resume)
app.command()(report)
app.command()(sweep)
app.command()(plan)
app.command("list")(list_)
app.add_typer(theory, name="theory")
app.add_typer(bench, name="bench")


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        Console(highlight=False).print(f"fedcams {__version__}")
        raise typer.Exit


def load(modules: Sequence[str]) -> None:
    """Import modules that register your own pieces; the working directory is searched too."""
    sys.path.insert(0, str(Path.cwd()))
    for module in modules:
        if module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
            raise SpecError(f"--import {module}: give the name of a module, such as my_pieces for ./my_pieces.py")
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise SpecError(f"--import {module}: {error}; name a module in this folder or on PYTHONPATH") from None
        except FedcamsError as error:
            raise SpecError(f"--import {module}: {error}") from None
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = "" if isinstance(error, SyntaxError) else f" ({Path(where.filename).name}, line {where.lineno})"
            raise SpecError(f"--import {module}: {type(error).__name__}: {error}{place}; fix the module") from error


@app.callback()
def main(
    context: typer.Context,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            envvar="FEDCAMS_IMPORT",
            help="Import a module that registers your own pieces; repeat the option for several.",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Communication-efficient adaptive federated learning: FedAMS, FedCAMS and their baselines."""
    context.obj = modules or []  # for the workers of `--jobs`
    if modules:
        load(modules)
