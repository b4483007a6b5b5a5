"""The example's server, which says who it is so that it can be killed."""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcams_app.server_app import main

app = ServerApp()


@app.main()
def run(grid: Grid, context: Context) -> None:
    """As the example has it."""
    (Path(os.environ["CHAOS_FOLDER"]) / "server.pid").write_text(str(os.getpid()))
    main(grid, context)
