"""Whole runs in one process."""

from fedcams.simulation.history import History
from fedcams.simulation.phases import Phases
from fedcams.simulation.record import RoundRecord
from fedcams.simulation.simulate import simulate
from fedcams.simulation.simulation import Simulation

__all__ = ["History", "Phases", "RoundRecord", "Simulation", "simulate"]
