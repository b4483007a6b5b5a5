"""Real federations on Flower: a client mod and a strategy around the two halves of a round.

An app that uses Flower's message API changes two lines::

    app = ClientApp(mods=[fedcams.flower.uplink("topk(ratio=1/64)", state_dir="state")])
    strategy = fedcams.flower.FedCAMS(server="fedams(lr=1.0, eps=1e-3)", checkpoint="checkpoint")
"""

from fedcams.extras import load

load("flwr", what="fedcams.flower", extra="flower")

from fedcams.flower.mod import Uplink, uplink  # noqa: E402
from fedcams.flower.strategy import FedCAMS  # noqa: E402

__all__ = ["FedCAMS", "Uplink", "uplink"]
