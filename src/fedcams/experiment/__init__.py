"""Experiments: descriptions of runs, and the simulations that are built from them."""

from fedcams.experiment.assembly import Built, build
from fedcams.experiment.experiment import Experiment

__all__ = ["Built", "Experiment", "build"]
