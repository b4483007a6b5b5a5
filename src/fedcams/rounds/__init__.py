"""A federated round: what clients and the server compute, on rows, and the messages between them."""

from fedcams.rounds.client import Client, ClientUpdate
from fedcams.rounds.cohort import Arrival, Outgoing, Received
from fedcams.rounds.intake import Intake
from fedcams.rounds.messages import Accepted, Instruction, Refusal, Reply, answer_from_bytes, answer_from_parts
from fedcams.rounds.server import Concluded, Server, ServerState

__all__ = [
    "Accepted",
    "Arrival",
    "Client",
    "ClientUpdate",
    "Concluded",
    "Instruction",
    "Intake",
    "Outgoing",
    "Received",
    "Refusal",
    "Reply",
    "Server",
    "ServerState",
    "answer_from_bytes",
    "answer_from_parts",
]
