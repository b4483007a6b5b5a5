"""The engine `graphs`: a model becomes a program of a few kinds of operation, each one kernel over the whole cohort."""

from fedcams.engines.graphs.engine import Graphs

__all__ = ["Graphs"]
