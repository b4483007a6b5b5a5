"""The replies of one round: checked one by one as they arrive, and stored on disk.

Only one reply is in memory at a time. They are read back in ascending client id, so the sum does not depend on the
order in which they arrived.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcams.compress.identity import IDENTITY
from fedcams.control.base import NoControl
from fedcams.durable import OWNER_ONLY, private_folder
from fedcams.errors import UpdateError
from fedcams.flower.arrays import ArrayNames
from fedcams.flower.records import (
    LONGEST,
    REPLY,
    about_of,
    app_metrics,
    bounded_metrics,
    message_parts,
    only_arrays,
    readable,
    told_by_metrics,
)
from fedcams.flower.replies import pull
from fedcams.flower.roster import APP_RAISED
from fedcams.layout import Layout
from fedcams.rounds.client import Client, ClientUpdate, reply_of, respond_
from fedcams.rounds.cohort import Received, streams_up
from fedcams.rounds.messages import Refusal, Reply, answer_from_parts, reply_size
from fedcams.rounds.server import Server, ServerState
from fedcams.runs.files import disk_errors, refuse_linked_folders

SLACK = 2
"""A reply may be this many times as long as a dense one: top-k with a ratio near one is longer than the vector."""


class Inbox:
    """The answers of one round."""

    def __init__(self, folder: Path, names: ArrayNames, arrays_key: str, server: Server, state: ServerState) -> None:
        """Empty the folder; `state` is the server's state at the start of the round."""
        self.folder, self.names, self.arrays_key, self.server, self.state = folder, names, arrays_key, server, state
        self.limit = SLACK * _dense_reply(server)
        self.came: dict[int, list[int]] = {}
        """Client -> bytes of each part of its reply."""
        self.refusals: dict[int, Refusal] = {}
        """Client -> its refusal."""
        self.told_again: set[int] = set()
        """Clients that were sent a second instruction, because they did not hold what the first one builds on."""
        self.other_bytes = 0
        """Bytes of messages that arrived but do not count: refusals, and replies that were refused here."""
        self.refused: dict[int, str] = {}
        self.absent: dict[int, str] = {}
        self.notes: dict[int, str] = {}
        self.metrics: dict[int, RecordDict] = {}
        shutil.rmtree(folder, ignore_errors=True)
        with disk_errors("make", folder):
            private_folder(folder)

    def fetch(self, grid: Grid, name: str, client: int, plain: bool) -> bool:
        """Take the client's reply to the message with this id, if it is there; return whether it was."""
        try:
            message = pull(grid, name)
        except UpdateError as error:
            self.refused[client] = readable(error)
            return True
        if message is not None:
            self.take(client, plain, message)
        return message is not None

    def take(self, client: int, plain: bool, message: Message) -> None:
        """Check a reply as far as possible without decoding it; if it is refused, record the reason in `refused`."""
        if message.has_error():
            where = self.refused if message.error.code in APP_RAISED else self.absent
            reason = " ".join((message.error.reason or "").split())
            where[client] = f"Flower, code {message.error.code}: {readable(reason[-LONGEST:])}"
            return
        try:
            parts = self._dense(client, message.content) if plain else self._ours(client, message.content)
        except Exception as error:  # whatever a node sends, the round continues without it
            self.refused[client] = readable(f"{type(error).__name__}: {error}")
            return
        finally:
            for record in message.content.array_records.values():
                record.clear()  # messages form reference cycles, which would keep their bytes until the next collection
        if not parts:
            return
        path = self.folder / str(client)
        refuse_linked_folders(self.folder.parent)
        with disk_errors("write", path), open(path, "wb", opener=_private) as file:
            file.writelines(parts)
        self.came[client] = [len(part) for part in parts]
        try:
            self.metrics[client] = bounded_metrics(message.content)
        except UpdateError as error:
            self._note(client, f"left out: {error}")

    @property
    def heard(self) -> set[int]:
        """The clients that are known to have answered, or to be gone."""
        return {*self.came, *self.refusals, *self.refused, *self.absent}

    def first_refusal(self, client: int) -> Refusal | None:
        """Return the client's refusal if a second instruction can help, and replace it by a note; None otherwise."""
        refusal = self.refusals.get(client)
        if refusal is None or client in self.told_again or refusal.round != self.state.round + 1:
            return None
        if refusal.held == self.server.method.downlink.expected(self.state.downlink, client):
            return None  # it is in step: its training failed
        self.told_again.add(client)
        self._note(client, f"out of step, so sent another instruction: {refusal.reason}")
        return self.refusals.pop(client)

    def _note(self, client: int, note: str) -> None:
        self.notes[client] = "; ".join(filter(None, [self.notes.get(client, ""), readable(note)]))

    def __iter__(self) -> Iterator[Reply | Refusal]:
        """Yield refusals, and then the replies in ascending client id; only one reply is in memory at a time."""
        yield from self.refusals.values()
        for client in sorted(self.came):
            path = self.folder / str(client)
            with disk_errors("read", path), path.open("rb") as file:
                parts = [file.read(size) for size in self.came[client]]  # part by part, so that none is copied
            yield Reply.from_parts(parts)
            del parts

    def _ours(self, client: int, content: RecordDict) -> list[bytes]:
        """Return the parts of a reply; none for a refusal, which goes to `refusals`, or if the client is not there."""
        told = about_of(content) or {}
        if "refused" in told:
            raise UpdateError(f"the client could not take part: {told['refused']}")
        if "site" in told:  # so the node is greeted again
            self.absent[client] = f"its node is now site {readable(told['site'])}"
            return []
        if REPLY not in content.array_records:
            raise UpdateError(f"the reply contains {', '.join(content) or 'nothing'}; expected {REPLY}")
        parts = message_parts(content.array_records[REPLY], self.limit)
        self.other_bytes += (size := sum(map(len, parts)))
        answer = answer_from_parts(parts)
        if answer.client != client:
            raise UpdateError(f"client {client} answers for client {answer.client}")
        if note := str(told.get("note", "")):
            self._note(client, note)
        if isinstance(answer, Refusal):
            self.refusals[client] = dataclasses.replace(answer, reason=readable(answer.reason))
            return []
        self.other_bytes -= size
        return answer.to_parts()

    def _dense(self, client: int, content: RecordDict) -> list[bytes]:
        """Return the parts of a reply made from the model that an app without the mod returns; it has no feedback."""
        state, server, names = self.state, self.server, self.names
        method, round = server.method, state.round + 1
        if method.control.active:
            raise UpdateError(
                f"control={method.control} needs what only clients with the fedcams mod keep; add the mod"
            )
        delta, buffers = names.change(only_arrays(content, self.arrays_key), state.x)
        examples, steps, loss = told_by_metrics(content, method.weighting)
        rate = float(method.in_round(round, server.rounds).local.lr)
        trained = ClientUpdate(delta, buffers, examples, steps, loss).as_cohort(rate)
        base = method.downlink.buffers_of(state.downlink, client)  # what the server adds the change to
        received = Received(state.x, state.buffers if base is None else base)
        outgoing = respond_(self._dense_client, [client], received, trained, round, server.seed)
        if outgoing.refused:
            raise UpdateError(outgoing.refused[client])
        held = method.downlink.expected(state.downlink, client)
        return reply_of(outgoing, names.layout, names.buffer_layout, held).to_parts()

    @functools.cached_property
    def _dense_client(self) -> Client:
        """The client's side for apps without the mod: their updates are not compressed, so nothing is kept for them."""
        method = dataclasses.replace(self.server.method, uplink=IDENTITY, feedback=False, control=NoControl())
        layouts, server = (self.names.layout, self.names.buffer_layout), self.server
        return Client(method, *layouts, rounds=server.rounds, population=server.population)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, OWNER_ONLY)


def dense_size(layout: Layout | None) -> int:
    """Return about how many bytes a dense vector takes."""
    return 0 if layout is None else 64 + 4 * layout.d


def _dense_reply(server: Server) -> int:
    """Return about how many bytes a reply takes if every stream is dense."""
    streams = streams_up(server.method, server.layout, server.buffer_layout)
    return reply_size({name: dense_size(stream.layout) for name, stream in streams.items()}, holding=True)


def that_average(metrics: Mapping[int, RecordDict], key: str) -> list[int]:
    """Return the keys of the metrics that have a mean, weighted by the metric `key`.

    Metrics without that weight, or with a value that is not finite, are left out. So are those whose names and lengths
    differ from most others', so that one client cannot prevent the mean of the others.
    """
    values = {place: app_metrics(record) for place, record in metrics.items() if len(record.metric_records) == 1}
    shapes = {place: _shape(found) for place, found in values.items() if _is_sound(found, key)}
    usual = Counter(shapes.values()).most_common(1)[0][0] if shapes else ()
    return [place for place, shape in shapes.items() if shape == usual]


def unweighted(metrics: Mapping[str, RecordDict], key: str) -> str:
    """Return a note on metrics that lack the weight `key`, naming the first sender; an empty string if none do."""
    lacking = {who: found for who, record in metrics.items() if (found := app_metrics(record)) and key not in found}
    if not lacking:
        return ""
    who, found = next(iter(lacking.items()))
    missing = f"it is missing from {len(lacking)} of {len(metrics)} replies"
    return f"{who} reports no weighted_by_key={key!r}, only {', '.join(found)}; {missing}"


def _is_sound(values: Mapping[str, Any], key: str) -> bool:
    numbers = itertools.chain.from_iterable(value if isinstance(value, list) else [value] for value in values.values())
    return isinstance(values.get(key), int | float) and all(map(math.isfinite, numbers))


def _shape(values: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, len(value) if isinstance(value, list) else -1) for name, value in values.items()))
