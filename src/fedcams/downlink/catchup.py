"""The cheapest message from an old version of the shared model to the current one, and its expected size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from fedcams.bits.positions import changed_since, take_at
from fedcams.compress import Compressor
from fedcams.downlink.message import as_bytes, dense_size, message_size, replacing
from fedcams.layout import Layout
from fedcams.wire import pack, size
from fedcams.wire.estimate import coordinates_changed, payload_bytes

if TYPE_CHECKING:
    from torch import Tensor


Kind = Literal["delta", "catchup", "dense"]
"""What brings a client up to date: one delta, a message for several that it missed, or the dense model."""


class Track(NamedTuple):
    """One vector that the clients of the last round hold, and what brings the others up to date."""

    w: Tensor
    """The broadcast vector `[d]`."""
    touched: Tensor | None
    """int32 `[d]`, the version in which each coordinate last changed; None if every delta changes all of them."""
    log: Mapping[int, Tensor]
    """Version -> the payload, as bytes, that led to it; at most as many bytes as the vector itself."""
    since: int
    """The log has all deltas after this version."""


class Way(NamedTuple):
    """One way to bring a client up to date: what to send, and what it costs."""

    kind: Kind
    size: int
    """Bytes of the message."""
    replaces: bool = False
    """Whether the payload's values replace those held, instead of being added."""
    payloads: Callable[[], Sequence[bytes]] = tuple


@dataclass(frozen=True)
class Catchup:
    """The ways from an old version of a track to its current one."""

    track: Track
    version: int
    """The current version."""
    layout: Layout
    counting: bool = False
    """Whether only sizes are needed, as in a simulation, so that nothing is packed."""

    def cheapest(self, held: int | None) -> Way:
        """Return the cheapest way for a client that holds this version; None means that it holds nothing."""
        if held == self.version:
            return Way("delta", message_size([]))
        ways = [Way("dense", dense_size(self.layout))]
        if held is not None and held >= self.track.since:
            ways.append(self._chain(held))
        if held is not None and self.track.touched is not None:
            ways.append(self._values(held, ways))
        return min(ways, key=lambda way: way.size)

    def _chain(self, held: int) -> Way:
        """Return the way that sends the missed deltas, one after the other."""
        missed = [payload for version, payload in self.track.log.items() if version > held]
        cost = message_size([payload.numel() for payload in missed])
        return Way(self._kind(held), cost, False, lambda: [as_bytes(payload) for payload in missed])

    def _values(self, held: int, others: Sequence[Way]) -> Way:
        """Return the way that sends the current values of all changed coordinates, or another if that is cheaper."""
        assert self.track.touched is not None
        positions = changed_since(self.track.touched, held)
        count = len(positions)
        if count == 0 or 4 * count > min(way.size for way in others):
            return others[0]
        codec, values = replacing(count), take_at(self.track.w[None], positions[None])[0]
        code = {"position": positions, "value": values}
        if self.counting:
            return Way(self._kind(held), message_size([size(codec, code, self.layout)]), True)
        payload = pack(codec, code, self.layout)  # pack now, because finding the length is half of the work
        return Way(self._kind(held), message_size([len(payload)]), True, lambda: [payload])

    def _kind(self, held: int) -> Kind:
        missed = sum(version > held for version in self.track.log)
        return "delta" if missed == 1 and held >= self.track.since else "catchup"


def expected_size(codec: Compressor, layout: Layout, missed: int) -> float:
    """Return the expected bytes of the cheapest message for a client that missed this many deltas.

    Assumes that each delta chooses its coordinates uniformly and independently.
    """
    delta, dense = payload_bytes(codec, layout), dense_size(layout)
    ways = [dense]
    if missed * delta <= dense:  # otherwise the log no longer has the oldest
        ways.append(message_size([delta] * missed))
    if missed > 1 and (each := coordinates_changed(codec, layout)) is not None:
        union = round(layout.d * (1 - (1 - each / layout.d) ** missed))
        ways.append(message_size([payload_bytes(replacing(union), layout)]))
    return min(ways)
