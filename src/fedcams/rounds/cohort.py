"""What the two sides of a round exchange, as rows: one per client.

A simulation passes these values on directly and counts the bytes that they would take. A site has one row, and
`fedcams.rounds.messages` carries it as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedcams.compress import Code, Compressor
from fedcams.errors import FedcamsError, SpecError, UpdateError
from fedcams.layout import Layout
from fedcams.method import BUFFERS, CONTROL, Method
from fedcams.rounds.messages import UPDATE, Reply, expect_streams
from fedcams.transforms import Facts
from fedcams.wire import Payload, unpack

if TYPE_CHECKING:
    from torch import Tensor


class Stream(NamedTuple):
    """One vector that travels to the server in every round: its name, layout and compressor."""

    name: str
    layout: Layout
    codec: Compressor


def streams_up(method: Method, layout: Layout, buffer_layout: Layout | None) -> dict[str, Stream]:
    """Return what clients send per round, by name, for a model of these layouts."""
    found = {UPDATE: Stream(UPDATE, layout, method.uplink)}
    if buffer_layout is not None:
        found[BUFFERS] = Stream(BUFFERS, buffer_layout, method.buffers)
    if method.control.active:
        found[CONTROL] = Stream(CONTROL, layout, method.control.codec)
    return found


def beside_the_model(method: Method, layout: Layout, buffer_layout: Layout | None) -> dict[str, Layout]:
    """Return the layouts of what instructions carry dense, besides what the downlink sends, by name."""
    found = {CONTROL: layout} if method.control.active else {}
    if buffer_layout is not None and BUFFERS not in method.delivered(layout, buffer_layout):
        found[BUFFERS] = buffer_layout
    return found


class Received(NamedTuple):
    """What the clients of a cohort receive at the start of a round."""

    start: Tensor
    """The model: `[d]` if all clients receive the same, otherwise `[C, d]`."""
    buffers: Tensor | None
    """The buffers `[b]` or `[C, b]`; None if the model has none."""
    control: Tensor | None = None
    """The server's control variate `[d]`; None if the method has none."""

    def only(self, places: Sequence[int]) -> Received:
        """Return what the clients at these places receive."""
        start, buffers = self.start, self.buffers
        start = start if start.dim() == 1 else start[places]
        buffers = buffers if buffers is None or buffers.dim() == 1 else buffers[places]
        return Received(start, buffers, self.control)


@dataclass(frozen=True)
class Arrival:
    """The encoded updates of some clients, in ascending id."""

    facts: Facts
    losses: tuple[float, ...]
    codes: Mapping[str, tuple[Compressor, Code]]
    """Stream -> its compressor and its code, tensors `[C, columns]`."""

    def __len__(self) -> int:
        return len(self.facts.ids)

    def only(self, places: Sequence[int]) -> Arrival:
        """Return the updates at these places."""
        if len(places) == len(self):
            return self
        codes = {name: (codec, code_rows(code, places)) for name, (codec, code) in self.codes.items()}
        return Arrival(self.facts.take(places), tuple(self.losses[i] for i in places), codes)


def arrival_of(reply: Reply, streams: Mapping[str, Stream], facts: Facts) -> Arrival:
    """Return one client's message as a row; refuses other streams, and other codecs except for the update."""
    expect_streams(reply, streams)
    codes: dict[str, tuple[Compressor, Code]] = {}
    for name, stream in streams.items():
        payload = _unpacked(reply, stream)
        if name != UPDATE and payload.compressor != stream.codec:
            raise UpdateError(
                f"client {reply.client} compresses {name} with {payload.compressor}; expected {stream.codec}"
            )
        codes[name] = (payload.compressor, {field: tensor[None] for field, tensor in payload.code.items()})
    return Arrival(facts, (reply.loss,), codes)


def _unpacked(reply: Reply, stream: Stream) -> Payload:
    """Return a client's payload; any error in reading it is that client's fault, and the client is refused."""
    try:
        return unpack(reply.streams[stream.name], stream.layout)
    except FedcamsError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise UpdateError(f"client {reply.client} sends {stream.name} that cannot be read ({found})") from None


@dataclass(frozen=True)
class Outgoing:
    """What the clients of a cohort send, and what each of them stores if the server accepts it."""

    arrival: Arrival
    rows: Mapping[str, Tensor]
    """Name of a row -> its values `[C, d]` once the updates are accepted."""
    errors: Tensor | None
    """`[C]`, the relative compression error ‖C(h)-h‖/‖h‖, if measured; zero for h = 0."""
    refused: Mapping[int, str]
    """Client -> why it sends a refusal instead: its training gave values that are not finite."""
    updates: Tensor | None = None
    """`[C, d]`, the updates Δ after their transforms, if probes need them."""
    messages: Tensor | None = None
    """`[C, d]`, what was compressed, if probes need it and it is not just Δ + e."""


def code_rows(code: Code, places: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of a code at these places."""
    return {name: some_rows(tensor, places) for name, tensor in code.items()}


def some_rows(rows: Tensor, places: Sequence[int]) -> Tensor:
    """Return the rows `[C, ...]` at these places; a selection of all rows is not copied."""
    return rows if len(places) == len(rows) else rows[torch.tensor(places, dtype=torch.long, device=rows.device)]


def check_returned(by: str, found: Tensor, like: Tensor) -> None:
    """Refuse what a method of a piece returns unless it has the shape and the dtype of `like`; `by` names both."""
    if (found.shape, found.dtype) != (like.shape, like.dtype):
        raise SpecError(f"{by} returns {found.dtype} {list(found.shape)}; return {like.dtype} {list(like.shape)}")
