"""The wire format: codes to bytes and back, with every byte checked."""

from fedcams.wire.payload import DEFAULT_MAX_D, Payload, decode, encode, pack, payload_size, size, sizes, unpack

__all__ = ["DEFAULT_MAX_D", "Payload", "decode", "encode", "pack", "payload_size", "size", "sizes", "unpack"]
