"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    Path | None,
    typer.Option(help="Folder of downloaded data; by default $FEDCAMS_DATA, else 'data'.", show_default=False),
]
Device = Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, ...")]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Rounds from one checkpoint to the next.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Let a tracker follow, such as tensorboard; may be given several times."),
]
Target = Annotated[
    float | None, typer.Option(help="Test accuracy to measure the way to, such as 0.9.", show_default=False)
]
