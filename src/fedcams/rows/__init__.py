"""Named rows per client (residuals, replicas, control variates), in memory, on the GPU or on disk."""

from fedcams.rows.base import RowStore, Versions
from fedcams.rows.saved import SavedRows

__all__ = ["RowStore", "SavedRows", "Versions"]
