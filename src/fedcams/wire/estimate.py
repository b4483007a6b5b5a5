"""The sizes of payloads, estimated from the codec's spec and the number of coordinates alone."""

from __future__ import annotations

import math

from fedcams.bits.packing import packed_size
from fedcams.compress import Compressor, Field
from fedcams.layout import Layout
from fedcams.wire.fields import fixed_size
from fedcams.wire.payload import CHECKSUM, HEADER

RICE_EXCESS = 1.015
"""The size of entropy-coded positions, relative to the entropy of uniform ones (docs/wire-format.md)."""


def payload_bytes(codec: Compressor, layout: Layout) -> int:
    """Return the length of a payload that `codec` writes for this layout, in bytes.

    It is exact except for positions and their signs, whose length depends on their values: positions are assumed to be
    uniform, and signs to take one bit each.
    """
    fields = codec.fields(layout).values()
    return HEADER.size + len(str(codec)) + CHECKSUM.size + sum(_field(field, layout.d) for field in fields)


def _field(field: Field, d: int) -> int:
    if field.at:
        return packed_size(field.count)
    if field.kind != "index":
        return fixed_size(field)
    return max(fixed_size(field), packed_size(math.ceil(RICE_EXCESS * _log2_choices(d, field.count))))


def _log2_choices(d: int, k: int) -> float:
    """Return log2 of the number of ways to choose k of d."""
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)


def coordinates_changed(codec: Compressor, layout: Layout) -> int | None:
    """Return how many coordinates a payload of `codec` changes; None if it may change all of them."""
    fields = codec.fields(layout).values()
    count = max(field.count for field in [field for field in fields if field.kind == "index"] or fields)
    return None if count >= layout.d else count
