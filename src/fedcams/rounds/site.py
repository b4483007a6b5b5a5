"""A client on its own machine: its half of the rounds, whatever dies in between.

<folder>/residuals/     a ResidualStore: the residual that counts, and while a reply waits the one that may replace it
<folder>/pending.reply  the reply that waits for the server's word, and what it answers; counts with its residual only
<folder>/held/          a HeldStore: the model that the client keeps, for a downlink by which it does

A reply is given out only when both are on disk. The next instruction says which of the client's updates the server
accepted last: if it is the one that waits, its residual counts from then on, otherwise it is dropped. An instruction
that was answered already is answered with the same bytes, so it does not matter how often messages come.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fedcams.bits.parallel import aside
from fedcams.compress import Compressor
from fedcams.downlink import Downlink, HeldStore, OutOfStep
from fedcams.downlink import downlink as resolve_downlink
from fedcams.durable import os_errors, write_whole
from fedcams.errors import ResidualError, WireError
from fedcams.feedback import DurableFeedback, Pending
from fedcams.layout import Layout
from fedcams.residuals import ResidualStore
from fedcams.rounds import client as half
from fedcams.rounds.client import Client, Train, Update
from fedcams.rounds.messages import Instruction, Refusal, Reply
from fedcams.wire.frames import Frame

PENDING, RESIDUALS, MODELS = "pending.reply", "residuals", "held"
WAITING = Frame(b"FCMP", "Q4s", blobs=1)  # round and checksum of the instruction, the reply


class Answer(NamedTuple):
    """What the client answers."""

    reply: Reply | Refusal
    """A refusal where the instruction builds on a model that the client does not hold."""
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
        store = ResidualStore.on_disk(layout, folder / RESIDUALS, spares=1) if feedback else None
        self.folder, self.uplink = folder, DurableFeedback(uplink, store, layout)
        downlink = resolve_downlink(downlink)
        held = HeldStore.on_disk(layout, folder / MODELS) if downlink.client_keeps_model else None
        self.client = Client(self.uplink, buffer_layout, downlink, held)

    def answer(self, instruction: Sequence[bytes], train: Train) -> Answer:
        """Settles what waits, trains, and makes the reply last before it gives it out.

        `instruction` is the message in parts, as `Instruction.to_parts` gives them.
        """
        asked = Instruction.from_parts(instruction)
        # beside the round its checksum: a server that started over may ask for the same round in another way
        name, waiting = (asked.round, bytes(instruction[-1][-4:])), self._waiting()
        if waiting is not None and waiting[0] == name:
            return Answer(waiting[1], again=True, note="")
        sent = None if waiting is None else waiting[1]
        note = self._compare(sent, asked)
        settled = aside(lambda: self._settle(sent, asked))  # while the app trains: the disk takes its time
        try:
            reply, pending = half.reply(self.client, asked, _after(settled, train))
        except OutOfStep as error:
            return Answer(half.refusal(asked, error), again=False, note=note)
        finally:
            settled.result()
        self._hold(name, reply, pending)
        return Answer(reply, again=False, note=note)

    # -- what the server said of the last reply ------------------------------------------------------------------

    def _settle(self, sent: Reply | None, instruction: Instruction) -> None:
        if sent is None:
            self.uplink.discard()  # a process may have died between residual and reply
        else:
            half.settle(self.client, sent, Pending((sent.client,), sent.round, {}, None), instruction)
        with os_errors(ResidualError, "remove", self.folder / PENDING):
            (self.folder / PENDING).unlink(missing_ok=True)

    def _compare(self, sent: Reply | None, instruction: Instruction) -> str:
        """Whether server and client agree on the last accepted round, once this is settled; ours can only be older."""
        if self.uplink.store is None:
            return ""
        last = 0 if instruction.accepted is None else instruction.accepted.round
        accepted = sent is not None and half.is_accepted(sent, instruction)
        ours = sent.round if sent is not None and accepted else self.uplink.store.snapshot_round or 0
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
        """Residual and reply go to the disk at once: the one without the other is as if it had never been."""
        if self.uplink.store is None:
            return
        written = aside(lambda: self._write(name, reply))
        try:
            self.uplink.hold(pending)
        finally:
            written.result()

    def _write(self, name: tuple[int, bytes], reply: Reply) -> None:
        path = self.folder / PENDING
        with os_errors(ResidualError, "write", path):
            write_whole(path, *WAITING.parts(name, reply.to_bytes()))

    def _waiting(self) -> tuple[tuple[int, bytes], Reply] | None:
        """The reply on disk, and what it answers; only where its residual is there too."""
        path, store = self.folder / PENDING, self.uplink.store
        if store is None or not path.exists():
            return None
        try:
            with os_errors(ResidualError, "read", path):
                head, (data,) = WAITING.unpack(path.read_bytes())
            reply = Reply.from_bytes(data)
        except WireError as error:
            raise ResidualError(f"{path}: damaged ({error}); delete it: the update in it counts as lost") from error
        return ((head[0], head[1]), reply) if store.round_of(reply.client) == reply.round else None


def _after(settled: Future[None], train: Train) -> Train:
    """Training whose update meets a residual that is settled."""

    def trained(x: Tensor, buffers: Tensor | None, instruction: Instruction) -> Update:
        update = train(x, buffers, instruction)
        settled.result()
        return update

    return trained
