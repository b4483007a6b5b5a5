"""`fedcams list`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND", help="presets, experiment, server, ...; by default an overview.", show_default=False
        ),
    ] = None,
) -> None:
    """Show what there is to choose from: presets, the keys of an experiment, and the pieces that spec strings name."""
    from fedcams.cli.pieces import pieces

    Console(highlight=False).print(pieces(kind))
