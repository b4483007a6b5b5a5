"""A node that attacks in every third round, each time in the next way, and is honest in between; and one that begins
without the mod and sends what NumPy cannot read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedcams.durable import write_whole
from fedcams.flower.records import REPLY, message_parts, message_record

EVERY = 3
ATTACKS = ("huge", "garbage", "stale", "mute", "array")
HEADS = {
    "TokenError": "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3",
    "OverflowError": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30},), }}",
    "IndexError": "{'descr': (), 'fortran_order': False, 'shape': (2, 3), }",
    "RecursionError|MemoryError|ValueError": "-" * 5000 + "1",  # by how deep Python's parser may go where it is read
}
"""What NumPy raises -> the head of an array that makes it do so."""


def attack_in(round: int) -> str:
    """Return how the node attacks in a round; empty if it is honest."""
    return "" if round % EVERY else ATTACKS[(round // EVERY - 1) % len(ATTACKS)]


def attack_of(message: Message) -> str:
    """Return the attack in the round of a message; greetings belong to none."""
    return attack_in(int(message.metadata.group_id)) if message.metadata.group_id else ""


def outermost(message: Message, context: Context, app: ClientAppCallable) -> Message:
    """Around everything: what the node sends in place of the reply, or after the round is over."""
    what = attack_of(message)
    reply = app(message, context)
    if not (reply.has_content() and REPLY in reply.content.array_records):
        return reply
    folder = Path(os.environ["CHAOS_FOLDER"])
    kept = folder / "last-reply"
    if what == "mute":
        outlast(folder, int(message.metadata.group_id))
    elif what == "garbage":
        reply.content[REPLY] = message_record([os.urandom(5000)])
    elif what == "stale":
        reply.content[REPLY] = message_record([kept.read_bytes()])
    elif what == "array":
        reply.content[REPLY] = ArrayRecord({"0": Array(np.zeros((2, 3), np.float32))})
    else:
        write_whole(kept, b"".join(message_parts(reply.content.array_records[REPLY], 2**40)))
    return reply


def shy(message: Message, context: Context, app: ClientAppCallable) -> Message:
    """Around everything: fail greetings, as an app without the mod, until it has sent an array with each of `HEADS`."""
    folder = Path(os.environ["CHAOS_FOLDER"])
    if (sent := len(list(folder.glob("head-*")))) == len(HEADS):
        return app(message, context)
    if not message.metadata.group_id:
        raise RuntimeError("this site is not ready yet")
    (folder / f"head-{sent}").touch()
    forged = with_head([*HEADS.values()][sent])
    arrays = ArrayRecord(dict.fromkeys(message.content.array_records["arrays"], forged))
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


def with_head(head: str) -> Array:
    """Return an array whose head says this."""
    data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + bytes(24)
    return Array("float32", (2, 3), "numpy.ndarray", data)


def outlast(folder: Path, round: int) -> None:
    """Return when the round is over: its deadline comes once all others have answered (`chaos_app.server_app`)."""
    others = int(os.environ["CHAOS_OTHERS"])
    while len(list((folder / "server" / "replies").glob("*"))) < others:
        time.sleep(0.2)
    (folder / f"jump-{round}").touch()
    while json.loads((folder / "server" / "state.json").read_bytes())["round"] < round:
        time.sleep(0.2)


def innermost(message: Message, context: Context, app: ClientAppCallable) -> Message:
    """Next to the app: a huge update goes the way of an honest one, and is compressed with the residual."""
    reply = app(message, context)
    if attack_of(message) == "huge":
        trained = reply.content.array_records["arrays"]
        for name, array in list(trained.items()):
            values = array.numpy()
            trained[name] = Array(np.where(values < 0, values - 1e3, values + 1e3).astype(values.dtype))
    return reply
