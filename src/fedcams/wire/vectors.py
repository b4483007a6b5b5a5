"""One vector in one call: compress and pack it, read and decode it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcams.compress import Code, Compressor, compressor
from fedcams.errors import WireError
from fedcams.layout import Layout
from fedcams.wire.payload import DEFAULT_MAX_D, pack, size, unpack

if TYPE_CHECKING:
    from torch import Tensor


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
