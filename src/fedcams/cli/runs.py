"""`fedcams run`, `resume`, `sweep` and `report`: carry out experiments and compare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table

from fedcams.errors import SpecError, UpdateError
from fedcams.recipes import RECIPES
from fedcams.registry.fields import nearest

if TYPE_CHECKING:
    from fedcams.cli.session import Session
    from fedcams.experiment import Experiment
    from fedcams.experiment.preset import Preset
    from fedcams.runs import Run
    from fedcams.simulation import RoundRecord

# -- options that several commands share -----------------------------------------------------------------------------

Data = Annotated[
    Path | None,
    typer.Option(help="Folder with downloaded data; default: $FEDCAMS_DATA, else 'data'.", show_default=False),
]
Device = Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, ...")]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Rounds between checkpoints.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC",
        help="Send every round to a tracker: tensorboard, csv, wandb(project=mine), ...; repeat for several.",
    ),
]
SET = f"Set a key for every run: -s rounds=5 -s uplink=sign -s recipe=light. Recipes: {', '.join(RECIPES)}."
Target = Annotated[
    float | None,
    typer.Option(help="Test accuracy at which methods are compared: 0.9, or 90 for 90 %.", show_default=False),
]


# -- commands ------------------------------------------------------------------------------------------------------


def run(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="A preset (`fedcams list presets`) or a TOML file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help=SET),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; default: runs/PRESET.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Run only this label; repeat for several."),
    ] = None,
    data: Data = None,
    device: Device = "cpu",
    track: Track = None,
    checkpoint_every: CheckpointEvery = 25,
    report: Annotated[bool, typer.Option(help="Write a report when all runs are finished.")] = True,
    quiet: Quiet = False,
) -> None:
    """Run all experiments of a preset, each in its own folder.

    Finished runs are left alone and interrupted ones continue, so you can repeat the same command after a stop.
    """
    from fedcams.cli.session import Session, refuse_other
    from fedcams.experiment.preset import load_preset, overridden
    from fedcams.trackers import tracker

    chosen = _only(overridden(load_preset(preset), _settings(settings or [])), only or [])
    session = Session(data, device, quiet, [tracker(name) for name in track or []], checkpoint_every)
    folder = Path("runs") / chosen.name if out is None else out
    for name, experiment in chosen.folders.items():
        refuse_other(experiment, folder / name)  # now, not after hours of earlier runs
    done = [session.carry_out(experiment, folder / name) for name, experiment in chosen.folders.items()]
    _summarize(session, done)
    if report:
        session.say(_report(done, folder / "report"))


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or a folder that holds runs.")],
    data: Data = None,
    device: Device = "cpu",
    track: Track = None,
    checkpoint_every: CheckpointEvery = 25,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its last checkpoint, or one after the other all runs in a folder."""
    from fedcams.cli.session import Session
    from fedcams.runs.folder import runs_below
    from fedcams.trackers import tracker

    session = Session(data, device, quiet, [tracker(name) for name in track or []], checkpoint_every)
    _summarize(session, [session.resume(path) for path in runs_below(folder) or [folder]])


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file: a preset whose runs have grids.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; default: runs/FILE.", show_default=False)
    ] = None,
    data: Data = None,
    device: Device = "cpu",
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Try every setting of every grid, and rank them in leaderboard.md and leaderboard.csv.

    In the file, a run marks what varies and lists the values to try:

    server = "fedams(lr={lr})" and grid = { lr = [0.1, 1] }

    Finished runs are left alone, so you can repeat the same command after a stop.
    """
    from fedcams.cli.session import Session, title
    from fedcams.experiment import sweep as sweeps
    from fedcams.trackers import tracker

    session = Session(data, device, quiet, [tracker(spec) for spec in track or []])
    folder = Path("runs") / file.stem if out is None else out

    def runner(experiment: Experiment, path: Path) -> Sequence[RoundRecord]:
        try:
            return session.carry_out(experiment, path).records
        except UpdateError as error:
            session.say(f"{title(experiment)}: diverged, {error}")
            raise

    for label, results in sweeps.ranking(sweeps.sweep(file, folder, runner)).items():
        session.say(f"{label}: the best of {len(results)} is {results[0].setting}: {results[0].verdict}")
    session.say(f"leaderboard: {folder / 'leaderboard.md'}")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that hold runs.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the report; default: RUN/report, or ./report for several.", show_default=False),
    ] = None,
    target: Target = None,
) -> None:
    """Compare runs: curves, tables and the numbers behind them."""
    beside = runs[0] if len(runs) == 1 else Path()
    page = write_report(runs, beside / "report" if out is None else out, target)
    Console(highlight=False, soft_wrap=True).print(f"report: {page}", markup=False)


def write_report(runs: Sequence[Path], out: Path, target: float | None = None) -> Path:
    """Write a report on runs and return the path of its page."""
    from fedcams.report import report  # slow to load: it draws

    return report(runs, out, target)


# -- parts of `run` --------------------------------------------------------------------------------------------------


def _report(done: Sequence[Run], out: Path) -> str:
    """Write the report and say where it is; a missing package is not an error, because the runs are complete."""
    try:
        return f"report: {write_report([run.path for run in done], out)}"
    except ImportError as error:
        return f"no report: {error}"


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SpecError(f"-s {pair}: give a key and a value, as in -s rounds=5")
        settings[key.strip()] = value.strip()
    return settings


def _only(preset: Preset, labels: Sequence[str]) -> Preset:
    known = dict.fromkeys(experiment.label for experiment in preset.experiments)
    for label in labels:
        if label not in known:
            choice = ", ".join(map(repr, known))
            raise SpecError(f"--only {label}: no run has this label{nearest(label, known)}; known: {choice}")
    chosen = [experiment for experiment in preset.experiments if not labels or experiment.label in labels]
    return dataclasses.replace(preset, experiments=chosen)


NUMBERS = ("seeds", "rounds", "accuracy", "up", "down")


def _summarize(session: Session, done: Sequence[Run]) -> None:
    """Print one row per label, averaged over seeds, with final accuracy and bytes sent; then who never adapted."""
    from fedcams.cli.session import title

    if session.quiet:
        return
    table = Table("run", *(Column(name, justify="right") for name in NUMBERS), box=SIMPLE_HEAD)
    for label in dict.fromkeys(run.experiment.label for run in done):
        same = [run for run in done if run.experiment.label == label]
        up, down = (decimal(round(fmean(_sent(run, key) for run in same))) for key in ("wire_up", "wire_down"))
        rounds = ", ".join(sorted({str(len(run.records)) for run in same}))
        table.add_row(label, str(len(same)), rounds, _accuracy(same), up, down)
    session.console.print(table)
    for run in done:
        if note := run.on_floor:
            session.say(f"{title(run.experiment)}: {note}")
    session.say("accuracy: mean over the last fifth of the rounds and over seeds; bytes: all clients, all rounds")


def _sent(run: Run, key: str) -> int:
    return sum(getattr(record, key) for record in run.records)


def _accuracy(same: Sequence[Run]) -> str:
    from fedcams.experiment.sweep import score

    scores = [score(run.records) for run in same]
    known = [value for value in scores if value is not None]
    return f"{fmean(known):.4f}" if known else ""
