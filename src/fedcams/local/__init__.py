"""What a client does with the model it received."""

from fedcams.local.schedule import Plan, batches, plan, step_count
from fedcams.local.sgd import SGD, Local, local

__all__ = ["SGD", "Local", "Plan", "batches", "local", "plan", "step_count"]
