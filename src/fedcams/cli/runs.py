"""`fedcams run`, `resume`, `sweep` and `report`: carry out experiments and compare them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedcams.cli.completion import labels, piece_names, preset_names
from fedcams.errors import SpecError
from fedcams.recipes import RECIPES

if TYPE_CHECKING:
    from fedcams.cli.jobs import Outcome
    from fedcams.cli.progress import Progress
    from fedcams.cli.session import Settings
    from fedcams.experiment import Experiment
    from fedcams.experiment.sweep import Trial
    from fedcams.runs import Run
    from fedcams.simulation import RoundRecord

# -- options that several commands share -----------------------------------------------------------------------------

Data = Annotated[
    Path | None,
    typer.Option(help="Folder with downloaded data; default: $FEDCAMS_DATA, else 'data'.", show_default=False),
]
Device = Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, ...")]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Rounds between checkpoints.")]
KeepRows = Annotated[
    bool,
    typer.Option(
        "--keep-rows", help="Also keep the clients' state after the last round, so that runs can be extended."
    ),
]
Jobs = Annotated[
    int,
    typer.Option("--jobs", "-j", min=1, help="How many runs at a time, each in its own process; they share the cores."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC",
        autocompletion=piece_names("tracker"),
        help="Send every round to a tracker: tensorboard, csv, wandb(project=mine), ...; repeat for several.",
    ),
]
SET = f"Set a key for every run: -s rounds=5 -s uplink=sign -s recipe=light. Recipes: {', '.join(RECIPES)}."
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help=SET)]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="LABEL", autocompletion=labels, help="Run only this label; repeat for several."),
]
Target = Annotated[
    float | None,
    typer.Option(help="Compare methods at this test accuracy: 0.9, or 90 for 90%.", show_default=False),
]


# -- commands ------------------------------------------------------------------------------------------------------


def run(
    context: typer.Context,
    presets: Annotated[
        list[str],
        typer.Argument(
            metavar="PRESETS...", autocompletion=preset_names, help="Presets (`fedcams list presets`) or TOML files."
        ),
    ],
    settings: Set = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the runs; several presets get a folder each below it; default: runs/PRESET.",
            show_default=False,
        ),
    ] = None,
    only: Only = None,
    data: Data = None,
    device: Device = "cpu",
    track: Track = None,
    checkpoint_every: CheckpointEvery = 25,
    keep_rows: KeepRows = False,
    report: Annotated[bool, typer.Option(help="Write a report when all runs are finished.")] = True,
    jobs: Jobs = 1,
    quiet: Quiet = False,
) -> None:
    """Run all experiments of one or more presets, each in its own folder.

    Finished runs are skipped and interrupted ones continue, so you can repeat the same command after a stop.

    More rounds than before (-s rounds=600) extend the runs, unless a schedule depends on their length.
    """
    from fedcams.cli.session import Settings
    from fedcams.experiment.preset import choose

    chosen = choose(presets, only or [], _settings(settings or []))
    folders = {name: _folder(out, name, alone=len(presets) == 1) for name in chosen}
    tasks = {folders[name] / each: run for name in chosen for each, run in chosen[name].folders.items()}
    options = Settings(data, device, track or [], checkpoint_every, context.obj, keep_rows)
    progress, outcomes = _begin(tasks, options, jobs, quiet)
    done = _summarize(progress, outcomes)
    for folder in folders.values() if report else ():
        own = [run.path for run in done if run.path.parent == folder]
        progress.say(f"report: {write_report(own, folder / 'report')}")


def resume(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or a folder that holds runs.")],
    data: Data = None,
    device: Device = "cpu",
    track: Track = None,
    checkpoint_every: CheckpointEvery = 25,
    keep_rows: KeepRows = False,
    jobs: Jobs = 1,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its last checkpoint, or all runs in a folder."""
    from fedcams.cli.session import Settings
    from fedcams.runs.folder import read_experiment, runs_below

    tasks = {path: read_experiment(path) for path in runs_below(folder) or [folder]}
    options = Settings(data, device, track or [], checkpoint_every, context.obj, keep_rows)
    _summarize(*_begin(tasks, options, jobs, quiet))


def sweep(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file: a preset whose runs have grids.")],
    settings: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; default: runs/FILE.", show_default=False)
    ] = None,
    only: Only = None,
    data: Data = None,
    device: Device = "cpu",
    track: Track = None,
    checkpoint_every: CheckpointEvery = 25,
    keep_rows: KeepRows = False,
    jobs: Jobs = 1,
    quiet: Quiet = False,
) -> None:
    """Try every setting of every grid and rank them in leaderboard.md and leaderboard.csv.

    In the file, a run marks what varies and lists the values to try:

    server = "fedams(lr={lr})" and grid = { lr = [0.1, 1] }

    A key set with -s replaces its values in a grid.

    Finished runs are skipped, so you can repeat the same command after a stop.
    """
    from fedcams.cli.session import Settings, are_finished
    from fedcams.experiment import sweep as sweeps
    from fedcams.runs import read_run

    folder = Path("runs") / file.stem if out is None else out
    values = _settings(settings or [])
    trials = sweeps.load_sweep(file, values, only or [])
    finished = {trial for trial in trials if are_finished(trial.folders(folder))}
    ordered = sweeps.in_turn(trials, finished)
    tasks = {path: experiment for trial in ordered for path, experiment in trial.folders(folder).items()}
    options = Settings(data, device, track or [], checkpoint_every, context.obj, keep_rows)
    progress, outcomes = _begin(tasks, options, jobs, quiet)

    def runner(experiment: Experiment, path: Path) -> Sequence[RoundRecord]:
        return (next(outcomes).finished() if path in tasks else read_run(path)).records  # both in the sweep's order

    ranked = _with_finished(trials, file, values, folder) if only else trials
    finished |= {trial for trial in ranked if trial not in trials}
    with contextlib.closing(outcomes):  # an error stops the other runs
        tried = sweeps.sweep(ranked, folder, runner, finished)
    for label, results in sweeps.ranking(tried).items():
        best = f"the best of {len(results)} is {results[0].setting}: " if results[0].setting else ""  # without a grid
        progress.say(f"{label}: {best}{results[0].verdict}")
    progress.say(f"leaderboard: {folder / 'leaderboard.md'}")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that hold runs.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the report; default: RUN/report, or ./report for several.", show_default=False),
    ] = None,
    target: Target = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also draw every chart as PNG and SVG, for papers.")
    ] = False,
) -> None:
    """Write a report that compares runs: charts, tables and the numbers behind them."""
    beside = runs[0] if len(runs) == 1 else Path()
    page = write_report(runs, beside / "report" if out is None else out, target, figures)
    Console(highlight=False, soft_wrap=True).print(f"report: {page}", markup=False)


def write_report(runs: Sequence[Path], out: Path, target: float | None = None, figures: bool = False) -> Path:
    """Write a report on runs and return the path of its page."""
    from fedcams.report import report  # slow to load

    return report(runs, out, target, figures)


# -- parts of `run` --------------------------------------------------------------------------------------------------


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SpecError(f"-s {pair}: give a key and a value, as in -s rounds=5")
        settings[key.strip()] = value.strip()
    return settings


def _folder(out: Path | None, preset: str, alone: bool) -> Path:
    if out is None:
        return Path("runs") / preset
    return out if alone else out / preset


def _with_finished(trials: Sequence[Trial], file: Path, values: Mapping[str, str], folder: Path) -> list[Trial]:
    """Return these trials and all others in the file that are finished, so that the leaderboard keeps them."""
    from fedcams.cli.session import are_finished
    from fedcams.experiment.sweep import load_sweep

    try:
        everything = load_sweep(file, values)
    except SpecError:  # other runs may not accept these values
        return list(trials)
    return [trial for trial in everything if trial in trials or are_finished(trial.folders(folder))]


def _begin(
    tasks: Mapping[Path, Experiment], settings: Settings, jobs: int, quiet: bool
) -> tuple[Progress, Generator[Outcome]]:
    """Return the console, and a generator that runs the experiments and yields their outcomes.

    Refuses all of them if one cannot run in its folder: now, not after hours of earlier runs.
    """
    from fedcams.cli.jobs import carry_out_at_once, carry_out_in_turn
    from fedcams.cli.progress import Progress
    from fedcams.cli.session import check_device, refuse_other, rounds_left
    from fedcams.trackers import tracker

    for path, experiment in tasks.items():
        refuse_other(experiment, path)
    for spec in settings.track:
        tracker(spec)  # refuses one that is unknown
    check_device(settings.device)
    jobs = min(jobs, len(tasks))
    left = {path: rounds_left(experiment, path) for path, experiment in tasks.items()}
    progress = Progress(left=left, jobs=jobs, quiet=quiet)
    if jobs == 1:
        return progress, carry_out_in_turn(tasks, settings, progress)
    return progress, carry_out_at_once(tasks, settings, jobs, progress)


def _summarize(progress: Progress, outcomes: Iterable[Outcome]) -> list[Run]:
    """Print the results and return the runs; raises an error that names those that failed."""
    from fedcams.cli.progress import results
    from fedcams.runs import RunError

    outcomes = list(outcomes)
    done = [outcome.run for outcome in outcomes if outcome.run is not None]
    if done and not progress.quiet:
        for table in results(done):
            progress.console.print(table)
        for run in done:
            for note in filter(None, (run.on_floor, run.refusals)):
                progress.say(f"{progress.title(run.path, run.experiment)}: {note}")
        models = "last and averaged models over the last fifth of the rounds"
        progress.say(f"means over seeds; accuracy, averaged: {models}; up, down: bytes of all clients in all rounds")
    if failed := [outcome for outcome in outcomes if outcome.error is not None]:
        names = "; ".join(f"{progress.title(each.path, each.experiment)} ({each.error})" for each in failed)
        raise RunError(f"{len(failed)} of {len(outcomes)} runs failed: {names}")
    return done
