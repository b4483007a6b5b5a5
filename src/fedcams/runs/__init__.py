"""Runs on disk: their folders, checkpoints and resumption."""

from fedcams.runs.folder import Run, RunError, is_run, read_run

__all__ = ["Run", "RunError", "is_run", "read_run"]
