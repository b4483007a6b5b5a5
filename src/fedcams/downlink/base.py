"""The base class of downlinks: how the server's model reaches the clients."""

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
"""The name of the rows that a server may keep: the model that each client holds."""


class Broadcast(NamedTuple):
    """What a downlink needs to send a round's model: the server's `x [d]`, its layout, round, seed and replicas."""

    x: Tensor
    layout: Layout
    round: int
    seed: int
    replicas: RowStore | None = None

    def key(self, client: int = 0) -> int:
        """Return the key for compressors that draw at random, for one client; client 0 stands for a common message."""
        return derive(self.seed, "downlink", self.round, client)


class Sent(NamedTuple):
    """What was sent to a client: a `delta` or compressed model, a `catchup` for missed rounds, or the `dense` model."""

    kind: Literal["delta", "catchup", "dense"]
    size: int
    """Bytes of the model in the instruction."""


class Delivery(NamedTuple):
    """The models of a simulated round, what was sent, and the downlink's next state."""

    start: Tensor
    """What these clients hold afterwards: `[d]` if all hold the same model, otherwise `[C, d]`."""
    sent: list[Sent]
    state: Any


class DownlinkCost(NamedTuple):
    """The estimated cost of a downlink over a run, in bytes over all clients."""

    deltas: float
    """Bytes of deltas or compressed models."""
    catchup: float
    """Bytes sent to clients that missed rounds."""
    dense: float
    """Bytes of dense models."""
    memory: float = 0.0
    """Bytes that the server stores in addition to the model and its optimizer."""
    bound: float = 0.0
    """The proven bound on the part of ‖x - held‖² that remains after one delta; 0 if the model is sent whole."""


class Downlink(Spec, ABC):
    """The base class of all downlinks. State is data: `init` makes it; `send` and `acknowledge` return the next one.

    The server never assumes that a message arrived: what it knows about a client changes only when the client says so.
    """

    kind = "downlink"
    client_keeps_model: ClassVar[bool] = False
    """Whether clients keep the model that they received, in a HeldStore."""
    server_keeps_rows: ClassVar[bool] = False
    """Whether the server keeps a model of every client, in a RowStore."""

    def init(self, x: Tensor) -> Any:
        """Return the server's state before anything is sent, for the initial model `x [d]`; None for no state."""
        return None

    @abstractmethod
    def send(self, state: Any, broadcast: Broadcast, clients: Sequence[int]) -> tuple[dict[int, bytes], Any]:
        """Return the bytes of the model for each of these clients, and the state until `acknowledge`."""

    def expected(self, state: Any, client: int) -> Held | None:
        """Return what a client holds once it has received the last message; None if clients keep nothing."""
        return None

    def acknowledge(
        self, state: Any, broadcast: Broadcast, acks: Mapping[int, Held | None], closing: bool = True
    ) -> Any:
        """Return the state after clients said what they hold; None means nothing usable.

        Clients that are not in `acks` said nothing. `closing` ends the round: what was sent in it can be forgotten,
        because the next message builds only on what clients said.
        """
        return state

    @abstractmethod
    def deliver(self, state: Any, broadcast: Broadcast, clients: Sequence[int]) -> Delivery:
        """Send a round's model to these clients in a simulation, where no message is lost, without bytes and digests.

        This does what `send`, `receive` at every client and `acknowledge` would do.
        """

    @abstractmethod
    def paper_bits(self, layout: Layout) -> int:
        """Return the bits that one client receives per round by the paper's rule."""

    def cost(self, layout: Layout, contacts: Contacts, rounds: int) -> DownlinkCost:
        """Return the estimated cost of a run of `rounds` rounds with these contacts, for `fedcams plan`.

        Refuses unless a downlink overrides it, because only the downlink knows what it will send.
        """
        raise SpecError(
            f"{self}: its cost is not known before it runs; write {type(self).__name__}.cost, or plan with another "
            "downlink"
        )

    def common(self, state: Any) -> Tensor | None:
        """Return the model `[d]` that all clients of the last round hold; None if they differ or it is the server's."""
        return None

    def receive(
        self, data: bytes, layout: Layout, store: HeldStore | None, client: int, crc_checked: bool = False
    ) -> tuple[Tensor, Held | None]:
        """Return the model `[d]` to train from, and what to tell the server about it.

        `data` is the model in the instruction, `store` where the client keeps its own; `crc_checked` means that the
        checksum at the end of the data was verified. Raises OutOfStep for a message that does not build on what the
        client holds, and a WireError for damaged data.
        """
        if store is None:
            raise SpecError(f"{self}: clients must keep their model; give store=HeldStore.in_memory(layout) or on_disk")
        if store.layout.id != layout.id:
            raise OutOfStep(f"client {client} keeps models of another layout, {store.layout.id.hex()}", None)
        return follow(store, client, Message.from_bytes(data))


def follow(store: HeldStore, client: int, message: Message) -> tuple[Tensor, Held]:
    """Return the model `[d]` that a message makes for a client that keeps its model, and the model's name.

    The message is staged: the held model stays until the server builds on the new one, and so has learned that it
    arrived. A lost reply leaves both sides where they were. Raises OutOfStep if the message builds on another model.
    """
    base = None if message.base is None else _settle(store, client, message.base)
    model = message.apply(base, store.layout)
    store.stage(client, message)
    return model, message.result


def _settle(store: HeldStore, client: int, named: Held) -> Tensor:
    """Return the model that the server builds on: the held one, or the staged one, which then becomes the held one."""
    held = store.held(client)
    if held == named:
        return store.model(client)
    staged = store.staged(client)
    if staged is None or staged.result != named or (staged.base is not None and staged.base != held):
        found = "nothing" if held is None else str(held)
        raise OutOfStep(f"client {client} holds {found}, but the message builds on {named}; send the dense model", held)
    model = staged.apply(None if staged.base is None else store.model(client), store.layout)
    store.keep(client, named, model)
    return model


def check_contractive(name: str, codec: Compressor) -> None:
    """Refuse a codec without an error bound for the downlink `name`: what clients hold would drift from the model."""
    if codec.at(1, 1).squared_error_bound(Layout.flat(1)) is None:
        raise SpecError(
            f"{name}: {codec} has no bound on its error, so what clients hold would drift ever further from the model; "
            "choose a contractive compressor, or stateless"
        )


def bound_of(codec: Compressor, layout: Layout) -> float:
    """Return the proven bound on the part of a vector's squared norm that the codec loses; 0 if it has none."""
    return codec.at(1, 1).squared_error_bound(layout) or 0.0


def downlink(spec: str | Downlink) -> Downlink:
    """Return the downlink that a spec string such as `shared(blockq)` names; refuses unknown names and keys."""
    return Downlink.parse(spec)
