"""Simulations of your own model and data, started from Python."""

from fedcams.own.history import History
from fedcams.own.start import simulate

__all__ = ["History", "simulate"]
