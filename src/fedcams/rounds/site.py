"""A client on its own machine: its half of the rounds, whatever dies in between.

<folder>/residuals/     a ResidualStore: the residual that counts, and while a reply waits the one that may replace it
<folder>/pending.reply  the reply that waits for the server's word, and what it answers

A reply is given out only when both are on disk. The next instruction says which of the client's updates the server
accepted last: if it is the one that waits, its residual counts from then on, otherwise it is dropped. An instruction
that was answered already is answered with the same bytes, so it does not matter how often messages come.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedcams.compress import Compressor
from fedcams.downlink import Downlink
from fedcams.downlink import downlink as resolve_downlink
from fedcams.durable import os_errors, write_whole
from fedcams.errors import ResidualError, WireError
from fedcams.feedback import DurableFeedback, Pending
from fedcams.layout import Layout
from fedcams.residuals import ResidualStore
from fedcams.rounds import client as half
from fedcams.rounds.client import Client, Train
from fedcams.rounds.messages import Instruction, Reply
from fedcams.wire.frames import Frame

PENDING, RESIDUALS = "pending.reply", "residuals"
HELD = Frame(b"FCMP", "Q4s", blobs=1)  # round and checksum of the instruction, the reply


class Answer(NamedTuple):
    """What the client answers."""

    reply: Reply
    again: bool
    """Whether it was given before and is only repeated."""
    note: str
    """What the server should know beside it; empty where all is well."""


class Site:
    """One client of one run and the folder that holds its state; one process at a time."""

    def __init__(
        self,
        folder: Path,
        uplink: Compressor | str,
        layout: Layout,
        buffer_layout: Layout | None = None,
        feedback: bool = True,
        downlink: Downlink | str = "none",
    ) -> None:
        """Opens the folder, or makes it; refuses one of another model."""
        store = ResidualStore.on_disk(layout, folder / RESIDUALS) if feedback else None
        self.folder, self.uplink = folder, DurableFeedback(uplink, store, layout)
        self.client = Client(self.uplink, buffer_layout, resolve_downlink(downlink))

    def answer(self, instruction: Sequence[bytes], train: Train) -> Answer:
        """Settles what waits, trains, and makes the reply last before it gives it out.

        `instruction` is the message in parts, as `Instruction.to_parts` gives them.
        """
        asked = Instruction.from_parts(instruction)
        # beside the round its checksum: a server that started over may ask for the same round in another way
        name, waiting = (asked.round, bytes(instruction[-1][-4:])), self._waiting()
        if waiting is not None and waiting[0] == name:
            return Answer(waiting[1], again=True, note="")
        note = self._settle(None if waiting is None else waiting[1], asked)
        reply, pending = half.reply(self.client, asked, train)
        self._hold(name, reply, pending)
        return Answer(reply, again=False, note=note)

    # -- what the server said of the last reply ------------------------------------------------------------------

    def _settle(self, sent: Reply | None, instruction: Instruction) -> str:
        if sent is None:
            self.uplink.discard()  # a process may have died between residual and reply
        else:
            half.settle(self.client, sent, Pending((sent.client,), sent.round, {}, None), instruction)
        with os_errors(ResidualError, "remove", self.folder / PENDING):
            (self.folder / PENDING).unlink(missing_ok=True)
        return self._compare(instruction)

    def _compare(self, instruction: Instruction) -> str:
        """Whether server and client now agree on the last accepted round; the client can only be behind."""
        if self.uplink.store is None:
            return ""
        last = 0 if instruction.accepted is None else instruction.accepted.round
        ours = self.uplink.store.snapshot_round or 0
        if ours > last:
            raise ResidualError(
                f"{self.folder}: the server accepted round {last} last, this residual is of round {ours}: the server "
                "was set back to an older checkpoint; go on under another run name, whose residuals start at zero"
            )
        if ours < last:
            return f"the residual of round {last} is lost, going on from that of round {ours}"
        return ""

    # -- what waits ----------------------------------------------------------------------------------------------

    def _hold(self, name: tuple[int, bytes], reply: Reply, pending: Pending) -> None:
        """First the residual: without the reply next to it, it is as if it had never been."""
        if self.uplink.store is None:
            return
        self.uplink.hold(pending)
        path = self.folder / PENDING
        with os_errors(ResidualError, "write", path):
            write_whole(path, *HELD.parts(name, reply.to_bytes()))

    def _waiting(self) -> tuple[tuple[int, bytes], Reply] | None:
        path = self.folder / PENDING
        if not path.exists():
            return None
        try:
            with os_errors(ResidualError, "read", path):
                head, (reply,) = HELD.unpack(path.read_bytes())
            return (head[0], head[1]), Reply.from_bytes(reply)
        except WireError as error:
            raise ResidualError(f"{path}: damaged ({error}); delete it: the update in it counts as lost") from error
