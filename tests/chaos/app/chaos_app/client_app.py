"""The example's app, which reports each step to a controller before and after; the controller may kill it there.

Without a controller nothing ends it. With CHAOS_HOSTILE the node attacks; with CHAOS_SHY it fails its first greeting.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from chaos_app import hostile
from fedcams.durable import write_whole
from fedcams.flower import uplink
from fedcams.flower.records import REPLY, message_parts
from fedcams.rounds import Reply, answer_from_parts
from fedcams_app import client_app

FOLDER = Path(os.environ["CHAOS_FOLDER"])
CONTROLLER = os.environ.get("CHAOS_PORT")


def tell(message: Message, context: Context, event: str) -> None:
    """Returns when the controller says so; greetings belong to no round and are not told."""
    if CONTROLLER and message.metadata.group_id:
        with socket.create_connection(("127.0.0.1", int(CONTROLLER))) as controller:
            said = {"site": context.node_config["site-id"], "round": int(message.metadata.group_id), "event": event}
            controller.sendall(json.dumps(said).encode() + b"\n")
            assert controller.recv(1), "the controller is gone"


def outside(message: Message, context: Context, app: ClientAppCallable) -> Message:
    """Around our mod: before it settles the last reply, and after the new one is on disk."""
    tell(message, context, "before commit")
    reply = app(message, context)
    if reply.has_content() and REPLY in reply.content.array_records:
        answer = answer_from_parts(message_parts(reply.content.array_records[REPLY], 2**40))
        if isinstance(answer, Reply):
            write_whole(FOLDER / "payloads" / answer.digest.hex(), answer.streams["update"])
    tell(message, context, "after prepare")
    return reply


def inside(message: Message, context: Context, app: ClientAppCallable) -> Message:
    """Between our mod and the app; notes what training changed."""
    tell(message, context, "before training")
    before = {name: array.numpy().copy() for name, array in message.content.array_records["arrays"].items()}
    reply = app(message, context)
    after = {name: array.numpy() for name, array in reply.content.array_records["arrays"].items()}
    change = np.concatenate([(after[name] - before[name]).ravel() for name in before])
    config = message.content.config_records["config"]
    write_whole(FOLDER / "updates" / f"{config['client']}-{config['server-round']}", change.tobytes())
    return reply


mods = [outside, uplink(state_dir=client_app.STATE, initial=client_app.initial), inside]
if os.environ.get("CHAOS_HOSTILE"):
    mods = [hostile.outermost, *mods, hostile.innermost]
if os.environ.get("CHAOS_SHY"):
    mods = [hostile.shy, *mods]
app = ClientApp(mods=mods)
app.train()(client_app.train)
