"""What nodes answer, fetched one message at a time, because Flower reads what nodes send before this package does.

If Flower cannot read a reply, it raises, and whatever it fetched at the same time is lost. It also hands out messages
that nodes send without being asked, together with any reply.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedcams.errors import UpdateError
from fedcams.flower.records import readable

PAUSE = 0.5
"""Seconds between two polls of the SuperLink."""
logger = logging.getLogger("flwr.fedcams")


def pull(grid: Grid, name: str) -> Message | None:
    """Return the reply to the message with this id; None if there is none yet.

    Raises an UpdateError for a reply that Flower cannot read; an error of the SuperLink is raised unchanged.
    """
    try:
        found = list(grid.pull_messages([name]))
    except Exception as error:  # whatever a node sends
        grid.get_node_ids()  # fails if the SuperLink is gone, for which no node is to blame
        raise UpdateError(f"Flower cannot read the reply ({type(error).__name__}: {error})") from None
    return next((message for message in found if message.metadata.reply_to_message_id == name), None)


def ask(grid: Grid, messages: Sequence[Message], seconds: float) -> list[tuple[int, Message]]:
    """Send messages, and return the replies that came in time, each with its node, in ascending order of nodes."""
    nodes = [message.metadata.dst_node_id for message in messages]
    sent = zip(grid.push_messages(messages), nodes, strict=False)
    waiting = {name: node for name, node in sent if name}  # for a node that is gone there is none
    found, end = list[tuple[int, Message]](), time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        for name, node in list(waiting.items()):
            try:
                reply = pull(grid, name)
            except UpdateError as error:
                logger.warning("node %s: %s", node, readable(error))
            else:
                if reply is None:
                    continue
                found.append((node, reply))
            del waiting[name]
        if waiting:
            time.sleep(PAUSE)
    return sorted(found, key=lambda each: each[0])
