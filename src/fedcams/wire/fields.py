"""Fields as bytes: how each kind of field is stored in a payload, little-endian, starting at a whole byte."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.cells import signs_decode, signs_encode, signs_size
from fedcams.bits.packing import pack_uints, packed_size, unpack_uints
from fedcams.bits.parallel import map_threads
from fedcams.bits.rice import rice_decode, rice_encode, rice_size
from fedcams.bits.vectors import abs_sum, read_floats
from fedcams.compress.base import Code, Field
from fedcams.errors import BadPadding, NonFinite, Truncated, WireError
from fedcams.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

assert sys.byteorder == "little", "payloads are little-endian and are read and written without swapping"

Bytes = NDArray[np.uint8]


def pack_field(name: str, field: Field, code: Code, layout: Layout) -> memoryview:
    """Return the field `name` of one row of a code, tensors `[columns]`, as bytes."""
    row = code[name].detach().cpu().contiguous()
    if field.kind == "index":
        return rice_encode(row.numpy(), layout.d).data
    if field.at:
        return signs_encode(row.numpy(), code[field.at].detach().cpu().numpy(), layout.cells).data
    if field.kind == "uint":
        return pack_uints(row.to(torch.int64).numpy(), field.bits).data
    if not row.numel():  # as read, its stride may be 0, with which torch refuses to view it as bytes
        return memoryview(b"")
    return row.view(torch.uint8).numpy().data


def varying_sizes(fields: Mapping[str, Field], code: Code, layout: Layout) -> list[int]:
    """Return for each row of a code `[C, columns]` the exact length in bytes of all fields whose `size_varies`.

    Nothing is packed; rows are read on several threads.
    """
    varying = {name: field for name, field in fields.items() if field.size_varies}
    rows = _on_host({name: code[name] for name in varying})
    count = len(next(iter(code.values())))
    return map_threads(
        range(count), lambda i: _varying_size(varying, {name: row[i] for name, row in rows.items()}, layout)
    )


def _on_host(code: Code) -> dict[str, NDArray[Any]]:
    host = {name: tensor.detach().to("cpu", non_blocking=True) for name, tensor in code.items()}  # pinned memory
    for device in {tensor.device for tensor in code.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return {name: tensor.contiguous().numpy() for name, tensor in host.items()}


def _varying_size(varying: Mapping[str, Field], row: Mapping[str, NDArray[Any]], layout: Layout) -> int:
    total = 0
    for name, field in varying.items():
        signs = bool(field.at)
        total += signs_size(row[name], row[field.at], layout.cells) if signs else rice_size(row[name], layout.d)
    return total


def fixed_size(field: Field) -> int:
    """Return the bytes of a field; if its length depends on its contents, the fewest it can have."""
    if field.at:
        return packed_size(min(field.count, 1))
    bits = {"f32": 32, "bf16": 16, "uint": field.bits, "packed": field.bits, "sign": 1, "index": 1}[field.kind]
    return packed_size(field.count * bits)


def unpack_field(name: str, field: Field, data: Bytes, before: Code, layout: Layout) -> tuple[Tensor, int]:
    """Read a field from the start of `data`; return a tensor `[columns]` and the number of bytes read.

    `before` has the fields that were read already. Raises a WireError for data that is too short, not finite or not
    canonical; it names the field.
    """
    size = fixed_size(field)
    if size > data.size:  # before anything is allocated
        raise Truncated(f"field {name!r} needs at least {size} bytes, {data.size} are left")
    if field.kind == "index":
        positions, size = rice_decode(data, field.count, layout.d)
        return torch.from_numpy(positions), size
    if field.at:
        return _unpack_signs(name, data, before[field.at], layout)
    if field.kind == "uint":
        values = torch.from_numpy(unpack_uints(data[:size], field.bits, field.count))
        return values.to(field.dtype), size
    if field.kind == "f32":
        vector, total = read_floats(data[:size])
        return _finite(name, torch.from_numpy(vector), total), size
    body = torch.from_numpy(data[:size].copy())
    if field.kind == "bf16":
        values = body.view(field.dtype)
        return _finite(name, values, abs_sum(values.float())), size
    _check_padding(name, field, body)
    return body, size


def _unpack_signs(name: str, data: Bytes, positions: Tensor, layout: Layout) -> tuple[Tensor, int]:
    try:
        signs, size = signs_decode(data, positions.numpy(), layout.cells)
    except WireError as error:
        raise type(error)(f"field {name!r}: {error}") from None
    return torch.from_numpy(signs), size


def _check_padding(name: str, field: Field, body: Tensor) -> None:
    used = field.count * max(1, field.bits) % 8
    if used and int(body[-1]) >> used:
        what = "signs" if field.kind == "sign" else f"{field.bits}-bit integers"
        raise BadPadding(f"field {name!r}: the bits after the last of {field.count} {what} are not zero")


def _finite(name: str, values: Tensor, total: float) -> Tensor:
    """Return the values; refuse them if their absolute sum `total` is not finite."""
    if not math.isfinite(total):
        bad = int((~torch.isfinite(values)).sum())
        raise NonFinite(f"field {name!r}: {bad} of {values.numel()} numbers are NaN or infinite")
    return values
