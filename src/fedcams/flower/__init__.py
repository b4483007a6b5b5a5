"""Real federations on Flower: a client mod and a strategy around the two halves of a round.

An app that uses Flower's message API changes two lines::

    app = ClientApp(mods=[fedcams.flower.uplink("blockq(bits=2)", state_dir="state")])
    strategy = fedcams.flower.FedCAMS(checkpoint="checkpoint")
"""

from fedcams.extras import load

load("flwr", what="fedcams.flower", extra="flower")

from fedcams.flower.mod import Uplink, uplink  # noqa: E402
from fedcams.flower.strategy import FedCAMS  # noqa: E402

__all__ = ["FedCAMS", "Uplink", "uplink"]
