"""A client on its own machine, whose state survives a kill at any moment.

<folder>/rows/          a RowStore: the valid rows and, while a reply is pending, those that may replace them
<folder>/pending.reply  the reply that waits for the server's decision, and what it answers; valid only with its rows
<folder>/held/          a HeldStore: the model that the client keeps, for downlinks that need it
<folder>/noise.json     a SiteSecret: the key of the noise, for methods in which clients add it

A reply is returned only when its rows and the reply itself are on disk. The next instruction says which of the client's
updates the server accepted last. If it is the pending one, its rows become valid; otherwise they are dropped. An
instruction that was answered before gets the same bytes again, so messages may arrive more than once. A client that
keeps no rows stores its reply only if it adds noise, because a second answer would spend more privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedcams.bits.parallel import in_background
from fedcams.downlink import HeldStore
from fedcams.durable import os_errors, write_whole
from fedcams.errors import FedcamsError, ResidualError, WireError
from fedcams.layout import Layout
from fedcams.method import BUFFERS, Method
from fedcams.rounds.client import Client, ClientUpdate, Train, answer, is_accepted
from fedcams.rounds.cohort import Outgoing, Received
from fedcams.rounds.messages import Instruction, Refusal, Reply
from fedcams.rounds.site_secret import SiteSecret
from fedcams.rows import RowStore
from fedcams.wire.frames import Frame

if TYPE_CHECKING:
    from torch import Tensor

PENDING, ROWS, MODELS = "pending.reply", "rows", "held"
OLD_ROWS = "residuals"
FRAME = Frame(b"FCMP", "Q4s", blobs=1)  # what is answered, and the reply


class Question(NamedTuple):
    """The instruction that a reply answers."""

    round: int
    checksum: bytes
    """Its last four bytes: a server that started over may send a different instruction for the same round."""


class Answer(NamedTuple):
    """A client's answer to an instruction."""

    reply: Reply | Refusal
    """A refusal if the instruction builds on a model that the client does not hold, or if its training failed."""
    again: bool
    """Whether the client gave this answer before and only repeats it."""
    note: str
    """What else the server should know; empty if all is well."""


class OtherClient(FedcamsError):
    """An instruction is for another client than the one whose state is in the folder."""


class DurableClient:
    """One client of one run, and the folder with its state; only one process may use it at a time."""

    def __init__(
        self,
        folder: Path,
        method: Method,
        layout: Layout,
        buffer_layout: Layout | None = None,
        rounds: int | None = None,
        population: int = 0,
        site: int | None = None,
    ) -> None:
        """Open the folder, or create it; refuses a folder of another model or method, or of an older version.

        `layout` and `buffer_layout` are those of the model; `rounds` is the length of the run, for schedules. With
        `site`, instructions for other clients are refused.
        """
        if (folder / OLD_ROWS).exists():
            raise ResidualError(
                f"{folder}: written by fedcams 0.1; version 0.1.0 is the last one that reads it; finish the run with "
                "it, or start a run under another name, where rows start at zero"
            )
        self.secret = _secret(folder, rounds, method) if method.privacy.at_client else None
        memory = method.memory(layout, buffer_layout)
        rows = RowStore.on_disk(memory, folder / ROWS, spares=1) if memory else None
        kept = method.delivered(layout, buffer_layout) if method.downlink.client_keeps_model else {}
        held = HeldStore.on_disk(layout, folder / MODELS, kept.get(BUFFERS)) if kept else None
        self.folder, self.rows, self.site = folder, rows, site
        keys = None if self.secret is None else (lambda client, key=self.secret.key: key)
        self.client = Client(method, layout, buffer_layout, rows, held, rounds, population, keys)

    def answer(self, instruction: Sequence[bytes], train: Train) -> Answer:
        """Resolve the pending reply, train, and return the new reply once it is on disk.

        `instruction` is the message in parts, as `Instruction.to_parts` returns them. Raises a WireError for a damaged
        instruction, OtherClient for one that is for another site, and a ResidualError for damaged state, another
        client's state or a server that went back to an older checkpoint. Raises an UpdateError if the client adds noise
        and has answered as often as the run has rounds.
        """
        asked = Instruction.from_parts(instruction)
        if self.site not in (None, asked.client):
            raise OtherClient(f"an instruction for client {asked.client} at site {self.site}")
        self._refuse_rows_of_others(asked.client)
        question = Question(asked.round, bytes(instruction[-1][-4:]))
        answered, sent = self._pending()
        if sent is not None and answered == question:
            return Answer(sent, again=True, note="")
        note = self._compare(sent, asked)
        settled = in_background(lambda: self._settle(sent, asked))  # the disk is slow; the app trains in the meantime
        try:
            if self.client.method.control.active:
                settled.result()  # training reads the control variates among the rows
            reply, outgoing = answer(self.client, asked, self._careful(settled, train))
        finally:
            settled.result()
        if isinstance(reply, Reply) and outgoing is not None:
            self._hold(question, reply, outgoing)
        return Answer(reply, again=False, note=note)

    def _careful(self, settled: Future[None], train: Train) -> Train:
        """Return `train`, extended to count the answer before it, and to wait at its end until rows are resolved."""

        def trained(received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
            if self.secret is not None:
                self.secret.spend(self.client.rounds)
            update = train(received, instruction, shift, rate)
            settled.result()
            return update

        return trained

    def _refuse_rows_of_others(self, client: int) -> None:
        """Refuse a folder that was copied from another client: its snapshot would hide that our own rows are lost."""
        others = [] if self.rows is None else [other for other in self.rows.ids() if other != client]
        if others:
            raise ResidualError(
                f"{self.folder / ROWS}: the rows of client {others[0]}, but this is client {client}; restore the "
                f"folder of this client, or {self._anew}"
            )

    @property
    def _anew(self) -> str:
        """How to begin with rows of zeros; the folder of a site with noise also counts what it has spent."""
        if self.secret is not None:
            return "take part under another run name"
        return "delete this folder, and residuals start at zero"

    # -- the server's decision on the last reply ---------------------------------------------------------------------

    def _settle(self, sent: Reply | None, instruction: Instruction) -> None:
        if self.rows is not None:
            if sent is not None and is_accepted(sent, instruction):
                self.rows.snapshot(sent.round)
            else:  # also after a kill between writing the rows and the reply
                self.rows.rollback(self.rows.snapshot_round or 0)
        with os_errors(ResidualError, "remove", self.folder / PENDING):
            (self.folder / PENDING).unlink(missing_ok=True)

    def _compare(self, sent: Reply | None, instruction: Instruction) -> str:
        """Return a note if the server knows of a later accepted round than these rows; refuse if ours is later."""
        if self.rows is None:
            return ""
        last = 0 if instruction.accepted is None else instruction.accepted.round
        accepted = sent is not None and is_accepted(sent, instruction)
        ours = sent.round if sent is not None and accepted else self.rows.snapshot_round or 0
        if ours > last:
            raise ResidualError(
                f"{self.folder / ROWS}: the server last accepted round {last}, but this residual is of round {ours}: "
                f"the server went back to an older checkpoint; {self._anew}"
            )
        if ours < last:
            return f"the residual of round {last} is lost, continuing from that of round {ours}"
        return ""

    # -- the pending reply -------------------------------------------------------------------------------------------

    @property
    def _repeats(self) -> bool:
        """Whether an instruction that comes again gets the same reply; without rows or noise, it is trained again."""
        return self.rows is not None or self.secret is not None

    def _hold(self, question: Question, reply: Reply, outgoing: Outgoing) -> None:
        """Write rows and reply to disk at the same time; either one without the other is ignored."""
        if not self._repeats:
            return
        written = in_background(lambda: self._write(question, reply))
        try:
            if self.rows is not None:
                self.rows.commit([reply.client], outgoing.rows, reply.round)
        finally:
            written.result()

    def _write(self, question: Question, reply: Reply) -> None:
        path = self.folder / PENDING
        with os_errors(ResidualError, "write", path):
            write_whole(path, *FRAME.parts(question, reply.to_bytes()))

    def _pending(self) -> tuple[Question, Reply] | tuple[None, None]:
        """Return the reply on disk, after what it answers; None unless its rows are there too, if it has any."""
        path = self.folder / PENDING
        if not self._repeats or not path.exists():
            return None, None
        try:
            with os_errors(ResidualError, "read", path):
                question, (data,) = FRAME.unpack(path.read_bytes())
            reply = Reply.from_bytes(data)
        except WireError as error:
            raise ResidualError(f"{path}: damaged ({error}); delete it; the update that it holds is lost") from error
        whole = self.rows is None or self.rows.round_of(reply.client) == reply.round
        return (Question(*question), reply) if whole else (None, None)


def _secret(folder: Path, rounds: int | None, method: Method) -> SiteSecret:
    """Open the site's key, or make it: before everything else, so that other files show that there was one."""
    known = any((folder / name).exists() for name in (PENDING, ROWS, MODELS))
    return SiteSecret(folder, rounds if method.privacy.depends_on_rounds else None, known)
