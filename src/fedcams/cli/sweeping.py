"""`fedcams sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcams.cli.options import Data, Device, Quiet
from fedcams.errors import UpdateError

if TYPE_CHECKING:
    from fedcams.experiment import Experiment
    from fedcams.simulation import RoundRecord


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file: a preset whose runs have grids.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; by default runs/FILE.", show_default=False)
    ] = None,
    data: Data = None,
    device: Device = "cpu",
    quiet: Quiet = False,
) -> None:
    """Try every setting of every grid, and rank them in leaderboard.md and leaderboard.csv.

    In the file, a run says what is open and what to try there:

    server = "fedams(lr={lr})" and grid = { lr = [0.1, 1] }

    What is finished is left alone, so the same command given again completes an interrupted sweep.
    """
    from fedcams.cli.progress import title
    from fedcams.cli.session import Session
    from fedcams.experiment import sweep as sweeps

    session = Session(data, device, quiet)
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
