"""The engine `captured`: any model on a GPU, a client's step compiled once and replayed as a CUDA graph."""

from fedcams.engines.captured.engine import Captured

__all__ = ["Captured"]
