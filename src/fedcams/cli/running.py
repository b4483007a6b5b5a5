"""`fedcams run` and `fedcams resume`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Column, Table

from fedcams.cli.options import CheckpointEvery, Data, Device, Quiet, Track
from fedcams.cli.reporting import write_report
from fedcams.errors import SpecError
from fedcams.registry.params import nearest

if TYPE_CHECKING:
    from fedcams.cli.session import Session
    from fedcams.experiment.preset import Preset
    from fedcams.runs import Run


def run(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="A preset (`fedcams list presets`) or a TOML file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of every run: -s rounds=5 -s uplink=sign."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; by default runs/PRESET.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Only the run of this label; may be given several times."),
    ] = None,
    data: Data = None,
    device: Device = "cpu",
    track: Track = None,
    checkpoint_every: CheckpointEvery = 25,
    report: Annotated[bool, typer.Option(help="Write a report when all runs are finished.")] = True,
    quiet: Quiet = False,
) -> None:
    """Run all experiments of a preset, each in a folder of its own.

    What is finished is left alone and what was interrupted goes on, so the same command given again completes it.
    """
    from fedcams.cli.session import Session, refuse_other
    from fedcams.experiment.preset import load_preset, overridden
    from fedcams.trackers import tracker

    chosen = _only(overridden(load_preset(preset), _settings(settings or [])), only or [])
    session = Session(data, device, quiet, [tracker(name) for name in track or []], checkpoint_every)
    folder = Path("runs") / chosen.name if out is None else out
    for name, experiment in chosen.folders.items():
        refuse_other(experiment, folder / name)  # now, and not after hours of the runs before it
    done = [session.carry_out(experiment, folder / name) for name, experiment in chosen.folders.items()]
    _summarize(session, done)
    if report:
        session.say(_report(done, folder / "report"))


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    data: Data = None,
    device: Device = "cpu",
    track: Track = None,
    checkpoint_every: CheckpointEvery = 25,
    quiet: Quiet = False,
) -> None:
    """Go on with a run from its last checkpoint."""
    from fedcams.cli.session import Session
    from fedcams.trackers import tracker

    session = Session(data, device, quiet, [tracker(name) for name in track or []], checkpoint_every)
    _summarize(session, [session.go_on(folder)])


def _report(done: Sequence[Run], out: Path) -> str:
    """Where it is, or what it lacks: the runs are worth something without it."""
    try:
        return f"report: {write_report([run.path for run in done], out)}"
    except ImportError as error:
        return f"no report: {error}"


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SpecError(f"-s {pair}: give a key and its value, as in -s rounds=5")
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
    """One row for each label, the mean over its seeds: how it ended and what it sent."""
    if session.quiet:
        return
    table = Table("run", *(Column(name, justify="right") for name in NUMBERS), box=SIMPLE_HEAD)
    for label in dict.fromkeys(run.experiment.label for run in done):
        same = [run for run in done if run.experiment.label == label]
        up, down = (decimal(round(fmean(_sent(run, key) for run in same))) for key in ("wire_up", "wire_down"))
        rounds = ", ".join(sorted({str(len(run.records)) for run in same}))
        table.add_row(label, str(len(same)), rounds, _accuracy(same), up, down)
    session.console.print(table)
    session.say("accuracy: mean over the last fifth of the rounds, and over seeds; bytes: all clients, all rounds")


def _sent(run: Run, key: str) -> int:
    return sum(getattr(record, key) for record in run.records)


def _accuracy(same: Sequence[Run]) -> str:
    from fedcams.experiment.sweep import score

    scores = [score(run.records) for run in same]
    known = [value for value in scores if value is not None]
    return f"{fmean(known):.4f}" if known else ""
