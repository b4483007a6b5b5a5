"""Experiments: descriptions of runs, and what they become."""

from fedcams.experiment.assembly import Built, build
from fedcams.experiment.experiment import Experiment

__all__ = ["Built", "Experiment", "build"]
