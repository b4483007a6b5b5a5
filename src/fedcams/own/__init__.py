"""Simulations of your own model and data, started from Python."""

from fedcams.own.history import History
from fedcams.own.start import simulate
from fedcams.simulation.evaluate import over_test_set

__all__ = ["History", "over_test_set", "simulate"]
