"""Run the command line in this process; typer's own runner would inspect all commands at every call."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer
from typer.testing import CliRunner

from fedcams.cli import app


@cache
def command() -> Any:
    return typer.main.get_command(app)


def fedcams(*words: str, **options: Any) -> Any:
    """Run `fedcams` with these words; returns its exit code, `stdout`, `stderr` and both together as `output`."""
    return super(CliRunner, CliRunner()).invoke(command(), list(words), **options)
