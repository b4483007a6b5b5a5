"""Rounds in one process, on the rows of a whole cohort."""

from fedcams.simulation.phases import Phases
from fedcams.simulation.record import RoundRecord
from fedcams.simulation.rounds import Simulation

__all__ = ["Phases", "RoundRecord", "Simulation"]
