"""The example's server, which reports its process id so that it can be killed; a controller triggers its deadlines."""

from __future__ import annotations

import os
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedcams.flower.grid_round
from fedcams_app.server_app import main

FOLDER = Path(os.environ["CHAOS_FOLDER"])
app = ServerApp()


class Clock:
    """The system's, which jumps past the deadline of the round in progress when the controller writes a file.

    So a round that lost a reply ends when nothing more can come, on a fast machine and on a slow one alike.
    """

    sleep = staticmethod(time.sleep)

    @staticmethod
    def monotonic() -> float:
        """Seconds."""
        return time.monotonic() + 1e6 * len(list(FOLDER.glob("jump-*")))


@app.main()
def run(grid: Grid, context: Context) -> None:
    """As the example has it."""
    (FOLDER / "server.pid").write_text(str(os.getpid()))
    fedcams.flower.grid_round.time = Clock()  # type: ignore[assignment]
    main(grid, context)
