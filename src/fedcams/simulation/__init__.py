"""Simulated rounds: all clients and the server in one process, on the rows of a whole cohort."""

from fedcams.simulation.record import Phases, RoundRecord
from fedcams.simulation.rounds import Simulation

__all__ = ["Phases", "RoundRecord", "Simulation"]
