"""A federated round as two pure halves that meet only in an `Instruction` and a `Reply`."""

from fedcams.feedback import Pending
from fedcams.rounds import client, server
from fedcams.rounds.client import Client, Update
from fedcams.rounds.messages import Accepted, Instruction, Reply
from fedcams.rounds.server import Closed, Server, ServerState

__all__ = [
    "Accepted",
    "Client",
    "Closed",
    "Instruction",
    "Pending",
    "Reply",
    "Server",
    "ServerState",
    "Update",
    "client",
    "server",
]
