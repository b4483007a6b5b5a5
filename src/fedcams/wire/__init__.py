"""The wire: codes as bytes and back, checked at every step."""

from fedcams.wire.payload import DEFAULT_MAX_D, Payload, decode, encode, pack, payload_size, size, sizes, unpack

__all__ = ["DEFAULT_MAX_D", "Payload", "decode", "encode", "pack", "payload_size", "size", "sizes", "unpack"]
