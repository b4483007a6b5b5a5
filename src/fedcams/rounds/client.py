"""The client's half of a round: train from the model received, answer, and keep or drop the residual later."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fedcams.compress.identity import IDENTITY
from fedcams.downlink import Downlink, HeldStore, OutOfStep, downlink
from fedcams.errors import UpdateError
from fedcams.feedback import ErrorFeedback, Pending
from fedcams.keys import derive
from fedcams.layout import Layout
from fedcams.rounds.messages import BUFFERS, MODEL, UPDATE, Instruction, Refusal, Reply, expect_streams
from fedcams.wire import decode, encode, pack


class Update(NamedTuple):
    """What local training brings: the change of the parameters `[d]`, the buffers, and what it saw."""

    delta: Tensor
    buffers: Tensor | None
    examples: int
    steps: int
    loss: float


Train = Callable[[Tensor, Tensor | None, Instruction], Update]
"""(model [d], buffers, instruction) -> Update; shuffles and augmentation are functions of the instruction's seed,
round and client. The model's memory is its own to use."""


@dataclass(frozen=True)
class Client:
    """What a client needs beside its data."""

    uplink: ErrorFeedback
    buffer_layout: Layout | None = None
    downlink: Downlink = field(default_factory=lambda: downlink("none"))
    held: HeldStore | None = None
    """Where it keeps its model, for a downlink by which clients keep it."""


def reply(client: Client, instruction: Instruction, train: Train) -> tuple[Reply, Pending]:
    """Trains and encodes; no residual is stored until the pending update is committed.

    A client that keeps its model stages the one received first, so that it survives a kill from here on. It refuses by
    OutOfStep, before any training, an instruction that builds on a model which it does not hold: `refusal` tells the
    server.
    """
    codec, layout = client.uplink.compressor, client.uplink.layout
    expect_streams(instruction, [MODEL, BUFFERS] if client.buffer_layout else [MODEL])
    streams, sealed = instruction.streams, instruction.sealed
    x, held = client.downlink.receive(streams[MODEL], layout, client.held, instruction.client, sealed)
    buffers = decode(streams[BUFFERS], client.buffer_layout) if client.buffer_layout else None
    update = train(x, buffers, instruction)
    if not math.isfinite(update.loss):  # before anything is held: no server would read the reply
        raise UpdateError(f"the training reports the loss {update.loss}; lower the learning rate or clip")
    key = derive(instruction.seed, "uplink", instruction.round, instruction.client)
    pending = client.uplink.prepare([instruction.client], update.delta[None], instruction.round, key)
    sent = {UPDATE: pack(codec, {name: tensor[0] for name, tensor in pending.code.items()}, layout)}
    if update.buffers is not None:
        sent[BUFFERS] = encode(IDENTITY, update.buffers, client.buffer_layout)
    about = (update.examples, update.steps, update.loss)
    return Reply(instruction.round, instruction.client, sent, *about, held), pending


def refusal(instruction: Instruction, error: OutOfStep) -> Refusal:
    """What to answer instead of a reply."""
    return Refusal(instruction.round, instruction.client, error.held, str(error))


def commit(client: Client, pending: Pending) -> None:
    """The server accepted the update: its residual becomes the stored one."""
    client.uplink.commit(pending)


def discard(client: Client, pending: Pending) -> None:
    """The server did not: the stored residual stays as it was."""
    client.uplink.discard(pending)


def settle(client: Client, sent: Reply, pending: Pending, instruction: Instruction) -> bool:
    """Commits or discards by what the next instruction names as accepted; returns which."""
    accepted = is_accepted(sent, instruction)
    (commit if accepted else discard)(client, pending)
    return accepted


def is_accepted(sent: Reply, instruction: Instruction) -> bool:
    """Whether the instruction names this reply as the one accepted last."""
    last = instruction.accepted
    return last is not None and (last.round, last.digest) == (sent.round, sent.digest)
