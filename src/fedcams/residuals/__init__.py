"""The residuals of error feedback: what every client still owes, in memory, on the GPU or on disk."""

from fedcams.residuals.base import ResidualStore

__all__ = ["ResidualStore"]
