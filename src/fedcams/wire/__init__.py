"""The wire format: codes to bytes and back, with every byte checked."""

from fedcams.wire.payload import DEFAULT_MAX_D, Payload, pack, size, sizes, unpack
from fedcams.wire.vectors import decode, encode, payload_size

__all__ = ["DEFAULT_MAX_D", "Payload", "decode", "encode", "pack", "payload_size", "size", "sizes", "unpack"]
