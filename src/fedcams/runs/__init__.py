"""Runs on disk: their folders, checkpoints and resumption."""

from fedcams.runs.execute import Watch, resume, run
from fedcams.runs.extension import check_extension, extend
from fedcams.runs.folder import Run, RunError, is_run, read_run

__all__ = ["Run", "RunError", "Watch", "check_extension", "extend", "is_run", "read_run", "resume", "run"]
