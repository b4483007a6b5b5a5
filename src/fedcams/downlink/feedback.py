"""What `shared` and `replica` have in common: what a compressor loses stays in the difference to what clients hold."""

from __future__ import annotations

from torch import Tensor

from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.downlink.message import DENSE, Message, message_size
from fedcams.downlink.versions import Held
from fedcams.errors import SpecError
from fedcams.layout import Layout
from fedcams.wire import encode, size


def check_contractive(name: str, codec: Compressor) -> None:
    """Refuses what would let the difference grow without end."""
    if codec.contraction(Layout.flat(1)) is None:
        raise SpecError(
            f"{name}: {codec} has no contraction, and the difference to what clients hold would grow without end; "
            "choose a contractive compressor, or stateless"
        )


def dense_message(x: Tensor, layout: Layout, result: Held) -> Message:
    """The model itself, for clients of which nothing is known."""
    return Message(DENSE, None, result, [encode(IDENTITY, x, layout)])


def dense_size(x: Tensor, layout: Layout) -> int:
    """The length of that message."""
    return message_size([size(IDENTITY, {"values": x}, layout)])
