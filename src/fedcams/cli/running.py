"""`fedcams run` and `fedcams resume`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from fedcams.cli.options import CheckpointEvery, Data, Device, Quiet, Track
from fedcams.cli.reporting import write_report
from fedcams.cli.session import Session
from fedcams.errors import SpecError
from fedcams.experiment.preset import Preset, load_preset, overridden
from fedcams.registry.params import nearest
from fedcams.runs import Run, read_run
from fedcams.trackers import tracker


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
    chosen = _only(overridden(load_preset(preset), _settings(settings or [])), only or [])
    session = Session(data, device, quiet, [tracker(name) for name in track or []], checkpoint_every)
    folder = Path("runs") / chosen.name if out is None else out
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
    session = Session(data, device, quiet, [tracker(name) for name in track or []], checkpoint_every)
    _summarize(session, [session.go_on(read_run(folder))])


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


def _summarize(session: Session, done: Sequence[Run]) -> None:
    """One row for each run: how it ended and what it sent."""
    if session.quiet:
        return
    table = Table("run", "seed", "rounds", "loss", "accuracy", "up", "down")
    for run in done:
        last, sent = run.records[-1], [(record.wire_up, record.wire_down) for record in run.records]
        up, down = (decimal(sum(column)) for column in zip(*sent, strict=True))
        loss, accuracy = ("" if value is None else f"{value:.4f}" for value in (last.train_loss, last.test_accuracy))
        table.add_row(run.experiment.label, str(run.experiment.seed), str(last.round), loss, accuracy, up, down)
    session.console.print(table)
