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
    """A payload that was read and checked, with everything needed to decode it or to write the same bytes again.

    Examples:
        >>> import fedcams, torch
        >>> from fedcams.wire import unpack
        >>> payload = unpack(fedcams.encode("topk(k=1)", torch.tensor([0.5, -2.0])))
        >>> payload.decode()
        tensor([ 0., -2.])
    """

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
    """Return the payload of one row of a code.

    Arguments:
        compressor: what made the code.
        code: its tensors `[columns]`.
        layout: the layout of the vector.
        layout_id: written in place of the layout's own.

    Returns:
        The bytes.

    Raises:
        SpecError: for a compressor whose spec does not fit a payload.

    Examples:
        >>> import fedcams, torch
        >>> from fedcams.wire import pack, size
        >>> sign, layout = fedcams.compressor("sign"), fedcams.Layout.flat(16)
        >>> code = sign.encode(torch.ones(16), layout)
        >>> len(pack(sign, code, layout)) == size(sign, code, layout)
        True
    """
    spec = _spec_bytes(compressor)
    parts: list[bytes | memoryview] = [HEADER.pack(MAGIC, VERSION, len(spec), layout.d, layout_id or layout.id), spec]
    fields = compressor.fields(layout)
    parts += [pack_field(name, fields[name], code, layout) for name in fields]
    return b"".join([*parts, CHECKSUM.pack(crc32_of(parts))])


def size(compressor: Compressor, code: Code, layout: Layout) -> int:
    """Return the length of the payload of one row of a code, without packing it.

    Arguments:
        compressor: what made the code.
        code: its tensors `[columns]`.
        layout: the layout of the vector.

    Returns:
        The number of bytes.

    Examples:
        >>> import fedcams, torch
        >>> from fedcams.wire import size
        >>> sign, layout = fedcams.compressor("sign"), fedcams.Layout.flat(800)
        >>> size(sign, sign.encode(torch.ones(800), layout), layout)
        134
    """
    return sizes(compressor, {name: tensor[None] for name, tensor in code.items()}, layout)[0]


def _fixed_part(compressor: Compressor, layout: Layout) -> int:
    """Return the bytes of a payload without the fields whose length depends on their contents."""
    fields = [field for field in compressor.fields(layout).values() if not field.size_varies]
    return HEADER.size + len(_spec_bytes(compressor)) + CHECKSUM.size + sum(map(fixed_size, fields))


def sizes(compressor: Compressor, code: Code, layout: Layout) -> list[int]:
    """Return the length of the payload of each row of a cohort's code, without packing it.

    Arguments:
        compressor: what made the code.
        code: its tensors `[C, columns]`.
        layout: the layout of a row.

    Returns:
        One number of bytes per row.

    Examples:
        >>> import fedcams, torch
        >>> from fedcams.wire import sizes
        >>> sign, layout = fedcams.compressor("sign"), fedcams.Layout.flat(800)
        >>> sizes(sign, sign.encode(torch.ones(3, 800), layout), layout)
        [134, 134, 134]
    """
    fixed = _fixed_part(compressor, layout)
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
    """Read and check a payload.

    Arguments:
        data: the bytes.
        layout: the layout that the payload must have.
        max_d: without a layout, the largest d to accept, because a tiny payload can claim a huge one.
        crc_checked: whether the caller has verified the checksum already.

    Returns:
        The payload, checked as a whole.

    Raises:
        WireError: the subclass that says what is wrong.

    Examples:
        >>> import fedcams, torch
        >>> from fedcams.wire import unpack
        >>> str(unpack(fedcams.encode("topk(k=1)", torch.tensor([0.5, -2.0]))).compressor)
        'topk(k=1)'
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
        raise Truncated(f"{len(view)} bytes; the header announces a codec spec of {spec_length} bytes")
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
