"""A federated round as two pure halves that meet only in an `Instruction` and a `Reply`."""

from fedcams.downlink import Held, HeldStore, OutOfStep
from fedcams.feedback import Pending
from fedcams.rounds import client, server
from fedcams.rounds.client import Client, Update
from fedcams.rounds.messages import (
    PROTOCOL,
    Accepted,
    Instruction,
    Refusal,
    Reply,
    answer_from_bytes,
    answer_from_parts,
    check_protocol,
    expect_streams,
    instruction_size,
    reply_size,
)
from fedcams.rounds.server import Closed, Server, ServerState

__all__ = [
    "PROTOCOL",
    "Accepted",
    "Client",
    "Closed",
    "Held",
    "HeldStore",
    "Instruction",
    "OutOfStep",
    "Pending",
    "Refusal",
    "Reply",
    "Server",
    "ServerState",
    "Update",
    "answer_from_bytes",
    "answer_from_parts",
    "check_protocol",
    "client",
    "expect_streams",
    "instruction_size",
    "reply_size",
    "server",
]
