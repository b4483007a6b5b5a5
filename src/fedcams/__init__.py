"""fedcams: communication-efficient adaptive federated learning (FedAMS and FedCAMS, ICML 2022)."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedcams.errors import FedcamsError, LayoutError, SpecError, WireError
from fedcams.version import __version__

if TYPE_CHECKING:
    from fedcams.aggregate import Aggregator
    from fedcams.compress import compressor
    from fedcams.downlink import HeldStore
    from fedcams.feedback import ErrorFeedback
    from fedcams.layout import Layout
    from fedcams.method import Method
    from fedcams.optimizers import server
    from fedcams.own import over_test_set, simulate
    from fedcams.rows import RowStore
    from fedcams.wire import decode, encode, payload_size
else:
    HOMES = {
        "Aggregator": "aggregate",
        "ErrorFeedback": "feedback",
        "HeldStore": "downlink",
        "Layout": "layout",
        "Method": "method",
        "RowStore": "rows",
        "compressor": "compress",
        "decode": "wire",
        "encode": "wire",
        "over_test_set": "own",
        "payload_size": "wire",
        "server": "optimizers",
        "simulate": "own",
    }

    def __getattr__(name: str) -> Any:
        """Return a name or a module, loaded on first use: importing torch takes seconds, too long for `--help`."""
        if name in HOMES:
            return getattr(import_module(f"fedcams.{HOMES[name]}"), name)
        if name.startswith("_") or find_spec(f"fedcams.{name}") is None:
            raise AttributeError(f"module 'fedcams' has no attribute {name!r}")
        return import_module(f"fedcams.{name}")

    def __dir__() -> list[str]:
        """Return the public names, for completion."""
        return sorted({*globals(), *__all__})


__all__ = [
    "Aggregator",
    "ErrorFeedback",
    "FedcamsError",
    "HeldStore",
    "Layout",
    "LayoutError",
    "Method",
    "RowStore",
    "SpecError",
    "WireError",
    "__version__",
    "compressor",
    "decode",
    "encode",
    "over_test_set",
    "payload_size",
    "server",
    "simulate",
]
