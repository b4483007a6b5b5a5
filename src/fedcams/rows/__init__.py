"""Named rows per client (residuals, replicas, control variates), in memory, on the GPU or on disk."""

from fedcams.rows.base import RowStore, Versions
from fedcams.rows.saved import DirectRows, SavedRows

__all__ = ["DirectRows", "RowStore", "SavedRows", "Versions"]
