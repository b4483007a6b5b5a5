"""Payloads, format version 1 (docs/wire-format.md): header, codec spec, body, checksum. Every code has one encoding."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedcams.bits.checksum import crc32, crc32_of
from fedcams.bits.rice import MAX_D
from fedcams.compress import Code, Compressor, compressor
from fedcams.errors import (
    BadMagic,
    ChecksumMismatch,
    LayoutMismatch,
    SpecError,
    TooLarge,
    TrailingBytes,
    Truncated,
    UnknownCodec,
    UnknownVersion,
    WireError,
)
from fedcams.layout import Layout
from fedcams.wire.fields import fixed_size, pack_field, unpack_field, varying_sizes

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"FCMS"
VERSION = 1
HEADER = struct.Struct("<4sBBQ8s")  # magic, version, length of the spec, d, layout id
CHECKSUM = struct.Struct("<I")
MAX_SPEC = 255
DEFAULT_MAX_D = 2**26
"""The most coordinates that a reader without a layout accepts: 256 MiB when decoded."""


@dataclass(frozen=True)
class Payload:
    """A payload that was read and checked, with everything needed to decode it or to write the same bytes again."""

    compressor: Compressor
    layout: Layout
    layout_id: bytes
    code: Code

    def decode(self) -> Tensor:
        """Return the vector `[d]`."""
        return self.compressor.decode(self.code, self.layout)

    def pack(self) -> bytes:
        """Return the bytes that it was read from."""
        return pack(self.compressor, self.code, self.layout, self.layout_id)


# -- writing -------------------------------------------------------------------------------------------------------


def pack(compressor: Compressor, code: Code, layout: Layout, layout_id: bytes | None = None) -> bytes:
    """Return the payload of one row of a code, tensors `[columns]`.

    `layout_id` is written in place of the layout's own. Refuses a compressor whose spec does not fit a payload.
    """
    spec = _spec_bytes(compressor)
    parts: list[bytes | memoryview] = [HEADER.pack(MAGIC, VERSION, len(spec), layout.d, layout_id or layout.id), spec]
    fields = compressor.fields(layout)
    parts += [pack_field(name, fields[name], code, layout) for name in fields]
    return b"".join([*parts, CHECKSUM.pack(crc32_of(parts))])


def size(compressor: Compressor, code: Code, layout: Layout) -> int:
    """Return the length of `pack(...)` of one row of a code, tensors `[columns]`, without packing."""
    return sizes(compressor, {name: tensor[None] for name, tensor in code.items()}, layout)[0]


def fixed_payload_size(compressor: Compressor, layout: Layout) -> int:
    """Return the bytes of a payload without the fields whose length depends on their contents."""
    fields = [field for field in compressor.fields(layout).values() if not field.size_varies]
    return HEADER.size + len(_spec_bytes(compressor)) + CHECKSUM.size + sum(map(fixed_size, fields))


def sizes(compressor: Compressor, code: Code, layout: Layout) -> list[int]:
    """Return the payload's length for each row of a cohort's code, tensors `[C, columns]`, without packing."""
    fixed = fixed_payload_size(compressor, layout)
    return [fixed + varying for varying in varying_sizes(compressor.fields(layout), code, layout)]


def _spec_bytes(compressor: Compressor) -> bytes:
    spec = str(compressor).encode("ascii")
    if len(spec) > MAX_SPEC:
        raise SpecError(f"{compressor}: a spec of {len(spec)} bytes does not fit a payload; allowed: {MAX_SPEC}")
    return spec


# -- reading -------------------------------------------------------------------------------------------------------


def unpack(
    data: bytes | bytearray | memoryview,
    layout: Layout | None = None,
    max_d: int = DEFAULT_MAX_D,
    crc_checked: bool = False,
) -> Payload:
    """Read and check a payload; a WireError says what is wrong with it.

    With `layout`, refuses payloads of another one. Without it, d may be at most `max_d`, because a tiny payload can
    claim a huge d. `crc_checked` means that the caller has verified the checksum already.
    """
    view = memoryview(data).cast("B")
    spec_length, d, layout_id = _read_header(view, crc_checked)
    codec = _read_codec(bytes(view[HEADER.size : HEADER.size + spec_length]))
    layout = _settle_layout(codec, layout, layout_id, d, max_d)
    body = np.frombuffer(view, np.uint8)[HEADER.size + spec_length : -CHECKSUM.size]
    code: dict[str, Tensor] = {}
    for name, field in codec.fields(layout).items():
        code[name], used = unpack_field(name, field, body, code, layout)
        body = body[used:]
    if body.size:
        raise TrailingBytes(f"{body.size} bytes follow the last field of {codec}")
    codec.check_code(code, layout)
    return Payload(codec, layout, layout_id, code)


def _read_header(view: memoryview, crc_checked: bool) -> tuple[int, int, bytes]:
    least = HEADER.size + 1 + CHECKSUM.size
    if view[: len(MAGIC)] != MAGIC[: len(view)]:
        raise BadMagic(f"a payload starts with {MAGIC!r}, this data with {bytes(view[:4])!r}")
    if len(view) < least:
        raise Truncated(f"{len(view)} bytes; a payload has at least {least}")
    _, version, spec_length, d, layout_id = HEADER.unpack_from(view)
    if version != VERSION:
        raise UnknownVersion(f"version {version}; this reader knows version {VERSION}, update fedcams")
    if len(view) < least - 1 + spec_length:
        raise Truncated(f"{len(view)} bytes; the header says a codec spec of {spec_length}")
    (checksum,) = CHECKSUM.unpack(view[-CHECKSUM.size :])
    if not crc_checked and crc32(view[: -CHECKSUM.size]) != checksum:
        raise ChecksumMismatch("the checksum does not match: the bytes were changed or cut off in transit")
    return spec_length, d, layout_id


def _read_codec(spec: bytes) -> Compressor:
    try:
        text = spec.decode("ascii")
        codec = compressor(text)
    except (UnicodeDecodeError, SpecError) as error:
        raise UnknownCodec(f"codec {spec[:80]!r}: {error}") from None
    if str(codec) != text:
        raise UnknownCodec(f"codec {text!r} is not in canonical form, which is {str(codec)!r}")
    if codec.schedules():
        raise UnknownCodec(f"codec {text!r} follows a schedule; a payload names the codec of its round")
    return codec


def _settle_layout(codec: Compressor, layout: Layout | None, layout_id: bytes, d: int, max_d: int) -> Layout:
    """Return the layout to read with; refuses another layout than the reader's, and a d that the reader cannot hold."""
    if layout is not None:
        if (layout_id, d) != (layout.id, layout.d):
            theirs, ours = f"{layout_id.hex()} with d={d}", f"{layout.id.hex()} with d={layout.d}"
            raise LayoutMismatch(f"the payload has layout {theirs}, the reader has {ours}; use the same model")
        return layout
    if not 1 <= d <= min(max_d, MAX_D):
        raise TooLarge(f"the payload claims d={d}; allowed: 1 to {max_d}, pass layout= or a larger max_d")
    flat = Layout.flat(d)
    if codec.per_tensor and layout_id != flat.id:
        raise LayoutMismatch(f"{codec} needs the layout {layout_id.hex()} it was written with: pass layout=")
    return flat


# -- in one call ---------------------------------------------------------------------------------------------------


def encode(codec: Compressor | str, x: Tensor, layout: Layout | None = None, key: int = 0) -> bytes:
    """Return the payload of one vector `x [d]`, compressed by `codec`.

    Arguments:
        codec: the compressor, or its spec string.
        x: the vector, float32.
        layout: its layout; that of a bare vector by default.
        key: seeds compressors that draw at random.

    Returns:
        The bytes, with a header and a checksum.

    Raises:
        SpecError: for an unknown compressor.
        WireError: for anything but one vector `[d]`.
        UpdateError: for values that are not finite.

    Examples:
        >>> import fedcams, torch
        >>> payload = fedcams.encode("topk(k=1)", torch.tensor([0.5, -2.0, 0.0]))
        >>> fedcams.decode(payload)
        tensor([ 0., -2.,  0.])
    """
    codec, layout, code = _one_row(codec, x, layout, key)
    return pack(codec, code, layout)


def payload_size(codec: Compressor | str, x: Tensor, layout: Layout | None = None, key: int = 0) -> int:
    """Return the length of `encode(...)` with the same arguments, without packing.

    Arguments:
        codec: the compressor, or its spec string.
        x: the vector, float32.
        layout: its layout; that of a bare vector by default.
        key: seeds compressors that draw at random.

    Returns:
        The number of bytes, including header and checksum.

    Raises:
        FedcamsError: for what `encode` refuses.

    Examples:
        >>> import fedcams, torch
        >>> fedcams.payload_size("identity", torch.zeros(1000)), fedcams.payload_size("sign", torch.zeros(1000))
        (4034, 159)
    """
    codec, layout, code = _one_row(codec, x, layout, key)
    return size(codec, code, layout)


def decode(data: bytes | bytearray | memoryview, layout: Layout | None = None, max_d: int = DEFAULT_MAX_D) -> Tensor:
    """Return the vector `[d]` of a payload.

    Arguments:
        data: the bytes that `encode` returned.
        layout: the layout that the payload must have; compressors that work tensor by tensor need it.
        max_d: without a layout, the largest d to accept, because a tiny payload can claim a huge d.

    Returns:
        The vector, float32.

    Raises:
        WireError: for bytes that are not a valid payload, or a payload of another layout.

    Examples:
        >>> import fedcams, torch
        >>> fedcams.decode(fedcams.encode("sign", torch.tensor([3.0, -1.0])))
        tensor([ 2., -2.])
    """
    return unpack(data, layout, max_d).decode()


def _one_row(codec: Compressor | str, x: Tensor, layout: Layout | None, key: int) -> tuple[Compressor, Layout, Code]:
    codec = compressor(codec)
    layout = layout or Layout.flat(x.numel())
    if x.dim() != 1:
        raise WireError(f"x has shape {tuple(x.shape)}; a payload holds one vector [d], encode each row separately")
    return codec, layout, codec.encode(x, layout, key)
