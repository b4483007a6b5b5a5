"""The whole model in few bits, rounded without bias; neither side keeps anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcams.compress import Compressor
from fedcams.downlink.base import Broadcast, Delivery, Downlink, DownlinkCost, Sent, Streams, bound_of
from fedcams.downlink.message import MODEL
from fedcams.errors import SpecError
from fedcams.layout import Layout
from fedcams.registry import nested, register
from fedcams.sampler import Contacts
from fedcams.wire import encode, sizes
from fedcams.wire.estimate import payload_bytes


@register("stateless")
@dataclass(frozen=True)
class Stateless(Downlink):
    """Sends C(x) for an unbiased C, drawn again for every client and round, so that the errors average out.

    Neither side keeps anything, so it serves any number of clients, whether they missed rounds or not. Buffers always
    travel dense, because rounding them together would turn small variances among large ones into zero.
    """

    codec: Compressor = nested("compressor", "blockq(bits=8, rounding=stochastic)", doc="how the model travels")

    hides_cohorts = True
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

    def send(self, state: None, broadcast: Broadcast, clients: Sequence[int]) -> tuple[dict[int, Streams], None]:
        x, layout = broadcast.x, broadcast.layout
        return {i: {MODEL: encode(self.codec, x, layout, broadcast.key(i))} for i in clients}, None

    def deliver(self, state: None, broadcast: Broadcast, clients: Sequence[int]) -> Delivery:
        rows, keys = broadcast.x.expand(len(clients), -1), [broadcast.key(i) for i in clients]
        code = self.codec.encode(rows, broadcast.layout, keys)
        sent = [Sent("delta", size) for size in sizes(self.codec, code, broadcast.layout)]
        return Delivery(self.codec.decode(code, broadcast.layout), sent, None)

    def paper_bits(self, layout: Layout) -> int:
        return self.codec.paper_bits(layout)

    def cost(self, layout: Layout, contacts: Contacts, rounds: int) -> DownlinkCost:
        sent = payload_bytes(self.codec, layout) * contacts.total
        return DownlinkCost(deltas=sent, catchup=0.0, dense=0.0, bound=bound_of(self.codec, layout))
