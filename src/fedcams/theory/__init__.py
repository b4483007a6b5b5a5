"""Convergence theory: bounds with every term, conditions, step sizes, and experiments that measure the rates."""

from fedcams.theory.paper import printed, printed_rate, theorem, tight_rate
from fedcams.theory.proved import sound
from fedcams.theory.setting import Bound, Condition, Constants, Setting

__all__ = ["Bound", "Condition", "Constants", "Setting", "printed", "printed_rate", "sound", "theorem", "tight_rate"]
