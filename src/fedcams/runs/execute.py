"""Run an experiment in its own folder, and resume it after a stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcams.errors import SpecError
from fedcams.experiment import Built, Experiment, build
from fedcams.runs.checkpoint import clear_after_last, read_state, start_over
from fedcams.runs.files import disk_errors, end_of, locked, write_private, write_public
from fedcams.runs.folder import (
    CHECKPOINT,
    ENVIRONMENT,
    EXPERIMENT,
    PARTITION,
    PRIVATE,
    ROUNDS,
    THEORY,
    Run,
    RunError,
    private_note,
    read_call,
    read_experiment,
    read_run,
)
from fedcams.runs.journal import Journal, environment_of, to_json
from fedcams.simulation import RoundRecord, Simulation

if TYPE_CHECKING:
    import torch

Watch = Callable[[RoundRecord, dict[str, Any]], None]
"""Called after every round with its record and its timing; an exception stops the run."""


def run(
    experiment: Experiment,
    folder: Path,
    *,
    data: Path | None = None,
    device: str | torch.device = "cpu",
    checkpoint_every: int = 25,
    watch: Watch | None = None,
    keep_rows: bool = False,
) -> Run:
    """Run an experiment in a new folder and return the finished run; however it stops, `resume` continues it there.

    Arguments:
        experiment: everything that defines the run.
        folder: where to write; the last checkpoint is there at the end.
        data: the folder of downloaded files; None means the default one.
        device: where to train.
        checkpoint_every: rounds between checkpoints.
        watch: called with every record and its timing.
        keep_rows: whether to keep the clients' state after the last round, which `extend` needs.

    Returns:
        The finished run.

    Raises:
        RunError: for a folder that already holds a run, or cannot be written.
        UpdateError: if training diverges; the last checkpoint stays.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.experiment import Experiment
        >>> from fedcams.runs import run
        >>> tiny = Experiment(task="quadratic", model="point", clients=2, sampler="full", rounds=3)
        >>> [record.round for record in run(tiny, Path("first")).records]
        [1, 2, 3]
    """
    folder = Path(folder)
    check_interval(checkpoint_every)
    refuse_taken(folder)
    built = build(experiment, data, device)  # first, so that an experiment that cannot be built leaves no folder behind
    make_folder(folder)
    with locked(folder):
        refuse_taken(folder)  # check again, in case another process was faster
        write_about(folder, experiment, built.simulation, built.histogram.tolist())
        return _finish(folder, experiment, built, checkpoint_every, watch, keep_rows)


def resume(
    folder: Path,
    *,
    data: Path | None = None,
    device: str | torch.device = "cpu",
    checkpoint_every: int = 25,
    watch: Watch | None = None,
    keep_rows: bool = False,
) -> Run:
    """Continue a run from its last checkpoint, or from its start; a finished run is returned unchanged.

    On the same machine, the records are equal, byte for byte, to those of a run that was never stopped.

    Arguments:
        folder: the run's folder.
        data: the folder of downloaded files; None means the default one.
        device: where to train.
        checkpoint_every: rounds between checkpoints.
        watch: called with every record and its timing.
        keep_rows: whether to keep the clients' state after the last round, which `extend` needs.

    Returns:
        The finished run.

    Raises:
        RunError: for a folder without a run, and an unfinished run that was started from Python, because only Python
            has its model and data.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.experiment import Experiment
        >>> from fedcams.runs import resume, run
        >>> tiny = Experiment(task="quadratic", model="point", clients=2, sampler="full", rounds=1)
        >>> finished = run(tiny, Path("resumed"))
        >>> resume(Path("resumed")).records == finished.records
        True
    """
    folder = Path(folder)
    check_interval(checkpoint_every)
    experiment = read_experiment(folder)
    with locked(folder):
        if call := read_call(folder):
            if (found := read_run(folder)).finished:
                return found
            raise RunError(f"{folder}: this run was started from Python, which has its model and data; call {call}")
        if _is_finished(folder, experiment):
            return read_run(folder)
        built = build(experiment, data, device)
        return _finish(folder, experiment, built, checkpoint_every, watch, keep_rows)


def _finish(
    folder: Path, experiment: Experiment, built: Built, every: int, watch: Watch | None, keep_rows: bool
) -> Run:
    """Run all rounds that are left."""
    journal = Journal(folder, built.simulation, identity(experiment), every, keep_rows, experiment.theory_every)
    steps = journal.rounds(journal.load(built.state))
    for step in steps:
        try:
            if watch is not None:
                watch(step.record, step.timing)
        except BaseException as error:
            steps.throw(error)  # end the rounds now, while the folder is locked, not when they are garbage-collected
    return read_run(folder)


def identity(experiment: Experiment) -> dict[str, Any]:
    """Return the values that must be equal for a run to continue, with its length only if a schedule follows it.

    `theory_every` is left out: it changes no round, and the checkpoints of older versions do not have it.
    """
    free = {"theory_every"} if experiment.depends_on_rounds else {"theory_every", "rounds"}
    return {key: value for key, value in experiment.to_dict().items() if key not in free}


def check_interval(checkpoint_every: int) -> None:
    """Refuse fewer than one round between checkpoints."""
    if checkpoint_every < 1:
        raise SpecError(f"checkpoint_every={checkpoint_every}; allowed: 1 or more")


def make_folder(folder: Path) -> None:
    """Create the folder of a run."""
    with disk_errors("make", folder, "free space, or name a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)


def write_about(folder: Path, experiment: Experiment, simulation: Simulation, histogram: list[list[int]]) -> None:
    """Write the description of a new run; the experiment comes last, because a folder with it counts as a run."""
    write_public(folder / ENVIRONMENT, to_json(environment_of(simulation)))
    private = experiment.privacy.active
    (write_private if private else write_public)(folder / PARTITION, to_json({"histogram": histogram}))
    if private:
        write_public(folder / PRIVATE, private_note(experiment).encode())
    write_public(folder / EXPERIMENT, experiment.to_toml().encode())


def refuse_taken(folder: Path) -> None:
    """Refuse a folder that holds a run."""
    for name in (EXPERIMENT, ROUNDS, CHECKPOINT):
        if (folder / name).exists():
            raise RunError(f"{folder} already holds a run ({name} is there); resume it, or name another folder")


def _is_finished(folder: Path, experiment: Experiment) -> bool:
    """Return whether the last round was saved; a finished run's checkpoint may have been deleted to save space."""
    if not (folder / CHECKPOINT).exists():
        return read_run(folder).finished
    saved = read_state(folder / CHECKPOINT, identity(experiment))
    if saved is None or saved["round"] < experiment.rounds:
        return False
    if saved["round"] > experiment.rounds:
        past = f"its checkpoint is of round {saved['round']}, after rounds={experiment.rounds}"
        raise RunError(f"{folder}: {past}; {start_over(folder / CHECKPOINT)}")
    end_of(folder / ROUNDS, experiment.rounds, saved.get("lines", ""))  # refuses lines that were lost or changed since
    if experiment.theory_every and (digest := saved.get("theory")):
        end_of(folder / THEORY, experiment.rounds, digest, gaps=True)
    if not saved["rows"]:
        clear_after_last(folder / CHECKPOINT, experiment.rounds)
    return True
