"""The base class of downlinks: how the server's model, and maybe its buffers, reach the clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from fedcams.buffers import add_change, change_between
from fedcams.compress import Code, Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.downlink.catchup import Kind
from fedcams.downlink.held import HeldStore
from fedcams.downlink.message import BUFFERS, MODEL, Held, Message, OutOfStep, apply_messages, base_of
from fedcams.errors import SpecError
from fedcams.keys import derive
from fedcams.layout import Layout
from fedcams.registry import Spec
from fedcams.rows import RowStore
from fedcams.sampler import Contacts
from fedcams.wire import unpack

if TYPE_CHECKING:
    from torch import Tensor

REPLICA = "replica"
"""The name of the rows that a server may keep: the model that each client holds."""
ROWS = {MODEL: REPLICA, BUFFERS: "replica-buffers"}
"""What clients hold -> the name of the server's rows of it."""


class Part(NamedTuple):
    """One vector that travels to clients, the model or its buffers: its values `[d]`, its layout and its codec."""

    name: str
    values: Tensor
    layout: Layout
    codec: Compressor

    def move_(self, rows: Tensor, keys: int | Sequence[int]) -> Code:
        """Move `rows [..., d]` towards the values by the difference as the codec sends it; return its code.

        The difference of buffers is in their own units, see `fedcams.buffers`.
        """
        if self.name == BUFFERS:
            change = change_between(rows, self.values, self.layout)
            code = self.codec.encode(change, self.layout, keys)
            rows.copy_(add_change(rows, self.codec.decode(code, self.layout), self.layout))
            return code
        code = self.codec.encode(self.values - rows, self.layout, keys)
        self.codec.add_to_(rows, code, self.layout)
        return code


class Broadcast(NamedTuple):
    """What a downlink needs to send a round's model: the server's `x [d]`, its layout, round, seed and replicas."""

    x: Tensor
    layout: Layout
    round: int
    seed: int
    replicas: RowStore | None = None
    buffers: Part | None = None
    """The server's buffers, if they travel by the downlink's rule, and the codec of their changes."""

    def parts(self, codec: Compressor) -> dict[str, Part]:
        """Return what to send, by name; `codec` is the codec of the model."""
        model = Part(MODEL, self.x, self.layout, codec)
        return {MODEL: model} if self.buffers is None else {MODEL: model, BUFFERS: self.buffers}

    def key(self, client: int = 0, name: str = MODEL) -> int:
        """Return the key for compressors that draw at random, for one client; client 0 stands for a common message."""
        return derive(self.seed, "downlink" if name == MODEL else f"downlink {name}", self.round, client)


Streams = Mapping[str, bytes]
"""Name of a stream -> its bytes, as instructions carry them."""


class Sent(NamedTuple):
    """What was sent to a client: a `delta` or compressed model, a `catchup` for missed rounds, or the `dense` model."""

    kind: Kind
    size: int
    """Bytes of the model in the instruction."""
    buffers: int = 0
    """Bytes of the buffers, if they travel by the downlink's rule."""


class Delivery(NamedTuple):
    """The models of a simulated round, what was sent, and the downlink's next state."""

    start: Tensor
    """What these clients hold afterwards: `[d]` if all hold the same model, otherwise `[C, d]`."""
    sent: list[Sent]
    state: Any
    buffers: Tensor | None = None
    """The buffers that they hold, `[b]` or `[C, b]`; None if buffers do not travel by the downlink's rule."""


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

    Examples:
        >>> import fedcams
        >>> from fedcams.downlink import downlink
        >>> downlink("shared(sign)").paper_bits(fedcams.Layout.flat(1000))  # one scale and one bit per coordinate
        1032
    """

    kind = "downlink"
    client_keeps_model: ClassVar[bool] = False
    """Whether clients keep the model that they received, in a HeldStore."""
    server_keeps_rows: ClassVar[bool] = False
    """Whether the server keeps a model of every client, in a RowStore."""
    carries_buffers: ClassVar[bool] = False
    """Whether buffers that the method compresses travel by its rule too; if not, they travel dense."""
    hides_cohorts: ClassVar[bool] = False
    """Whether what a client receives depends only on the server's models and on that client, not on other clients."""

    @property
    def starts_warm(self) -> bool:
        """Whether clients hold the initial model before their first contact."""
        return False

    def init(self, x: Tensor, buffers: Part | None = None) -> Any:
        """Return the server's state before anything is sent, for the initial model `x [d]`; None for no state.

        `buffers` are given if they travel by the downlink's rule.
        """
        return None

    @abstractmethod
    def send(self, state: Any, broadcast: Broadcast, clients: Sequence[int]) -> tuple[dict[int, Streams], Any]:
        """Return the streams for each of these clients, and the state until `acknowledge`.

        The streams are `model` and, if the broadcast has buffers, `buffers`.
        """

    def expected(self, state: Any, client: int) -> Held | None:
        """Return what a client holds once it has received the last message; None if clients keep nothing."""
        return None

    def buffers_of(self, state: Any, client: int) -> Tensor | None:
        """Return the buffers `[b]` that a client holds once it has received the last message, until `acknowledge`.

        The client's own change is relative to them. None means the server's own buffers.
        """
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

    def for_buffers(self, codec: Compressor) -> Self:
        """Return the downlink that carries the buffers of a method that compresses them with `codec`.

        Called only for a downlink that carries buffers.
        """
        return self

    def common(self, state: Any) -> dict[str, Tensor]:
        """Return what all clients of the last round hold, by name; empty if they differ or it is the server's."""
        return {}

    def receive(
        self,
        streams: Streams,
        layouts: Mapping[str, Layout],
        store: HeldStore | None,
        client: int,
        crc_checked: bool = False,
    ) -> tuple[dict[str, Tensor], Held | None]:
        """Return what to train from, name -> `[d]`, and what to tell the server about it.

        `streams` are those that `send` made, `layouts` those of what they carry, `store` is where the client keeps its
        own; `crc_checked` means that the checksum at the end of the model was verified. If clients keep no model, it is
        one payload. Raises OutOfStep for a message that does not build on what the client holds, and a WireError for
        damaged data.
        """
        if not self.client_keeps_model:
            payload = unpack(streams[MODEL], layouts[MODEL], crc_checked=crc_checked)
            dense = payload.compressor == IDENTITY  # used as it was read, which saves a copy
            return {MODEL: payload.code["values"] if dense else payload.decode()}, None
        if store is None:
            raise SpecError(f"{self}: clients must keep their model; give store=HeldStore.in_memory(layout) or on_disk")
        if store.layouts != layouts:
            theirs = ", ".join(f"{name} with d={layout.d}" for name, layout in store.layouts.items())
            raise OutOfStep(f"client {client} keeps models of another layout: {theirs}", None)
        return follow(store, client, {name: Message.from_bytes(data) for name, data in streams.items()})


def follow(store: HeldStore, client: int, messages: Mapping[str, Message]) -> tuple[dict[str, Tensor], Held]:
    """Return what the messages of one instruction make for a client that keeps its model, and its name.

    The messages are staged: what was held stays until the server builds on the new model, which shows that it knows it
    arrived. A lost reply leaves both sides where they were. Raises OutOfStep if they build on another model.
    """
    named = base_of(messages)
    made = apply_messages(messages, {} if named is None else _settle(store, client, named), store.layouts)
    store.stage(client, messages)
    return made, messages[MODEL].result


def _settle(store: HeldStore, client: int, named: Held) -> dict[str, Tensor]:
    """Return what the server builds on: what is held, or what is staged, which is then held."""
    held = store.held(client)
    if held == named:
        return store.vectors(client)
    staged = store.staged(client)
    base = None if staged is None else base_of(staged)
    if staged is None or staged[MODEL].result != named or (base is not None and base != held):
        found = "nothing" if held is None else str(held)
        raise OutOfStep(f"client {client} holds {found}, but the message builds on {named}; send the dense model", held)
    made = apply_messages(staged, {} if base is None else store.vectors(client), store.layouts)
    store.keep(client, named, made)
    return made


def check_contractive(name: str, codec: Compressor) -> None:
    """Refuse a codec without an error bound for the downlink `name`: what clients hold would drift from the model."""
    if codec.at(1, 1).squared_error_bound(Layout.flat(1)) is None:
        raise SpecError(
            f"{name}: {codec} has no bound on its error, so the clients' models would drift away from the server's; "
            "choose a contractive compressor, or stateless"
        )


def bound_of(codec: Compressor, layout: Layout) -> float:
    """Return the proven bound on the part of a vector's squared norm that the codec loses; 0 if it has none."""
    return codec.at(1, 1).squared_error_bound(layout) or 0.0


def downlink(spec: str | Downlink) -> Downlink:
    """Return the downlink that a spec string names.

    Arguments:
        spec: such as `shared(blockq)`; a downlink is returned unchanged.

    Returns:
        The downlink. It holds no state: `init` makes one.

    Raises:
        SpecError: for an unknown name or key, or a value out of range.

    Examples:
        >>> from fedcams.downlink import downlink
        >>> downlink("replica(blockq(bits=2))").server_keeps_rows
        True
    """
    return Downlink.parse(spec)
