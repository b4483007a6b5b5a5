"""Run the command line in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from fedcams.cli import app


def fedcams(*words: str, **options: Any) -> Any:
    """Run `fedcams` with these words; returns its exit code, `stdout`, `stderr` and both together as `output`."""
    return CliRunner().invoke(app, list(words), **options)
