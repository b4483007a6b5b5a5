"""fedcams: communication-efficient adaptive federated learning (FedAMS and FedCAMS, ICML 2022)."""

from fedcams.aggregate import Aggregator
from fedcams.compress import compressor
from fedcams.downlink import HeldStore
from fedcams.errors import FedcamsError, LayoutError, SpecError, WireError
from fedcams.feedback import ErrorFeedback
from fedcams.layout import Layout
from fedcams.optimizers import server
from fedcams.residuals import ResidualStore
from fedcams.simulation import simulate
from fedcams.version import __version__
from fedcams.wire import decode, encode, payload_size

__all__ = [
    "Aggregator",
    "ErrorFeedback",
    "FedcamsError",
    "HeldStore",
    "Layout",
    "LayoutError",
    "ResidualStore",
    "SpecError",
    "WireError",
    "__version__",
    "compressor",
    "decode",
    "encode",
    "payload_size",
    "server",
    "simulate",
]
