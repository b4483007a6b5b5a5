"""`fedcams theory`: what convergence theorems say about a run, the steps they recommend, and the measured rates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table

from fedcams.cli.completion import piece_names, preset_names
from fedcams.cli.runs import Data

if TYPE_CHECKING:
    from fedcams.experiment import Experiment
    from fedcams.optimizers.base import ServerOptimizer
    from fedcams.simulation import RoundRecord
    from fedcams.theory.check import Checked
    from fedcams.theory.measure import Measured
    from fedcams.theory.setting import Constants, Setting
    from fedcams.theory.steps import Steps

theory = typer.Typer(
    no_args_is_help=True, help="Convergence theory: bounds, conditions, step sizes and measured rates."
)


# -- check ---------------------------------------------------------------------------------------------------------


@theory.command()
def check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|RUN|TOML", autocompletion=preset_names, help="A preset, the folder of a run, or a file."
        ),
    ],
    only: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Check only this label; repeat for several.")
    ] = None,
    data: Data = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check experiments or a run against the theorems: constants, both bounds with every term, and conditions.

    Constants are exact or proven for the tasks quadratic and logistic.

    For other tasks, they are the largest that a run with theory_every measured, or else measured at the start.

    Settings that the theorems do not cover are checked as far as possible; the assumptions that fail are listed.
    """
    from fedcams.theory.check import check as check_experiment

    found = [check_experiment(each, records, data, lines) for each, records, lines in _experiments(source, only or [])]
    console = Console(highlight=False)
    if as_json:
        console.print_json(json.dumps([checked.to_dict() for checked in found], ensure_ascii=False))
        return
    for checked in found:
        for part in _pages(checked):
            console.print(part, soft_wrap=isinstance(part, str), markup=not isinstance(part, str))


def _experiments(source: str, labels: list[str]) -> Iterator[tuple[Experiment, list[RoundRecord], list[Measured]]]:
    from fedcams.experiment.preset import check_labels, choose
    from fedcams.report.collection import read_checked
    from fedcams.runs import is_run

    if is_run(Path(source)):
        run = read_checked(Path(source))
        check_labels(labels, [run.experiment.label])
        yield run.experiment, run.records, run.measured
        return
    first: dict[str, Experiment] = {}  # one seed of each
    (preset,) = choose([source], labels).values()
    for each in preset.experiments:
        first.setdefault(each.label, each)
    yield from ((each, [], []) for each in first.values())


def _pages(checked: Checked) -> Iterator[Any]:
    run = checked.run
    counts = f"n/m = {run.n}/{run.m}, K = {run.K}, T = {run.T}{_compression(run)}"
    yield f"\n{checked.label}: theorem {checked.theorem}, {counts}"
    yield f"step of a round α = {run.alpha:.4g}, u = {run.adaptivity(checked.constants):.4g}: {checked.regime}"
    if checked.twin:
        near = "while v̂ is on its floor, the server equals" if run.inside else "where √v is far below ε, it is close to"
        yield f"{near} {checked.twin}"
    yield _constants(checked.constants)
    yield _terms(checked)
    yield _conditions(checked)
    if checked.may_leave is not None and checked.may_leave < 1:
        yield f"v̂ left its floor in at most {100 * checked.may_leave:.3g}% of coordinates, by the norms of the updates"
    for fail in checked.fails:
        yield f"does not hold: {fail}"


def _compression(run: Setting) -> str:
    """Return q, and γ where the bounds use it; nothing without compression."""
    return (f", q = {run.q:.6g}" if run.q else "") + (f", γ = {run.gamma:.4g}" if run.q and run.full else "")


def _table(*heads: str, title: str = "") -> Table:
    first, *rest = heads
    return Table(first, *(Column(name, justify="right") for name in rest), box=SIMPLE_HEAD, title=title)


def _constants(constants: Constants) -> Table:
    table = Table("constant", Column("value", justify="right"), "source", box=SIMPLE_HEAD)
    for name in ("L", "G", "s_l", "s_g", "F", "d"):
        table.add_row(name, f"{getattr(constants, name):.6g}", escape(constants.how.get(name, "exact")))
    return table


def _terms(checked: Checked) -> Table:
    table = _table("term of the bound on mean ‖∇f‖²", *(head for b in checked.bounds for head in (b.version, "share")))
    for name in checked.bounds[0].terms:
        cells = [(bound.terms[name], bound.terms[name] / bound.value) for bound in checked.bounds]
        table.add_row(name, *(text for term, part in cells for text in (f"{term:.4g}", f"{100 * part:.1f}%")))
    table.add_row("total", *(text for bound in checked.bounds for text in (f"{bound.value:.4g}", "")), style="bold")
    table.add_row("trivial bound G²", f"{checked.constants.G**2:.4g}", "", f"{checked.constants.G**2:.4g}", "")
    if "gradient_sq" in checked.seen:
        measured = f"{checked.seen['gradient_sq']:.4g}"
        table.add_row("measured (estimate from updates)", measured, "", measured, "")
    if "measured_gradient_sq" in checked.seen:
        measured, rounds = f"{checked.seen['measured_gradient_sq']:.4g}", checked.seen["measured_rounds"]
        table.add_row(f"measured (gradients in {rounds:.0f} rounds)", measured, "", measured, "")
    return table


def _conditions(checked: Checked) -> Table:
    table = _table("condition", "allowed", "used", "used/allowed", "holds")
    for bound in checked.bounds:
        for condition in bound.conditions:
            ratio = condition.used / condition.allowed if condition.allowed else float("inf")
            shown = (
                f"{condition.allowed:.4g}",
                f"{condition.used:.4g}",
                f"{ratio:.3g}",
                "yes" if condition.holds else "no",
            )
            table.add_row(f"{bound.version}: {condition.name}", *shown)
    return table


# -- steps ---------------------------------------------------------------------------------------------------------


@theory.command()
def steps(
    task: Annotated[
        str, typer.Option(autocompletion=piece_names("task"), help="The task that determines the constants.")
    ] = "logistic",
    partition: Annotated[str, typer.Option(help="How the data is split over clients.")] = "iid",
    rounds: Annotated[int, typer.Option("--rounds", "-T", min=1, help="Number of rounds T.")] = 1000,
    local_steps: Annotated[int, typer.Option("--steps", "-K", min=1, help="Local steps per round K.")] = 5,
    cohort: Annotated[int, typer.Option("--cohort", "-n", min=1, help="Clients per round n.")] = 10,
    clients: Annotated[int, typer.Option("--clients", "-m", min=1, help="Number of clients m.")] = 100,
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Examples per local step.")] = 20,
    server: Annotated[str, typer.Option(help="The server; its lr is ignored.")] = "fedams",
    uplink: Annotated[str, typer.Option(help="Compressor for the updates.")] = "identity",
    data: Data = None,
) -> None:
    """Recommend both learning rates from the proved bound, next to the corollaries' choice."""
    from fedcams.experiment import Experiment
    from fedcams.theory.check import check as check_experiment
    from fedcams.theory.steps import corollary, recommended

    experiment = Experiment.from_dict({
        "task": task, "model": _model(task), "partition": partition, "clients": clients,
        "sampler": f"uniform(n={cohort})",
        "local": f"sgd(steps={local_steps}, batch={batch}, replace=true)", "server": server, "uplink": uplink,
        "rounds": rounds,
    })  # fmt: skip
    checked, console = check_experiment(experiment, data=data), Console(highlight=False)
    constants, run = checked.constants, checked.run
    console.print(_constants(constants))
    chosen = {"recommended": recommended(constants, run), "corollary": corollary(constants, run)}
    console.print(_steps(chosen, experiment.server, constants))
    if limit := chosen["recommended"].limited_by:
        console.print(f"the step is shorter than the best one, because of {limit}")
    for fail in checked.fails:
        console.print(f"does not hold: {fail}", soft_wrap=True, markup=False)


def _model(task: str) -> str:
    from fedcams.registry import resolve

    return str(getattr(resolve("task", task), "model", "mlp"))


def _steps(chosen: dict[str, Steps], server: ServerOptimizer, constants: Constants) -> Table:
    from fedcams.theory.describe import server_lr

    table = _table("", *chosen)
    rows = {
        f"lr of {server.name}": lambda each: f"{server_lr(server, each.run.eta):.4g}",
        "local lr": lambda each: f"{each.run.eta_l:.4g}",
        "step of a round α": lambda each: f"{each.run.alpha:.4g}",
        "sound bound on mean ‖∇f‖²": lambda each: f"{each.bound.value:.4g}",
        "trivial bound G²": lambda each: f"{constants.G**2:.4g}",
        "conditions": lambda each: "hold" if each.bound.admissible else "do not hold",
    }
    for name, shown in rows.items():
        table.add_row(name, *map(shown, chosen.values()))
    return table


# -- rates ---------------------------------------------------------------------------------------------------------


@theory.command()
def rates(
    quick: Annotated[bool, typer.Option("--quick", help="Run only a small grid, in a third of the time.")] = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs per point; with several, also show the standard deviation.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print every point as JSON.")] = False,
) -> None:
    """Measure how mean ‖∇f‖² falls with rounds T, local steps K and clients m; theory predicts the exponent -1/2.

    Each seed takes about half a minute on one CPU core.
    """
    from fedcams.theory import rates as measured

    grid, base = (measured.QUICK, measured.BASE["quick"]) if quick else (measured.FULL, measured.BASE["full"])
    runs, total = measured.sweep(base, grid, range(1, seeds + 1)), seeds * sum(map(len, grid.values()))
    found = list(track(runs, "running quadratics", total, console=Console(stderr=True), transient=True))
    fits = {name: measured.slopes(found, late=name == "late") for name in ("average", "late")}
    console = Console(highlight=False)
    if as_json:
        console.print_json(json.dumps({"points": measured.points(found), "slopes": fits}))
        return
    table = _table("slope against", "all rounds", "second half", "theory")
    for axis in grid:
        table.add_row(axis, *(_slope(fit[axis]) for fit in fits.values()), "-0.5")
    console.print(table)
    if seeds > 1:
        console.print(f"mean ± standard deviation over {seeds} seeds")


def _slope(fits: list[float]) -> str:
    return f"{fmean(fits):+.3f}" + (f" ± {stdev(fits):.3f}" if len(fits) > 1 else "")
