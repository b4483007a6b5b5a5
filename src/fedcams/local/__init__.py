"""What a client does with the model it received."""

from fedcams.local.schedule import batches, step_count
from fedcams.local.sgd import SGD, Local, local

__all__ = ["SGD", "Local", "batches", "local", "step_count"]
