"""What clients get and hold: how the server's model reaches them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedcams.compress import Compressor
from fedcams.downlink.held import HeldStore
from fedcams.downlink.message import Held, Message, OutOfStep
from fedcams.errors import SpecError
from fedcams.keys import derive
from fedcams.layout import Layout
from fedcams.registry import Spec
from fedcams.rows import RowStore
from fedcams.sampler import Contacts

REPLICA = "replica"
"""The name of the rows that a server may keep: the model which each client holds."""


class Broadcast(NamedTuple):
    """What a downlink sends in a round, the server's model `x [d]`, and what it may need for that."""

    x: Tensor
    layout: Layout
    round: int
    seed: int
    replicas: RowStore | None = None

    def key(self, client: int = 0) -> int:
        """For compressors that draw: of what goes to one client, or without one of what goes to all alike."""
        return derive(self.seed, "downlink", self.round, client)


class Sent(NamedTuple):
    """What a client got: a `delta` (or a compressed model), a `catchup` for rounds it missed, or the `dense` model."""

    kind: Literal["delta", "catchup", "dense"]
    size: int
    """Bytes of the model's part of the instruction."""


class Delivery(NamedTuple):
    """A round's models in a simulation."""

    start: Tensor
    """What these clients hold then: `[d]` where all hold the same, and else `[C, d]`."""
    sent: list[Sent]
    state: Any


class DownlinkCost(NamedTuple):
    """What a downlink costs over a run: bytes of all clients, worked out before it runs."""

    deltas: float
    """Sent as deltas or compressed models."""
    catchup: float
    """Sent to clients that had missed rounds."""
    dense: float
    """Sent as dense models."""
    memory: float = 0.0
    """Kept by the server beside the model and its optimizer."""
    bound: float = 0.0
    """The part of ‖x - held‖² that one delta may leave behind, by its proof; 0 where the model is sent whole."""


class Downlink(Spec, ABC):
    """The root of all downlinks. State is data: `init` makes it, `send` and `acknowledge` return the next one.

    The server never assumes that a message has arrived: what it believes of a client changes by what the client says.
    """

    kind = "downlink"
    client_keeps_model: ClassVar[bool] = False
    """Whether clients keep the model that they got, in a HeldStore."""
    server_keeps_rows: ClassVar[bool] = False
    """Whether the server keeps a model of every client, in a RowStore."""

    def init(self, x: Tensor) -> Any:
        """What the server keeps between rounds, before anything was sent."""
        return None

    @abstractmethod
    def send(self, state: Any, broadcast: Broadcast, clients: Sequence[int]) -> tuple[dict[int, bytes], Any]:
        """The bytes for each of these clients, and the state until `acknowledge`."""

    def expected(self, state: Any, client: int) -> Held | None:
        """What a client holds that got what was sent to it last; None for downlinks that keep nothing."""
        return None

    def acknowledge(
        self, state: Any, broadcast: Broadcast, acks: Mapping[int, Held | None], closing: bool = True
    ) -> Any:
        """Return the state, given what clients said in this round that they hold (None: nothing sound).

        Of clients that are not in `acks` nothing new is known. `closing` ends the round: what was sent in it need not
        be remembered, because the next message builds on what is known.
        """
        return state

    @abstractmethod
    def deliver(self, state: Any, broadcast: Broadcast, clients: Sequence[int]) -> Delivery:
        """`send`, receipt and `acknowledge` in one, for a simulation, which loses nothing: no bytes, no digests."""

    @abstractmethod
    def paper_bits(self, layout: Layout) -> int:
        """Bits of one client's link in a round by the paper's rule."""

    def cost(self, layout: Layout, contacts: Contacts, rounds: int) -> DownlinkCost:
        """Return what a run of `rounds` rounds with these contacts costs, for `fedcams plan`.

        Refuses unless a downlink overrides it: nobody else can tell what it will send.
        """
        raise SpecError(
            f"{self}: what it will send is not known before it runs; write {type(self).__name__}.cost, or plan with "
            "another downlink"
        )

    def common(self, state: Any) -> Tensor | None:
        """The model `[d]` that all clients of the last round hold, where that is one and not the server's own."""
        return None

    def receive(
        self, data: bytes, layout: Layout, store: HeldStore | None, client: int, crc_checked: bool = False
    ) -> tuple[Tensor, Held | None]:
        """The model `[d]` to train from, and what to tell the server about it; refuses by OutOfStep.

        `crc_checked` says that the checksum at the end of the data was checked.
        """
        if store is None:
            raise SpecError(f"{self}: clients keep their model; give them a HeldStore, in memory or on disk")
        if store.layout.id != layout.id:
            raise OutOfStep(f"client {client} keeps models of layout {store.layout.id.hex()}, another model", None)
        return follow(store, client, Message.from_bytes(data))


def follow(store: HeldStore, client: int, message: Message) -> tuple[Tensor, Held]:
    """What a client that keeps its model does with a message. It is staged: what was held stays until the server shows,
    by building on the new model, that it knows of it, so a reply that gets lost leaves both sides where they were."""
    base = None if message.base is None else _settle(store, client, message.base)
    model = message.apply(base, store.layout)
    store.stage(client, message)
    return model, message.result


def _settle(store: HeldStore, client: int, named: Held) -> Tensor:
    """The model that the server builds on: the one held, or the staged one, which then becomes the one held."""
    held = store.held(client)
    if held == named:
        return store.model(client)
    staged = store.staged(client)
    if staged is None or staged.result != named or (staged.base is not None and staged.base != held):
        found = "nothing" if held is None else str(held)
        raise OutOfStep(f"client {client} holds {found}, and the message builds on {named}; ask for all of it", held)
    model = staged.apply(None if staged.base is None else store.model(client), store.layout)
    store.keep(client, named, model)
    return model


def check_contractive(name: str, codec: Compressor) -> None:
    """Refuses what would let the difference between the server's model and what clients hold grow without end."""
    if codec.at(1, 1).squared_error_bound(Layout.flat(1)) is None:
        raise SpecError(
            f"{name}: {codec} has no contraction, and the difference to what clients hold would grow without end; "
            "choose a contractive compressor, or stateless"
        )


def bound_of(codec: Compressor, layout: Layout) -> float:
    """Return the part of a vector's squared norm that the codec may lose, by its proof; 0 where there is no proof."""
    return codec.at(1, 1).squared_error_bound(layout) or 0.0


def downlink(spec: str | Downlink) -> Downlink:
    """The downlink that a spec string spells."""
    return Downlink.parse(spec)
