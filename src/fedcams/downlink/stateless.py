"""The whole model in few bits, rounded without bias; neither side keeps anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedcams.compress import Code, Compressor
from fedcams.downlink.base import Broadcast, Delivery, Downlink, DownlinkCost, Part, Sent, Streams, bound_of
from fedcams.downlink.held import HeldStore
from fedcams.downlink.message import BUFFERS, MODEL, Held
from fedcams.errors import SpecError
from fedcams.layout import Layout, floor_variances_
from fedcams.registry import nested, register
from fedcams.sampler import Contacts
from fedcams.wire import pack, sizes, unpack
from fedcams.wire.estimate import payload_bytes

State = Mapping[int, Tensor] | None
"""Client -> the buffers `[b]` that it received in this round, until the round ends; None without any."""


@register("stateless")
@dataclass(frozen=True)
class Stateless(Downlink):
    """Sends C(x) for an unbiased C, drawn again for every client and round, so that the errors average out.

    Neither side keeps anything, so it serves any number of clients, whether they were away or not. Buffers that the
    method compresses travel by the same C: without memory, nothing would correct the bias of another one.
    """

    codec: Compressor = nested("compressor", "blockq(bits=8, rounding=stochastic)", doc="how the model travels")

    carries_buffers = True
    examples = ("stateless", "stateless(blockq(rounding=stochastic))")
    refused = (
        ("stateless(sign)", "sign is biased.*choose an unbiased one"),
        ("stateless(blockq)", "blockq is biased.*rounding=stochastic"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.codec.unbiased:
            raise SpecError(
                f"stateless: {self.codec} is biased, and without memory nothing corrects the bias; choose an unbiased "
                "one, such as blockq(bits=8, rounding=stochastic), or a downlink that keeps what is lost"
            )

    def send(self, state: State, broadcast: Broadcast, clients: Sequence[int]) -> tuple[dict[int, Streams], State]:
        made: dict[int, Streams] = {}
        held = dict(state or {})
        for client in clients:
            coded = self._coded(broadcast, [client])
            one = {name: {field: rows[0] for field, rows in code.items()} for name, (_, code) in coded.items()}
            made[client] = {name: pack(self.codec, one[name], part.layout) for name, (part, _) in coded.items()}
            if BUFFERS in coded:
                held[client] = self._decoded(*coded[BUFFERS])[0]
        return made, held

    def _coded(self, broadcast: Broadcast, clients: Sequence[int]) -> dict[str, tuple[Part, Code]]:
        """Return what is sent to these clients, by name, and its code `[C, columns]`."""
        coded = {}
        for name, part in broadcast.parts(self.codec).items():
            keys = [broadcast.key(client, name) for client in clients]
            coded[name] = part, self.codec.encode(part.values.expand(len(clients), -1), part.layout, keys)
        return coded

    def _decoded(self, part: Part, code: Code) -> Tensor:
        """Return what clients make of a code, `[C, d]`."""
        return part.floor_(self.codec.decode(code, part.layout))

    def deliver(self, state: State, broadcast: Broadcast, clients: Sequence[int]) -> Delivery:
        coded = self._coded(broadcast, clients)
        rows = {name: self._decoded(part, code) for name, (part, code) in coded.items()}
        counts = {name: sizes(self.codec, code, part.layout) for name, (part, code) in coded.items()}
        buffers = counts.get(BUFFERS, [0] * len(clients))
        sent = [Sent("delta", *size) for size in zip(counts[MODEL], buffers, strict=True)]
        held = dict(zip(clients, rows[BUFFERS], strict=True)) if BUFFERS in rows else None
        return Delivery(rows[MODEL], sent, held, rows.get(BUFFERS))

    def buffers_of(self, state: State, client: int) -> Tensor | None:
        return (state or {}).get(client)

    def acknowledge(
        self, state: State, broadcast: Broadcast, acks: Mapping[int, Held | None], closing: bool = True
    ) -> State:
        return None if closing else state

    def paper_bits(self, layout: Layout) -> int:
        return self.codec.paper_bits(layout)

    def cost(self, layout: Layout, contacts: Contacts, rounds: int) -> DownlinkCost:
        sent = payload_bytes(self.codec, layout) * contacts.total
        return DownlinkCost(deltas=sent, catchup=0.0, dense=0.0, bound=bound_of(self.codec, layout))

    def receive(
        self,
        streams: Streams,
        layouts: Mapping[str, Layout],
        store: HeldStore | None,
        client: int,
        crc_checked: bool = False,
    ) -> tuple[dict[str, Tensor], None]:
        read = {
            name: unpack(streams[name], layout, crc_checked=crc_checked and name == MODEL).decode()
            for name, layout in layouts.items()
        }
        if BUFFERS in read:
            floor_variances_(read[BUFFERS], layouts[BUFFERS])
        return read, None
