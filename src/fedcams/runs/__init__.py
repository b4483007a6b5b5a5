"""Runs on disk: their folders, checkpoints and resumption."""

from fedcams.runs.execute import Watch, resume, run
from fedcams.runs.folder import Run, RunError, is_run, read_run

__all__ = ["Run", "RunError", "Watch", "is_run", "read_run", "resume", "run"]
