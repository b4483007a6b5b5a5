"""Give a run more rounds than it started with, if its rounds so far are the first ones of the longer run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fedcams.experiment import Experiment
from fedcams.runs.checkpoint import read_state
from fedcams.runs.execute import identity
from fedcams.runs.files import locked, write_public
from fedcams.runs.folder import CHECKPOINT, EXPERIMENT, RunError, read_call, read_experiment, read_run


def extend(folder: Path, rounds: int) -> None:
    """Set the number of rounds of a run, finished or not, to a larger one; `resume` then runs those that are left.

    Arguments:
        folder: the run's folder.
        rounds: the new number of rounds.

    Returns:
        Nothing.

    Raises:
        RunError: for what `check_extension` refuses.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.experiment import Experiment
        >>> from fedcams.runs import extend, resume, run
        >>> tiny = Experiment(task="quadratic", model="point", clients=2, sampler="full", rounds=1)
        >>> finished = run(tiny, Path("extended"), keep_rows=True)
        >>> extend(Path("extended"), rounds=2)
        >>> len(resume(Path("extended")).records)
        2
    """
    with locked(folder):
        check_extension(folder, rounds)
        longer = dataclasses.replace(read_experiment(folder), rounds=rounds)
        write_public(folder / EXPERIMENT, longer.to_toml().encode())


def check_extension(folder: Path, rounds: int) -> None:
    """Refuse to extend a run that cannot continue.

    Arguments:
        folder: the run's folder.
        rounds: the new number of rounds.

    Returns:
        Nothing, if `extend` would succeed.

    Raises:
        RunError: if that is fewer rounds, if its schedules depend on its length, or if its state is gone.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.experiment import Experiment
        >>> from fedcams.runs import check_extension, run
        >>> tiny = Experiment(task="quadratic", model="point", clients=2, sampler="full", rounds=1)
        >>> finished = run(tiny, Path("checked"), keep_rows=True)
        >>> check_extension(Path("checked"), rounds=2)
    """
    found, elsewhere = read_experiment(folder), f"run {rounds} rounds in another folder"
    if call := read_call(folder):
        raise RunError(f"{folder}: this run was started from Python, which has its model and data; call {call}")
    if rounds < found.rounds:
        raise RunError(f"{folder}: rounds={rounds}, but the run there has rounds={found.rounds}; give at least as many")
    follow = [f"{path}={schedule}" for path, schedule in found.schedules() if schedule.depends_on_rounds]
    follow += [f"privacy={found.privacy}"] if found.privacy.depends_on_rounds else []
    if follow:
        raise RunError(
            f"{folder}: {follow[0]} depends on the length of the run, so in a run of {rounds} rounds, the first "
            f"{found.rounds} would have been different; {elsewhere}"
        )
    _check_state(folder, found, elsewhere)


def _check_state(folder: Path, found: Experiment, elsewhere: str) -> None:
    saved = read_state(folder / CHECKPOINT, identity(found))
    if saved is None and read_run(folder).finished:
        raise RunError(f"{folder}: the run is finished, and its checkpoint was deleted; restore it, or {elsewhere}")
    if saved is not None and (lacking := saved.get("left_out")):
        raise RunError(
            f"{folder}: the run is finished, and its last checkpoint leaves out what more rounds need "
            f"({', '.join(lacking)}); {elsewhere}, or start runs that you may extend with --keep-rows"
        )
